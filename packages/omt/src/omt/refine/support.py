"""Weighted points that stand for a mixture or for a sample: few, but with the information of many.

Independent draws are a wasteful support: the error of a transport map is then the sampling noise of those few points.
Here many more points are drawn (or all samples taken) and replaced by the means of small groups of them, as k-means
does. The noise is then that of the many, and what is lost is the spread inside a group, far below the temperature.

Letters: ``N`` samples, ``n`` support points, ``d`` features, ``K`` components.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from omt.mixture import Mixture

    FloatArray = NDArray[np.float64]

__all__ = ["Support", "allocated", "drawn_support", "quantised"]

_OVERSAMPLING = 8  # draws for each point of the support
_MOST = 64  # samples for each point of the support beyond which more only cost time
_SWEEPS = 2  # of Lloyd's iteration; the first does most
_BLOCK_ENTRIES = 1 << 21


class Support(NamedTuple):
    """Points ``[n, d]`` and their weights ``[n]``, positive with sum 1."""

    points: FloatArray
    weights: FloatArray


def allocated(shares: FloatArray, n: int) -> NDArray[np.int64]:
    """Share ``n`` points among components: at least one each, and otherwise as near to ``n · shares`` as whole numbers
    get.

    Examples
    --------
    >>> import numpy as np
    >>> allocated(np.array([0.7, 0.299, 0.001]), 10).tolist()
    [6, 3, 1]
    """
    wanted = 1.0 + shares * (n - len(shares)) / shares.sum()
    counts: NDArray[np.int64] = np.floor(wanted).astype(np.int64)
    rest = n - int(counts.sum())
    counts[np.argsort(counts - wanted, kind="stable")[:rest]] += 1
    return counts


def drawn_support(mixture: Mixture, weights: FloatArray, n: int, rng: np.random.Generator) -> Support:
    """Points of every component in proportion to its weight, which they keep exactly.

    Parameters
    ----------
    mixture : Mixture
        Where points are drawn.
    weights : array [K]
        Weights to give the components, positive with sum 1.
    n : int
        Points, at least K.
    rng : numpy.random.Generator
        Source of randomness.
    """
    counts = allocated(weights, n)
    drawn = _OVERSAMPLING * counts
    samples = mixture.components.sample(np.repeat(np.arange(mixture.K), drawn), rng)
    samples = np.asarray(samples.toarray() if hasattr(samples, "toarray") else samples, dtype=np.float64)
    parts = []
    for k, part in enumerate(np.split(samples, np.cumsum(drawn)[:-1])):
        share = np.full(len(part), weights[k] / len(part))
        parts.append(quantised(part, share, int(counts[k]), rng))
    return Support(np.concatenate([p.points for p in parts]), np.concatenate([p.weights for p in parts]))


def quantised(X: FloatArray, weights: FloatArray, n: int, rng: np.random.Generator) -> Support:
    """Means of ``n`` groups of samples, or of fewer where groups run empty; the weights of groups add up.

    The mean of the support is that of the samples, to rounding.

    Parameters
    ----------
    X : array [N, d]
        Samples; of more than ``64 n`` a random part is used.
    weights : array [N]
        Their weights; zero leaves a sample out.
    n : int
        Points.
    rng : numpy.random.Generator
        Source of randomness.
    """
    total = float(weights.sum())
    kept = np.flatnonzero(weights > 0.0)
    if len(kept) > _MOST * n:
        kept = np.sort(rng.choice(kept, _MOST * n, replace=False))
    if len(kept) < len(X):
        X, weights = X[kept], weights[kept]
    weights = weights * (total / float(weights.sum()))
    if len(X) <= n:
        return Support(X, weights)
    points = X[rng.choice(len(X), n, replace=False, p=weights / total)]
    mass = np.zeros(n)
    for _ in range(_SWEEPS):
        nearest = _nearest(X, points)
        mass = np.asarray(np.bincount(nearest, weights, minlength=len(points)), dtype=np.float64)
        used = mass > 0.0
        sums = np.stack([np.bincount(nearest, weights * column, minlength=len(points)) for column in X.T], axis=1)
        points, mass = sums[used] / mass[used, None], mass[used]
    return Support(points, mass)


def _nearest(X: FloatArray, points: FloatArray) -> NDArray[np.intp]:
    """Index of the nearest point of each sample, by matrix products in blocks."""
    centre = points.mean(axis=0)
    centred = points - centre
    half = 0.5 * np.einsum("nd,nd->n", centred, centred)
    nearest = np.empty(len(X), dtype=np.intp)
    step = max(1, _BLOCK_ENTRIES // len(points))
    for start in range(0, len(X), step):
        nearest[start : start + step] = (half - (X[start : start + step] - centre) @ centred.T).argmin(axis=1)
    return nearest
