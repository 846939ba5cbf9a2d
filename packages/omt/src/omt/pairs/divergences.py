"""Overlap of Gaussian components in closed form: Bhattacharyya and squared Hellinger distances, batched over pairs.

Dimension letters: ``K`` source components, ``L`` target components, ``d`` features. The Kullback-Leibler divergence
is a method of the family (``GaussianComponents.kl``), because fitting uses it too.

With ``Σ̄ = (A + B)/2`` and ``δ = m − m'`` the Bhattacharyya distance is
``−log ∫ √(p q) = ⅛ δᵀ Σ̄⁻¹ δ + ½ log det Σ̄ − ¼ log det A − ¼ log det B``; log-determinants are sums of logarithms of
Cholesky diagonals, so nothing underflows in high dimension.

References
----------
Kailath, "The divergence and Bhattacharyya distance measures in signal selection", IEEE Trans. Comm. Tech. 15, 1967.
"""

from __future__ import annotations

import numpy as np

from omt.families.base import FloatArray

__all__ = ["diagonal_bhattacharyya", "gaussian_bhattacharyya", "squared_hellinger"]

_BLOCK_ENTRIES = 1 << 18


def gaussian_bhattacharyya(
    means_p: FloatArray, covariances_p: FloatArray, means_q: FloatArray, covariances_q: FloatArray
) -> FloatArray:
    """Bhattacharyya distances between every two Gaussians of two lists.

    Parameters
    ----------
    means_p, means_q : array [K, d], [L, d]
        Means.
    covariances_p, covariances_q : array [K or 1, d, d], [L or 1, d, d]
        Positive definite covariances; a first axis of length one is shared by all components of its side.

    Returns
    -------
    array [K, L]
        Distances ≥ 0, in nats.

    Examples
    --------
    >>> import numpy as np
    >>> D = gaussian_bhattacharyya(np.zeros((1, 1)), np.ones((1, 1, 1)), np.full((1, 1), 2.0), np.ones((1, 1, 1)))
    >>> round(float(D[0, 0]), 12)  # ⅛ δ² for equal variances
    0.5
    """
    K, d = means_p.shape
    L = len(means_q)
    out = np.empty((K, L))
    covariances_p = np.broadcast_to(covariances_p, (K, d, d))
    covariances_q = np.broadcast_to(covariances_q, (L, d, d))
    columns = max(1, min(L, _BLOCK_ENTRIES // d**2))
    rows = max(1, _BLOCK_ENTRIES // (columns * d**2))
    for i in range(0, K, rows):
        for j in range(0, L, columns):
            middle = 0.5 * (covariances_p[i : i + rows, None] + covariances_q[None, j : j + columns])
            root = np.linalg.cholesky(middle)
            delta = means_p[i : i + rows, None] - means_q[None, j : j + columns]
            white = np.linalg.solve(root, delta[..., None])[..., 0]
            out[i : i + rows, j : j + columns] = 0.125 * (white**2).sum(axis=-1) + 0.5 * _log_det(np.asarray(root))
    out -= 0.25 * _log_det(np.asarray(np.linalg.cholesky(covariances_p)))[:, None]
    out -= 0.25 * _log_det(np.asarray(np.linalg.cholesky(covariances_q)))[None, :]
    return np.asarray(np.maximum(out, 0.0))


def diagonal_bhattacharyya(
    means_p: FloatArray, variances_p: FloatArray, means_q: FloatArray, variances_q: FloatArray
) -> FloatArray:
    """The distance of :func:`gaussian_bhattacharyya` for axis-aligned covariances, axis by axis.

    Parameters
    ----------
    means_p, means_q : array [K, d], [L, d]
        Means.
    variances_p, variances_q : array [K, d], [L, d]
        Positive variances along the axes.

    Returns
    -------
    array [K, L]
        Distances ≥ 0, in nats.

    Examples
    --------
    >>> import numpy as np
    >>> m, v = np.zeros((1, 2)), np.ones((1, 2))
    >>> round(float(diagonal_bhattacharyya(m, v, m + 2.0, v)[0, 0]), 12)
    1.0
    """
    out = np.empty((len(means_p), len(means_q)))
    log_p, log_q = np.log(variances_p).sum(axis=1), np.log(variances_q).sum(axis=1)
    rows = max(1, _BLOCK_ENTRIES // means_q.size)
    for i in range(0, len(out), rows):
        block = slice(i, i + rows)
        middle = 0.5 * (variances_p[block, None] + variances_q[None])
        delta = means_p[block, None] - means_q[None]
        out[block] = 0.125 * (delta**2 / middle).sum(axis=-1) + 0.5 * np.log(middle).sum(axis=-1)
        out[block] -= 0.25 * (log_p[block, None] + log_q[None])
    return np.asarray(np.maximum(out, 0.0))


def squared_hellinger(bhattacharyya: FloatArray) -> FloatArray:
    """``H² = 1 − ∫ √(p q) = 1 − exp(−D_B)``, in [0, 1], from Bhattacharyya distances.

    Parameters
    ----------
    bhattacharyya : array
        Distances, in nats.

    Returns
    -------
    array
        Same shape; accurate for nearly equal components too.

    Examples
    --------
    >>> import numpy as np
    >>> squared_hellinger(np.array([0.0, np.log(2.0)]))
    array([0. , 0.5])
    """
    return np.asarray(-np.expm1(-bhattacharyya))


def _log_det(root: FloatArray) -> FloatArray:
    """Log-determinants of the matrices whose Cholesky factors are given."""
    return np.asarray(2.0 * np.log(np.diagonal(root, axis1=-2, axis2=-1)).sum(axis=-1))
