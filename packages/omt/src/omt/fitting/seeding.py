"""Where an unsupervised fit starts: k-means++ centres and a few steps of Lloyd's algorithm, on a subsample.

Letters: ``n`` rows, ``d`` features, ``K`` components.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from omt.chunks import is_sparse
from omt.families import quadratic
from omt.families.base import FloatArray


def kmeans_labels(
    X: Any, K: int, rng: np.random.Generator, weight: FloatArray | None = None, *, steps: int = 10
) -> NDArray[np.int64]:
    """Partition samples into at most ``K`` groups.

    Parameters
    ----------
    X
        ``[n, d]``, dense or CSR.
    K
        Number of groups.
    rng
        Source of randomness.
    weight
        Weight of each sample, ``[n]``.
    steps
        Most steps of Lloyd's algorithm.

    Returns
    -------
    ndarray ``[n]``
        Group of each sample, in ``0 … K−1``. Every group has a sample if there are K different ones.

    References
    ----------
    Arthur & Vassilvitskii (2007), k-means++: the advantages of careful seeding (the greedy variant, as in
    scikit-learn).
    """
    from sklearn.cluster import kmeans_plusplus  # heavy, and only needed here

    seed = int(rng.integers(2**31 - 1))
    if K == 1:
        return np.zeros(X.shape[0], dtype=np.int64)
    # Squared distances lose their digits far from the origin.
    data = X if is_sparse(X) else X - X.mean(axis=0)
    centres, chosen = kmeans_plusplus(data, K, random_state=seed, sample_weight=weight)
    if is_sparse(centres):
        centres = centres.toarray()
    weights = np.ones(X.shape[0]) if weight is None else weight
    labels = _nearest(data, centres)
    for _ in range(steps):
        one_hot: Any = sparse.csr_array((weights, labels, np.arange(X.shape[0] + 1)), shape=(X.shape[0], K))
        mass = np.asarray(one_hot.sum(axis=0)).ravel()
        sums = one_hot.T @ data
        sums = sums.toarray() if is_sparse(sums) else np.asarray(sums)
        filled = mass > 0
        centres[filled] = sums[filled] / mass[filled, None]
        previous, labels = labels, _nearest(data, centres)
        if np.array_equal(previous, labels):
            break
    # An empty group takes back the sample that it began with.
    for k in np.flatnonzero(np.bincount(labels, minlength=K) == 0):
        if np.count_nonzero(labels == labels[chosen[k]]) > 1:
            labels[chosen[k]] = k
    return labels


def _nearest(X: Any, centres: FloatArray) -> NDArray[np.int64]:
    scores = np.empty((X.shape[0], centres.shape[0]), dtype=centres.dtype)
    quadratic.axis_aligned(X, centres, np.ones_like(centres), scores)
    return np.asarray(scores.argmax(axis=1), dtype=np.int64)
