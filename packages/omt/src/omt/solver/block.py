"""Alternating minimisation of the biconvex objective over within-pair plans and the coupling.

The method never needs it: pairs decouple, so one sweep from any interior start reaches the only minimum. The routine
exists to show exactly that, on Gaussian components.

Letters: ``K`` source components, ``L`` target components, ``d`` features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from omt.solver.outer import solve

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class BlockDescent:
    """Result of `block_coordinate_descent`.

    Attributes
    ----------
    coupling : array [K, L]
        Component coupling ``W``.
    contraction : array [K, L, d, d]
        ``R`` of each within-pair plan: the cross-covariance is ``A^{1/2} R B^{1/2}``.
    objectives : list of float
        ``F`` at the start and after each half-step (plans, coupling, plans, …).
    n_sweeps : int
        Sweeps until the objective stood still.
    """

    coupling: NDArray[np.float64]
    contraction: NDArray[np.float64]
    objectives: list[float]
    n_sweeps: int


def block_coordinate_descent(
    a: ArrayLike,
    means_p: ArrayLike,
    covariances_p: ArrayLike,
    b: ArrayLike,
    means_q: ArrayLike,
    covariances_q: ArrayLike,
    *,
    lam: float,
    epsilon: float,
    coupling: ArrayLike | None = None,
    contraction: ArrayLike | None = None,
    max_sweeps: int = 10,
    tol: float = 1e-12,
) -> BlockDescent:
    """Alternate between the best within-pair plans and the best component coupling.

    The objective is ``F(W, π) = Σ_kl W_kl (∫‖x−y‖² dπ_kl + ε KL(π_kl‖p_k⊗q_l)) + λ KL(W‖a⊗b)`` over couplings ``W`` and
    Gaussian plans ``π_kl`` between ``p_k = N(m_k, A_k)`` and ``q_l = N(m'_l, B_l)``, each given by a contraction
    ``R_kl`` (spectral norm below 1): the cross-covariance is ``A^{1/2} R B^{1/2}``, ``KL = −½ log det(I − R Rᵀ)``.

    Parameters
    ----------
    a, b : array_like [K], [L]
        Weights.
    means_p, means_q : array_like [K, d], [L, d]
        Component means.
    covariances_p, covariances_q : array_like [K, d, d], [L, d, d]
        Component covariances.
    lam, epsilon : float
        Outer and inner temperature in units of cost, both positive.
    coupling : array_like [K, L], optional
        Positive start of ``W``; ``a⊗b`` if not given.
    contraction : array_like [K, L, d, d], optional
        Start of ``R``; zero (independence inside each pair) if not given.
    max_sweeps : int
        Most sweeps.
    tol : float
        Stop when a sweep lowers ``F`` by at most this, relative to ``|F|``.

    Returns
    -------
    BlockDescent
        Minimiser and the objective along the way.

    Raises
    ------
    ValueError
        If a temperature is not positive.
    """
    if not (lam > 0.0 and epsilon > 0.0):
        raise ValueError(f"lam and epsilon must be positive, got lam={lam!r}, epsilon={epsilon!r}")
    weights_p, weights_q = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    independent = np.outer(weights_p, weights_q)
    apart, roots_p, roots_q = _pair_geometry(means_p, covariances_p, means_q, covariances_q)
    W = independent if coupling is None else np.asarray(coupling, dtype=float)
    d = roots_p.shape[-1]
    R = np.zeros((*W.shape, d, d)) if contraction is None else np.asarray(contraction, dtype=float)

    def pair_cost(R: NDArray[np.float64]) -> NDArray[np.float64]:
        shared = np.einsum("kij,kljm,lmi->kl", roots_p, R, roots_q, optimize=True)
        log_det = np.linalg.slogdet(np.eye(d) - R @ R.mT)[1]
        cost: NDArray[np.float64] = apart - 2.0 * shared - 0.5 * epsilon * log_det
        return cost

    def objective(W: NDArray[np.float64], cost: NDArray[np.float64]) -> float:
        return float(np.sum(W * cost) + lam * np.sum(W * np.log(W / independent) - W + independent))

    objectives = [objective(W, pair_cost(R))]
    for _ in range(max_sweeps):
        R = _best_contraction(roots_p, roots_q, epsilon)
        cost = pair_cost(R)
        objectives.append(objective(W, cost))
        # 1e-300 keeps the logarithm finite where the best coupling underflows; such entries weigh nothing.
        W = np.maximum(solve(cost, weights_p, weights_q, lam=lam).coupling, 1e-300)
        objectives.append(objective(W, cost))
        if objectives[-3] - objectives[-1] <= tol * abs(objectives[-1]):
            break
    return BlockDescent(W, R, objectives, (len(objectives) - 1) // 2)


def _pair_geometry(
    means_p: ArrayLike, covariances_p: ArrayLike, means_q: ArrayLike, covariances_q: ArrayLike
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """``‖m−m'‖² + tr A + tr B`` [K, L] and the symmetric roots of the covariances."""
    m, m2 = np.asarray(means_p, dtype=float), np.asarray(means_q, dtype=float)
    A, B = np.asarray(covariances_p, dtype=float), np.asarray(covariances_q, dtype=float)
    trace_p, trace_q = np.trace(A, axis1=1, axis2=2), np.trace(B, axis1=1, axis2=2)
    apart = ((m[:, None] - m2) ** 2).sum(axis=-1) + trace_p[:, None] + trace_q
    return apart, _symmetric_root(A), _symmetric_root(B)


def _symmetric_root(covariances: NDArray[np.float64]) -> NDArray[np.float64]:
    values, vectors = np.linalg.eigh(covariances)
    root: NDArray[np.float64] = (vectors * np.sqrt(np.maximum(values, 0.0))[..., None, :]) @ vectors.mT
    return root


def _best_contraction(
    roots_p: NDArray[np.float64], roots_q: NDArray[np.float64], epsilon: float
) -> NDArray[np.float64]:
    """Minimise ``−2 tr(A^{1/2} R B^{1/2}) − (ε/2) log det(I − R Rᵀ)`` over contractions, pair by pair.

    With ``B^{1/2} A^{1/2} = U diag(s) Vᵀ`` the minimiser is ``R = V diag(r) Uᵀ``, each ``r`` solving
    ``2 s (1 − r²) = ε r``.
    """
    U, s, Vt = np.linalg.svd(roots_q[None] @ roots_p[:, None])
    # The root of the quadratic in the form that stays exact as s → 0.
    r = 4.0 * s / (epsilon + np.sqrt(epsilon**2 + 16.0 * s**2))
    best: NDArray[np.float64] = (Vt.mT * r[..., None, :]) @ U.mT
    return best
