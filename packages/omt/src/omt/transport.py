"""Transport between two mixtures: one table between components, and maps and plans for samples that follow from it.

Letters: ``K`` source components, ``L`` target components, ``N``, ``M`` source and target samples, ``d`` features.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from omt.growth import grown_weights
from omt.scalars import generator

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    import pandas as pd
    from numpy.typing import ArrayLike, NDArray

    from omt.mixture import Mixture
    from omt.plans.sample import SamplePlan
    from omt.refine import RefinedTransport
    from omt.solver import Solution
    from omt.stability.sensitivity import Sensitivity

__all__ = ["Transport"]


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
    growth : array [K] or None
        Growth of the source components that was assumed, see :attr:`prior_growth`. Source weights in the problem are
        then ``a∘growth``, scaled to sum 1.
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
    growth: NDArray[np.float64] | None = None

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
        """Descendants [K] per cell of each source component that were assumed before solving; 1 if nothing was."""
        return np.ones(self.source.K) if self.growth is None else self.growth

    @property
    def posterior_growth(self) -> NDArray[np.float64]:
        """Descendants [K] per cell of each source component that the plan found: ``(W1)_k / a_k``, times the mean
        prior growth.

        On a balanced source it is the prior growth.
        """
        growth: NDArray[np.float64] = self.coupling.sum(axis=1) / self.source.weights
        return growth if self.growth is None else growth * float(self.source.weights @ self.growth)

    @property
    def solved_weights(self) -> NDArray[np.float64]:
        """Source weights [K] that the problem was solved with: those of the source mixture, grown and scaled to sum
        1.
        """
        return grown_weights(self.source.weights, self.growth)

    def sensitivity(self) -> Sensitivity:
        """How the plan answers to small changes of costs and weights.

        Returns
        -------
        omt.stability.Sensitivity
            Directional derivatives and their operator norm.

        Raises
        ------
        ValueError
            For ``λ = 0``, where the plan jumps.
        """
        from omt.stability.sensitivity import sensitivity

        return sensitivity(self)

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
        """Transport from the target to the source: the same plan, read backwards.

        Where growth was assumed, the mixture it leads to is the source with its weights grown.
        """
        s = self.solution
        return Transport(
            source=self.target,
            target=self.source if self.growth is None else replace(self.source, weights=self.solved_weights),
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
            return sample_map(X, self.source, self.target, self.coupling, self.epsilon, generator(rng))
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
        balanced = self.balanced and self.growth is None  # samples that grow send more than their weight
        weights_x, weights_y = checked_weights(mu, len(R), "mu"), checked_weights(nu, len(S), "nu")
        if balanced and not np.isclose(weights_x.sum(), weights_y.sum(), rtol=1e-9, atol=0.0):
            raise ValueError(
                f"mu sums to {weights_x.sum():.9g} and nu to {weights_y.sum():.9g}; a balanced plan needs equal masses"
            )
        W = coupling_for(self, weights_x @ R, weights_y @ S)
        return SamplePlan(R, S, W, weights_x, weights_y, balanced=balanced, cells=cells)

    def refine(
        self,
        n_points: int = 2000,
        reg: float = 0.02,
        *,
        X: ArrayLike | None = None,
        Y: ArrayLike | None = None,
        tol: float = 1e-6,
        max_iter: int = 500,
        seed: int | np.random.Generator = 0,
    ) -> RefinedTransport:
        """Entropic transport between points of both mixtures, free of the components' restriction.

        Points are drawn from the mixtures, or stand for samples ``X``, ``Y`` if those are given: then the mixtures'
        error does not reach the map. Parameters, errors and an example are those of :func:`omt.refine.refine`.

        Parameters
        ----------
        n_points : int
            Points on each side.
        reg : float
            Temperature as a multiple of the mean squared distance between the points, > 0.
        X, Y : array [N, d], [M, d], optional
            Samples of the source and of the target.
        tol, max_iter : float, int
            Marginal error to reach, and sweeps before Newton steps take over.
        seed : int or Generator
            Randomness of the points.

        Returns
        -------
        omt.refine.RefinedTransport
            With a ``map`` for new samples.
        """
        from omt.refine import refine

        return refine(self, n_points, reg, X=X, Y=Y, tol=tol, max_iter=max_iter, seed=seed)

    def interpolate(self, t: float, *, bridge: bool = False) -> Mixture:
        """The mixture at time ``t`` on the way from the source to the target.

        Details, errors and an example are in :func:`omt.interpolation.interpolate`.

        Parameters
        ----------
        t : float in [0, 1]
            0 gives the source and 1 the target, exactly.
        bridge : bool
            The Schrödinger bridge instead of straight lines to mean partners, for plans with an inner temperature.

        Returns
        -------
        Mixture
            A component ``"A→B"`` for each pair that carries mass.
        """
        from omt.interpolation import interpolate

        return interpolate(self, t, bridge=bridge)

    def interpolate_samples(
        self,
        X: Any,
        t: float,
        n: int | None = None,
        rng: np.random.Generator | int | None = None,
        *,
        bridge: bool = False,
    ) -> NDArray[np.float64]:
        """Samples of the source, moved part of their way to the target.

        Details, errors and an example are in :func:`omt.interpolation.interpolate_samples`.

        Parameters
        ----------
        X : array [N, d]
            Samples of the source.
        t : float in [0, 1]
            0 gives samples themselves, 1 their images.
        n : int, optional
            How many; as many as there are if not given.
        rng : Generator or int, optional
            Randomness of what is taken and where it goes.
        bridge : bool
            As in :meth:`interpolate`.

        Returns
        -------
        array [n, d]
        """
        from omt.interpolation import interpolate_samples

        return interpolate_samples(self, X, t, n, rng, bridge=bridge)

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
