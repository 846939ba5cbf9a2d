"""Squared Mahalanobis distances of many samples to many Gaussians, in matrix products, without inverse covariances.

Each function adds ``−½ (x − m_k)ᵀ Σ_k⁻¹ (x − m_k)`` to a block of scores. Rows are taken in blocks that stay in the
processor's cache, so a matrix product is followed by the sum of its squares while it is still there.

Letters: ``N`` samples, ``d`` features, ``K`` components, ``r`` rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

# Values of one whitened block: 512 rows × ~512 columns of float64 are 2 MiB, the second-level cache of current
# processors.
_BLOCK_ROWS = 512
_BLOCK_COLUMNS = 512
# Largest squared distance of a mean from the common centre, in a component's own standard deviations, up to which the
# expanded square keeps ten digits (four in float32); beyond it the differences are formed one component at a time.
EXPANDED_LIMIT = {np.dtype(np.float64): 1e5, np.dtype(np.float32): 1e3}


def dense_rows(X: Any, start: int, stop: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Rows ``start:stop`` as a dense array of the given type (no copy when it already is one)."""
    rows = X[start:stop]
    return np.asarray(rows.toarray() if hasattr(rows, "toarray") else rows, dtype=dtype)


def whitened(X: Any, means: NDArray[Any], whitening: NDArray[Any], centre: NDArray[Any], out: NDArray[Any]) -> None:
    """Fill ``out[N, K]`` with ``−½‖P_k(x − m_k)‖²`` for whitening matrices ``P_k``, ``[K, r, d]``.

    One product with the stacked ``P_k`` per block; the offset ``P_k(m_k − centre)`` rides along as the weight of a
    constant feature. Rounding grows only linearly with the distance of a mean from the centre, not with its square.
    """
    K, d = means.shape
    rank = whitening.shape[1]
    dtype = out.dtype
    offsets = np.einsum("krd,kd->kr", whitening, means - centre)
    width = max(1, _BLOCK_COLUMNS // max(rank, 1))
    stacked = []
    for first in range(0, K, width):
        last = min(first + width, K)
        block = whitening[first:last]
        matrix = np.empty((d + 1, (last - first) * rank), dtype=dtype)
        matrix[:d] = block.reshape(-1, d).T
        matrix[d] = -offsets[first:last].reshape(-1)
        stacked.append((first, last, matrix))
    shift = centre.astype(dtype)
    rows = np.empty((_BLOCK_ROWS, d + 1), dtype=dtype)
    rows[:, d] = 1.0
    product = np.empty(_BLOCK_ROWS * min(width, K) * rank, dtype=dtype)
    for start in range(0, X.shape[0], _BLOCK_ROWS):
        stop = min(start + _BLOCK_ROWS, X.shape[0])
        n = stop - start
        np.subtract(dense_rows(X, start, stop, dtype), shift, out=rows[:n, :d])
        for first, last, matrix in stacked:
            block = product[: n * matrix.shape[1]].reshape(n, matrix.shape[1])
            np.matmul(rows[:n], matrix, out=block)
            cube = block.reshape(n, last - first, rank)
            np.einsum("nkr,nkr->nk", cube, cube, out=out[start:stop, first:last])
    out *= -0.5


def low_rank(
    X: Any,
    means: NDArray[Any],
    scale: NDArray[Any],
    correction: NDArray[Any],
    out: NDArray[Any],
) -> None:
    """Fill ``out[N, K]`` for ``Σ_k = F_k F_kᵀ + diag(D_k)`` by the Woodbury identity.

    With ``z = (x − m_k) · scale_k``, ``scale_k = D_k^{-1/2}``, and ``correction_k = C_k^{-1} F_kᵀ D_k^{-1/2}``
    (``C_k`` the Cholesky factor of ``I + F_kᵀ D_k⁻¹ F_k``): ``(x−m)ᵀ Σ⁻¹ (x−m) = ‖z‖² − ‖correction_k z‖²``. Shapes
    ``[K, d]`` and ``[K, r, d]``.
    """
    K, d = means.shape
    dtype = out.dtype
    means, scale, correction = (a.astype(dtype, copy=False) for a in (means, scale, correction))
    z = np.empty((_BLOCK_ROWS, d), dtype=dtype)
    for start in range(0, X.shape[0], _BLOCK_ROWS):
        stop = min(start + _BLOCK_ROWS, X.shape[0])
        rows = dense_rows(X, start, stop, dtype)
        block = z[: stop - start]
        for k in range(K):
            np.subtract(rows, means[k], out=block)
            block *= scale[k]
            inside = block @ correction[k].T
            out[start:stop, k] = np.einsum("nd,nd->n", block, block) - np.einsum("nr,nr->n", inside, inside)
    out *= -0.5


def axis_aligned(X: Any, means: NDArray[Any], precisions: NDArray[Any], out: NDArray[Any]) -> None:
    """Fill ``out[N, K]`` with ``−½ Σ_j (x_j − m_kj)² · precision_kj``; sparse ``X`` is never densified.

    Two products with the stacked components; about the common centre for dense ``X``, about zero for sparse ``X``.
    Where a mean lies so far from that centre that the expanded square would lose digits, dense samples are compared
    with one component at a time instead.
    """
    K, d = means.shape
    dtype = out.dtype
    sparse = hasattr(X, "toarray")
    centre = np.zeros(d) if sparse else means.mean(axis=0)
    offset = means - centre
    far = np.einsum("kd,kd->k", offset**2, precisions)
    linear = np.ascontiguousarray((offset * precisions).T, dtype=dtype)
    square = np.ascontiguousarray((-0.5 * precisions).T, dtype=dtype)
    constant = (-0.5 * far).astype(dtype)
    if sparse:
        for start in range(0, X.shape[0], 4096):
            rows = X[start : start + 4096].astype(dtype, copy=False)
            out[start : start + 4096] = rows @ linear
            out[start : start + 4096] += rows.power(2) @ square
        out += constant
        return
    exact = bool(far.max(initial=0.0) > EXPANDED_LIMIT[dtype])
    shift = centre.astype(dtype)
    root = np.sqrt(precisions).astype(dtype)
    typed_means = means.astype(dtype)
    for start in range(0, X.shape[0], _BLOCK_ROWS):
        stop = min(start + _BLOCK_ROWS, X.shape[0])
        rows = dense_rows(X, start, stop, dtype)
        if exact:
            for k in range(K):
                z = (rows - typed_means[k]) * root[k]
                np.einsum("nd,nd->n", z, z, out=out[start:stop, k])
            out[start:stop] *= -0.5
        else:
            rows = rows - shift
            np.matmul(rows, linear, out=out[start:stop])
            rows *= rows
            out[start:stop] += rows @ square
            out[start:stop] += constant


def shared(X: Any, means: NDArray[Any], whitening: NDArray[Any], out: NDArray[Any]) -> None:
    """Fill ``out[N, K]`` for one covariance shared by all: samples are whitened once, by ``whitening [d, d]``."""
    dtype = out.dtype
    centre = means.mean(axis=0)
    white_means = (means - centre) @ whitening.T
    matrix = np.ascontiguousarray(whitening.T, dtype=dtype)
    unit = np.ones_like(white_means)
    for start in range(0, X.shape[0], 4096):
        stop = min(start + 4096, X.shape[0])
        rows = (dense_rows(X, start, stop, dtype) - centre.astype(dtype)) @ matrix
        axis_aligned(rows, white_means, unit, out[start:stop])
