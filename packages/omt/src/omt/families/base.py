"""What the fit and the transport need to know about a family of distributions, and what all families share.

A family is one file that provides two things: its *components* (K fitted distributions, stacked in arrays) and its
*recipe* (which statistics to add up over the data, and how to turn their sums into components). The
expectation-maximisation of :mod:`omt.fitting.em` and the :class:`omt.mixture.Mixture` know families only through the
two protocols below.

Letters: ``N`` samples, ``d`` features, ``K`` components, ``L`` components of another mixture, ``s`` sufficient
statistics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import DTypeLike, NDArray

FloatArray: TypeAlias = NDArray[np.float64]
Prior: TypeAlias = dict[str, FloatArray]
"""Arrays that regularise a family's components; plain arrays, so that a checkpoint can hold them."""


@runtime_checkable
class Components(Protocol):
    """K distributions of one exponential family, stacked: the left half of a :class:`~omt.mixture.Mixture`."""

    @property
    def family(self) -> str:
        """Name of the family, e.g. ``"gaussian"``."""

    @property
    def K(self) -> int:  # noqa: N802  # the formulas' letter
        """Number of components."""

    @property
    def d(self) -> int:
        """Number of features."""

    @property
    def n_parameters(self) -> int:
        """Number of free parameters of all components together, weights not counted."""

    def log_prob(self, X: Any, *, dtype: DTypeLike = np.float64, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Log-density of each sample under each component, ``[N, K]``."""

    def sample(self, labels: NDArray[np.int64], rng: np.random.Generator) -> FloatArray:
        """One draw from component ``labels[i]`` for each i, ``[n, d]``."""

    def mean(self) -> FloatArray:
        """Means, ``[K, d]``."""

    def centre(self) -> FloatArray | None:
        """Where the statistics of the next M-step are taken from: first axis component, or ``None`` for about zero."""

    def cov(self) -> FloatArray:
        """Covariances, ``[K, d, d]``."""

    def kl(self, other: Any) -> FloatArray:
        """Kullback-Leibler divergences ``KL(self_k ‖ other_l)``, ``[K, L]``."""

    def natural_parameters(self) -> FloatArray:
        """Natural parameters η, ``[K, s]``."""

    def mean_parameters(self) -> FloatArray:
        """Mean parameters ``μ = E T(x)``, ``[K, s]``."""

    def log_partition(self, eta: FloatArray) -> FloatArray:
        """Log-partition ``A(η)`` of natural parameters ``[..., s]``, shape ``[...]``."""

    def select(self, index: NDArray[Any]) -> Self:
        """The components at ``index``, in that order."""

    def parameters(self) -> dict[str, Any]:
        """Constructor arguments: what ``type(self)(**parameters)`` needs to build an equal object."""


class SizedComponents(Protocol):
    """Components of counts, which score samples of different size."""

    def log_prob(
        self,
        X: Any,
        *,
        dtype: DTypeLike = np.float64,
        out: NDArray[Any] | None = None,
        size: FloatArray | None = None,
    ) -> NDArray[Any]:
        """Log-density of each sample, of the given size factor ``[N]``, under each component, ``[N, K]``."""


@dataclass
class Statistics:
    """Sums over samples that determine the components: ``merge`` adds those of other samples.

    Sums of chunks, files and machines merge by addition as long as they are taken about the same ``centre``.

    Parameters
    ----------
    sums
        Arrays whose first axis is the component, by name. ``sums["weight"]``, ``[K]``, is the
        total responsibility of each component.
    centre
        What the sums are taken about, its first axis the component, or ``None`` for families that need nothing. For
        Gaussians the point ``[K, d]`` from which samples are measured before they are squared, which keeps second
        moments free of cancellation; for negative binomials the parameters ``[K, 2, d]`` that weigh the samples.
    """

    sums: dict[str, NDArray[Any]]
    centre: FloatArray | None = None

    @property
    def weight(self) -> FloatArray:
        """Total responsibility of each component, ``[K]``."""
        return self.sums["weight"]

    def select(self, keep: NDArray[Any]) -> Statistics:
        """The sums of some components (mask or indices)."""
        centre = None if self.centre is None else self.centre[keep]
        return Statistics({name: value[keep] for name, value in self.sums.items()}, centre)

    def merge(self, other: Statistics) -> None:
        """Add the sums of other samples, in place."""
        self.blend(other, 1.0, 1.0)

    def blend(self, other: Statistics, keep: float, add: float) -> None:
        """Replace the sums by ``keep · self + add · other``, in place."""
        if (self.centre is None) != (other.centre is None) or (
            self.centre is not None and other.centre is not None and not np.array_equal(self.centre, other.centre)
        ):
            raise ValueError("statistics taken about different centres do not add up; recentre one of them first")
        self.scale(keep)
        for name, value in other.sums.items():
            self.sums[name] += add * value

    def scale(self, factor: float) -> None:
        """Count every sample ``factor`` times, in place."""
        for name in self.sums:
            self.sums[name] *= factor


class Family(Protocol):
    """Recipe of a family: from data and responsibilities to components."""

    @property
    def name(self) -> str:
        """Name of the family, e.g. ``"gaussian"``."""

    @property
    def single_precision(self) -> bool:
        """Whether densities computed in float32 are good enough for responsibilities."""

    @property
    def one_step(self) -> bool:
        """Whether one M-step is the whole maximisation, so that given responsibilities need no iteration."""

    def check(self, X: Any, first_row: int) -> None:
        """Raise ``ValueError`` if rows ``X`` (starting at ``first_row`` of the data) are outside the support."""

    def features(self, X: Any, seed: int) -> Any:
        """Coordinates of samples ``X [n, d]`` in which k-means may look for groups, ``[n, r]``."""

    def empty(self, K: int, d: int, centre: FloatArray | None) -> Statistics:
        """Statistics of no samples about ``centre``."""

    def accumulate(self, statistics: Statistics, X: Any, R: NDArray[Any]) -> None:
        """Add samples ``X [n, d]`` with weighted responsibilities ``R [n, K]`` to the statistics, in place."""

    def prior(self, statistics: Statistics) -> Prior:
        """What regularises the components, estimated from the pooled statistics."""

    def m_step(self, statistics: Statistics, prior: Prior, previous: Any = None) -> Any:
        """Components that maximise the expected log-likelihood plus the log-prior.

        ``previous`` are the components of the last step, for families whose M-step is itself iterative.
        """

    def place(self, statistics: Statistics, k: int, x: FloatArray, prior: Prior, weight: float) -> None:
        """Make component ``k`` one of ``weight`` samples around ``x`` with the pooled spread, in place."""

    def log_prior(self, components: Any, prior: Prior) -> float:
        """Log-density of the components under the prior, up to a constant."""


class SizedFamily(Protocol):
    """Recipe of a family whose samples may have different sizes."""

    def with_sizes(self, totals: FloatArray) -> tuple[Family, FloatArray | None]:
        """The recipe for data with these totals ``[N]``, and the size factor of each sample (``None``: all one)."""

    def accumulate(self, statistics: Statistics, X: Any, R: NDArray[Any], size: FloatArray | None = None) -> None:
        """Add samples ``X [n, d]`` of the given sizes ``[n]`` to the statistics, in place."""


def bregman_kl(p: Components, q: Components) -> FloatArray:
    """Kullback-Leibler divergences between components of one family, from its log-partition alone.

    ``KL(p ‖ q) = A(η_q) − A(η_p) − ⟨η_q − η_p, μ_p⟩``: the divergence of an exponential family is the Bregman
    divergence of ``A``.

    Parameters
    ----------
    p, q
        Components of the same family and number of features.

    Returns
    -------
    ndarray ``[K, L]``
        ``KL(p_k ‖ q_l)`` in nats.

    References
    ----------
    Banerjee, Merugu, Dhillon & Ghosh (2005), Clustering with Bregman divergences, section 4.

    Examples
    --------
    >>> import numpy as np
    >>> from omt.families import GaussianComponents
    >>> p = GaussianComponents(np.zeros((1, 1)), "spherical", variances=np.ones(1))
    >>> q = GaussianComponents(np.full((1, 1), 2.0), "spherical", variances=np.ones(1))
    >>> float(np.round(bregman_kl(p, q)[0, 0], 12))
    2.0
    """
    eta_p, eta_q, mu = p.natural_parameters(), q.natural_parameters(), p.mean_parameters()
    own = np.einsum("ks,ks->k", eta_p, mu) - p.log_partition(eta_p)
    divergence: FloatArray = q.log_partition(eta_q)[None, :] + own[:, None] - mu @ eta_q.T
    return divergence


def bhattacharyya_coefficient(p: Components, q: Components) -> FloatArray:
    """Bhattacharyya coefficients ``∫√(p q)`` between components of one family, from its log-partition alone.

    ``exp(A((η_p + η_q)/2) − (A(η_p) + A(η_q))/2)``; the squared Hellinger distance is one minus it.

    Parameters
    ----------
    p, q
        Components of the same family and number of features.

    Returns
    -------
    ndarray ``[K, L]``
        Coefficients in (0, 1].

    References
    ----------
    Nielsen & Garcia (2009), Statistical exponential families: a digest with flash cards, section 4.

    Examples
    --------
    >>> import numpy as np
    >>> from omt.families import GaussianComponents
    >>> p = GaussianComponents(np.zeros((1, 1)), "spherical", variances=np.ones(1))
    >>> q = GaussianComponents(np.full((1, 1), 2.0), "spherical", variances=np.ones(1))
    >>> bool(np.isclose(bhattacharyya_coefficient(p, q)[0, 0], np.exp(-0.5)))
    True
    """
    eta_p, eta_q = p.natural_parameters(), q.natural_parameters()
    ends = (p.log_partition(eta_p)[:, None] + q.log_partition(eta_q)[None, :]) / 2
    middle = np.stack([p.log_partition((eta + eta_q) / 2) for eta in eta_p])
    return np.exp(middle - ends)
