"""Bounds on how far the plan can move when the mixtures do.

With ``c = C/λ``, the plan is ``W = exp(φ̃ ⊕ ψ̃ − c)`` where ``φ̃ = f/λ + log a`` and ``ψ̃ = g/λ + log b``. Two plans
obey, ``J`` being ``KL(W‖W') + KL(W'‖W)``,

    J(W, W') = ⟨ΔW, Δ log W⟩ = ⟨Δφ̃, Δa⟩ + ⟨Δψ̃, Δb⟩ − ⟨Δc, ΔW⟩,      ‖ΔW‖₁² ≤ M · J(W, W'),

with the mean ``M`` of the two masses (the second is Cauchy-Schwarz and "the logarithmic mean is at most the arithmetic
one"; for masses of 1 it is Pinsker's inequality). The changes of balanced weights sum to 0, so an inner product with
them is at most half the oscillation ``osc(u) = max u − min u`` times their norm: this is S2, and with equal weights
S1. A change of cost that a whole row or column shares moves no mass, only its potential. The identity holds for
``Δc − u⊕v``, ``Δφ̃ − u`` and ``Δψ̃ − v`` with any ``u``, ``v``; taking the common part of rows and columns off the costs
halves the bound in practice.

On a relaxed side ``φ̃`` follows from the marginal, ``f = −ρ log(W1/a)``. With ``κ = τ/(1−τ)`` its term becomes
``(1+κ)⟨ΔW1, Δ log a⟩ − κ J(W1, W'1)``, which is at most ``(1+κ) x ‖Δ log a‖_∞``, and at most
``(1+κ)² M ‖Δ log a‖²_∞ / 4κ``. The statement for relaxed sides is ours, as that of the balanced ones.

Letters: ``K`` source components, ``L`` target components; ``x = ‖ΔW‖₁``.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from omt.mixture import Mixture
    from omt.transport import Transport

__all__ = ["StabilityCertificate", "cost_perturbation_bound", "movement_bound", "stability_certificate"]

_CENTRINGS = 20
_STRUCTURAL = -300.0  # log-plan above which an entry that is 0 is so because no plan can use it, not by underflow


@dataclass(frozen=True)
class StabilityCertificate:
    """A proven bound on the distance of two plans; :func:`stability_certificate` makes it.

    Attributes
    ----------
    bound : float
        ``‖ΔW‖₁`` is at most this.
    observed : float
        ``‖ΔW‖₁``, sum of absolute differences.
    diameter : float
        Sum of the two masses, 2 for balanced plans: no two plans are further apart.
    cost_change : float
        What the costs contribute, ``osc(ΔC/λ)/2`` without what rows and columns share, or ``‖ΔC/λ‖_∞`` where masses may
        differ. With equal weights it is the bound, up to the mean mass as a factor.
    source_change, target_change : float
        What the weights of either side contribute: half the oscillation of their potential's change times ``‖Δa‖₁``;
        on a relaxed side the term with ``‖Δ log a‖_∞``.
    """

    bound: float
    observed: float
    diameter: float
    cost_change: float
    source_change: float
    target_change: float

    @property
    def vacuous(self) -> bool:
        """Whether the bound says no more than that both are plans."""
        return self.bound >= self.diameter

    def __str__(self) -> str:
        seen = f"the plans differ by {self.observed:.3g} of at most {self.diameter:.3g}"
        if self.vacuous:
            return (
                f"{seen}; the bound ({self.bound:.3g}) is vacuous here: read the sensitivity and the bootstrap "
                "instead, or take a larger reg"
            )
        parts = {"costs": self.cost_change, "source weights": self.source_change, "target weights": self.target_change}
        most = max(parts, key=parts.__getitem__)
        return f"{seen}, provably by no more than {self.bound:.3g} (most of it from the {most})"


def stability_certificate(
    first: Transport, second: Transport, *, match: Literal["name", "order"] = "name"
) -> StabilityCertificate:
    """Bound the distance of two plans by how much their costs and weights differ.

    It shows that a plan cannot jump. The constant is ``1/λ``, so at small temperatures it is often vacuous; what to
    read then is :meth:`omt.Transport.sensitivity` and :func:`omt.tl.bootstrap`.

    Parameters
    ----------
    first, second : Transport
        Two transports between mixtures of the same components, such as fits on different samples. Temperatures may
        differ: what counts are costs in units of the temperature.
    match : {"name", "order"}
        Which components correspond: those of equal names, or those at equal places.

    Returns
    -------
    StabilityCertificate
        Its text form is one sentence.

    Raises
    ------
    ValueError
        If components do not correspond, ``λ`` is 0, or the two differ in ``tau`` or in what is forbidden.

    Examples
    --------
    >>> import omt
    >>> P = omt.Mixture.from_gaussians([0.5, 0.5], [[0.0], [4.0]], [[[1.0]], [[1.0]]])
    >>> Q = omt.Mixture.from_gaussians([0.5, 0.5], [[0.1], [4.3]], [[[1.0]], [[1.0]]])
    >>> certificate = omt.stability_certificate(omt.transport(P, P, lam=4.0), omt.transport(P, Q, lam=4.0))
    >>> print(certificate)
    the plans differ by 0.00642 of at most 2, provably by no more than 0.1 (most of it from the costs)
    """
    _check_comparable(first, second)
    rows = _correspondence(first.source, second.source, "source", match)
    columns = _correspondence(first.target, second.target, "target", match)
    part = np.ix_(rows, columns)
    allowed = _allowed(first)
    if not np.array_equal(allowed, _allowed(second)[part]):
        raise ValueError("the two transports forbid different transitions; their plans cannot be close everywhere")
    W, other = first.coupling, second.coupling[part]
    cost = np.where(allowed, second.cost_matrix[part] / second.lam - first.cost_matrix / first.lam, np.nan)
    mean_mass = 0.5 * float(W.sum() + other.sum())
    observed = float(np.abs(other - W).sum())
    if not allowed.all():
        _check_supports(first, second, rows, columns)
    sides = (
        (first.solved_weights, second.solved_weights[rows], first.f / first.lam, second.f[rows] / second.lam),
        (first.target.weights, second.target.weights[columns], first.g / first.lam, second.g[columns] / second.lam),
    )
    gauges = [_shared_change(cost, first.tau, rounds) for rounds in (0, _CENTRINGS)]
    found = min(_smallest_bound(cost, gauge, sides, first.tau, mean_mass) for gauge in gauges)
    return StabilityCertificate(found[0], observed, 2.0 * mean_mass, *found[1:])


def _smallest_bound(
    cost: NDArray[np.float64],
    gauge: tuple[NDArray[np.float64], NDArray[np.float64]],
    sides: tuple[tuple[NDArray[np.float64], ...], ...],
    taus: tuple[float, float],
    mean_mass: float,
) -> tuple[float, float, float, float]:
    """Bound with ``u``, ``v`` taken off the costs, and what costs, source and target contribute."""
    left = cost - gauge[0][:, None] - gauge[1]
    fixed_mass = 1.0 in taus
    slope = 0.5 * float(np.nanmax(left) - np.nanmin(left)) if fixed_mass else float(np.nanmax(np.abs(left)))
    choices = []
    for (weights, changed, potential, moved), shift, tau in zip(sides, gauge, taus, strict=True):
        ratio = np.log(changed / weights)
        if tau == 1.0:
            swing = float(np.ptp(moved - potential + ratio - shift))
            choices.append([(0.0, 0.5 * swing * float(np.abs(changed - weights).sum()))])
        else:
            kappa, most = tau / (1.0 - tau), float(np.abs(ratio).max())
            squared = (1.0 + kappa) ** 2 * most**2 * mean_mass / (4.0 * kappa)
            choices.append([((1.0 + kappa) * most, 0.0), (0.0, squared)])
    # Each choice of terms gives x² ≤ M ((slope + s) x + q); the smallest of the largest roots is the bound.
    return min(
        (_root(mean_mass, slope + one[0] + two[0], one[1] + two[1]), slope, max(one), max(two))
        for one, two in itertools.product(*choices)
    )


def _shared_change(
    cost: NDArray[np.float64], taus: tuple[float, float], rounds: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What rows and columns share of a change of the costs (NaN: forbidden), on the sides whose weights hold.

    Alternately taking off the mid-range of each row and each column comes close to the smallest oscillation.
    """
    u, v = np.zeros(cost.shape[0]), np.zeros(cost.shape[1])
    for _ in range(rounds):
        if taus[0] == 1.0:
            left = cost - v
            u = 0.5 * (np.nanmax(left, axis=1) + np.nanmin(left, axis=1))
        if taus[1] == 1.0:
            left = cost - u[:, None]
            v = 0.5 * (np.nanmax(left, axis=0) + np.nanmin(left, axis=0))
    return u, v


