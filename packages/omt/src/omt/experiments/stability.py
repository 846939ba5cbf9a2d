"""How much the plan moves when mixtures are fitted again on half of the samples, against what is proven.

Letters: ``n`` samples a side, ``K`` components, ``d`` features.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from omt.mixture import Mixture
    from omt.stability.certificate import StabilityCertificate

    Array = NDArray[np.float64]

__all__ = ["Refits", "stability"]

_SPREAD = {"separated": 2.0, "overlapping": 0.6}  # standard deviation of the means per axis; within components about 1


@dataclass(frozen=True)
class Refits:
    """What fitting again on half of the samples did to the plan.

    Attributes
    ----------
    certificates
        One for each refit, against the fit on all samples.
    overlap
        Mean probability of a sample's components other than its most probable one: how much components overlap.
    """

    certificates: tuple[StabilityCertificate, ...]
    overlap: float

    @property
    def observed(self) -> Array:
        """``‖ΔW‖₁`` of each refit."""
        return np.array([one.observed for one in self.certificates])

    @property
    def bounds(self) -> Array:
        """What ``‖ΔW‖₁`` of each refit is proven not to exceed."""
        return np.array([one.bound for one in self.certificates])


class _Side(NamedTuple):
    X: Array
    component: NDArray[np.int64]
    full: Mixture


def stability(
    *,
    seed: int,
    separation: Literal["separated", "overlapping"] = "separated",
    halves: Literal["random", "stratified"] = "random",
    reg: float = 0.01,
    n: int = 4000,
    n_components: int = 8,
    n_features: int = 10,
    n_refits: int = 20,
) -> Refits:
    """Two mixtures of Gaussians, a plan between fits on all samples, and plans between fits on halves of them.

    Components are found by EM, from scratch on each half, and matched to those of the full fit by least total cost.
    Stratified halves hold half of each component's samples: what is left is the error of the components' shapes, and
    the random composition of the halves is taken out.

    Parameters
    ----------
    seed
        Seed of the mixtures, the samples and the halves.
    separation
        Means 2 or 0.6 standard deviations apart per axis.
    halves
        Whether halves are drawn from all samples, or from each component's.
    reg
        Outer temperature.
    n, n_components, n_features
        Samples a side, ``K`` and ``d``.
    n_refits
        Halves drawn.
    """
    from omt.problem import transport
    from omt.stability.certificate import stability_certificate

    rng = np.random.default_rng([seed, 7])
    means = _SPREAD[separation] * rng.standard_normal((n_components, n_features))
    moved = means + _SPREAD[separation] / 2.0 * rng.standard_normal(means.shape)
    weights = rng.uniform(0.5, 1.5, size=n_components)
    sides = [_side(rng, weights / weights.sum(), centers, n, seed) for centers in (means, moved)]
    reference = transport(sides[0].full, sides[1].full, reg=reg)
    certificates = []
    for refit in range(n_refits):
        P, Q = (_refitted(side, _half(rng, side.component, halves), refit) for side in sides)
        certificates.append(stability_certificate(reference, transport(P, Q, reg=reg)))
    R = np.asarray(sides[0].full.responsibilities(sides[0].X))
    return Refits(tuple(certificates), float(1.0 - R.max(axis=1).mean()))


def _side(rng: np.random.Generator, weights: Array, means: Array, n: int, seed: int) -> _Side:
    from omt.fitting.em import fit_mixture

    K, d = means.shape
    component = rng.choice(K, size=n, p=weights)
    scale = rng.uniform(0.7, 1.2, size=(K, d))
    X = means[component] + scale[component] * rng.standard_normal((n, d))
    return _Side(X, component, fit_mixture(X, K, random_state=seed, progress=False))


def _half(rng: np.random.Generator, component: NDArray[np.int64], halves: str) -> NDArray[np.int64]:
    if halves == "random":
        return rng.permutation(component.size)[: component.size // 2]
    if halves != "stratified":
        raise ValueError(f"halves is {halves!r}; it must be 'random' or 'stratified'")
    parts = [rng.permutation(np.flatnonzero(component == k)) for k in np.unique(component)]
    return np.concatenate([part[: part.size // 2] for part in parts])


def _refitted(side: _Side, rows: NDArray[np.int64], seed: int) -> Mixture:
    """Mixture of some samples, its components in the order of the full fit's that they resemble most."""
    from scipy.optimize import linear_sum_assignment

    from omt.fitting.em import fit_mixture
    from omt.pairs.cost import component_cost

    found = fit_mixture(side.X[rows], side.full.K, random_state=seed, progress=False)
    order = linear_sum_assignment(component_cost(side.full, found))[1]
    return replace(
        found, weights=found.weights[order], components=found.components.select(order), names=side.full.names
    )
