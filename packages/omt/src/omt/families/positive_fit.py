"""Fitting components of positive numbers: gamma, exponential and log-normal.

Letters: ``n`` rows of a block, ``d`` features, ``K`` components.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from omt.families.base import FloatArray, Prior, Statistics
from omt.families.conjugate import ConjugateFamily, check_shrinkage
from omt.families.gaussian import CovarianceType
from omt.families.gaussian_fit import Gaussian
from omt.families.positive import ExponentialComponents, GammaComponents, LogNormalComponents
from omt.families.support import require_positive

# Smallest spread that the shape of a gamma distribution is fitted to; for small spreads it is half the squared
# coefficient of variation.
_SPREAD_FLOOR = 1e-6
_NEWTON_STEPS = 25


@dataclass(frozen=True)
class Gamma:
    """The gamma family: what to fit.

    Maximum likelihood sets the mean of a component to the average, and its shape α by its *spread*, the gap of Jensen's
    inequality ``log(average) − average of logs = log α − ψ(α)``.

    Parameters
    ----------
    shrinkage
        Pseudo-samples ν by which the spread of each component is pulled to the pooled spread within components, so that
        a component of one sample has a width.
    floor
        Smallest spread; for small ones this is half the squared coefficient of variation.

    References
    ----------
    Minka (2002), Estimating a Gamma distribution, for the Newton steps.

    Examples
    --------
    >>> Gamma().name
    'gamma'
    """

    shrinkage: float = 1.0
    floor: float = _SPREAD_FLOOR

    def __post_init__(self) -> None:
        check_shrinkage(self.shrinkage)
        if not (np.isfinite(self.floor) and self.floor > 0):
            raise ValueError(f"floor is {self.floor}; it must be a finite number > 0")

    @property
    def name(self) -> str:
        """``"gamma"``."""
        return "gamma"

    @property
    def single_precision(self) -> bool:
        """``False``: for large shapes densities are differences of large numbers."""
        return False

    @property
    def one_step(self) -> bool:
        """``True``: one M-step from sums is the whole maximisation."""
        return True

    def check(self, X: Any, first_row: int) -> None:
        """Raise ``ValueError`` for entries that are not above zero."""
        require_positive(X, first_row, self.name)

    def features(self, X: Any, seed: int) -> FloatArray:
        """Coordinates for k-means: logarithms, ``[n, d]``."""
        return np.asarray(np.log(X))

    def empty(self, K: int, d: int, centre: FloatArray | None) -> Statistics:
        """Sums of no samples: responsibilities ``[K]``, samples and their logarithms ``[K, d]``."""
        return Statistics({"weight": np.zeros(K), "first": np.zeros((K, d)), "logs": np.zeros((K, d))})

    def accumulate(self, statistics: Statistics, X: Any, R: NDArray[Any]) -> None:
        """Add samples ``X [n, d]`` with weighted responsibilities ``R [n, K]``, in place."""
        statistics.sums["weight"] += R.sum(axis=0, dtype=np.float64)
        statistics.sums["first"] += R.T @ X
        statistics.sums["logs"] += R.T @ np.log(X)

    def _moments(self, statistics: Statistics) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Weights ``[K, 1]``, means and spreads ``[K, d]``; components without samples are like all others."""
        weight = statistics.weight[:, None]
        everyone = statistics.sums["first"].sum(axis=0) / weight.sum()
        empty = weight <= 1e-12 * weight.sum()
        safe = np.where(empty, 1.0, weight)
        means = np.where(empty, everyone, statistics.sums["first"] / safe)
        spread = np.where(empty, 0.0, np.maximum(np.log(means) - statistics.sums["logs"] / safe, 0.0))
        return weight, means, spread

    def prior(self, statistics: Statistics) -> Prior:
        """Pooled spread within components ``[d]``, pseudo-samples ν and the floor."""
        weight, _, spread = self._moments(statistics)
        pooled = np.maximum((weight * spread).sum(axis=0) / weight.sum(), self.floor)
        return {
            "pooled": pooled,
            "shrinkage": np.asarray(float(self.shrinkage)),
            "floor": np.asarray(float(self.floor)),
        }

    def place(self, statistics: Statistics, k: int, x: FloatArray, prior: Prior, weight: float) -> None:
        """Make component ``k`` one of ``weight`` samples around ``x [d]`` with the pooled spread, in place."""
        statistics.sums["weight"][k] = weight
        statistics.sums["first"][k] = weight * x
        statistics.sums["logs"][k] = weight * (np.log(x) - prior["pooled"])

    def log_prior(self, components: GammaComponents, prior: Prior) -> float:
        """``ν Σ (α log α − log Γ(α) − α − α s̄)``: ν samples of each feature with the pooled spread ``s̄`` and the
        component's own mean.
        """
        a = components.shapes
        value = a * np.log(a) - special.gammaln(a) - a - a * prior["pooled"]
        return float(prior["shrinkage"]) * float(value.sum())

    def m_step(self, statistics: Statistics, prior: Prior, previous: Any = None) -> GammaComponents:
        """Components that maximise the expected log-likelihood plus :meth:`log_prior`, spreads above the floor."""
        weight, means, spread = self._moments(statistics)
        nu = float(prior["shrinkage"])
        spread = np.maximum((weight * spread + nu * prior["pooled"]) / (weight + nu), float(prior["floor"]))
        shapes = gamma_shapes(spread)
        return GammaComponents(shapes, shapes / means)


