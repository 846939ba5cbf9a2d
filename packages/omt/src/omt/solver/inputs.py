"""Checks of what a user hands to the outer solver."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from omt.scalars import finite_at_least_zero, positive, whole

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


def checked_tau(tau: ArrayLike) -> tuple[float, float]:
    """Check ``tau`` and return it as a pair (source, target)."""
    try:
        values = np.atleast_1d(np.asarray(tau, dtype=float))
    except (TypeError, ValueError):
        values = np.empty(0)
    if values.shape not in {(1,), (2,)} or not np.all((values > 0.0) & (values <= 1.0)):
        raise ValueError(
            f"tau is {tau!r}; it must be a number in (0, 1] or a pair of them (source, target), 1 = balanced"
        )
    return float(values[0]), float(values[-1])


def checked_problem(
    C: ArrayLike,
    a: ArrayLike,
    b: ArrayLike,
    lam: float,
    tau: float | tuple[float, float],
    tol: float,
    max_iter: int,
    forbidden: ArrayLike | None,
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], tuple[float, float]]:
    """Cost (``inf`` where forbidden), both weights and ``tau`` as a pair, or a ValueError that says what is wrong."""
    cost = np.array(C, dtype=np.float64)
    weights = [np.asarray(w, dtype=np.float64) for w in (a, b)]
    if cost.ndim != 2 or cost.shape != (weights[0].size, weights[1].size) or cost.size == 0:
        raise ValueError(f"C has shape {cost.shape}, but a and b have {weights[0].size} and {weights[1].size} weights")
    if np.isnan(cost).any() or np.isneginf(cost).any():
        k, l = np.argwhere(np.isnan(cost) | np.isneginf(cost))[0]
        raise ValueError(f"C[{k}, {l}] is {cost[k, l]}; costs must be finite, or +inf where forbidden")
    for name, w in zip("ab", weights, strict=True):
        if not np.all(np.isfinite(w)) or not np.all(w > 0.0):
            where = int(np.flatnonzero(~(np.isfinite(w) & (w > 0.0)))[0])
            raise ValueError(
                f"{name}[{where}] is {w[where]}; weights must be finite and > 0, so leave out empty components"
            )
    finite_at_least_zero(lam, "lam", ", in units of cost")
    pair = checked_tau(tau)
    if lam == 0.0 and pair != (1.0, 1.0):
        raise ValueError(f"tau is {pair}, which needs lam (or reg) > 0: a marginal's weight is lam·tau/(1−tau)")
    positive(tol, "tol")
    whole(max_iter, "max_iter")
    if pair == (1.0, 1.0) and not np.isclose(weights[0].sum(), weights[1].sum(), rtol=1e-9, atol=0.0):
        raise ValueError(
            f"a sums to {weights[0].sum():.9g} and b to {weights[1].sum():.9g}: balanced transport needs equal sums; "
            f"normalise them, or relax a side with tau < 1"
        )
    if forbidden is not None:
        mask = np.asarray(forbidden)
        if mask.shape != cost.shape or mask.dtype != np.bool_:
            raise ValueError(f"forbidden must be a bool array of shape {cost.shape}, got {mask.dtype} {mask.shape}")
        cost[mask] = np.inf
    return cost, weights[0], weights[1], pair


def check_reachable(cost: NDArray[np.float64], names: tuple[list[str], list[str]]) -> None:
    """Raise where a component may go nowhere, naming it."""
    for axis, (side, other) in ((1, ("source", "target")), (0, ("target", "source"))):
        alone = np.flatnonzero(~np.isfinite(cost).any(axis=axis))
        if alone.size:
            name = names[1 - axis][alone[0]]
            raise ValueError(
                f"forbidden leaves no feasible plan: {side} component {name!r} has no allowed {other} component; "
                f"allow one, or take the component out of the mixture"
            )
