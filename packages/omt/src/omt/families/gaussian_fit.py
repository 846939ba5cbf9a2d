"""Fitting Gaussian components: statistics, the M-step for each shape of covariance, the prior that keeps it finite.

Letters: ``N`` samples, ``n`` rows of a block, ``d`` features, ``K`` components, ``r`` rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omt.families.base import FloatArray, Prior, Statistics
from omt.families.gaussian import COVARIANCE_TYPES, CovarianceType, GaussianComponents

# Responsibilities below this are left out of second moments. Even the sum over 10⁹ such samples is below rounding.
_NEGLIGIBLE = 1e-25
# Floor of the variance in every direction, relative to the mean pooled variance.
_RELATIVE_FLOOR = 1e-6
# EM steps of factor analysis in one M-step: after the first fit, from scratch, and in later M-steps, which start
# from the last one.
_FACTOR_STEPS_FIRST = 50
_FACTOR_STEPS = 3


@dataclass(frozen=True)
class Gaussian:
    """The Gaussian family: what to fit.

    Parameters
    ----------
    covariance
        ``"full"``, ``"diag"``, ``"spherical"``, ``"tied"`` (one full covariance for all) or ``"lowrank"`` (``F Fᵀ +
        diag``).
    rank
        Columns of ``F`` for ``"lowrank"``; default ``min(10, d − 1)``, at least 1.
    shrinkage
        Pseudo-samples ν by which each covariance is pulled to the pooled within-component covariance Ψ:
        ``Σ_k = (N_k Σ̂_k + ν Ψ) / (N_k + ν)``. Default ``d``. 0 is maximum likelihood, for data in which every
        component has many more samples than features.
    floor
        Smallest variance allowed in any direction, relative to the mean pooled variance ``tr(Ψ)/d``.

    Examples
    --------
    >>> Gaussian("lowrank", rank=3).covariance
    'lowrank'
    """

    covariance: CovarianceType = "full"
    rank: int | None = None
    shrinkage: float | None = None
    floor: float = _RELATIVE_FLOOR

    def __post_init__(self) -> None:
        if self.covariance not in COVARIANCE_TYPES:
            raise ValueError(f"covariance is {self.covariance!r}; it must be one of {', '.join(COVARIANCE_TYPES)}")
        if self.rank is not None and (self.covariance != "lowrank" or self.rank < 1):
            raise ValueError(f"rank is {self.rank}; it must be at least 1, and only covariance='lowrank' takes it")
        if self.shrinkage is not None and not (np.isfinite(self.shrinkage) and self.shrinkage >= 0):
            raise ValueError(f"shrinkage is {self.shrinkage}; it must be a finite number ≥ 0 of pseudo-samples")
        if not (np.isfinite(self.floor) and self.floor >= 0):
            raise ValueError(f"floor is {self.floor}; it must be a finite number ≥ 0")

    @property
    def name(self) -> str:
        """``"gaussian"``."""
        return "gaussian"

    @property
    def single_precision(self) -> bool:
        """``True``: samples are centred before they are squared."""
        return True

    @property
    def one_step(self) -> bool:
        """Whether one M-step is the whole maximisation: true, the steps of ``"lowrank"`` being many enough."""
        return True

    @property
    def _axis_aligned(self) -> bool:
        return self.covariance in {"diag", "spherical"}

    # ------------------------------------------------------------------------------------------------ statistics
    def check(self, X: Any, first_row: int) -> None:
        """Raise ``ValueError`` for sparse samples, unless covariances are axis-aligned."""
        if hasattr(X, "toarray") and not self._axis_aligned:
            raise ValueError(
                f"X is sparse, and covariance={self.covariance!r} mixes all features; give a dense representation of "
                "few features (use_rep='X_pca'), or covariance='diag'"
            )

    def features(self, X: Any, seed: int) -> Any:
        """Coordinates for k-means: the samples themselves."""
        return X

    def empty(self, K: int, d: int, centre: FloatArray | None) -> Statistics:
        """Statistics of no samples: weights ``[K]``, first and second moments about ``centre``.

        Second moments are ``[K, d, d]``, or ``[K, d]`` for axis-aligned covariances.
        """
        second = (K, d) if self._axis_aligned else (K, d, d)
        sums = {"weight": np.zeros(K), "first": np.zeros((K, d)), "second": np.zeros(second)}
        return Statistics(sums, np.zeros((K, d)) if centre is None else np.array(centre, dtype=np.float64))

    def accumulate(self, statistics: Statistics, X: Any, R: NDArray[Any]) -> None:
        """Add a block of samples.

        Parameters
        ----------
        statistics
            Changed in place.
        X
            ``[n, d]``, dense or (axis-aligned covariances) CSR.
        R
            Responsibilities times sample weights, ``[n, K]``.
        """
        sums, centre = statistics.sums, statistics.centre
        assert centre is not None  # noqa: S101  # `empty` always sets it
        weight = R.sum(axis=0, dtype=np.float64)
        sums["weight"] += weight
        if self._axis_aligned:
            self._accumulate_diagonal(sums, centre, X, R, weight)
        else:
            self._accumulate_full(sums, centre, X, R)

    @staticmethod
    def _accumulate_full(sums: dict[str, FloatArray], centre: FloatArray, X: Any, R: NDArray[Any]) -> None:
        """Second moments per component, over the samples it is responsible for: most have few."""
        columns = np.ascontiguousarray(R.T)
        for k in range(columns.shape[0]):
            rows = np.flatnonzero(columns[k] > _NEGLIGIBLE)
            if rows.size == 0:
                continue
            everyone = rows.size == X.shape[0]
            r = columns[k] if everyone else columns[k, rows]
            offset = (X if everyone else X[rows]) - centre[k].astype(X.dtype)
            sums["first"][k] += r @ offset
            offset *= np.sqrt(r)[:, None]
            sums["second"][k] += offset.T @ offset

    @staticmethod
    def _accumulate_diagonal(
        sums: dict[str, FloatArray], centre: FloatArray, X: Any, R: NDArray[Any], weight: FloatArray
    ) -> None:
        """First and second moments in two products; about zero for sparse samples, then moved to the centre."""
        if hasattr(X, "toarray"):
            transposed = X.T.tocsr()
            first = np.asarray(transposed @ R).T
            square = np.asarray(transposed.power(2) @ R).T
            sums["first"] += first - weight[:, None] * centre
            sums["second"] += square - 2.0 * centre * first + weight[:, None] * centre**2
            return
        shift = centre.mean(axis=0)
        moved = X - shift.astype(X.dtype)
        first = (R.T @ moved).astype(np.float64)
        moved *= moved
        square = (R.T @ moved).astype(np.float64)
        offset = centre - shift
        sums["first"] += first - weight[:, None] * offset
        sums["second"] += square - 2.0 * offset * first + weight[:, None] * offset**2

    def _moments(self, statistics: Statistics) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Weights ``[K]``, means ``[K, d]`` and scatter about the means (sums, not averages)."""
        weight, first, second = (statistics.sums[name] for name in ("weight", "first", "second"))
        assert statistics.centre is not None  # noqa: S101  # `empty` always sets it
        shift = first / np.maximum(weight, np.finfo(float).tiny)[:, None]
        if self._axis_aligned:
            scatter = np.maximum(second - first * shift, 0.0)
        else:
            scatter = second - first[:, :, None] * shift[:, None, :]
            scatter = (scatter + scatter.swapaxes(1, 2)) / 2.0
        return weight, statistics.centre + shift, scatter

    # ----------------------------------------------------------------------------------------------------- prior
    def prior(self, statistics: Statistics) -> Prior:
        """Pooled within-component covariance Ψ, pseudo-samples ν and the floor, from the statistics of all components.

        ``"pooled"`` is ``[d, d]``, ``[d]`` for diagonal and a number for spherical covariances. Where every
        component is a single point, the floor comes from the spread of the means instead, and is 1e-6 if there is
        none either.
        """
        weight, means, scatter = self._moments(statistics)
        d = means.shape[1]
        pooled = scatter.sum(axis=0) / weight.sum()
        spread = pooled if self._axis_aligned else np.diagonal(pooled)
        average = float(spread.mean())
        between = float((weight @ (means - weight @ means / weight.sum()) ** 2).mean() / weight.sum())
        if average <= 1e-14 * between:
            average = between
        rounding = float((4.0 * np.finfo(float).eps * np.abs(means)).max()) ** 2
        # Of copies of one sample only the last bit of their mean varies.
        floor = max(self.floor, rounding) if average <= rounding else self.floor * average
        if self.covariance == "spherical":
            pooled = np.asarray(max(float(pooled.mean()), floor))
        elif self.covariance == "diag":
            pooled = np.maximum(pooled, floor)
        else:
            pooled = _clipped(pooled[None], floor)[0]
        nu = float(d) if self.shrinkage is None else float(self.shrinkage)
        return {"pooled": pooled, "shrinkage": np.asarray(nu), "floor": np.asarray(floor)}

    def place(self, statistics: Statistics, k: int, x: FloatArray, prior: Prior, weight: float) -> None:
        """Make component ``k`` one of ``weight`` samples around ``x [d]`` with covariance Ψ, in place."""
        assert statistics.centre is not None  # noqa: S101  # `empty` always sets it
        offset = x - statistics.centre[k]
        square = offset**2 if self._axis_aligned else np.outer(offset, offset)
        statistics.sums["weight"][k] = weight
        statistics.sums["first"][k] = weight * offset
        statistics.sums["second"][k] = weight * (prior["pooled"] + square)

    def log_prior(self, components: GaussianComponents, prior: Prior) -> float:
        """``−(ν/2) Σ_k [log|Σ_k| + tr(Ψ Σ_k⁻¹)]``, the log-density whose MAP estimate is the shrunk covariance.

        Constant (0) for tied covariances, which need no shrinkage.
        """
        nu = float(prior["shrinkage"])
        if nu == 0.0 or self.covariance == "tied":
            return 0.0
        if self._axis_aligned:
            ratio = (prior["pooled"] / components.diagonal_variances()).sum(axis=1)
        else:
            white = components._whitening @ np.linalg.cholesky(prior["pooled"])
            ratio = np.einsum("kij,kij->k", white, white)
        return float(-0.5 * nu * (components.log_determinants + ratio).sum())

    # ---------------------------------------------------------------------------------------------------- M-step
    def m_step(
        self, statistics: Statistics, prior: Prior, previous: GaussianComponents | None = None
    ) -> GaussianComponents:
        """Components that maximise the expected log-likelihood plus :meth:`log_prior` over covariances above the floor.

        Clipping eigenvalues at the floor is the exact maximiser under that constraint, so the objective never falls.
        Low-rank covariances take some EM steps of factor analysis, from ``previous`` where there is one.
        """
        weight, means, scatter = self._moments(statistics)
        nu, floor, pooled = float(prior["shrinkage"]), float(prior["floor"]), prior["pooled"]
        if self.covariance == "tied":
            tied = _clipped(scatter.sum(axis=0, keepdims=True) / weight.sum(), floor)[0]
            return GaussianComponents(means, "tied", covariances=tied)
        total = np.maximum(weight + nu, np.finfo(float).tiny)
        if self.covariance == "spherical":
            variances = (scatter.mean(axis=1) + nu * pooled) / total
            return GaussianComponents(means, "spherical", variances=np.maximum(variances, floor))
        if self.covariance == "diag":
            variances = (scatter + nu * pooled) / total[:, None]
            return GaussianComponents(means, "diag", variances=np.maximum(variances, floor))
        covariances = (scatter + nu * pooled) / total[:, None, None]
        if self.covariance == "full":
            return GaussianComponents(means, "full", covariances=_clipped(covariances, floor))
        d = means.shape[1]
        rank = max(1, min(10, d - 1)) if self.rank is None else self.rank
        if rank > d:
            raise ValueError(f"rank is {rank}; it must be at most the number of features, {d}")
        usable = previous is not None and previous.rank == rank and means.shape[0] == previous.K
        factors, noise = (previous.factors, previous.noise) if usable and previous is not None else (None, None)
        factors, noise = factor_analysis(covariances, rank, floor, factors, noise)
        return GaussianComponents(means, "lowrank", factors=factors, noise=noise)


