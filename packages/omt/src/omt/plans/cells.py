r"""The fine plan between samples: inside a pair of components, mass follows the inner plan.

Letters: ``N``/``M`` source/target samples, ``K``/``L`` components, ``d`` features.

Row ``i`` of the plan is ``μ_i Σ_kl (r_ik / a_k) W_kl · ν_j s_jl ρ_kl(x_i, y_j) / Z_ikl``, with responsibilities
``r``, ``s``, sample weights ``μ``, ``ν``, the density ratio ``ρ_kl = dπ_kl/d(p_k⊗q_l)`` of the inner plan at
temperature ``ε > 0``, and ``Z`` the sum over ``j`` of what stands before it. ``Z`` makes rows exact; columns are
exact only as far as the samples look like their components, which in twenty dimensions they do not: at a low
temperature few samples near the middle take the mass of all. So the closed form is the start of a few Sinkhorn sweeps
inside each pair, which scale columns to ``W_kl ν_j s_jl / b_l`` (and rows by ``Z``). Their limit is entropic optimal
transport between the samples of the two components.

``log ρ_kl`` is a quadratic in ``x`` (which ``Z`` removes), a quadratic in ``y`` (computed once per pair) and ``2⟨x
− m_k, y − m'_l⟩/ε``: one matrix product per tile. Tiles join the samples of one source component with those of one
target component, so separated components cost far less than ``N M`` exponentials, and each exponential is taken
relative to the largest in its row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from omt.chunks import require_finite
from omt.families.base import FloatArray
from omt.pairs.cost import gaussian_pair, inner_epsilon
from omt.pairs.gaussian import quadratic_form
from omt.pairs.maps import carried_pairs, iterate_plans

if TYPE_CHECKING:
    from omt.mixture import Mixture

__all__ = ["CellLaws", "cell_laws"]

# A sample takes no part in a component that it belongs to with a smaller probability.
_NEGLIGIBLE = 1e-12
# Entries of the largest work array: 32 MiB of float64.
_TILE_ENTRIES = 1 << 22


@dataclass(frozen=True, eq=False)
class CellLaws:
    """Samples of both sides with the mixtures whose inner plans couple them; build it with :func:`cell_laws`.

    Parameters
    ----------
    X, Y : array [N, d], [M, d]
        Source and target samples.
    source, target : Mixture
        The mixtures.
    epsilon : float
        Temperature of the inner plans, > 0, in units of the cost.
    sweeps : int
        Sinkhorn sweeps inside each pair after the closed form.
    """

    X: FloatArray
    Y: FloatArray
    source: Mixture
    target: Mixture
    epsilon: float
    sweeps: int


def cell_laws(X: Any, Y: Any, P: Mixture, Q: Mixture, *, epsilon: float | None = None, sweeps: int = 5) -> CellLaws:
    """Check samples and temperature for a fine :class:`omt.plans.sample.SamplePlan`.

    Parameters
    ----------
    X, Y : array [N, d], [M, d]
        Source and target samples.
    P, Q : Mixture
        Source and target mixture.
    epsilon : float, optional
        Temperature of the inner plans in units of the cost; ``0.01`` times the mean ``"w2"`` cost if not given.
    sweeps : int
        Sinkhorn sweeps inside each pair of components, each one pass over the plan: more bring the column marginals
        closer to the sample weights. With 0 the inner plans are the closed form, normalised by rows.

    Returns
    -------
    CellLaws

    Raises
    ------
    ValueError
        If shapes do not fit, a value is not finite, ``epsilon`` is not positive, or ``sweeps`` is negative.

    Examples
    --------
    >>> from omt.mixture import Mixture
    >>> P = Mixture.from_gaussians([1.0], [[0.0]], [[[1.0]]])
    >>> Q = Mixture.from_gaussians([1.0], [[3.0]], [[[4.0]]])
    >>> round(cell_laws([[0.5]], [[4.0]], P, Q).epsilon, 12)  # 1 % of 3² + (2 - 1)²
    0.1
    """
    gaussian_pair(P, Q)
    samples = []
    for name, value, mixture in (("X", X, P), ("Y", Y, Q)):
        array = np.asarray(value.toarray() if hasattr(value, "toarray") else value, dtype=np.float64)
        if array.ndim != 2 or array.shape[1] != mixture.d:
            raise ValueError(
                f"{name} has shape {array.shape}; its mixture has d={mixture.d}, so it must be [samples, {mixture.d}]"
            )
        require_finite(array, 0, name=name)
        samples.append(array)
    temperature = inner_epsilon(P, Q, inner_reg=0.01) if epsilon is None else inner_epsilon(P, Q, epsilon=epsilon)
    if temperature == 0.0:
        raise ValueError("epsilon is 0; a cell-level plan needs a temperature > 0 (at 0 the inner plan has no density)")
    if sweeps < 0:
        raise ValueError(f"sweeps is {sweeps}; it must be at least 0")
    return CellLaws(samples[0], samples[1], P, Q, temperature, int(sweeps))


@dataclass(frozen=True, eq=False)
class Tile:
    """A dense piece of the plan: ``mass[i, j]`` goes from source sample ``rows[i]`` to target sample ``columns[j]``."""

    pair: tuple[int, int]
    rows: NDArray[np.intp]
    columns: NDArray[np.intp]
    mass: FloatArray


class CellTiles:
    """The fine plan as a stream of tiles; entries of different tiles for the same two samples add up.

    Parameters
    ----------
    laws : CellLaws
        Samples, mixtures and temperature.
    R, S : array [N, K], [M, L]
        Responsibilities.
    W : array [K, L]
        Coupling of the components.
    mu, nu : array [N], [M]
        Sample weights.
    """

    def __init__(
        self, laws: CellLaws, R: FloatArray, S: FloatArray, W: FloatArray, mu: FloatArray, nu: FloatArray
    ) -> None:
        self._laws, self._mu = laws, mu
        kept = np.where(R > _NEGLIGIBLE, R, 0.0)
        self._R = kept / kept.sum(axis=1, keepdims=True)
        a = mu @ R
        self._share = np.divide(W, a[:, None], out=np.zeros_like(W), where=a[:, None] > 0.0)
        # Samples of each target component, and their weights ν_j s_jl.
        self._columns = [np.flatnonzero((S[:, l] > _NEGLIGIBLE) & (nu > 0.0)) for l in range(S.shape[1])]
        self._weights = [nu[columns] * S[columns, l] for l, columns in enumerate(self._columns)]
        k, l = carried_pairs(W)
        # What the pair's law says about y alone, log(ν_j s_jl) − (y − m')ᵀ T' (y − m') / ε, for the samples of
        # component l.
        self._target_logits: dict[tuple[int, int], FloatArray] = {}
        means_q = laws.target.components.mean()
        self._centred_y = [laws.Y[columns] - means_q[l] for l, columns in enumerate(self._columns)]
        for block, plans in iterate_plans(laws.source, laws.target, k, l, laws.epsilon):
            back = plans.inverse_maps()
            for i, index in enumerate(range(block.start, block.stop)):
                quadratic = quadratic_form(back[i], self._centred_y[l[index]])
                logits = np.log(self._weights[l[index]]) - quadratic / laws.epsilon
                self._target_logits[int(k[index]), int(l[index])] = logits
        self._partners: list[list[int]] = [[] for _ in range(W.shape[0])]
        for k_pair, l_pair in zip(k.tolist(), l.tolist(), strict=True):
            self._partners[k_pair].append(l_pair)
        # Dropping negligible pairs must not change what a row sends: their share goes to the pairs that stay.
        for k_row, targets in enumerate(self._partners):
            if targets:
                self._share[k_row, targets] *= self._share[k_row].sum() / self._share[k_row, targets].sum()
        for _ in range(laws.sweeps):
            self._scale_columns()

    def tiles(self, start: int, stop: int) -> Iterator[Tile]:
        """Tiles of the source samples ``start:stop``.

        Parameters
        ----------
        start, stop : int
            Range of rows.

        Yields
        ------
        Tile
            With at most about four million entries.
        """
        laws = self._laws
        means_p = laws.source.components.mean()
        for k, targets in enumerate(self._partners):
            members = start + np.flatnonzero(self._R[start:stop, k])
            if not members.size:
                continue
            for l in targets:
                columns = self._columns[l]
                step = max(1, _TILE_ENTRIES // max(1, columns.size))
                for first in range(0, members.size, step):
                    rows = members[first : first + step]
                    logits = ((2.0 / laws.epsilon) * (laws.X[rows] - means_p[k])) @ self._centred_y[l].T
                    logits += self._target_logits[k, l]
                    logits -= logits.max(axis=1, keepdims=True)
                    mass = np.exp(logits, out=logits)
                    mass *= (self._mu[rows] * self._R[rows, k] * self._share[k, l] / mass.sum(axis=1))[:, None]
                    yield Tile((k, l), rows, columns, mass)

    def _scale_columns(self) -> None:
        """One Sinkhorn sweep inside each pair: columns to what the pair owes them (rows follow in :meth:`tiles`)."""
        arriving = {pair: np.zeros(logits.size) for pair, logits in self._target_logits.items()}
        for tile in self.tiles(0, self._mu.size):
            arriving[tile.pair] += tile.mass.sum(axis=0)
        for (k, l), mass in arriving.items():
            owed = self._weights[l] * (mass.sum() / self._weights[l].sum())
            # A sample that nothing reaches is drawn nearer by a bounded step; the next sweep sees it better.
            self._target_logits[k, l] += np.log(owed / np.maximum(mass, 1e-30 * owed)) if mass.any() else 0.0
