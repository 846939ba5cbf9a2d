r"""Plans between the samples of two mixtures, from the coupling of their components.

Letters: ``N``/``M`` source/target samples, ``K``/``L`` components, ``c`` columns of a set of vectors.

With responsibilities ``R``, ``S``, sample weights ``μ``, ``ν`` and the empirical component weights ``a = Rᵀμ``, ``b
= Sᵀν``, the coarse plan is ``Γ = diag(μ) R diag(1/a) W diag(1/b) Sᵀ diag(ν)``: mass that leaves a sample spreads
over its components, crosses by ``W``, and falls on all samples of a target component alike. It has rank ``min(K,
L)`` and is never formed. The fine plan (:mod:`omt.plans.cells`) lets mass inside a pair of components follow the inner
plan.

In a balanced plan ``Γ 1 = μ`` and ``Γᵀ 1 = ν``. In an unbalanced one ``W 1 ≠ a``, ``Wᵀ 1 ≠ b``, and ``Γ`` keeps
these differences: row ``i`` sums to ``μ_i Σ_k r_ik (W 1)_k / a_k``, the mass that sample ``i`` is given to
transport (its growth), and column ``j`` to what arrives. Nothing is rescaled to hide it; ``conditional=True`` gives
averages that do not depend on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy import sparse
from scipy.sparse.linalg import LinearOperator

from omt.families.base import FloatArray
from omt.plans.cells import CellLaws, CellTiles
from omt.plans.inputs import checked_responsibilities, checked_vectors, checked_weights, one_hot
from omt.plans.marginals import fit_marginals, inverse_weights

__all__ = ["LowRankFactors", "MarginalError", "SamplePlan", "SparsePlan"]

_MAX_DENSE_ENTRIES = 10**8
_BLOCK_ENTRIES = 1 << 22
_CONSISTENT = 1e-6  # relative error of given marginals that counts as rounding of a solver


class LowRankFactors(NamedTuple):
    """``Γ = Q diag(1/g) Rᵀ``, the form of low-rank optimal transport.

    In a balanced plan ``Q 1 = μ``, ``R 1 = ν`` and ``Qᵀ1 = Rᵀ1 = g``.
    """

    Q: FloatArray
    """[N, r], r = min(K, L)."""
    R: FloatArray
    """[M, r]."""
    g: FloatArray
    """[r]."""


class SparsePlan(NamedTuple):
    """The largest entries of a plan."""

    matrix: sparse.csr_array
    """[N, M]."""
    kept_mass: float
    """Share of the plan's mass that the kept entries carry, before any rescaling."""


class MarginalError(NamedTuple):
    """Distance of a plan's marginals from the sample weights, in sums of absolute values."""

    source: float
    """``‖Γ1 − μ‖₁``."""
    target: float
    """``‖Γᵀ1 − ν‖₁``."""


