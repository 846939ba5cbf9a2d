"""Components of positive numbers: gamma, exponential and log-normal.

The recipes of the fit are in :mod:`omt.families.positive_fit`.

Letters: ``N`` samples, ``d`` features, ``K`` components, ``L`` components of another mixture.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray
from scipy import special

from omt.families.base import FloatArray
from omt.families.gaussian import GaussianComponents
from omt.families.product import ProductComponents, finish, refuse_wide
from omt.families.support import require_positive

__all__ = ["ExponentialComponents", "GammaComponents", "LogNormalComponents"]


@dataclass(frozen=True, eq=False)
class GammaComponents(ProductComponents):
    """K products of gamma distributions, stacked.

    Parameters
    ----------
    shapes, rates
        ``α`` and ``β``, both ``[K, d]`` and positive; means are ``α/β``, variances ``α/β²``.

    Raises
    ------
    ValueError
        If a shape does not fit or an entry is not positive and finite.

    Examples
    --------
    >>> import numpy as np
    >>> g = GammaComponents(np.array([[2.0]]), np.array([[4.0]]))
    >>> g.mean().tolist(), g.variances().tolist()
    ([[0.5]], [[0.125]])
    """

    shapes: FloatArray
    rates: FloatArray
    _arrays: ClassVar[tuple[str, ...]] = ("shapes", "rates")

    def __post_init__(self) -> None:
        self._settle("shapes")
        self._settle("rates")

    @property
    def family(self) -> str:
        """``"gamma"``."""
        return "gamma"

    @cached_property
    def _partition(self) -> FloatArray:
        return np.asarray((special.gammaln(self.shapes) - self.shapes * np.log(self.rates)).sum(axis=1))

    def check(self, X: Any, first_row: int) -> None:
        """Raise ``ValueError`` for entries that are not above zero."""
        require_positive(X, first_row, self.family)

    def log_prob(self, X: Any, *, dtype: DTypeLike = np.float64, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Log-density of each sample ``[N, d]`` under each component, ``[N, K]``, by two products."""
        self._check_width(X)
        X = np.asarray(X, dtype=np.float64)
        scores = np.log(X) @ (self.shapes - 1.0).T
        scores -= X @ self.rates.T
        scores -= self._partition
        return finish(scores, dtype, out)

    def sample(self, labels: NDArray[np.int64], rng: np.random.Generator) -> FloatArray:
        """One draw from component ``labels[i]`` for each i, ``[n, d]``."""
        labels = np.asarray(labels)
        drawn: FloatArray = rng.gamma(self.shapes[labels], 1.0 / self.rates[labels])
        # A shape near zero puts mass below the smallest float; a positive sample stays positive.
        return np.maximum(drawn, np.finfo(float).tiny)

    def mean(self) -> FloatArray:
        """Means ``α/β``, ``[K, d]``."""
        return self.shapes / self.rates

    def variances(self) -> FloatArray:
        """Variances ``α/β²``, ``[K, d]``."""
        return self.shapes / self.rates**2

    def kl(self, other: GammaComponents) -> FloatArray:
        """Divergences ``Σ (α−α')ψ(α) − log Γ(α)/Γ(α') + α' log(β/β') + α(β'−β)/β`` in nats, ``[K, L]``."""
        self._check_peer(other)
        log_mean = special.digamma(self.shapes) - np.log(self.rates)
        own = ((self.shapes * log_mean) - self.shapes).sum(axis=1) - self._partition
        cross = log_mean @ other.shapes.T - self.mean() @ other.rates.T
        return np.asarray(np.maximum(own[:, None] - cross + other._partition, 0.0))

    def natural_parameters(self) -> FloatArray:
        """``(α − 1, −β)`` for the statistics ``(log x, x)``, ``[K, 2d]``."""
        return np.concatenate([self.shapes - 1.0, -self.rates], axis=1)

    def mean_parameters(self) -> FloatArray:
        """``(ψ(α) − log β, α/β)``, ``[K, 2d]``."""
        return np.concatenate([special.digamma(self.shapes) - np.log(self.rates), self.mean()], axis=1)

    def log_partition(self, eta: FloatArray) -> FloatArray:
        """``Σ_g log Γ(α) − α log β`` of natural parameters ``[..., 2d]``."""
        shapes, rates = eta[..., : self.d] + 1.0, -eta[..., self.d :]
        return np.asarray((special.gammaln(shapes) - shapes * np.log(rates)).sum(axis=-1))


