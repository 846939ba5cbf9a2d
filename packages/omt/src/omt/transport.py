"""Transport between two mixtures: one table between components, and maps and plans for samples that follow from it.

Letters: ``K`` source components, ``L`` target components, ``N``, ``M`` source and target samples, ``d`` features.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    import pandas as pd
    from numpy.typing import ArrayLike, NDArray

    from omt.mixture import Mixture
    from omt.pairs.cost import CostName
    from omt.plans.sample import SamplePlan
    from omt.solver import Solution

__all__ = ["Transport", "mw2", "transport"]


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
    from omt.pairs.cost import component_cost, inner_epsilon
    from omt.solver import checked_tau, solve

    if not (np.isfinite(reg) and reg >= 0.0):
        raise ValueError(f"reg is {reg!r}; it must be a finite number ≥ 0 (0 solves the linear program)")
    table = component_cost(P, Q, cost=cost, inner_reg=inner_reg, epsilon=epsilon)
    temperature = _temperature(table, reg) if lam is None else float(lam)
    solution = solve(
        table,
        P.weights,
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


@dataclass(frozen=True, eq=False)
class Transport:
    """Transport between two mixtures; :func:`omt.transport` makes it.

    Attributes
    ----------
    source, target : Mixture
        The mixtures.
    cost_matrix : array [K, L]
        ``C``, cost of the best plan inside each pair.
    solution : omt.solver.Solution
        The component coupling with its potentials and what the solver did.
    epsilon : float
        Temperature of the inner plans, in units of cost.
    tau : pair of float
        How strictly the source and target weights hold; ``(1, 1)`` is balanced.
    forbidden : bool array [K, L] or None
        Impossible transitions.
    tol, max_iter : float, int
        What the solver was given; plans for new samples are solved with them too.
    """

    source: Mixture
    target: Mixture
    cost_matrix: NDArray[np.float64]
    solution: Solution
    epsilon: float
    tau: tuple[float, float]
    forbidden: NDArray[np.bool_] | None = None
    tol: float = 1e-9
    max_iter: int = 500

    def __repr__(self) -> str:
        return (
            f"Transport(K={self.source.K}, L={self.target.K}, d={self.source.d}, "
            f"transport_cost={self.transport_cost:.4g}, lam={self.lam:.4g}, epsilon={self.epsilon:.4g}, "
            f"tau={self.tau}, converged={self.converged})"
        )

    # ------------------------------------------------------------------------------------------------ the coupling
    @property
    def coupling(self) -> NDArray[np.float64]:
        """``W``, [K, L]: mass between each pair of components."""
        return self.solution.coupling

    @property
    def f(self) -> NDArray[np.float64]:
        """Source potential [K] in units of cost: ``W = a b exp((f ⊕ g − C)/λ)``."""
        return self.solution.f

    @property
    def g(self) -> NDArray[np.float64]:
        """Target potential [L] in units of cost."""
        return self.solution.g

    @property
    def lam(self) -> float:
        """Outer temperature ``λ`` in units of cost."""
        return self.solution.lam

    @property
    def objective(self) -> float:
        """Value of the regularised problem."""
        return self.solution.objective

    @property
    def transport_cost(self) -> float:
        """``⟨C, W⟩``."""
        return self.solution.transport_cost

    @property
    def converged(self) -> bool:
        """Whether the solver reached its tolerance."""
        return self.solution.converged

    @property
    def marginal_error(self) -> float:
        """Distance of the marginals from what they should be, in ``‖·‖₁``."""
        return self.solution.marginal_error

    @property
    def unique(self) -> bool | None:
        """True for ``λ > 0``, where the plan is the only minimiser. None for the linear program, which may have
        several.

        There :attr:`strictly_complementary` tells more.
        """
        return True if self.lam > 0.0 else None

    @property
    def strictly_complementary(self) -> bool | None:
        """For the linear program: whether a strictly complementary dual proves the plan unique, up to rounding."""
        return self.solution.strictly_complementary

    @property
    def balanced(self) -> bool:
        """Whether both sides keep their weights."""
        return self.tau == (1.0, 1.0)

    @property
    def prior_growth(self) -> NDArray[np.float64]:
        """Growth [K] of the source components assumed before solving: 1, as many descendants as there are cells."""
        return np.ones(self.source.K)

    @property
    def posterior_growth(self) -> NDArray[np.float64]:
        """Growth [K] of the source components that the plan found: ``(W1)_k / a_k``; 1 on a balanced source."""
        growth: NDArray[np.float64] = self.coupling.sum(axis=1) / self.source.weights
        return growth

    def conditional(self, direction: Literal["forward", "backward"] = "forward") -> NDArray[np.float64]:
        """Row-stochastic table of where mass goes (``[K, L]``) or, ``"backward"``, comes from (``[L, K]``).

        A component whose mass has died out below what float64 holds still has a law, given by the potentials.
        """
        from omt.coupling import conditional_table

        return conditional_table(self, direction)

    def transition_matrix(
        self, direction: Literal["forward", "backward"] = "forward", names: bool = True
    ) -> pd.DataFrame:
        """Transition probabilities between components.

        Parameters
        ----------
        direction : {"forward", "backward"}
            ``"forward"``: row ``k`` is where source component ``k`` goes. ``"backward"``: row ``l`` is where target
            component ``l`` comes from.
        names : bool
            Whether rows and columns carry the components' names, or their numbers.

        Returns
        -------
        pandas.DataFrame
            Rows sum to 1.

        Raises
        ------
        ValueError
            If the direction is another word.
        """
        import pandas as pd

        rows, columns = (self.source, self.target) if direction == "forward" else (self.target, self.source)
        table = self.conditional(direction)
        if not names:
            return pd.DataFrame(table)
        return pd.DataFrame(table, index=list(rows.names), columns=list(columns.names))

    def inverse(self) -> Transport:
        """Transport from the target to the source: the same plan, read backwards."""
        s = self.solution
        return Transport(
            source=self.target,
            target=self.source,
            cost_matrix=self.cost_matrix.T,
            solution=replace(s, coupling=s.coupling.T, f=s.g, g=s.f),
            epsilon=self.epsilon,
            tau=self.tau[::-1],
            forbidden=None if self.forbidden is None else self.forbidden.T,
            tol=self.tol,
            max_iter=self.max_iter,
        )

    # ----------------------------------------------------------------------------------------------------- samples
    def map(
        self,
        X: Any,
        kind: Literal["barycentric", "sample", "mode"] = "barycentric",
        *,
        rng: np.random.Generator | int | None = None,
    ) -> NDArray[np.float64]:
        """Map samples, also new ones, from the source to the target.

        Parameters
        ----------
        X : array [N, d]
            Samples.
        kind : {"barycentric", "sample", "mode"}
            The mean of where each sample goes; one random image each, whose law is exactly the target's if that of
            ``X`` is the source's; or the image under the most probable pair of components.
        rng : Generator or int, optional
            Randomness of ``kind="sample"``.

        Returns
        -------
        array [N, d]
            Images.

        Raises
        ------
        ValueError
            If the kind is unknown, or ``X`` does not fit the source.
        """
        from omt.pairs.maps import barycentric_map, mode_map, sample_map

        if kind == "sample":
            generator = np.random.default_rng(rng)
            return sample_map(X, self.source, self.target, self.coupling, self.epsilon, generator)
        if kind not in {"barycentric", "mode"}:
            raise ValueError(f"kind is {kind!r}; it must be 'barycentric', 'sample' or 'mode'")
        chosen = barycentric_map if kind == "barycentric" else mode_map
        return chosen(X, self.source, self.target, self.coupling, self.epsilon)

    def plan(
        self,
        X: Any,
        Y: Any,
        resolution: Literal["component", "cell"] = "component",
        *,
        mu: ArrayLike | None = None,
        nu: ArrayLike | None = None,
        epsilon: float | None = None,
    ) -> SamplePlan:
        """Plan between samples of the source and samples of the target.

        The samples' own component weights ``Rᵀμ``, ``Sᵀν`` take the place of the mixtures'. Where they differ, the
        coupling is solved again for them, at the same cost and temperature: the plan's marginals are those of the
        samples.

        Parameters
        ----------
        X, Y : array [N, d], [M, d]
            Samples.
        resolution : {"component", "cell"}
            ``"component"``: low rank, mass spreads over all samples of a component. ``"cell"``: inside each pair of
            components it follows the inner plan.
        mu, nu : array [N], [M], optional
            Sample weights; equal ones of sum 1 if not given.
        epsilon : float, optional
            Inner temperature of a cell plan, in units of cost. This transport's own if that is positive, else 0.01
            times the mean cost.

        Returns
        -------
        SamplePlan

        Raises
        ------
        ValueError
            If samples or weights do not fit, or the resolution is unknown.
        """
        from omt.coupling import coupling_for
        from omt.plans.cells import cell_laws
        from omt.plans.inputs import checked_weights
        from omt.plans.sample import SamplePlan

        if resolution not in {"component", "cell"}:
            raise ValueError(f"resolution is {resolution!r}; it must be 'component' or 'cell'")
        R, S = np.asarray(self.source.responsibilities(X)), np.asarray(self.target.responsibilities(Y))
        cells = None
        if resolution == "cell":
            inner = self.epsilon or None if epsilon is None else epsilon
            cells = cell_laws(X, Y, self.source, self.target, epsilon=inner)
        weights_x, weights_y = checked_weights(mu, len(R), "mu"), checked_weights(nu, len(S), "nu")
        if self.balanced and not np.isclose(weights_x.sum(), weights_y.sum(), rtol=1e-9, atol=0.0):
            raise ValueError(
                f"mu sums to {weights_x.sum():.9g} and nu to {weights_y.sum():.9g}; a balanced plan needs equal masses"
            )
        W = coupling_for(self, weights_x @ R, weights_y @ S)
        return SamplePlan(R, S, W, weights_x, weights_y, balanced=self.balanced, cells=cells)

    # ----------------------------------------------------------------------------------------------------- storage
    def to_dict(self) -> dict[str, Any]:
        """Everything but the two mixtures as arrays, strings and numbers in a nested dict that h5ad can hold."""
        from omt.transportstore import transport_to_dict

        return transport_to_dict(self)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any], *, source: Mixture, target: Mixture) -> Self:
        """Rebuild what :meth:`to_dict` gave, also after a round trip through h5ad or JSON.

        Raises
        ------
        ValueError
            If the format version is unknown, an entry is missing, or a table does not fit the mixtures.
        """
        from omt.transportstore import transport_fields

        return cls(source=source, target=target, **transport_fields(stored, (source.K, target.K)))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the transport and both mixtures into the folder ``path``: ``transport.npz`` and ``meta.json``.

        Files are written under temporary names and renamed: an interrupted run leaves the old ones or the new ones.

        Parameters
        ----------
        path
            Folder; it is made if its parent exists.
        """
        from omt import archive

        mixtures = {"source": self.source.to_dict(), "target": self.target.to_dict()}
        archive.save(path, "transport", {**self.to_dict(), **mixtures})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what :meth:`save` wrote; nothing is unpickled.

        Raises
        ------
        FileNotFoundError
            If the folder or its files do not exist.
        ValueError
            If a file is truncated or damaged, or written in an unknown format version.
        """
        from omt import archive
        from omt.mixture import Mixture
        from omt.transportstore import FORMAT

        stored = archive.load(path, "transport", FORMAT)
        for side in ("source", "target"):
            if side not in stored:
                raise ValueError(f"{path} holds no {side} mixture")
        return cls.from_dict(
            stored, source=Mixture.from_dict(stored["source"]), target=Mixture.from_dict(stored["target"])
        )


def _temperature(table: NDArray[np.float64], reg: float) -> float:
    """``λ = reg · mean(C)``; equal mixtures of one component cost nothing, and any temperature gives their plan."""
    mean = float(table.mean())
    if mean < 0.0 and reg > 0.0:
        raise ValueError(f"reg scales with the mean cost, which is {mean:.3g} here; give lam in units of cost instead")
    if mean == 0.0:
        return reg
    return reg * mean
