"""Gaussian components with five shapes of covariance: their parameters, density, samples and divergences.

Letters: ``N`` samples, ``d`` features, ``K`` components, ``L`` components of another mixture, ``r`` rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Self, get_args

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray
from scipy.linalg import solve_triangular

from omt.families import quadratic
from omt.families.base import FloatArray

CovarianceType = Literal["full", "diag", "spherical", "tied", "lowrank"]
COVARIANCE_TYPES: tuple[str, ...] = get_args(CovarianceType)

_LOG_2PI = float(np.log(2.0 * np.pi))
# Which parameters each shape has, with their dimensions.
_PARAMETERS = {
    "full": {"covariances": "Kdd"},
    "tied": {"covariances": "dd"},
    "diag": {"variances": "Kd"},
    "spherical": {"variances": "K"},
    "lowrank": {"factors": "Kdr", "noise": "Kd"},
}


def _read_only(value: ArrayLike | None) -> FloatArray | None:
    if value is None:
        return None
    array = np.array(value, dtype=np.float64)
    array.setflags(write=False)
    return array


@dataclass(frozen=True, eq=False)
class GaussianComponents:
    """K Gaussian distributions on ``R^d``, stacked.

    Parameters
    ----------
    means
        ``[K, d]``.
    covariance_type
        Shape of the covariances; it decides which of the other arguments must be given.
    covariances
        ``[K, d, d]`` for ``"full"``; one ``[d, d]`` shared by all for ``"tied"``.
    variances
        ``[K, d]`` for ``"diag"``; ``[K]`` for ``"spherical"``.
    factors, noise
        ``F [K, d, r]`` and ``D [K, d]`` for ``"lowrank"``: the covariance is ``F Fᵀ + diag(D)``.

    Raises
    ------
    ValueError
        If a shape does not fit, a value is not finite, or a covariance is not symmetric positive definite; the message
        names the argument and the component.

    Examples
    --------
    >>> import numpy as np
    >>> g = GaussianComponents(np.zeros((2, 3)), "diag", variances=np.ones((2, 3)))
    >>> g.K, g.d, g.covariance_matrices().shape
    (2, 3, (2, 3, 3))
    >>> bool(np.isclose(g.log_prob(np.zeros((1, 3)))[0, 0], -1.5 * np.log(2 * np.pi)))
    True
    """

    means: FloatArray
    covariance_type: CovarianceType
    covariances: FloatArray | None = None
    variances: FloatArray | None = None
    factors: FloatArray | None = None
    noise: FloatArray | None = None

    def __post_init__(self) -> None:
        if self.covariance_type not in COVARIANCE_TYPES:
            raise ValueError(
                f"covariance_type is {self.covariance_type!r}; it must be one of {', '.join(COVARIANCE_TYPES)}"
            )
        object.__setattr__(self, "means", _read_only(self.means))
        if self.means.ndim != 2 or 0 in self.means.shape:
            raise ValueError(f"means has shape {self.means.shape}; it must be [K, d] with K, d ≥ 1")
        needed = _PARAMETERS[self.covariance_type]
        sizes: dict[str, int] = {"K": self.means.shape[0], "d": self.means.shape[1]}
        for name in ("covariances", "variances", "factors", "noise"):
            value = getattr(self, name)
            if (value is not None) != (name in needed):
                verb = "needs" if value is None else "takes no"
                raise ValueError(f"covariance_type {self.covariance_type!r} {verb} {name}; it has {', '.join(needed)}")
            if value is None:
                continue
            object.__setattr__(self, name, _read_only(value))
            self._check_parameter(name, needed[name], sizes)
        if not np.isfinite(self.means).all():
            raise ValueError(f"means of component {_first(~np.isfinite(self.means))} are not finite")
        if self.covariance_type in {"full", "tied"}:
            self._cholesky  # noqa: B018  # raises for a covariance that is not positive definite

    def _check_parameter(self, name: str, dims: str, sizes: dict[str, int]) -> None:
        value: FloatArray = getattr(self, name)
        expected = tuple(sizes.get(letter, -1) for letter in dims)
        if value.ndim != len(dims) or any(e not in (-1, s) for e, s in zip(expected, value.shape, strict=True)):
            raise ValueError(
                f"{name} has shape {value.shape}; with means of shape {self.means.shape} and covariance_type "
                f"{self.covariance_type!r} it must be [{', '.join(dims)}]"
            )
        if not np.isfinite(value).all():
            where = f" of component {_first(~np.isfinite(value))}" if dims[0] == "K" else ""
            raise ValueError(f"{name}{where} are not finite")
        if name in {"variances", "noise"} and (value <= 0).any():
            raise ValueError(f"{name} of component {_first(value <= 0)} are not positive; every variance must be > 0")
        if name == "covariances":
            scale = np.abs(value).max(axis=(-2, -1), keepdims=True)
            lopsided = np.abs(value - np.swapaxes(value, -1, -2)) > 1e-8 * scale
            if lopsided.any():
                where = f" of component {_first(lopsided)}" if dims[0] == "K" else ""
                raise ValueError(f"covariances{where} are not symmetric")

    # ------------------------------------------------------------------------------------------------ parameters
    @property
    def family(self) -> str:
        """``"gaussian"``."""
        return "gaussian"

    @property
    def K(self) -> int:  # noqa: N802  # the formulas' letter
        """Number of components."""
        return int(self.means.shape[0])

    @property
    def d(self) -> int:
        """Number of features."""
        return int(self.means.shape[1])

    @property
    def rank(self) -> int | None:
        """Columns of the factors of ``"lowrank"``, otherwise ``None``."""
        return None if self.factors is None else int(self.factors.shape[2])

    @property
    def n_parameters(self) -> int:
        """Free parameters of means and covariances together (rotations of low-rank factors not counted)."""
        K, d = self.K, self.d
        r = self.rank or 0
        shape = {
            "full": K * d * (d + 1) // 2,
            "tied": d * (d + 1) // 2,
            "diag": K * d,
            "spherical": K,
            "lowrank": K * (d * r - r * (r - 1) // 2 + d),
        }
        return K * d + shape[self.covariance_type]

    def parameters(self) -> dict[str, Any]:
        """Constructor arguments that rebuild these components: ``covariance_type`` and arrays."""
        names = ("means", *_PARAMETERS[self.covariance_type])
        return {"covariance_type": self.covariance_type, **{name: getattr(self, name) for name in names}}

    def select(self, index: ArrayLike) -> Self:
        """The components at ``index`` (integers or a mask), in that order."""
        rows = np.asarray(index)
        picked = {"means": self.means[rows]}
        for name, dims in _PARAMETERS[self.covariance_type].items():
            value = getattr(self, name)
            picked[name] = value[rows] if dims[0] == "K" else value
        return type(self)(covariance_type=self.covariance_type, **picked)

    def mean(self) -> FloatArray:
        """Means, ``[K, d]``."""
        return self.means

    def centre(self) -> FloatArray:
        """The means, about which second moments are taken, ``[K, d]``."""
        return self.means

    def cov(self) -> FloatArray:
        """Covariances, ``[K, d, d]``; the same as :meth:`covariance_matrices`."""
        return self.covariance_matrices()

    def covariance_matrices(self) -> FloatArray:
        """Covariances as dense matrices, ``[K, d, d]``, whatever their shape (a read-only view for ``"tied"``)."""
        if self.covariances is not None:
            return np.broadcast_to(self.covariances, (self.K, self.d, self.d))
        if self.factors is not None and self.noise is not None:
            dense: FloatArray = self.factors @ self.factors.swapaxes(1, 2)
            dense[:, np.arange(self.d), np.arange(self.d)] += self.noise
            return dense
        dense = np.zeros((self.K, self.d, self.d))
        dense[:, np.arange(self.d), np.arange(self.d)] = self.diagonal_variances()
        return dense

    def diagonal_variances(self) -> FloatArray:
        """Variances along the axes, ``[K, d]``, of ``"diag"`` and ``"spherical"`` components.

        Raises
        ------
        TypeError
            For the other shapes, whose covariances are not diagonal.
        """
        if self.variances is None:
            raise TypeError(f"{self.covariance_type!r} covariances are not diagonal; use covariance_matrices()")
        variances = self.variances if self.variances.ndim == 2 else self.variances[:, None]
        return np.broadcast_to(variances, (self.K, self.d))

    # ------------------------------------------------------------------------------------------- factorisations
    @cached_property
    def _cholesky(self) -> FloatArray:
        """Lower Cholesky factors, ``[K, d, d]``, or ``[1, d, d]`` for ``"tied"``."""
        matrices = self.covariance_matrices()[:1] if self.covariance_type == "tied" else self.covariance_matrices()
        try:
            factors = np.linalg.cholesky(matrices)
        except np.linalg.LinAlgError:
            smallest = np.linalg.eigvalsh(matrices)[:, 0]
            worst = int(smallest.argmin())
            where = "the tied covariance" if self.covariance_type == "tied" else f"the covariance of component {worst}"
            raise ValueError(
                f"{where} is not positive definite (smallest eigenvalue {smallest[worst]:.3g}); add a floor such as "
                "1e-6 · trace / d to its diagonal"
            ) from None
        return np.asarray(factors, dtype=np.float64)

    @cached_property
    def _whitening(self) -> FloatArray:
        """Inverse Cholesky factors ``P_k`` with ``P_k Σ_k P_kᵀ = I``, ``[K, d, d]`` or ``[1, d, d]``."""
        identity = np.eye(self.d)
        return np.stack([solve_triangular(L, identity, lower=True, check_finite=False) for L in self._cholesky])

    @cached_property
    def _woodbury(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """``D^{-1/2} [K, d]``, ``C⁻¹ Fᵀ D^{-1/2} [K, r, d]`` and log-determinants ``[K]`` of low-rank covariances."""
        assert self.factors is not None and self.noise is not None  # noqa: S101, PT018  # narrows the type
        scale = 1.0 / np.sqrt(self.noise)
        scaled = self.factors * scale[:, :, None]
        inner = np.linalg.cholesky(np.eye(self.factors.shape[2]) + scaled.swapaxes(1, 2) @ scaled)
        correction = np.stack(
            [solve_triangular(C, F.T, lower=True, check_finite=False) for C, F in zip(inner, scaled, strict=True)]
        )
        log_det = np.log(self.noise).sum(axis=1) + 2.0 * np.log(np.diagonal(inner, axis1=1, axis2=2)).sum(axis=1)
        return scale, correction, log_det

    @cached_property
    def log_determinants(self) -> FloatArray:
        """Log-determinants of the covariances, ``[K]``: sums of logarithms, which do not underflow."""
        if self.covariance_type == "lowrank":
            return self._woodbury[2]
        if self.variances is not None:
            return np.asarray(np.log(self.diagonal_variances()).sum(axis=1))
        diagonal = np.diagonal(self._cholesky, axis1=1, axis2=2)
        return np.broadcast_to(2.0 * np.log(diagonal).sum(axis=1), (self.K,))

    # --------------------------------------------------------------------------------------------------- density
    def log_prob(self, X: Any, *, dtype: DTypeLike = np.float64, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Log-density of each sample under each component.

        Parameters
        ----------
        X
            Samples, ``[N, d]``; CSR is accepted by ``"diag"`` and ``"spherical"`` and never densified.
        dtype
            ``float64``, or ``float32`` for twice the speed and responsibilities that are off by up to 1e-4.
        out
            Array ``[N, K]`` of that type to fill.

        Returns
        -------
        ndarray ``[N, K]``
        """
        if X.ndim != 2 or X.shape[1] != self.d:
            raise ValueError(f"X has shape {X.shape}; these components have d = {self.d}, so it must be [N, {self.d}]")
        scores: NDArray[Any] = np.empty((X.shape[0], self.K), dtype=dtype) if out is None else out
        if self.variances is not None:
            quadratic.axis_aligned(X, self.means, 1.0 / self.diagonal_variances(), scores)
        elif hasattr(X, "toarray"):
            raise ValueError(
                f"X is sparse, and {self.covariance_type!r} covariances mix all features; give a dense representation "
                "of few features (use_rep='X_pca'), or covariance='diag'"
            )
        elif self.covariance_type == "lowrank":
            quadratic.low_rank(X, self.means, *self._woodbury[:2], scores)
        elif self.covariance_type == "tied":
            quadratic.shared(X, self.means, self._whitening[0], scores)
        else:
            quadratic.whitened(X, self.means, self._whitening, self.means.mean(axis=0), scores)
        scores -= (0.5 * (self.d * _LOG_2PI + self.log_determinants)).astype(scores.dtype)
        return scores

    def sample(self, labels: NDArray[np.int64], rng: np.random.Generator) -> FloatArray:
        """One draw from component ``labels[i]`` for each i.

        Parameters
        ----------
        labels
            Component of each draw, ``[n]``.
        rng
            Source of randomness.

        Returns
        -------
        ndarray ``[n, d]``
        """
        labels = np.asarray(labels)
        noise = rng.standard_normal((labels.size, self.d))
        if self.variances is not None:
            noise *= np.sqrt(self.diagonal_variances())[labels]
        elif self.factors is not None and self.noise is not None:
            noise *= np.sqrt(self.noise)[labels]
            latent = rng.standard_normal((labels.size, self.factors.shape[2]))
            for k in np.unique(labels):
                noise[labels == k] += latent[labels == k] @ self.factors[k].T
        else:
            factors = np.broadcast_to(self._cholesky, (self.K, self.d, self.d))
            for k in np.unique(labels):
                noise[labels == k] = noise[labels == k] @ factors[k].T
        noise += self.means[labels]
        return noise

    # ----------------------------------------------------------------------------------------------- divergences
    def kl(self, other: GaussianComponents) -> FloatArray:
        """Kullback-Leibler divergences ``KL(self_k ‖ other_l)`` in nats, ``[K, L]``, in closed form.

        Raises
        ------
        ValueError
            If ``other`` has a different number of features.
        """
        if other.d != self.d:
            raise ValueError(f"the components have {self.d} and {other.d} features; they must have the same")
        log_ratio = other.log_determinants[None, :] - self.log_determinants[:, None]
        if self.variances is not None and other.variances is not None:
            ratio = self.diagonal_variances() @ (1.0 / other.diagonal_variances()).T
        else:
            # tr(Σ_l⁻¹ Σ_k) = ‖P_l C_k‖² with Cholesky factors C_k and their inverses P_l: no inverse covariance is
            # formed.
            own = np.broadcast_to(self._cholesky, (self.K, self.d, self.d))
            ratio = np.empty((self.K, other.K))
            whitening = np.broadcast_to(other._whitening, (other.K, self.d, self.d))
            for l in range(other.K):
                white = whitening[l] @ own
                ratio[:, l] = np.einsum("kij,kij->k", white, white)
        distance = np.ascontiguousarray(other.log_prob(self.means))
        distance += 0.5 * (self.d * _LOG_2PI + other.log_determinants)
        # The closed form can fall below zero by rounding for equal components.
        return np.asarray(np.maximum(0.5 * (ratio - self.d + log_ratio) - distance, 0.0))

    def natural_parameters(self) -> FloatArray:
        """Natural parameters ``(Σ⁻¹m, −½Σ⁻¹)`` for the statistics ``(x, xxᵀ)``, ``[K, d + d²]``."""
        whitening = np.broadcast_to(self._whitening, (self.K, self.d, self.d))
        precision = whitening.swapaxes(1, 2) @ whitening
        linear = np.einsum("kij,kj->ki", precision, self.means)
        return np.concatenate([linear, -0.5 * precision.reshape(self.K, -1)], axis=1)

    def mean_parameters(self) -> FloatArray:
        """Mean parameters ``(m, Σ + mmᵀ)``, ``[K, d + d²]``."""
        second = self.covariance_matrices() + self.means[:, :, None] * self.means[:, None, :]
        return np.concatenate([self.means, second.reshape(self.K, -1)], axis=1)

    def log_partition(self, eta: FloatArray) -> FloatArray:
        """Log-partition ``½ mᵀΣ⁻¹m + ½ log|Σ| + (d/2) log 2π`` of natural parameters ``[..., d + d²]``."""
        linear = eta[..., : self.d]
        precision = -2.0 * eta[..., self.d :].reshape(*eta.shape[:-1], self.d, self.d)
        factor = np.linalg.cholesky(precision)
        white = np.linalg.solve(factor, linear[..., None])[..., 0]
        log_det = np.log(np.diagonal(factor, axis1=-2, axis2=-1)).sum(axis=-1)
        return np.asarray(0.5 * (white**2).sum(axis=-1) - log_det + 0.5 * self.d * _LOG_2PI)


def _first(bad: NDArray[np.bool_]) -> int:
    """Index of the first component with a bad entry."""
    return int(np.argmax(bad.reshape(bad.shape[0], -1).any(axis=1)))