@dataclass(frozen=True, eq=False)
class ExponentialComponents(ProductComponents):
    """K products of exponential distributions, stacked.

    Parameters
    ----------
    rates
        ``λ [K, d]``, positive; means are ``1/λ``.

    Raises
    ------
    ValueError
        If the shape does not fit or a rate is not positive and finite.

    Examples
    --------
    >>> import numpy as np
    >>> e = ExponentialComponents(np.array([[2.0]]))
    >>> bool(np.isclose(e.log_prob(np.array([[1.0]]))[0, 0], np.log(2.0) - 2.0))
    True
    """

    rates: FloatArray
    _arrays: ClassVar[tuple[str, ...]] = ("rates",)

    def __post_init__(self) -> None:
        self._settle("rates")

    @property
    def family(self) -> str:
        """``"exponential"``."""
        return "exponential"

    @cached_property
    def _log_rates(self) -> FloatArray:
        return np.asarray(np.log(self.rates).sum(axis=1))

    def check(self, X: Any, first_row: int) -> None:
        """Raise ``ValueError`` for entries that are not above zero."""
        require_positive(X, first_row, self.family)

    def log_prob(self, X: Any, *, dtype: DTypeLike = np.float64, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Log-density of each sample ``[N, d]`` under each component, ``[N, K]``."""
        self._check_width(X)
        return finish(self._log_rates - np.asarray(X, dtype=np.float64) @ self.rates.T, dtype, out)

    def sample(self, labels: NDArray[np.int64], rng: np.random.Generator) -> FloatArray:
        """One draw from component ``labels[i]`` for each i, ``[n, d]``."""
        drawn: FloatArray = rng.exponential(1.0 / self.rates[np.asarray(labels)])
        return np.maximum(drawn, np.finfo(float).tiny)

    def mean(self) -> FloatArray:
        """Means ``1/λ``, ``[K, d]``."""
        return 1.0 / self.rates

    def variances(self) -> FloatArray:
        """Variances ``1/λ²``, ``[K, d]``."""
        return 1.0 / self.rates**2

    def kl(self, other: ExponentialComponents) -> FloatArray:
        """Divergences ``Σ log(λ/λ') + λ'/λ − 1`` in nats, ``[K, L]``."""
        self._check_peer(other)
        return np.maximum(
            self._log_rates[:, None] - other._log_rates + (1.0 / self.rates) @ other.rates.T - self.d, 0.0
        )

    def natural_parameters(self) -> FloatArray:
        """``−λ``, ``[K, d]``."""
        return -self.rates

    def mean_parameters(self) -> FloatArray:
        """``1/λ``, ``[K, d]``."""
        return 1.0 / self.rates

    def log_partition(self, eta: FloatArray) -> FloatArray:
        """``−Σ_g log(−η_g)`` of natural parameters ``[..., d]``."""
        return np.asarray(-np.log(-eta).sum(axis=-1))


@dataclass(frozen=True, eq=False)
class LogNormalComponents:
    """K log-normal distributions, stacked: Gaussian on the logarithms.

    Parameters
    ----------
    gaussian
        The distributions of ``log x``, with covariances of any shape.

    Examples
    --------
    >>> import numpy as np
    >>> c = LogNormalComponents(GaussianComponents(np.zeros((1, 1)), "diag", variances=np.ones((1, 1))))
    >>> float(c.mean()[0, 0].round(6))
    1.648721
    """

    gaussian: GaussianComponents

    @classmethod
    def of_logarithm(cls, *, covariance_type: Any = "full", **arrays: Any) -> Self:
        """Components from the parameters of their logarithms: those of :class:`omt.families.GaussianComponents`."""
        return cls(GaussianComponents(covariance_type=covariance_type, **arrays))

    @property
    def family(self) -> str:
        """``"lognormal"``."""
        return "lognormal"

    @property
    def K(self) -> int:  # noqa: N802  # the formulas' letter
        """Number of components."""
        return self.gaussian.K

    @property
    def d(self) -> int:
        """Number of features."""
        return self.gaussian.d

    @property
    def n_parameters(self) -> int:
        """Number of free parameters of all components together."""
        return self.gaussian.n_parameters

    @property
    def covariance_type(self) -> str:
        """Shape of the covariances of the logarithms."""
        return self.gaussian.covariance_type

    def parameters(self) -> dict[str, Any]:
        """What :meth:`of_logarithm` needs to rebuild these components."""
        return self.gaussian.parameters()

    def select(self, index: ArrayLike) -> Self:
        """The components at ``index`` (integers or a mask), in that order."""
        return type(self)(self.gaussian.select(index))

    def centre(self) -> FloatArray:
        """Means of the logarithms, about which moments are taken, ``[K, d]``."""
        return self.gaussian.means

    def check(self, X: Any, first_row: int) -> None:
        """Raise ``ValueError`` for entries that are not above zero."""
        require_positive(X, first_row, self.family)

    def log_prob(self, X: Any, *, dtype: DTypeLike = np.float64, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Log-density of each sample ``[N, d]`` under each component, ``[N, K]``: that of ``log x`` over ``Π x``."""
        logarithm = np.log(X)
        scores = self.gaussian.log_prob(logarithm, dtype=dtype, out=out)
        scores -= logarithm.sum(axis=1, keepdims=True)
        return scores

    def sample(self, labels: NDArray[np.int64], rng: np.random.Generator) -> FloatArray:
        """One draw from component ``labels[i]`` for each i, ``[n, d]``."""
        return np.exp(self.gaussian.sample(labels, rng))

    def mean(self) -> FloatArray:
        """Means ``exp(m + σ²/2)``, ``[K, d]``."""
        return np.exp(self.gaussian.means + 0.5 * self._log_variances())

    def _log_variances(self) -> FloatArray:
        g = self.gaussian
        if g.variances is not None:
            return g.diagonal_variances()
        if g.factors is not None and g.noise is not None:
            return np.asarray((g.factors**2).sum(axis=2) + g.noise)
        return np.asarray(np.diagonal(g.covariance_matrices(), axis1=1, axis2=2))

    def variances(self) -> FloatArray:
        """Variance of each feature, ``[K, d]``."""
        return self.mean() ** 2 * np.expm1(self._log_variances())

    def cov(self) -> FloatArray:
        """Covariances ``E x_i E x_j (exp Σ_ij − 1)``, ``[K, d, d]``.

        Raises
        ------
        ValueError
            If they would have more than 10⁸ entries.
        """
        refuse_wide(self.K, self.d)
        mean = self.mean()
        return mean[:, :, None] * mean[:, None, :] * np.expm1(self.gaussian.covariance_matrices())

    def kl(self, other: LogNormalComponents) -> FloatArray:
        """Divergences in nats, ``[K, L]``: those of the logarithms."""
        return self.gaussian.kl(other.gaussian)

    def natural_parameters(self) -> FloatArray:
        """Natural parameters for the statistics ``(log x, log x log xᵀ)``, ``[K, d + d²]``."""
        return self.gaussian.natural_parameters()

    def mean_parameters(self) -> FloatArray:
        """Mean parameters, ``[K, d + d²]``."""
        return self.gaussian.mean_parameters()

    def log_partition(self, eta: FloatArray) -> FloatArray:
        """Log-partition of natural parameters ``[..., d + d²]``."""
        return self.gaussian.log_partition(eta)
