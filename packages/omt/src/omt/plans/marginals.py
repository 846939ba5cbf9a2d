"""Make the marginals of a component coupling exact to rounding."""

from __future__ import annotations

import numpy as np

from omt.families.base import FloatArray

__all__ = ["fit_marginals", "inverse_weights"]

_EPS = float(np.finfo(np.float64).eps)
_TINY = 1e-280


def fit_marginals(W: FloatArray, a: FloatArray, b: FloatArray) -> FloatArray:
    """Close the last gap between a coupling and its marginals without touching zeros.

    A solver stops at a tolerance; sums over millions of samples should not inherit it. Columns are scaled to ``b``,
    then ``W ← W ∘ (1 + u − (Wᵀu)/b)`` with the ``u`` that makes rows exact to first order, which is Newton's step
    on the dual. Two rounds go from 1e-9 to rounding. Where they do not help (a pattern of zeros that cannot have
    these marginals), the best coupling so far is returned.

    Parameters
    ----------
    W : array [K, L]
        Coupling with marginals close to ``a`` and ``b``.
    a, b : array [K], [L]
        Marginals ≥ 0 with equal sums.

    Returns
    -------
    array [K, L]
        Coupling with the same zeros.

    Examples
    --------
    >>> import numpy as np
    >>> W = np.array([[0.3, 0.2], [0.1, 0.4]]) + 1e-9
    >>> fitted = fit_marginals(W, np.array([0.5, 0.5]), np.array([0.4, 0.6]))
    >>> bool(np.abs(fitted.sum(axis=1) - 0.5).max() < 1e-15)
    True
    """
    if W.shape[0] > W.shape[1]:
        return fit_marginals(W.T, b, a).T
    best, best_gap = W, _gap(W, a, b)
    for _ in range(3):
        if best_gap <= _EPS * a.sum():
            break
        columns = best.sum(axis=0)
        scaled = best * np.divide(b, columns, out=np.ones_like(b), where=columns > 0.0)
        rows = scaled.sum(axis=1)
        hessian = np.diag(rows) - (scaled * inverse_weights(b)) @ scaled.T
        # Jacobi scaling; the pseudo-inverse leaves out the constants (a gauge) and what a near-permutation adds to
        # them.
        root = np.sqrt(inverse_weights(rows))
        scaled_hessian = root[:, None] * hessian * root
        u = root * (np.linalg.pinv(scaled_hessian, rcond=1e-13, hermitian=True) @ (root * (a - rows)))
        # No entry may lose more than half: far from the marginals the linear step is not to be trusted.
        candidate = scaled * np.maximum(1.0 + u[:, None] - inverse_weights(b) * (scaled.T @ u), 0.5)
        gap = _gap(candidate, a, b)
        if gap >= best_gap:
            break
        best, best_gap = candidate, gap
    return best


def inverse_weights(weights: FloatArray) -> FloatArray:
    """``1/w``, and 0 where a component has no weight (below 1e-280, where the inverse would overflow in a product).

    Parameters
    ----------
    weights : array
        Weights ≥ 0.

    Returns
    -------
    array
        Same shape.

    Examples
    --------
    >>> import numpy as np
    >>> inverse_weights(np.array([0.5, 0.0]))
    array([2., 0.])
    """
    return np.divide(1.0, weights, out=np.zeros_like(weights), where=weights > _TINY)


def _gap(W: FloatArray, a: FloatArray, b: FloatArray) -> float:
    return float(np.abs(W.sum(axis=1) - a).sum() + np.abs(W.sum(axis=0) - b).sum())