def cost_perturbation_bound(P: Mixture, Q: Mixture, moved_P: Mixture, moved_Q: Mixture) -> NDArray[np.float64]:
    """Bound how much each cost changes when components move (S3).

    ``|W₂²(p,q) − W₂²(p',q')| ≤ (W₂(p,q) + W₂(p',q')) (W₂(p,p') + W₂(q,q'))``, by the triangle inequality.

    Parameters
    ----------
    P, Q : Mixture
        Source and target.
    moved_P, moved_Q : Mixture
        The same with moved components, in the same order.

    Returns
    -------
    array [K, L]
        Bound on ``|ΔC|`` of the cost ``"w2"``.

    Raises
    ------
    ValueError
        If numbers of components differ.

    Examples
    --------
    >>> import omt
    >>> from omt.stability import cost_perturbation_bound
    >>> P, Q = (omt.Mixture.from_gaussians([1.0], [[x]], [[[1.0]]]) for x in (0.0, 3.0))
    >>> moved = omt.Mixture.from_gaussians([1.0], [[-0.5]], [[[1.0]]])
    >>> cost_perturbation_bound(P, Q, moved, Q).round(6).tolist()  # from 3² to 3.5²
    [[3.25]]
    """
    from omt.pairs.cost import component_cost

    for side, old, new in (("source", P, moved_P), ("target", Q, moved_Q)):
        if old.K != new.K:
            raise ValueError(f"the {side} has {old.K} components and the moved one {new.K}; they must correspond")
    before, after = (np.sqrt(np.maximum(component_cost(*pair), 0.0)) for pair in ((P, Q), (moved_P, moved_Q)))
    step_p, step_q = (
        np.sqrt(np.maximum(np.diagonal(component_cost(*pair)), 0.0)) for pair in ((P, moved_P), (Q, moved_Q))
    )
    bound: NDArray[np.float64] = (before + after) * (step_p[:, None] + step_q)
    return bound


