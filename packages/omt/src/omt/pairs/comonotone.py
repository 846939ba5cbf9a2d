r"""Comonotone plans of laws of counts: cost, conditional mean and conditional draws, one pair of laws a row.

Letters: ``n`` pairs of laws, ``S`` entries of a table.

On the line the optimal plan for a squared cost is the comonotone one: ``x = F⁻¹(u)`` goes to ``y = G⁻¹(u)`` with the
same ``u``. For laws of counts everything is a sum over tails, without any quantile:

======================  =========================================================================================
cost                    ``∫ (F⁻¹ − G⁻¹)² du = Σ_s Σ_t [P(X > s ∨ t) − P(Y > s ∧ t)]₊ + [P(Y > s ∨ t) − P(X > s ∧ t)]₊``
conditional mean        ``E[y | x] = Σ_s clip((P(Y > s) − P(X > x)) / P(X = x), 0, 1)``
conditional draw        ``y = #{s : P(Y > s) ≥ t}`` with ``t`` uniform in ``(P(X > x), P(X ≥ x)]``
======================  =========================================================================================

All terms are positive: nothing cancels, equal laws cost exactly zero, and a gene with a mean of 1e-6 has its digits
like one with a mean of 10⁴. The cost in this form takes as many passes over the table as the plan shifts counts
(few, for the small means of single-cell data); where supports are long the breakpoints of both laws are merged
instead, which is linear in the support.

References
----------
Santambrogio, "Optimal Transport for Applied Mathematicians", 2015, section 2.1 (the comonotone plan).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from omt.families.base import FloatArray
from omt.pairs.countlaws import DEEPEST, DEPTH, CountLaws, IntArray, log_pmf, lower_table, tails, upper_table, windows

__all__ = ["count_cost", "count_draw", "count_mean"]

# Work arrays of a block of pairs stay near the size of a core's second-level cache.
_BLOCK_ENTRIES = 1 << 17
# Widest table for which passes over it beat the merge of all breakpoints; both are exact.
_SHORT = 12
# Means up to this one start their recurrence at zero, where their probability is no underflow.
_SMALL_MEAN = 100.0


def count_cost(
    p: CountLaws, q: CountLaws, i: NDArray[np.intp] | None = None, j: NDArray[np.intp] | None = None
) -> FloatArray:
    """Squared Wasserstein-2 distances between laws of counts.

    Parameters
    ----------
    p, q : CountLaws
        Source and target laws.
    i, j : int array [n], optional
        Which source and target law each pair has; pairs ``0, 1, 2, …`` of equal position if not given.

    Returns
    -------
    array [n]
        Costs, exact up to tails of probability 1e-12 relative to the laws' means.

    Examples
    --------
    >>> import numpy as np
    >>> p, q = CountLaws(np.array([0.3]), np.array([-1.0])), CountLaws(np.array([0.5]), np.array([-1.0]))
    >>> round(float(count_cost(p, q)[0]), 12)  # Bernoulli: |p − p'|
    0.2
    """
    if i is None or j is None:
        i = j = np.arange(p.mean.size)
    low_p, high_p = windows(p, _depth(p))
    low_q, high_q = windows(q, _depth(q))
    low = np.minimum(low_p[i], low_q[j])
    width = np.maximum(high_p[i], high_q[j]) - low
    out = np.zeros(i.size)
    apart = (p.mean[i] != q.mean[j]) | (p.dispersion[i] != q.dispersion[j])
    for rows, size in _blocks(np.where(apart, width, 0)):
        F, G = _tables(upper_table, p, i[rows], low[rows], size), _tables(upper_table, q, j[rows], low[rows], size)
        out[rows] = _by_shifts(F, G) if size <= _SHORT else _by_merging(F, G)
    return out


def count_mean(
    x: FloatArray, p: CountLaws, q: CountLaws, i: NDArray[np.intp] | None = None, j: NDArray[np.intp] | None = None
) -> FloatArray:
    """Where counts go on average: ``E[y | x]`` under the comonotone plan.

    Parameters
    ----------
    x : array [n]
        Counts.
    p, q : CountLaws
        Source and target laws.
    i, j : int array [n], optional
        Which source and target law each count belongs to; those of equal position if not given.

    Returns
    -------
    array [n]
        Conditional means, rising in ``x``. Counts so far out that their probability underflows keep their distance
        from the last one that has one.

    Examples
    --------
    >>> import numpy as np
    >>> p, q = CountLaws(np.array([0.2]), np.array([-1.0])), CountLaws(np.array([0.6]), np.array([-1.0]))
    >>> count_mean(np.array([0.0, 1.0]), p, q, np.zeros(2, int), np.zeros(2, int)).round(12)  # 0.4 of the 0.8 zeros
    array([0.5, 1. ])
    """
    return _conditional(x, p, q, i, j, None)


def count_draw(
    x: FloatArray,
    p: CountLaws,
    q: CountLaws,
    rng: np.random.Generator,
    i: NDArray[np.intp] | None = None,
    j: NDArray[np.intp] | None = None,
) -> FloatArray:
    """One draw of where each count goes; if counts follow ``p``, draws follow ``q`` exactly.

    Parameters
    ----------
    x : array [n]
        Counts.
    p, q : CountLaws
        Source and target laws.
    rng : numpy.random.Generator
        Source of randomness.
    i, j : int array [n], optional
        As in :func:`count_mean`.

    Returns
    -------
    array [n]
        Counts.

    References
    ----------
    Rüschendorf, "On the distributional transform, Sklar's theorem, and the empirical copula process", J. Stat. Plan.
    Inference 139, 2009.

    Examples
    --------
    >>> import numpy as np
    >>> law = CountLaws(np.array([3.0]), np.zeros(1))
    >>> x = np.arange(6.0)
    >>> count_draw(x, law, law, np.random.default_rng(0), np.zeros(6, int), np.zeros(6, int))
    array([0., 1., 2., 3., 4., 5.])
    """
    return _conditional(x, p, q, i, j, rng)


def _depth(laws: CountLaws) -> FloatArray:
    """Cut relative to the mean, so that a rare count keeps its digits."""
    return np.asarray(DEPTH + np.maximum(0.0, -np.log(laws.mean)))


def _blocks(width: IntArray) -> Iterator[tuple[NDArray[np.intp], int]]:
    """Rows of similar table width in blocks, each with the width of its tables; rows of width 0 are left out.

    Widths are rounded up to powers of ``2^(1/3)``. Inside such a class rows keep their order, in which neighbours
    share laws.
    """
    classes = np.ceil(3.0 * np.log2(np.maximum(width, 1))).astype(np.int64)
    order = np.argsort(classes, kind="stable")
    order = order[width[order] > 0]
    edges = np.flatnonzero(np.diff(classes[order], prepend=-1, append=np.iinfo(np.int64).max))
    for first, last in itertools.pairwise(edges):
        size = int(np.floor(2.0 ** (classes[order[first]] / 3.0) + 1e-9))
        step = max(1, _BLOCK_ENTRIES // size)
        for start in range(first, last, step):
            yield order[start : min(start + step, last)], size


def _tables(
    make: Callable[[CountLaws, IntArray, int], FloatArray],
    laws: CountLaws,
    index: NDArray[np.intp],
    low: IntArray,
    width: int,
) -> FloatArray:
    """Table [n, width] of the laws at ``index``, each distinct row computed once."""
    span = int(low.max()) + 1
    distinct, place = np.unique(index * span + low, return_inverse=True)
    if 2 * distinct.size > index.size:
        return make(laws.take(index), low, width)
    return make(laws.take(distinct // span), distinct % span, width)[place]


def _by_shifts(F: FloatArray, G: FloatArray) -> FloatArray:
    """``Σ_s Σ_t [F(s ∨ t) − G(s ∧ t)]₊ + [G(s ∨ t) − F(s ∧ t)]₊`` of upper tails [n, S], a shift ``|s − t|`` a pass."""
    out = np.abs(F - G).sum(axis=1)
    active = np.arange(out.size)
    for shift in range(1, F.shape[1]):
        gain = np.maximum(F[:, shift:] - G[:, :-shift], 0.0) + np.maximum(G[:, shift:] - F[:, :-shift], 0.0)
        total = gain.sum(axis=1)
        out[active] += 2.0 * total
        # A pair that is not shifted as far as this is not shifted farther.
        moving = np.flatnonzero(total)
        if not moving.size:
            break
        active, F, G = active[moving], F[moving], G[moving]
    return np.asarray(out)


def _by_merging(F: FloatArray, G: FloatArray) -> FloatArray:
    """``∫ (F⁻¹ − G⁻¹)² du`` between all breakpoints of both laws, from upper tails [n, S]."""
    S = F.shape[1]
    levels = np.concatenate([F, G], axis=1)
    # The last bit of a level tells whose it is, so that plain sorting, the fastest there is, keeps track of both.
    bits = levels.view(np.int64)
    bits[:, :S] &= ~1
    bits[:, S:] |= 1
    levels.sort(axis=1)
    # Passing a breakpoint of a law lowers its quantile by one: the difference of both is a running sum of ±1.
    gap = np.cumsum(2 * (bits[:, :-1] & 1).astype(np.int8) - 1, axis=1, dtype=np.float64)
    gap *= gap
    return np.asarray(np.einsum("ns,ns->n", np.diff(levels, axis=1), gap))


def _conditional(
    x: FloatArray,
    p: CountLaws,
    q: CountLaws,
    i: NDArray[np.intp] | None,
    j: NDArray[np.intp] | None,
    rng: np.random.Generator | None,
) -> FloatArray:
    """Mean, or with ``rng`` a draw, of the count that each ``x`` goes to."""
    x = np.asarray(x, dtype=np.float64)
    if i is None or j is None:
        i = j = np.arange(x.size)
    share = None if rng is None else 1.0 - rng.random(x.size)  # in (0, 1]
    out = np.empty(x.size)
    zero = (x == 0.0) & (q.mean[j] <= _SMALL_MEAN) & (p.mean[i] <= _SMALL_MEAN)
    for chosen, move in ((np.flatnonzero(zero), _from_zero), (np.flatnonzero(~zero), _from_tails)):
        for start in range(0, chosen.size, _BLOCK_ENTRIES):
            rows = chosen[start : start + _BLOCK_ENTRIES]
            out[rows] = move(x[rows], p, q, i[rows], j[rows], None if share is None else share[rows])
    return out


def _from_zero(
    x: FloatArray, p: CountLaws, q: CountLaws, i: NDArray[np.intp], j: NDArray[np.intp], share: FloatArray | None
) -> FloatArray:
    """Images of zeros, most entries of sparse data: the target's lower tail from zero up, until it covers ``P(X = 0)``.

    ``E[y | 0] = Σ_s [1 − P(Y ≤ s) / P(X = 0)]₊``; a draw counts the tails below a uniform share of ``P(X = 0)``.
    """
    source, target = p.take(i), q.take(j)
    level = np.exp(log_pmf(np.zeros(i.size), source))
    if share is not None:
        level *= share
    out = np.zeros(i.size)
    mass = np.exp(log_pmf(np.zeros(j.size), target))
    tail = mass.copy()
    ratio = np.asarray(target.mean / (1.0 + target.dispersion * target.mean))
    phi, rows, s = target.dispersion, np.arange(i.size), 0
    while True:
        # What is left of a law once its terms are below rounding covers nothing more.
        short = (tail < level) & ((mass > 1e-18) | (s < target.mean[rows]))
        if not short.any():
            return out
        rows, level, tail, mass = rows[short], level[short], tail[short], mass[short]
        ratio, phi = ratio[short], phi[short]
        out[rows] += 1.0 - tail / level if share is None else 1.0
        mass *= ratio * ((1.0 + phi * s) / (s + 1.0))
        tail += mass
        s += 1


def _from_tails(
    x: FloatArray, p: CountLaws, q: CountLaws, i: NDArray[np.intp], j: NDArray[np.intp], share: FloatArray | None
) -> FloatArray:
    """Images of any counts: from the tails on that side of the median where ``x`` lies, which keeps all digits there.

    Below the median the roles of the tails change: ``P(Y > s) − P(X > x) = P(X ≤ x) − P(Y ≤ s)``.
    """
    source = p.take(i)
    first, last = windows(source, DEEPEST)
    nearest = np.clip(x, first, last)
    below, above = tails(nearest, source)
    below_before, above_before = tails(nearest - 1.0, source)
    upper = below > 0.5
    near = np.where(upper, above, below_before)  # the end of (P(X > x), P(X ≥ x)] that is farther out
    span = np.where(upper, above_before - above, below - below_before)
    far = near + span
    depth = DEPTH - np.log(np.maximum(far, 1e-290))
    low, high = windows(q.take(j), np.where(upper, DEPTH, depth))
    high = np.where(upper, windows(q.take(j), depth)[1], high)
    level = None if share is None else near + share * span
    out = low.astype(np.float64)
    for side, make, sign in ((upper, upper_table, 1.0), (~upper, lower_table, -1.0)):
        for rows, size in _blocks(np.where(side, high - low, 0)):
            table = _tables(make, q, j[rows], low[rows], size)
            if level is not None:
                passed = table >= level[rows, None] if sign > 0.0 else table < level[rows, None]
                out[rows] += passed.sum(axis=1)
                continue
            start = near if sign > 0.0 else far
            table -= start[rows, None]
            table *= sign / span[rows, None]
            out[rows] += np.clip(table, 0.0, 1.0, out=table).sum(axis=1)
    return np.asarray(np.maximum(out + (x - nearest), 0.0))