def gamma_shapes(spread: FloatArray) -> FloatArray:
    """Solve ``log α − ψ(α) = spread`` for positive spreads of any shape, by Newton's method on ``1/α``.

    References
    ----------
    Minka (2002), Estimating a Gamma distribution, equation 11.

    Examples
    --------
    >>> import numpy as np
    >>> a = gamma_shapes(np.array([0.5, 1e-3]))
    >>> bool(np.allclose(np.log(a) - special.digamma(a), [0.5, 1e-3], rtol=1e-12))
    True
    """
    a = (3.0 - spread + np.sqrt((spread - 3.0) ** 2 + 24.0 * spread)) / (12.0 * spread)
    for _ in range(_NEWTON_STEPS):
        gap = spread - (np.log(a) - special.digamma(a))
        # d(log α − ψ(α)) / d(1/α) = −α² (1/α − ψ'(α)) > 0
        step = gap / (a * (a * special.polygamma(1, a) - 1.0))
        a = 1.0 / (1.0 / a + step)
        if np.abs(step * a).max(initial=0.0) < 1e-14:
            break
    return np.asarray(a, dtype=np.float64)


@dataclass(frozen=True)
class Exponential(ConjugateFamily):
    """The exponential family of waiting times: what to fit.

    Parameters
    ----------
    shrinkage
        Pseudo-samples by which the mean of each component is pulled to the pooled mean.

    Examples
    --------
    >>> Exponential().name
    'exponential'
    """

    shrinkage: float = 1e-2

    def __post_init__(self) -> None:
        check_shrinkage(self.shrinkage)

    @property
    def name(self) -> str:
        """``"exponential"``."""
        return "exponential"

    def check(self, X: Any, first_row: int) -> None:
        """Raise ``ValueError`` for entries that are not above zero."""
        require_positive(X, first_row, self.name)

    def features(self, X: Any, seed: int) -> FloatArray:
        """Coordinates for k-means: logarithms, ``[n, d]``."""
        return np.asarray(np.log(X))

    def prior(self, statistics: Statistics) -> Prior:
        """Pooled means ``[d]`` and the number ν of pseudo-samples."""
        pooled = statistics.sums["first"].sum(axis=0) / statistics.weight.sum()
        return {"pooled": pooled, "shrinkage": np.asarray(float(self.shrinkage))}

    def place(self, statistics: Statistics, k: int, x: FloatArray, prior: Prior, weight: float) -> None:
        """Make component ``k`` one of ``weight`` samples around ``x [d]``, in place."""
        statistics.sums["weight"][k] = statistics.sums["size"][k] = weight
        statistics.sums["first"][k] = weight * x

    def m_step(self, statistics: Statistics, prior: Prior, previous: Any = None) -> ExponentialComponents:
        """Inverse averages of each component, with the pseudo-samples."""
        return ExponentialComponents(1.0 / self.averages(statistics, prior))


@dataclass(frozen=True)
class LogNormal:
    """The log-normal family: a Gaussian recipe for the logarithms.

    Parameters
    ----------
    covariance, rank, shrinkage, floor
        As of :class:`omt.families.Gaussian`.

    Examples
    --------
    >>> LogNormal("diag").name
    'lognormal'
    """

    covariance: CovarianceType = "full"
    rank: int | None = None
    shrinkage: float | None = None
    floor: float = 1e-6

    def __post_init__(self) -> None:
        self._gaussian  # noqa: B018  # checks the arguments

    @cached_property
    def _gaussian(self) -> Gaussian:
        return Gaussian(self.covariance, self.rank, self.shrinkage, self.floor)

    @property
    def name(self) -> str:
        """``"lognormal"``."""
        return "lognormal"

    @property
    def single_precision(self) -> bool:
        """``True``, as for Gaussian components."""
        return True

    @property
    def one_step(self) -> bool:
        """As for Gaussian components."""
        return self._gaussian.one_step

    def check(self, X: Any, first_row: int) -> None:
        """Raise ``ValueError`` for entries that are not above zero."""
        require_positive(X, first_row, self.name)

    def features(self, X: Any, seed: int) -> Any:
        """Coordinates for k-means: logarithms, ``[n, d]``."""
        return np.log(X)

    def empty(self, K: int, d: int, centre: FloatArray | None) -> Statistics:
        """Statistics of no samples about ``centre``, a point of logarithms."""
        return self._gaussian.empty(K, d, centre)

    def accumulate(self, statistics: Statistics, X: Any, R: NDArray[Any]) -> None:
        """Add the logarithms of samples ``X [n, d]`` with weighted responsibilities ``R [n, K]``, in place."""
        self._gaussian.accumulate(statistics, np.log(X), R)

    def prior(self, statistics: Statistics) -> Prior:
        """What regularises the Gaussian components of the logarithms."""
        return self._gaussian.prior(statistics)

    def place(self, statistics: Statistics, k: int, x: FloatArray, prior: Prior, weight: float) -> None:
        """Make component ``k`` one of ``weight`` samples around ``x [d]`` with the pooled spread, in place."""
        self._gaussian.place(statistics, k, np.log(x), prior, weight)

    def log_prior(self, components: LogNormalComponents, prior: Prior) -> float:
        """Log-density of the Gaussian components under the prior, up to a constant."""
        return self._gaussian.log_prior(components.gaussian, prior)

    def m_step(self, statistics: Statistics, prior: Prior, previous: Any = None) -> LogNormalComponents:
        """Components that maximise the expected log-likelihood plus the log-prior."""
        before = None if previous is None else previous.gaussian
        return LogNormalComponents(self._gaussian.m_step(statistics, prior, before))