def movement_bound(transport: Transport, moved_source: Mixture, moved_target: Mixture) -> float:
    """Bound how far the plan of a transport can move if its components do (S3, then S1).

    Nothing is solved: the weights, the temperature and the cost ``"w2"`` are those of the transport.

    Parameters
    ----------
    transport : Transport
        A balanced transport with ``λ > 0`` and the cost ``"w2"``.
    moved_source, moved_target : Mixture
        Its mixtures with moved components, in the same order; their weights are not looked at.

    Returns
    -------
    float
        ``‖ΔW‖₁`` is at most this; 2 or more says nothing.

    Raises
    ------
    ValueError
        If numbers of components differ, ``λ`` is 0, or the transport is not balanced.
    """
    _check_temperature(transport)
    if not transport.balanced:
        raise ValueError(
            f"tau is {transport.tau}; how much mass a relaxed plan will carry is not known before it is solved, so "
            "solve both and use stability_certificate"
        )
    bound = cost_perturbation_bound(transport.source, transport.target, moved_source, moved_target)
    if transport.forbidden is not None:
        bound = bound[~transport.forbidden]
    return float(bound.max()) / transport.lam


def _allowed(transport: Transport) -> NDArray[np.bool_]:
    if transport.forbidden is None:
        return np.ones(transport.coupling.shape, dtype=bool)
    return ~transport.forbidden


def _root(mean_mass: float, slope: float, constant: float) -> float:
    """Largest ``x`` with ``x² ≤ M (slope x + constant)``."""
    half = 0.5 * mean_mass * slope
    return half + float(np.sqrt(half**2 + mean_mass * constant))


def _check_temperature(transport: Transport) -> None:
    if transport.lam == 0.0:
        raise ValueError("lam is 0: the plan of a linear program may jump, no bound exists; solve with reg > 0")


def _check_comparable(first: Transport, second: Transport) -> None:
    for one in (first, second):
        _check_temperature(one)
    if first.tau != second.tau:
        raise ValueError(
            f"tau is {first.tau} in one transport and {second.tau} in the other; the bound compares plans of one tau"
        )


def _correspondence(old: Mixture, new: Mixture, side: str, match: str) -> NDArray[np.int64]:
    """Places in ``new`` of the components of ``old``."""
    if old.K != new.K:
        raise ValueError(
            f"the {side}s have {old.K} and {new.K} components; the bound compares plans between the same components"
        )
    if match == "order":
        return np.arange(old.K)
    if match != "name":
        raise ValueError(f"match is {match!r}; it must be 'name' or 'order'")
    place = {name: k for k, name in enumerate(new.names)}
    missing = [name for name in old.names if name not in place]
    if missing:
        raise ValueError(
            f"the {side} of the second transport has no component {missing[0]!r}; it has {', '.join(new.names)}. "
            "Give match='order' if components correspond by their places"
        )
    return np.array([place[name] for name in old.names], dtype=np.int64)


def _forced_empty(t: Transport) -> NDArray[np.bool_]:
    """Allowed entries that no plan between these weights can use."""
    logs = (t.f[:, None] + t.g - t.cost_matrix) / t.lam + np.log(t.solved_weights)[:, None] + np.log(t.target.weights)
    forced: NDArray[np.bool_] = _allowed(t) & (t.coupling == 0.0) & (logs > _STRUCTURAL)
    return forced


def _check_supports(first: Transport, second: Transport, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> None:
    """Refuse plans of which only one is forced to leave an allowed entry empty: their divergence is infinite."""
    if not np.array_equal(_forced_empty(first), _forced_empty(second)[np.ix_(rows, columns)]):
        raise ValueError(
            "what is forbidden leaves other entries empty under the weights of one transport than under the other's; "
            "the plans have different supports and no bound exists"
        )