def factor_analysis(
    covariances: FloatArray,
    rank: int,
    floor: float,
    factors: FloatArray | None = None,
    noise: FloatArray | None = None,
) -> tuple[FloatArray, FloatArray]:
    """Approximate covariances by ``F Fᵀ + diag(D)`` with EM steps, none of which lowers the Gaussian likelihood.

    Parameters
    ----------
    covariances
        ``S [K, d, d]``.
    rank
        ``r``, columns of ``F``.
    floor
        Smallest entry of ``D``.
    factors, noise
        Start, ``[K, d, r]`` and ``[K, d]``; principal components of ``S`` if not given.

    Returns
    -------
    factors, noise
        ``[K, d, r]`` and ``[K, d]``.

    References
    ----------
    Rubin & Thayer (1982), EM algorithms for ML factor analysis.
    """
    S, d = covariances, covariances.shape[1]
    diagonal = np.diagonal(S, axis1=1, axis2=2)
    steps = _FACTOR_STEPS
    if factors is None or noise is None:
        values, vectors = np.linalg.eigh(S)
        rest = values[:, : d - rank].mean(axis=1) if rank < d else np.full(S.shape[0], 0.0)
        strength = np.sqrt(np.maximum(values[:, d - rank :] - rest[:, None], floor))
        factors = vectors[:, :, d - rank :] * strength[:, None, :]
        noise = np.maximum(diagonal - (factors**2).sum(axis=2), max(floor, 1e-12 * float(diagonal.mean())))
        steps = _FACTOR_STEPS_FIRST
    identity = np.eye(rank)
    for _ in range(steps):
        scaled = factors / noise[:, :, None]
        # β = Fᵀ Σ⁻¹ by the Woodbury identity; rows of it predict the latent factors from a sample.
        inner = identity + factors.swapaxes(1, 2) @ scaled
        beta = np.linalg.solve(inner, scaled.swapaxes(1, 2))
        cross = S @ beta.swapaxes(1, 2)
        latent = identity - beta @ factors + beta @ cross
        factors = np.asarray(np.linalg.solve(latent, cross.swapaxes(1, 2)).swapaxes(1, 2), dtype=np.float64)
        noise = np.maximum(diagonal - np.einsum("kdr,kdr->kd", factors, cross), max(floor, np.finfo(float).tiny))
    return factors, noise


def _clipped(covariances: FloatArray, floor: float) -> FloatArray:
    """Raise eigenvalues below ``floor`` to it; matrices without such eigenvalues are left untouched."""
    d = covariances.shape[1]
    lowered = covariances - floor * np.eye(d)
    try:
        np.linalg.cholesky(lowered)
    except np.linalg.LinAlgError:
        pass
    else:
        return covariances
    result = covariances.copy()
    for k in range(covariances.shape[0]):
        values, vectors = np.linalg.eigh(covariances[k])
        if values[0] < floor:
            result[k] = (vectors * np.maximum(values, floor)) @ vectors.T
            result[k] = (result[k] + result[k].T) / 2.0
    return result