class SamplePlan:
    """Transport plan between ``N`` source and ``M`` target samples, as an operator.

    Parameters
    ----------
    R, S : array [N, K], [M, L]
        Responsibilities of the source and target samples; rows sum to one.
    W : array [K, L]
        Coupling of the components. Where ``balanced``, its marginals must be the empirical component weights
        ``Rᵀμ`` and ``Sᵀν`` (within 1e-6); what a solver left open is then closed, see
        :func:`omt.plans.marginals.fit_marginals`.
    mu, nu : array [N], [M], optional
        Sample weights ≥ 0; equal weights that sum to one if not given.
    balanced : bool
        Whether ``W`` is meant to have the marginals above.
    cells : CellLaws, optional
        Samples and mixtures (:func:`omt.plans.cells.cell_laws`); with them the plan is resolved to cells inside each
        pair of components, without them to components.

    Raises
    ------
    ValueError
        If shapes do not fit, responsibilities or weights are not what they must be, or ``W`` does not have the
        marginals of these samples.

    Examples
    --------
    >>> import numpy as np
    >>> R = np.array([[1.0, 0.0], [0.0, 1.0]])
    >>> plan = SamplePlan(R, R, np.array([[0.5, 0.0], [0.0, 0.5]]))
    >>> plan.push(np.array([1.0, 0.0]))  # all mass of sample 0 goes to target sample 0
    array([0.5, 0. ])
    >>> plan.pull(np.array([1.0, 0.0]), conditional=True)
    array([1., 0.])
    """

    def __init__(
        self,
        R: ArrayLike,
        S: ArrayLike,
        W: ArrayLike,
        mu: ArrayLike | None = None,
        nu: ArrayLike | None = None,
        *,
        balanced: bool = True,
        cells: CellLaws | None = None,
    ) -> None:
        self.source_responsibilities = checked_responsibilities(R, "R")
        self.target_responsibilities = checked_responsibilities(S, "S")
        N, K = self.source_responsibilities.shape
        M, L = self.target_responsibilities.shape
        self.mu = checked_weights(mu, N, "mu")
        self.nu = checked_weights(nu, M, "nu")
        self.source_component_weights: FloatArray = self.mu @ self.source_responsibilities
        self.target_component_weights: FloatArray = self.nu @ self.target_responsibilities
        coupling = np.array(W, dtype=np.float64)
        if coupling.shape != (K, L):
            raise ValueError(f"W has shape {coupling.shape}; with these responsibilities it must be [{K}, {L}]")
        if not (np.isfinite(coupling).all() and (coupling >= 0.0).all()):
            raise ValueError("W has entries that are negative or not finite; a coupling holds masses ≥ 0")
        self.balanced = balanced
        self.coupling = self._consistent(coupling)
        if cells is not None and (len(cells.X), len(cells.Y)) != (N, M):
            raise ValueError(f"cells has {len(cells.X)} and {len(cells.Y)} samples, but R and S have {N} and {M} rows")
        self.cells = cells

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of source and target samples, ``(N, M)``."""
        return self.mu.size, self.nu.size

    @property
    def resolution(self) -> Literal["component", "cell"]:
        """``"component"`` for the coarse plan, ``"cell"`` for the fine one."""
        return "component" if self.cells is None else "cell"

    # --------------------------------------------------------------------------------------------------- operator
    def push(self, v: ArrayLike, *, conditional: bool = False) -> FloatArray:
        """Send a function of the source samples forward.

        Parameters
        ----------
        v : array [N] or [N, c]
            Values per source sample, such as the indicator of a cell type.
        conditional : bool
            ``False``: ``Γᵀ v``, the mass that arrives at each target sample, each source sample counted ``v_i``
            times. ``True``: ``Γᵀ v / Γᵀ 1``, the mean of ``v`` over the origins of each target sample.

        Returns
        -------
        array [M] or [M, c]
            ``push(1)`` is the target marginal of the plan. NaN where ``conditional`` and nothing arrives.
        """
        values = checked_vectors(v, self.shape[0], "source samples")
        moved = self._push(values)
        return _per_mass(moved, self._marginals[1]) if conditional else moved

    def pull(self, v: ArrayLike, *, conditional: bool = False) -> FloatArray:
        """Bring a function of the target samples back.

        Parameters
        ----------
        v : array [M] or [M, c]
            Values per target sample.
        conditional : bool
            ``False``: ``Γ v``, the mass that each source sample sends to the target, each target sample counted
            ``v_j`` times. ``True``: ``Γ v / Γ 1``, the mean of ``v`` over the destinations of each source sample.

        Returns
        -------
        array [N] or [N, c]
            ``pull(1)`` is the source marginal of the plan. NaN where ``conditional`` and nothing leaves.
        """
        values = checked_vectors(v, self.shape[1], "target samples")
        moved = self._pull(values)
        return _per_mass(moved, self._marginals[0]) if conditional else moved

    def as_linear_operator(self) -> LinearOperator:
        """``Γ`` as a SciPy operator of shape ``(N, M)``: ``matvec`` pulls, ``rmatvec`` pushes."""
        return LinearOperator(
            self.shape,
            matvec=self.pull,
            rmatvec=self.push,
            matmat=self.pull,
            rmatmat=self.push,
            dtype=np.dtype(np.float64),
        )

    def marginal_error(self) -> MarginalError:
        """How far the plan's marginals are from ``μ`` and ``ν``.

        Zero up to rounding for a balanced coarse plan; rows only for a balanced fine one. For an unbalanced plan
        this is the mass created and lost.
        """
        source, target = self._marginals
        return MarginalError(float(np.abs(source - self.mu).sum()), float(np.abs(target - self.nu).sum()))

    def cell_transition(
        self,
        labels_x: ArrayLike,
        labels_y: ArrayLike,
        *,
        direction: Literal["forward", "backward", "joint"] = "forward",
    ) -> pd.DataFrame:
        """Transport between groups of samples.

        Parameters
        ----------
        labels_x, labels_y : array [N], [M]
            Group of each sample; samples without one (NaN, None) are left out.
        direction : {"forward", "backward", "joint"}
            Rows sum to one (where does a source group go?), columns sum to one (where does a target group come
            from?), or entries are masses.

        Returns
        -------
        pandas.DataFrame
            Source groups by target groups, in the order of the categories where labels are categorical, else
            sorted. A group without mass has NaN.

        Raises
        ------
        ValueError
            If the number of labels or the direction is wrong.
        """
        if direction not in {"forward", "backward", "joint"}:
            raise ValueError(f"direction is {direction!r}; it must be 'forward', 'backward' or 'joint'")
        in_x, names_x = one_hot(labels_x, self.shape[0], "labels_x")
        in_y, names_y = one_hot(labels_y, self.shape[1], "labels_y")
        mass = in_x.T @ self.pull(in_y.toarray())
        if direction != "joint":
            total = mass.sum(axis=1, keepdims=True) if direction == "forward" else mass.sum(axis=0, keepdims=True)
            mass = np.divide(mass, total, out=np.full_like(mass, np.nan), where=total > 0.0)
        return pd.DataFrame(mass, index=names_x, columns=names_y)

    # ----------------------------------------------------------------------------------------------------- export
    def to_factors(self) -> LowRankFactors:
        """The coarse plan as ``Q diag(1/g) Rᵀ``, of rank ``min(K, L)``.

        Raises
        ------
        ValueError
            For a fine plan, which has no low rank.
        """
        if self.cells is not None:
            raise ValueError("a plan with resolution='cell' has no low-rank factors; use resolution='component'")
        a, b = self.source_component_weights, self.target_component_weights
        Q = self.mu[:, None] * self.source_responsibilities
        R = self.nu[:, None] * self.target_responsibilities
        if a.size <= b.size:
            return LowRankFactors(Q, R @ (self.coupling * inverse_weights(b)).T, a)
        return LowRankFactors(Q @ (inverse_weights(a)[:, None] * self.coupling), R, b)

    def to_sparse(self, top_k: int, *, rescale: bool = False) -> SparsePlan:
        """Keep the ``top_k`` largest entries of each row.

        Parameters
        ----------
        top_k : int
            Entries per row.
        rescale : bool
            Scale what is kept of a row to the row's whole mass, so that row marginals stay those of the plan.

        Returns
        -------
        SparsePlan
            CSR matrix with sorted columns, and the share of mass that was kept.

        Raises
        ------
        ValueError
            If ``top_k`` is no integer or below 1.
        """
        requested: Any = top_k
        if not isinstance(requested, (int, np.integer)) or requested < 1:
            raise ValueError(f"top_k is {top_k!r}; it must be an integer and at least 1")
        N, M = self.shape
        width = min(int(requested), M)
        data, columns = np.empty((N, width)), np.empty((N, width), dtype=np.int64)
        kept_mass = total_mass = 0.0
        for start, block in self._dense_blocks():
            rows = slice(start, start + len(block))
            columns[rows] = np.sort(np.argpartition(block, M - width, axis=1)[:, M - width :], axis=1)
            data[rows] = np.take_along_axis(block, columns[rows], axis=1)
            whole, kept = block.sum(axis=1), data[rows].sum(axis=1)
            total_mass += float(whole.sum())
            kept_mass += float(kept.sum())
            if rescale:
                data[rows] *= np.divide(whole, kept, out=np.ones_like(kept), where=kept > 0.0)[:, None]
        matrix = sparse.csr_array((data.ravel(), columns.ravel(), np.arange(0, N * width + 1, width)), shape=(N, M))
        matrix.eliminate_zeros()
        return SparsePlan(matrix, kept_mass / total_mass if total_mass > 0.0 else 1.0)

    def to_dense(self) -> FloatArray:
        """``Γ`` as an array [N, M].

        Raises
        ------
        ValueError
            Above 10⁸ entries; the message names what to use instead.
        """
        N, M = self.shape
        if N * M > _MAX_DENSE_ENTRIES:
            raise ValueError(
                f"a dense plan of {N} × {M} samples has more than {_MAX_DENSE_ENTRIES:.0e} entries; use "
                "push, pull, as_linear_operator() or to_sparse(top_k)"
            )
        dense = np.empty((N, M))
        for start, block in self._dense_blocks():
            dense[start : start + len(block)] = block
        return dense

    # ---------------------------------------------------------------------------------------------------- private
    def _consistent(self, W: FloatArray) -> FloatArray:
        a, b = self.source_component_weights, self.target_component_weights
        for name, weights, sums in (("source", a, W.sum(axis=1)), ("target", b, W.sum(axis=0))):
            stranded = (weights <= 0.0) & (sums > _CONSISTENT * W.sum())
            if stranded.any():
                raise ValueError(
                    f"W has mass on {name} component {int(np.flatnonzero(stranded)[0])}, to which no sample belongs; "
                    "solve the coupling for the component weights of these samples"
                )
        if not self.balanced:
            return W
        if abs(self.mu.sum() - self.nu.sum()) > _CONSISTENT * self.mu.sum():
            raise ValueError(
                f"mu sums to {self.mu.sum():.9g} and nu to {self.nu.sum():.9g}; a balanced plan needs equal masses"
            )
        error = np.abs(W.sum(axis=1) - a).sum() + np.abs(W.sum(axis=0) - b).sum()
        if error > _CONSISTENT * self.mu.sum():
            raise ValueError(
                f"the marginals of W differ by {error:.3g} from the component weights of these samples (Rᵀmu, Sᵀnu); "
                "solve the coupling for those weights, or give balanced=False for an unbalanced coupling"
            )
        return fit_marginals(W, a, b)

    @cached_property
    def _tiles(self) -> CellTiles:
        assert self.cells is not None  # noqa: S101  # narrows the type
        return CellTiles(
            self.cells, self.source_responsibilities, self.target_responsibilities, self.coupling, self.mu, self.nu
        )

    @cached_property
    def _bridge(self) -> FloatArray:
        """``diag(1/a) W diag(1/b)``, [K, L]."""
        return np.asarray(
            inverse_weights(self.source_component_weights)[:, None]
            * self.coupling
            * inverse_weights(self.target_component_weights)
        )

    @cached_property
    def _marginals(self) -> tuple[FloatArray, FloatArray]:
        return self._pull(np.ones(self.shape[1])), self._push(np.ones(self.shape[0]))

    def _pull(self, values: FloatArray) -> FloatArray:
        if self.cells is None:
            inner = self._bridge @ (self.target_responsibilities.T @ _scaled(values, self.nu))
            return _scaled(self.source_responsibilities @ inner, self.mu)
        out = np.zeros((self.shape[0], *values.shape[1:]))
        for tile in self._tiles.tiles(0, self.shape[0]):
            out[tile.rows] += tile.mass @ values[tile.columns]
        return out

    def _push(self, values: FloatArray) -> FloatArray:
        if self.cells is None:
            inner = self._bridge.T @ (self.source_responsibilities.T @ _scaled(values, self.mu))
            return _scaled(self.target_responsibilities @ inner, self.nu)
        out = np.zeros((self.shape[1], *values.shape[1:]))
        for tile in self._tiles.tiles(0, self.shape[0]):
            out[tile.columns] += tile.mass.T @ values[tile.rows]
        return out

    def _dense_blocks(self) -> Iterator[tuple[int, FloatArray]]:
        """Rows of ``Γ`` in dense blocks of bounded size, with the index of the first."""
        N, M = self.shape
        step = max(1, _BLOCK_ENTRIES // M)
        landing = self._bridge @ (self.target_responsibilities * self.nu[:, None]).T if self.cells is None else None
        for start in range(0, N, step):
            stop = min(start + step, N)
            if landing is not None:
                yield start, (self.mu[start:stop, None] * self.source_responsibilities[start:stop]) @ landing
                continue
            block = np.zeros((stop - start, M))
            for tile in self._tiles.tiles(start, stop):
                block[np.ix_(tile.rows - start, tile.columns)] += tile.mass
            yield start, block


def _scaled(values: FloatArray, weights: FloatArray) -> FloatArray:
    """Rows of ``values`` [n] or [n, c] times ``weights`` [n]."""
    return np.asarray(values * (weights if values.ndim == 1 else weights[:, None]))


def _per_mass(moved: FloatArray, mass: FloatArray) -> FloatArray:
    """Rows of ``moved`` over ``mass`` [n]; NaN where there is none."""
    mass = mass if moved.ndim == 1 else mass[:, None]
    return np.divide(moved, mass, out=np.full_like(moved, np.nan), where=mass > 0.0)
