"""State the transport problem between two mixtures, and solve it.

Letters: ``K`` source components, ``L`` target components, ``d`` features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from omt.transport import Transport

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import ArrayLike, NDArray

    from omt.mixture import Mixture
    from omt.pairs.cost import CostName

__all__ = ["mw2", "transport"]


def transport(
    P: Mixture,
    Q: Mixture,
    *,
    cost: CostName | Callable[[Mixture, Mixture], ArrayLike] | ArrayLike = "w2",
    reg: float = 0.01,
    lam: float | None = None,
    inner_reg: float = 0.0,
    epsilon: float | None = None,
    tau: float | tuple[float, float] = (1.0, 1.0),
    tol: float = 1e-9,
    max_iter: int = 500,
    forbidden: ArrayLike | None = None,
    growth: ArrayLike | None = None,
) -> Transport:
    """Transport the mixture ``P`` onto the mixture ``Q``.

    Solves ``min_W ⟨C, W⟩ + λ KL(W‖a⊗b) + ρ_a KL(W1‖a) + ρ_b KL(Wᵀ1‖b)`` over tables ``W`` between components, with the
    cost ``C`` of the best plan inside each pair. For ``λ > 0`` the solution is unique. The work depends on the numbers
    of components and features only.

    Parameters
    ----------
    P, Q : Mixture
        Source and target, of one family and with the same features.
    cost : str, callable or array [K, L]
        Cost between components, see :func:`omt.component_cost`.
    reg : float
        Outer temperature ``λ`` as a multiple of the mean cost, ≥ 0. Zero solves the linear program exactly.
    lam : float, optional
        ``λ`` in units of cost, instead of ``reg``.
    inner_reg, epsilon : float
        Temperature of the plans inside pairs, as a multiple of the mean ``"w2"`` cost or in units of cost; 0 makes them
        deterministic maps.
    tau : float or pair of floats in (0, 1]
        How strictly the weights of source and target hold, ``τ = ρ/(ρ+λ)``. 1 is balanced; below, components may grow,
        shrink or die out. With small ``reg`` a given ``tau`` relaxes more, because ``ρ`` scales with ``λ``.
    tol : float
        Marginal error at which the solver stops.
    max_iter : int
        Most Newton steps.
    forbidden : bool array [K, L], optional
        Impossible transitions, such as those that a known lineage excludes.
    growth : array [K], optional
        Descendants per cell of each source component over the step, positive. The source weights become ``a∘growth``,
        scaled to sum 1, so that what grows sends more; only ratios matter for the plan.

    Returns
    -------
    Transport

    Raises
    ------
    ValueError
        If the mixtures do not fit each other, a parameter is out of range, or ``forbidden`` leaves no feasible plan
        (the message names the component).

    Warns
    -----
    omt.solver.ConvergenceWarning
        If ``tol`` is not reached.

    References
    ----------
    J. Delon, A. Desolneux, A Wasserstein-type distance in the space of Gaussian mixture models, SIAM J. Imaging Sci.
    13, 2020. G. Schiebinger et al., Optimal-transport analysis of single-cell gene expression, Cell 176, 2019 (relaxed
    marginals).

    Examples
    --------
    >>> import omt
    >>> P = omt.Mixture.from_gaussians([0.5, 0.5], [[0.0], [9.0]], [[[1.0]], [[1.0]]], names=["stem", "neuron"])
    >>> Q = omt.Mixture.from_gaussians([0.4, 0.6], [[1.0], [9.5]], [[[1.0]], [[1.0]]], names=["stem", "neuron"])
    >>> result = omt.transport(P, Q)
    >>> result.transition_matrix().round(2)
            stem  neuron
    stem     0.8     0.2
    neuron   0.0     1.0
    >>> result.map([[0.0]], kind="mode").round(6)
    array([[1.]])
    """
    from omt.growth import checked_growth, grown_weights
    from omt.pairs.cost import component_cost, inner_epsilon
    from omt.scalars import finite_at_least_zero
    from omt.solver import checked_tau, solve

    reg = finite_at_least_zero(reg, "reg", " (0 solves the linear program)")
    table = component_cost(P, Q, cost=cost, inner_reg=inner_reg, epsilon=epsilon)
    temperature = _temperature(table, reg) if lam is None else finite_at_least_zero(lam, "lam", ", in units of cost")
    grown = None if growth is None else checked_growth(growth, P.K, "growth", P.names)
    solution = solve(
        table,
        grown_weights(P.weights, grown),
        Q.weights,
        lam=temperature,
        tau=tau,
        tol=tol,
        max_iter=max_iter,
        forbidden=forbidden,
        source_names=P.names,
        target_names=Q.names,
    )
    w2_cost = table if isinstance(cost, str) and cost == "w2" else None
    return Transport(
        source=P,
        target=Q,
        cost_matrix=table,
        solution=solution,
        epsilon=inner_epsilon(P, Q, inner_reg=inner_reg, epsilon=epsilon, w2_cost=w2_cost),
        tau=checked_tau(tau),
        forbidden=None if forbidden is None else np.asarray(forbidden, dtype=bool),
        tol=tol,
        max_iter=max_iter,
        growth=grown,
    )


def mw2(P: Mixture, Q: Mixture) -> float:
    """Distance ``MW₂`` between two mixtures: Wasserstein-2 with plans restricted to mixtures of pair plans.

    It is a metric on mixtures, at least ``W₂``, and zero exactly for equal ones.

    Parameters
    ----------
    P, Q : Mixture
        Mixtures of one family and with the same features.

    Returns
    -------
    float
        ``(min_W ⟨C, W⟩)^{1/2}`` with the squared Wasserstein-2 cost between components, in units of the data.

    Raises
    ------
    ValueError
        If the mixtures do not fit each other.

    References
    ----------
    J. Delon, A. Desolneux, A Wasserstein-type distance in the space of Gaussian mixture models, SIAM J. Imaging Sci.
    13, 2020, eq. 4.5.

    Examples
    --------
    >>> import omt
    >>> P = omt.Mixture.from_gaussians([1.0], [[0.0]], [[[1.0]]])
    >>> Q = omt.Mixture.from_gaussians([1.0], [[3.0]], [[[25.0]]])
    >>> round(omt.mw2(P, Q), 12)
    5.0
    """
    from omt.pairs.cost import component_cost
    from omt.solver import solve

    return float(np.sqrt(max(solve(component_cost(P, Q), P.weights, Q.weights, lam=0.0).transport_cost, 0.0)))


def _temperature(table: NDArray[np.float64], reg: float) -> float:
    """``λ = reg · mean(C)``; equal mixtures of one component cost nothing, and any temperature gives their plan."""
    mean = float(table.mean())
    if mean < 0.0 and reg > 0.0:
        raise ValueError(f"reg scales with the mean cost, which is {mean:.3g} here; give lam in units of cost instead")
    if mean == 0.0:
        return reg
    return reg * mean
