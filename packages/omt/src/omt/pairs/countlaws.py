r"""Laws of counts on the line as tables: Poisson, negative binomial and Bernoulli in one recurrence.

Letters: ``n`` laws, ``S`` entries of a table.

A law is given by its mean ``μ`` and dispersion ``φ``, with variance ``μ + φ μ²``: ``φ > 0`` is the negative binomial,
``φ = 0`` Poisson, ``φ = −1`` Bernoulli. All three obey Panjer's recurrence

``p(x + 1) / p(x) = (1 + φ x) / (x + 1) · μ / (1 + φ μ)``,

so one pass of products gives a table of probabilities, and one pass of sums the tails. Sums run from the far end of
each tail towards the middle: a tail probability of 1e-200 keeps its digits.

References
----------
Panjer, "Recursive evaluation of a family of compound distributions", ASTIN Bulletin 12, 1981.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special

from omt.families.base import FloatArray
from omt.families.loggamma import rising

__all__ = ["DEEPEST", "DEPTH", "CountLaws", "log_pmf", "lower_table", "tails", "upper_table", "windows"]

IntArray = NDArray[np.int64]

DEPTH = 27.7
"""Depth, in nats, at which a support is cut: what lies beyond has probability below 1e-12."""
DEEPEST = 620.0
"""A count farther out than this many nats has a probability that float64 cannot hold."""


class CountLaws(NamedTuple):
    """``n`` laws of counts.

    Attributes
    ----------
    mean : array [n]
        ``μ > 0``.
    dispersion : array [n]
        ``φ``: positive, zero, or −1 with ``μ < 1``.
    """

    mean: FloatArray
    dispersion: FloatArray

    def take(self, index: NDArray[np.intp] | slice) -> CountLaws:
        """The laws at ``index``."""
        return CountLaws(self.mean[index], self.dispersion[index])


def windows(laws: CountLaws, depth: FloatArray | float) -> tuple[IntArray, IntArray]:
    """Smallest and largest count of each law's support, cut where what lies beyond is rarer than ``exp(−depth)``.

    By Chernoff's bound ``P(X ≥ x) ≤ exp(−D(x))`` above the mean and ``P(X ≤ x) ≤ exp(−D(x))`` below it, with ``D(x)``
    the divergence of the law with mean ``x`` from the law itself. ``D`` is convex, so a bisection finds both ends.

    Parameters
    ----------
    laws : CountLaws
        ``n`` laws.
    depth : array [n] or float
        In nats, > 0.

    Returns
    -------
    low, high : int array [n]
        Inclusive ends; at least one count.

    Examples
    --------
    >>> import numpy as np
    >>> from scipy.stats import poisson
    >>> low, high = windows(CountLaws(np.array([100.0]), np.zeros(1)), 27.7)
    >>> bool(poisson.sf(high[0], 100.0) < 1e-12), bool(poisson.cdf(low[0] - 1, 100.0) < 1e-12)
    (True, True)
    >>> int(high[0]) < 200  # and not much wider than needed
    True
    """
    mean, phi = laws
    depth = np.broadcast_to(np.asarray(depth, dtype=np.float64), mean.shape)
    # Above: double the distance from the mean until the bound holds, then halve the bracket.
    step = np.sqrt(2.0 * depth * mean) + depth
    above = mean + step
    for _ in range(64):
        short = _divergence(above, mean, phi) < depth
        if not short.any():
            break
        step = np.where(short, 2.0 * step, step)
        above = np.where(short, mean + step, above)
    high = _bisect(mean, above, mean, phi, depth)
    low = _bisect(mean, np.zeros_like(mean), mean, phi, depth)
    bottom = np.maximum(np.floor(low), 0.0).astype(np.int64)
    top = np.maximum(np.ceil(high).astype(np.int64), bottom + 1)
    bernoulli = phi == -1.0
    return np.where(bernoulli, 0, bottom), np.where(bernoulli, 1, top)


def log_pmf(x: FloatArray, laws: CountLaws) -> FloatArray:
    """Log-probability of the counts ``x`` [n], one for each law; far from both ends it is ``−D(x)`` plus half a log.

    Examples
    --------
    >>> import numpy as np
    >>> round(float(log_pmf(np.array([2.0]), CountLaws(np.array([2.0]), np.zeros(1)))[0]), 6)  # 2² e⁻² / 2!
    -1.306853
    """
    mean, phi = laws
    out = special.xlogy(x, mean) - mean - special.gammaln(x + 1.0)
    over = phi > 0.0
    if over.any():
        f, m, k = phi[over], mean[over], x[over]
        # A difference of log-gammas would lose the digits of laws that are nearly Poisson.
        out[over] = rising(k, f) - special.gammaln(k + 1.0) + special.xlogy(k, m) - (k + 1.0 / f) * np.log1p(f * m)
    one = phi == -1.0
    if one.any():
        out[one] = np.where(x[one] > 0.0, np.log(mean[one]), np.log1p(-mean[one]))
    return np.asarray(out)


def upper_table(laws: CountLaws, low: IntArray, width: int) -> FloatArray:
    """Upper tails ``P(X > low + s)``, ``s = 0 … width − 1``, as [n, width]; what lies beyond is taken as zero."""
    table = _pmf_table(laws, low, width + 1)
    return np.asarray(np.cumsum(table[:, :0:-1], axis=1)[:, ::-1])


def lower_table(laws: CountLaws, low: IntArray, width: int) -> FloatArray:
    """Lower tails ``P(X ≤ low + s)``, ``s = 0 … width − 1``, [n, width]; what lies below ``low`` is taken as zero."""
    return np.asarray(np.cumsum(_pmf_table(laws, low, width), axis=1))


def tails(x: FloatArray, laws: CountLaws) -> tuple[FloatArray, FloatArray]:
    """Lower and upper tail ``P(X ≤ x)``, ``P(X > x)`` of the counts ``x`` [n] ≥ −1, each to full relative accuracy."""
    mean, phi = laws
    known = np.maximum(x, 0.0)
    lower, upper = np.empty_like(mean), np.empty_like(mean)
    poisson, over, one = phi == 0.0, phi > 0.0, phi == -1.0
    lower[poisson] = special.pdtr(known[poisson], mean[poisson])
    upper[poisson] = special.pdtrc(known[poisson], mean[poisson])
    if over.any():
        odds = phi[over] * mean[over]
        # betainc takes the smaller of the two shares: 1 − share would lose the digits of a rare event.
        size, success = 1.0 / phi[over], 1.0 / (1.0 + odds)
        lower[over] = special.betainc(size, known[over] + 1.0, success)
        upper[over] = special.betainc(known[over] + 1.0, size, odds / (1.0 + odds))
    lower[one] = np.where(known[one] > 0.0, 1.0, 1.0 - mean[one])
    upper[one] = np.where(known[one] > 0.0, 0.0, mean[one])
    before = x < 0.0
    return np.where(before, 0.0, lower), np.where(before, 1.0, upper)


def _pmf_table(laws: CountLaws, low: IntArray, width: int) -> FloatArray:
    mean, phi = laws
    table = np.empty((mean.size, width))
    first = log_pmf(low.astype(np.float64), laws)
    # Where the first entry would underflow, and the whole product with it, the recurrence starts farther up.
    skipped = np.zeros(mean.size, dtype=np.int64)
    late = np.flatnonzero((first < -DEEPEST) & (low < mean))
    if late.size:
        start = windows(laws.take(late), DEEPEST)[0]
        skipped[late] = np.maximum(start - low[late], 0)
        first[late] = log_pmf((low[late] + skipped[late]).astype(np.float64), laws.take(late))
    table[:, 0] = np.exp(first)
    if width > 1:
        x = low[:, None] + np.arange(width - 1.0)
        ratio = np.divide(mean, 1.0 + phi * mean, out=np.zeros_like(mean), where=1.0 + phi * mean > 0.0)
        steps = table[:, 1:]
        np.multiply(x, phi[:, None], out=steps)
        steps += 1.0
        steps *= ratio[:, None]
        x += 1.0
        steps /= x
    for row in late:
        table[row, 1 : skipped[row] + 1] = 1.0
    np.multiply.accumulate(table, axis=1, out=table)
    for row in late:
        table[row, : skipped[row]] = 0.0
    return table


def _divergence(x: FloatArray, mean: FloatArray, phi: FloatArray) -> FloatArray:
    """``D(x) = x log(x/μ) − (x + 1/φ) log((1 + φ x)/(1 + φ μ))``; at ``φ = 0`` that is ``x log(x/μ) − x + μ``."""
    first = special.xlogy(x, x / mean)
    over = phi > 0.0
    second = x - mean
    if over.any():
        size = 1.0 / phi[over]
        second[over] = (x[over] + size) * np.log1p((x[over] - mean[over]) / (mean[over] + size))
    return np.asarray(first - second)


def _bisect(
    near: FloatArray, far: FloatArray, mean: FloatArray, phi: FloatArray, depth: FloatArray, halvings: int = 12
) -> FloatArray:
    """Where the divergence crosses ``depth`` between the mean and ``far``, from the far side to 1/4096 of the way."""
    near, far = near.copy(), far.copy()
    for _ in range(halvings):
        middle = 0.5 * (near + far)
        enough = _divergence(middle, mean, phi) >= depth
        far = np.where(enough, middle, far)
        near = np.where(enough, near, middle)
    return far
