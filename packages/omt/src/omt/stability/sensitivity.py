"""Derivatives of a plan between components with respect to its costs and weights.

At the solution ``W = a b exp(φ ⊕ ψ − C/λ)``, so a change of the data moves the plan by ``dW = W ∘ (dΦ ⊕ dΨ − dC/λ)``,
where ``Φ``, ``Ψ`` hold the potentials and the logarithms of the weights. The marginal conditions are linear in ``dΦ``
and ``dΨ``; eliminating the longer side leaves one system with the Hessian of the semi-dual
(:mod:`omt.solver.semidual`),

    (diag(W1/τ_a) − W diag(τ_b/Wᵀ1) Wᵀ) dΦ = (W∘dC/λ)1 + W1 (da/a)/τ_a − W (τ_b (W∘dC/λ)ᵀ1 / Wᵀ1 + db/b),

the Laplacian of a network of conductances (:mod:`omt.solver.network`). Memory is ``K·L + K²`` numbers, never
``(K·L)²``.

Letters: ``K`` source components, ``L`` target components; ``m`` is the source that sends most to a target.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from omt.plans.marginals import inverse_weights
from omt.solver.network import IsolatedError, Network

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from omt.transport import Transport

__all__ = ["Sensitivity", "sensitivity"]

_BALANCE = 1e-9  # relative difference of two sums that counts as rounding


def sensitivity(transport: Transport) -> Sensitivity:
    """How the plan of a transport answers to small changes; see :class:`Sensitivity`.

    Parameters
    ----------
    transport : Transport
        A solved transport at a temperature ``λ > 0``, balanced or not.

    Returns
    -------
    Sensitivity

    Raises
    ------
    ValueError
        At ``λ = 0``: the plan of a linear program jumps from vertex to vertex and has no derivative.

    Examples
    --------
    >>> import numpy as np, omt
    >>> P = omt.Mixture.from_gaussians([0.5, 0.5], [[0.0], [1.0]], [[[1.0]], [[1.0]]])
    >>> s = omt.transport(P, P, lam=1.0).sensitivity()
    >>> s.dC([[0.0, 1.0], [0.0, 0.0]]).round(3)  # making 0 → 1 dearer moves mass to the diagonal
    array([[ 0.049, -0.049],
           [-0.049,  0.049]])
    """
    if transport.lam == 0.0:
        raise ValueError(
            "lam is 0: the plan of a linear program jumps between vertices and has no sensitivity; "
            "solve with reg > 0, for example 0.01"
        )
    return Sensitivity(transport)


@dataclass(frozen=True, eq=False)
class Sensitivity:
    """Derivatives of the plan ``W`` at fixed temperature ``λ`` and ``tau``, contracted with directions.

    Forbidden entries, and all that float64 holds as zero, do not move. ``∂W/∂C`` is symmetric and negative
    semidefinite, being the second derivative of the optimal value. A change of ``λ`` is one of the costs:
    ``∂W/∂λ = dC(−C/λ)``.

    Parameters
    ----------
    transport : Transport
        A solved transport with ``λ > 0``.
    """

    transport: Transport

    # ------------------------------------------------------------------------------------------------- directions
    def dC(self, direction: ArrayLike) -> NDArray[np.float64]:  # noqa: N802  # the formulas' letter
        """Change of the plan per unit step of the costs along a direction.

        Parameters
        ----------
        direction : array [K, L]
            In units of cost; what stands at forbidden entries is ignored.

        Returns
        -------
        array [K, L]
        """
        return self.along(dC=direction)

    def da(self, direction: ArrayLike) -> NDArray[np.float64]:
        """Change of the plan per unit step of the source weights along a direction.

        Parameters
        ----------
        direction : array [K]
            Its sum must be 0 where both sides are balanced.

        Returns
        -------
        array [K, L]
        """
        return self.along(da=direction)

    def db(self, direction: ArrayLike) -> NDArray[np.float64]:
        """Change of the plan per unit step of the target weights along a direction.

        Parameters
        ----------
        direction : array [L]
            Its sum must be 0 where both sides are balanced.

        Returns
        -------
        array [K, L]
        """
        return self.along(db=direction)

    def along(
        self, *, dC: ArrayLike | None = None, da: ArrayLike | None = None, db: ArrayLike | None = None
    ) -> NDArray[np.float64]:
        """Change of the plan per unit step of costs and weights together.

        Parameters
        ----------
        dC : array [K, L], optional
            Direction of the costs.
        da, db : arrays [K], [L], optional
            Directions of the weights, of equal sum where both sides are balanced.

        Returns
        -------
        array [K, L]

        Raises
        ------
        ValueError
            If a shape does not fit, a number is not finite, the sums of balanced directions differ, or weight is to
            move between components that the plan does not connect.
        """
        t = self.transport
        K, L = t.coupling.shape
        costs = _direction(dC, (K, L), "dC", allowed=None if t.forbidden is None else ~t.forbidden)
        source, target = _direction(da, (K,), "da"), _direction(db, (L,), "db")
        if t.growth is not None:  # the plan's marginal is a∘g, scaled to sum 1
            mean = float(t.source.weights @ t.growth)
            source = t.growth * (source - t.source.weights * float(t.growth @ source) / mean) / mean
        off = float(source.sum() - target.sum())
        if t.balanced and abs(off) > _BALANCE * float(np.abs(source).sum() + np.abs(target).sum()):
            raise ValueError(
                f"da sums to {source.sum():.6g} and db to {target.sum():.6g}: the masses of a balanced plan stay "
                "equal, so the two sums must be; take the mean off a direction"
            )
        try:
            return self._system.plan_change(costs / t.lam, source, target)
        except IsolatedError as error:
            name = (t.target if self._system.flipped else t.source).names[error.node]
            raise ValueError(
                f"weight cannot move between the components around {name!r} and the others: the plan between them is "
                "zero (to float64, or because of what is forbidden), so it has no derivative there; take a larger reg"
            ) from error

    # ------------------------------------------------------------------------------------------------ its strength
    @cached_property
    def operator_norm(self) -> float:
        """Largest ``‖dW‖/‖dC‖`` over all directions of cost, in Euclidean norms and per unit of cost.

        At most ``max W / λ``; a few dozen solves (Lanczos).
        """
        W = self.transport.coupling
        if W.size < 3:
            basis = np.eye(W.size).reshape(-1, *W.shape)
            table = np.stack([self.dC(direction).ravel() for direction in basis])
            return float(np.linalg.norm(table, 2))
        from scipy.sparse.linalg import LinearOperator, eigsh

        def sharpen(direction: NDArray[np.float64]) -> NDArray[np.float64]:
            return -self.dC(direction.reshape(W.shape)).ravel()

        operator = LinearOperator((W.size, W.size), matvec=sharpen, dtype=np.dtype(np.float64))
        start = np.random.default_rng(0).standard_normal(W.size)
        if not sharpen(start).any():
            return 0.0
        values = eigsh(operator, k=1, which="LA", v0=start, tol=1e-6, return_eigenvectors=False)
        return float(values[0])

    @property
    def condition_number(self) -> float:
        """By how much relative errors of the costs can grow in the plan: ``operator_norm · ‖C‖ / ‖W‖``."""
        t = self.transport
        costs = t.cost_matrix if t.forbidden is None else np.where(t.forbidden, 0.0, t.cost_matrix)
        return self.operator_norm * float(np.linalg.norm(costs) / np.linalg.norm(t.coupling))

    @cached_property
    def _system(self) -> _System:
        t = self.transport
        return _System.of(t.coupling, t.solved_weights, t.target.weights, t.tau)


@dataclass(frozen=True)
class _System:
    """The plan with the factorised Hessian, with the shorter side as rows."""

    flipped: bool
    plan: NDArray[np.float64]
    share: NDArray[np.float64]  # columns of the plan scaled to sum 1
    main: NDArray[np.int64]  # m, the row with most of each column
    inverse: tuple[NDArray[np.float64], NDArray[np.float64]]  # 1/a or, where the side is balanced, 1/W1; likewise b
    row: NDArray[np.float64]
    tau: tuple[float, float]
    network: Network

    @classmethod
    def of(
        cls, W: NDArray[np.float64], a: NDArray[np.float64], b: NDArray[np.float64], tau: tuple[float, float]
    ) -> _System:
        flipped = W.shape[0] > W.shape[1]
        if flipped:
            W, a, b, tau = W.T, b, a, tau[::-1]
        row, column = W.sum(axis=1), W.sum(axis=0)
        share = W * inverse_weights(column)
        edges = tau[1] * (W @ share.T)
        network = Network.of(edges, row * (1.0 / tau[0] - tau[1]))
        inverse = tuple(
            inverse_weights(marginal if t == 1.0 else weights)
            for marginal, weights, t in ((row, a, tau[0]), (column, b, tau[1]))
        )
        return cls(flipped, W, share, W.argmax(axis=0), (inverse[0], inverse[1]), row, tau, network)

    def plan_change(
        self, dc: NDArray[np.float64], da: NDArray[np.float64], db: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """``dW`` for changes of the costs (in units of ``λ``) and of the weights."""
        if self.flipped:
            dc, da, db = dc.T, db, da
        W, share, m, (tau_a, tau_b) = self.plan, self.share, self.main, self.tau
        columns = np.arange(W.shape[1])
        offset = dc[m, columns]
        # A cost that a whole column shares changes nothing but its potential. Taking that of the main entry off keeps
        # the digits of the small differences that matter.
        uneven = dc - offset
        driven = tau_b * ((W * uneven) @ share.T)
        arriving = db * self.inverse[1]  # db/b
        injected = self.row * (da * self.inverse[0]) / tau_a - W @ arriving
        if tau_b < 1.0:
            injected = injected + (1.0 - tau_b) * (W * dc).sum(axis=1)
        difference = self.network.potential_differences(driven - driven.T, injected)
        change = difference[:-1][:, m] - uneven
        change[W == 0.0] = 0.0
        change = change - tau_b * np.einsum("kl,kl->l", share, change) + arriving
        if tau_b < 1.0:
            change += (1.0 - tau_b) * (difference[m, -1] - offset)
        moved: NDArray[np.float64] = change * W
        return moved.T if self.flipped else moved


def _direction(
    value: ArrayLike | None, shape: tuple[int, ...], name: str, allowed: NDArray[np.bool_] | None = None
) -> NDArray[np.float64]:
    """A direction as an array, zero if not given and where not allowed."""
    if value is None:
        return np.zeros(shape)
    array = np.array(value, dtype=np.float64)
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}; it must be {list(shape)}")
    if allowed is not None:
        array[~allowed] = 0.0
    if not np.isfinite(array).all():
        where = ", ".join(str(i) for i in np.argwhere(~np.isfinite(array))[0])
        raise ValueError(f"{name}[{where}] is {array[~np.isfinite(array)][0]}; a direction must be finite")
    return array
