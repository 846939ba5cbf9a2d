"""Fitting negative binomial components, with or without size factors, in one additive pass an iteration.

Without size factors the M-step is the average. With them the maximiser over ``θ = log μ`` of one component and feature
solves ``A = μ B`` with ``A = Σ r x / (1 + φ s μ)`` and ``B = Σ r s / (1 + φ s μ)``. Each iteration takes these sums at
the previous ``μ`` (sums over samples, so they merge) and proposes ``μ ← A / B``, which is one step of Fisher scoring.
It is taken where it provably does not lower the objective: along ``θ`` the curvature ``I`` of the negative objective
changes by at most a factor ``e^|δ|`` over a step ``δ``, so with the score ``U = A − μ B``

    Q(θ + δ) − Q(θ) ≥ U δ − I (e^|δ| − 1 − |δ|).

Elsewhere the step that maximises this bound is taken, ``δ = sign(U) log(1 + |U| / I)``. Near the solution the proposal
always passes. ``B`` and the part of ``I`` from zeros are sums of smooth functions of the size factor over samples; they
are kept as weights of a lattice of size factors (:mod:`omt.families.sizes`).

Letters: ``n`` rows of a block, ``d`` features, ``K`` components.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse

from omt.families.base import FloatArray, Prior, Statistics
from omt.families.conjugate import ConjugateFamily, check_shrinkage
from omt.families.embedding import embed_counts
from omt.families.negative_binomial import NegativeBinomialComponents, checked_dispersion, shrinkages
from omt.families.product import transposed_times
from omt.families.sizes import (
    N_NODES,
    SizeFactors,
    check_size_factors,
    largest_size,
    lattice,
    resolve_sizes,
    size_basis,
)
from omt.families.support import require_counts

# An estimated dispersion is kept within these: Poisson for all purposes, and a feature that is a few bursts.
_DISPERSION_RANGE = (1e-3, 1e2)
# A sample counts for a component if its responsibility is more than this share of the component's largest in the block:
# what a million others add is below rounding. Of many features most responsibilities are smaller than that.
_NEGLIGIBLE = 1e-22
# Share of pairs of sample and component above which to take all is faster than to pick them.
_MANY = 0.4


@dataclass(frozen=True)
class NegativeBinomial(ConjugateFamily):
    """The negative binomial family: what to fit.

    Parameters
    ----------
    dispersion
        ``φ`` of each feature, ``[d]`` or one number, held fixed; ``None`` estimates it for each feature by the method
        of moments from the spread within components, as long as the starts are tried, then holds it fixed (so that
        the objective never falls): ``φ = Σ_k (Σ r (x − s μ)² / s − Σ r μ) / Σ_k μ² Σ r s``, kept in [0.001, 100].
    size_factors, reference
        As of :class:`omt.families.Poisson`.
    shrinkage
        Pseudo-samples ν, of the mean size, by which the means of each component are pulled to the pooled ones.

    References
    ----------
    Anders & Huber (2010), Differential expression analysis for sequence count data, supplementary note D, for the
    moments.

    Examples
    --------
    >>> NegativeBinomial(dispersion=0.5, size_factors="total").name
    'negative_binomial'
    """

    dispersion: ArrayLike | None = None
    size_factors: SizeFactors = field(default=None, repr=False)
    reference: float | None = None
    shrinkage: float = 1e-2

    def __post_init__(self) -> None:
        if self.dispersion is not None:
            checked_dispersion(self.dispersion, None)
        check_size_factors(self.size_factors, self.reference)
        check_shrinkage(self.shrinkage)

    @property
    def name(self) -> str:
        """``"negative_binomial"``."""
        return "negative_binomial"

    @property
    def one_step(self) -> bool:
        """Whether one M-step is the whole maximisation: without size factors."""
        return self.size_factors is None

    def with_sizes(self, totals: FloatArray) -> tuple[Self, FloatArray | None]:
        """The recipe with its reference, and the size of each sample, for data with these totals ``[N]``."""
        if self.size_factors is None:
            return self, None
        sizes, reference = resolve_sizes(self.size_factors, self.reference, totals)
        return replace(self, reference=reference), sizes

    def check(self, X: Any, first_row: int) -> None:
        """Raise ``ValueError`` for entries that are no counts, or a dispersion of another width."""
        require_counts(X, first_row, self.name)
        if self.dispersion is not None:
            checked_dispersion(self.dispersion, X.shape[1])

    def features(self, X: Any, seed: int) -> FloatArray:
        """Coordinates for k-means, ``[n, r]``."""
        return embed_counts(X, seed)

    # ------------------------------------------------------------------------------------------------ statistics
    def empty(self, K: int, d: int, centre: FloatArray | None) -> Statistics:
        """Sums of no samples.

        Beside those of :class:`~omt.families.conjugate.ConjugateFamily`: ``"square"``, for a dispersion that is
        estimated; ``"shrunk"`` (A at ``centre``) and ``"nodes"`` (weights of the lattice), with size factors.
        """
        statistics = super().empty(K, d, centre)
        if self.dispersion is None:
            statistics.sums["square"] = np.zeros((K, d))
        if not self.one_step:
            statistics.sums["shrunk"] = np.zeros((K, d))
            statistics.sums["nodes"] = np.zeros((K, N_NODES))
            statistics.centre = None if centre is None else np.array(centre, dtype=np.float64)
        return statistics

    def accumulate(self, statistics: Statistics, X: Any, R: NDArray[Any], size: FloatArray | None = None) -> None:
        """Add samples ``X [n, d]`` with weighted responsibilities ``R [n, K]`` and sizes ``[n]``, in place."""
        sums = statistics.sums
        first = transposed_times(X, R)
        weight = R.sum(axis=0, dtype=np.float64)
        sums["weight"] += weight
        sums["size"] += weight if size is None else np.asarray(size @ R)
        sums["first"] += first
        if self.dispersion is None:
            inverse = None if size is None else np.divide(1.0, size, out=np.zeros_like(size), where=size > 0)
            squares = X.power(2) if hasattr(X, "power") else np.square(X)
            sums["square"] += transposed_times(squares, R if inverse is None else inverse[:, None] * R)
        if self.one_step:
            return
        size = np.ones(X.shape[0]) if size is None else size
        basis = size_basis(size)
        sums["nodes"][:, basis.nodes] += R.T @ basis.weights
        if statistics.centre is None:
            sums["shrunk"] += first
            return
        X = X if sparse.issparse(X) else sparse.csr_array(np.asarray(X, dtype=np.float64))
        scaled = statistics.centre[:, 1] * statistics.centre[:, 0]
        counted = _NEGLIGIBLE * R.max(axis=0) < R
        if counted.mean() < _MANY:
            for k in range(R.shape[1]):
                sums["shrunk"][k] += _shrunk_of_few(X, R[:, k], size, scaled[k], np.flatnonzero(counted[:, k]))
        else:
            sums["shrunk"] += _shrunk_of_all(X, R, size, scaled)

    # ----------------------------------------------------------------------------------------------------- prior
    def prior(self, statistics: Statistics) -> Prior:
        """Pooled means ``[d]`` of size one, the number ν of pseudo-samples, and the dispersion ``[d]``."""
        prior = super().prior(statistics)
        d = prior["pooled"].size
        if self.dispersion is not None:
            prior["dispersion"] = checked_dispersion(self.dispersion, d)
            return prior
        sums = statistics.sums
        size = np.maximum(sums["size"], np.finfo(float).tiny)[:, None]
        means = sums["first"] / size
        # Σ r (x − s μ)² / s, and what of it a Poisson distribution has; one mean a component was fitted.
        squares = sums["square"] - means * sums["first"]
        n, K = float(sums["weight"].sum()), means.shape[0]
        squares *= n / max(n - K, 1.0)
        excess = (squares - sums["weight"][:, None] * means).sum(axis=0)
        scale = (size * means**2).sum(axis=0)
        estimate = np.divide(excess, scale, out=np.zeros(d), where=scale > 0)
        prior["dispersion"] = np.clip(estimate, *_DISPERSION_RANGE)
        return prior

    def place(self, statistics: Statistics, k: int, x: FloatArray, prior: Prior, weight: float) -> None:
        """Make component ``k`` one of ``weight`` samples, half like ``x [d]`` and half like all others, in place."""
        super().place(statistics, k, x, prior, weight)
        sums, phi = statistics.sums, prior["dispersion"]
        means = sums["first"][k] / weight
        if "square" in sums:
            sums["square"][k] = weight * (means + (1.0 + phi) * means**2)
        if self.one_step:
            return
        basis = size_basis(np.ones(1))
        sums["nodes"][k] = 0.0
        sums["nodes"][k, basis.nodes] = weight * basis.weights[0]
        sums["shrunk"][k] = sums["first"][k]
        if statistics.centre is not None:
            # Measured from its own place, the component is where it should be.
            statistics.centre[k] = means, phi
            sums["shrunk"][k] /= 1.0 + phi * means

    # ---------------------------------------------------------------------------------------------------- M-step
    def m_step(self, statistics: Statistics, prior: Prior, previous: Any = None) -> NegativeBinomialComponents:
        """Average counts without size factors; with them a step that never lowers the objective (see the module)."""
        if self.one_step or statistics.centre is None:
            means = self.averages(statistics, prior)
        else:
            means = self._scored(statistics, prior)
        return NegativeBinomialComponents(means, prior["dispersion"], self.reference)

    @staticmethod
    def _scored(statistics: Statistics, prior: Prior) -> FloatArray:
        """Means after one safe step of Fisher scoring from the centre, ``[K, d]``."""
        assert statistics.centre is not None  # noqa: S101  # the caller checked
        means, phi = statistics.centre[:, 0], statistics.centre[:, 1]
        scaled, nodes = phi * means, statistics.sums["nodes"]
        nu, pooled = float(prior["shrinkage"]), prior["pooled"]
        # The pseudo-samples have size one and the pooled counts.
        w = 1.0 / (1.0 + scaled)
        A = statistics.sums["shrunk"] + nu * w * pooled
        B = nu * w
        curvature = nu * w**2 * means
        used = np.flatnonzero((nodes != 0).any(axis=0))
        for p in used:
            s = lattice()[p]
            w = 1.0 / (1.0 + s * scaled)
            B += (s * nodes[:, p])[:, None] * w
            w *= w
            w *= means
            curvature += (s * nodes[:, p])[:, None] * w
        # The part of the curvature from counts, Σ r φ s μ x / (1 + φ s μ)², from above.
        v = max(largest_size(used), 1.0) * scaled
        curvature += v / (1.0 + v) * A
        score = A - means * B
        proposal = np.log(A / B) - np.log(means)
        far = np.abs(proposal)
        sure = score * proposal >= curvature * (np.expm1(np.minimum(far, 50.0)) - far)
        safe = np.sign(score) * np.log1p(np.abs(score) / curvature)
        result: FloatArray = means * np.exp(np.where(sure, proposal, safe))
        return result


def _shrunk_of_all(X: Any, R: NDArray[Any], size: FloatArray, scaled: FloatArray) -> FloatArray:
    """``Σ_i r_ik x_ig / (1 + φ_g s_i μ_kg)`` over all samples of a CSR block, ``[K, d]``."""
    sums = np.zeros((R.shape[1], X.shape[1]))
    for rows, columns, values, v in shrinkages(X, size, scaled):
        np.divide(values, v, out=v)
        r = np.repeat(R[rows].T, np.diff(X.indptr[rows.start : rows.stop + 1]), axis=1)
        np.multiply(v, r, out=v)
        for k in range(R.shape[1]):
            np.add.at(sums[k], columns, v[k])
    return sums


def _shrunk_of_few(X: Any, r: NDArray[Any], size: FloatArray, scaled: FloatArray, rows: NDArray[np.intp]) -> FloatArray:
    """``Σ_i r_i x_ig / (1 + φ_g s_i μ_g)`` over some samples of a CSR block for one component, ``[d]``."""
    part = X[rows]
    counts = np.diff(part.indptr)
    v = scaled.take(part.indices, mode="clip")
    v *= np.repeat(size[rows], counts)
    v += 1.0
    np.divide(part.data, v, out=v)
    v *= np.repeat(r[rows], counts)
    return np.asarray(np.bincount(part.indices, v, minlength=X.shape[1]), dtype=np.float64)
