"""Components of counts: Poisson, multinomial and Bernoulli. Sparse samples stay sparse: zeros cost nothing.

The negative binomial is in :mod:`omt.families.negative_binomial`; the recipes of the fit are in
:mod:`omt.families.counts_fit`.

Letters: ``N`` samples, ``d`` features, ``K`` components, ``L`` components of another mixture.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from omt.families.base import FloatArray
from omt.families.loggamma import log_factorials
from omt.families.negative_binomial import NegativeBinomialComponents
from omt.families.product import ProductComponents, entries, finish, refuse_wide, row_sums, times
from omt.families.sizes import check_reference, sizes_of, totals_of
from omt.families.support import require_binary, require_counts

__all__ = ["BernoulliComponents", "MultinomialComponents", "NegativeBinomialComponents", "PoissonComponents"]


def _log_counts(X: Any) -> FloatArray:
    """``Σ_g log x_g!`` of each sample, over its non-zero counts only, ``[n]``."""
    return row_sums(X, log_factorials(entries(X)))


@dataclass(frozen=True, eq=False)
class PoissonComponents(ProductComponents):
    """K products of Poisson distributions, stacked.

    Parameters
    ----------
    rates
        ``λ [K, d]``, positive: the mean counts of a sample of size one.
    reference
        Total count of a sample of size one. If given, a sample ``x`` has size ``s = Σ_g x_g / reference`` and means
        ``s λ``; if ``None``, every sample has size one.

    Raises
    ------
    ValueError
        If the shape does not fit or a rate is not positive and finite.

    References
    ----------
    Banerjee, Merugu, Dhillon & Ghosh (2005), Clustering with Bregman divergences, table 2.

    Examples
    --------
    >>> import numpy as np
    >>> p = PoissonComponents(np.array([[1.0, 2.0], [3.0, 4.0]]))
    >>> bool(np.isclose(p.log_prob(np.array([[0, 1]]))[0, 0], -3.0 + np.log(2.0)))
    True
    """

    rates: FloatArray
    reference: float | None = None
    _arrays: ClassVar[tuple[str, ...]] = ("rates",)

    def __post_init__(self) -> None:
        self._settle("rates")
        _settle_reference(self)

    @property
    def family(self) -> str:
        """``"poisson"``."""
        return "poisson"

    @cached_property
    def _linear(self) -> FloatArray:
        return np.ascontiguousarray(np.log(self.rates).T)

    @cached_property
    def _totals(self) -> FloatArray:
        return np.asarray(self.rates.sum(axis=1))

    def check(self, X: Any, first_row: int) -> None:
        """Raise ``ValueError`` for entries that are no counts."""
        require_counts(X, first_row, self.family)

    def log_prob(
        self,
        X: Any,
        *,
        dtype: DTypeLike = np.float64,
        out: NDArray[Any] | None = None,
        size: FloatArray | None = None,
    ) -> NDArray[Any]:
        """Log-probability of each sample under each component: one product, and the base measure of the non-zeros.

        Parameters
        ----------
        X
            Counts, ``[N, d]``, dense or CSR.
        dtype, out
            Type of the result, or an array ``[N, K]`` to fill; sums are in float64 always.
        size
            Size factor of each sample, ``[N]``; default: from the totals, if there is a ``reference``.

        Returns
        -------
        ndarray ``[N, K]``
        """
        self._check_width(X)
        scores = times(X, self._linear)
        base = -_log_counts(X)
        size = sizes_of(X, size, self.reference)
        if size is None:
            scores -= self._totals
        else:
            scores -= size[:, None] * self._totals
            base += totals_of(X) * np.log(np.where(size > 0, size, 1.0))
        scores += base[:, None]
        return finish(scores, dtype, out)

    def sample(self, labels: NDArray[np.int64], rng: np.random.Generator) -> FloatArray:
        """One draw of size one from component ``labels[i]`` for each i, ``[n, d]``."""
        return rng.poisson(self.rates[np.asarray(labels)]).astype(np.float64)

    def mean(self) -> FloatArray:
        """Means of a sample of size one, ``[K, d]``."""
        return self.rates

    def variances(self) -> FloatArray:
        """Variances of a sample of size one, ``[K, d]``: the means."""
        return self.rates

    def kl(self, other: PoissonComponents) -> FloatArray:
        """Divergences ``Σ_g λ log(λ/λ') − λ + λ'`` of samples of size one, in nats, ``[K, L]``."""
        self._check_peer(other)
        own = (self.rates * self._linear.T).sum(axis=1) - self._totals
        return np.asarray(np.maximum(own[:, None] + other._totals - self.rates @ other._linear, 0.0))

    def natural_parameters(self) -> FloatArray:
        """``log λ``, ``[K, d]``."""
        return self._linear.T

    def mean_parameters(self) -> FloatArray:
        """``λ``, ``[K, d]``."""
        return self.rates

    def log_partition(self, eta: FloatArray) -> FloatArray:
        """``Σ_g exp η_g`` of natural parameters ``[..., d]``."""
        return np.asarray(np.exp(eta).sum(axis=-1))


@dataclass(frozen=True, eq=False)
class MultinomialComponents(ProductComponents):
    """K multinomial distributions of a sample's total over the features, stacked.

    Densities are given the total of each sample, so only proportions matter.

    Parameters
    ----------
    probs
        ``p [K, d]``, positive, rows summing to 1.
    total
        ``n̄ > 0``: the total count to which means, divergences and drawn samples refer (these rounded).

    Raises
    ------
    ValueError
        If the shape does not fit, a probability is not positive, a row does not sum to 1, or the total is not positive.

    Examples
    --------
    >>> import numpy as np
    >>> m = MultinomialComponents(np.array([[0.25, 0.75]]), 4)
    >>> m.mean().tolist(), float(np.exp(m.log_prob(np.array([[1, 1]])))[0, 0].round(12))
    ([[1.0, 3.0]], 0.375)
    """

    probs: FloatArray
    total: float
    _arrays: ClassVar[tuple[str, ...]] = ("probs",)

    def __post_init__(self) -> None:
        self._settle("probs")
        sums = self.probs.sum(axis=1)
        off = np.abs(sums - 1.0) > 1e-6
        if off.any():
            k = int(off.argmax())
            raise ValueError(f"probs of component {k} sum to {sums[k]:.9g}; they must sum to 1")
        total = float(self.total)
        if not (np.isfinite(total) and total > 0):
            raise ValueError(f"total is {total!r}; it must be a positive count")
        object.__setattr__(self, "total", total)

    @property
    def family(self) -> str:
        """``"multinomial"``."""
        return "multinomial"

    @property
    def n_parameters(self) -> int:
        """Number of free parameters: ``d − 1`` a component."""
        return self.K * (self.d - 1)

    @cached_property
    def _linear(self) -> FloatArray:
        return np.ascontiguousarray(np.log(self.probs).T)

    def check(self, X: Any, first_row: int) -> None:
        """Raise ``ValueError`` for entries that are no counts."""
        require_counts(X, first_row, self.family)

    def log_prob(self, X: Any, *, dtype: DTypeLike = np.float64, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Log-probability of each sample ``[N, d]``, given its total, under each component, ``[N, K]``."""
        self._check_width(X)
        scores = times(X, self._linear)
        scores += (log_factorials(totals_of(X)) - _log_counts(X))[:, None]
        return finish(scores, dtype, out)

    def sample(self, labels: NDArray[np.int64], rng: np.random.Generator) -> FloatArray:
        """One draw of ``round(total)`` counts from component ``labels[i]`` for each i, ``[n, d]``."""
        probs = self.probs / self.probs.sum(axis=1, keepdims=True)
        return rng.multinomial(round(self.total), probs[np.asarray(labels)]).astype(np.float64)

    def mean(self) -> FloatArray:
        """Means ``n̄ p``, ``[K, d]``."""
        return self.total * self.probs

    def variances(self) -> FloatArray:
        """Variances ``n̄ p (1 − p)``, ``[K, d]``."""
        return self.total * self.probs * (1.0 - self.probs)

    def cov(self) -> FloatArray:
        """Covariances ``n̄ (diag(p) − p pᵀ)``, ``[K, d, d]``.

        Raises
        ------
        ValueError
            If they would have more than 10⁸ entries.
        """
        refuse_wide(self.K, self.d)
        dense = -self.total * self.probs[:, :, None] * self.probs[:, None, :]
        dense[:, np.arange(self.d), np.arange(self.d)] += self.total * self.probs
        return dense

    def kl(self, other: MultinomialComponents) -> FloatArray:
        """Divergences ``n̄ Σ_g p log(p/p')`` with this mixture's total, in nats, ``[K, L]``."""
        self._check_peer(other)
        own = (self.probs * self._linear.T).sum(axis=1)
        return np.asarray(np.maximum(self.total * (own[:, None] - self.probs @ other._linear), 0.0))

    def natural_parameters(self) -> FloatArray:
        """``log p``, ``[K, d]``."""
        return self._linear.T

    def mean_parameters(self) -> FloatArray:
        """``n̄ p``, ``[K, d]``."""
        return self.mean()

    def log_partition(self, eta: FloatArray) -> FloatArray:
        """``n̄ log Σ_g exp η_g`` of natural parameters ``[..., d]``."""
        high = eta.max(axis=-1, keepdims=True)
        return np.asarray(self.total * (np.log(np.exp(eta - high).sum(axis=-1)) + high[..., 0]))


@dataclass(frozen=True, eq=False)
class BernoulliComponents(ProductComponents):
    """K products of Bernoulli distributions, stacked: features that are on or off.

    Parameters
    ----------
    probs
        ``p [K, d]`` in (0, 1): probabilities of one.

    Raises
    ------
    ValueError
        If the shape does not fit or a probability is not between 0 and 1.

    Examples
    --------
    >>> import numpy as np
    >>> b = BernoulliComponents(np.array([[0.5, 0.25]]))
    >>> float(np.exp(b.log_prob(np.array([[1, 0]])))[0, 0])
    0.375
    """

    probs: FloatArray
    _arrays: ClassVar[tuple[str, ...]] = ("probs",)

    def __post_init__(self) -> None:
        self._settle("probs", below=1.0)

    @property
    def family(self) -> str:
        """``"bernoulli"``."""
        return "bernoulli"

    @cached_property
    def _linear(self) -> FloatArray:
        return np.ascontiguousarray((np.log(self.probs) - np.log1p(-self.probs)).T)

    @cached_property
    def _all_zero(self) -> FloatArray:
        """Log-probability of a sample without ones, ``[K]``."""
        return np.asarray(np.log1p(-self.probs).sum(axis=1))

    def check(self, X: Any, first_row: int) -> None:
        """Raise ``ValueError`` for entries other than 0 and 1."""
        require_binary(X, first_row, self.family)

    def log_prob(self, X: Any, *, dtype: DTypeLike = np.float64, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Log-probability of each sample ``[N, d]`` under each component, ``[N, K]``."""
        self._check_width(X)
        return finish(times(X, self._linear) + self._all_zero, dtype, out)

    def sample(self, labels: NDArray[np.int64], rng: np.random.Generator) -> FloatArray:
        """One draw from component ``labels[i]`` for each i, ``[n, d]``."""
        probs = self.probs[np.asarray(labels)]
        return (rng.random(probs.shape) < probs).astype(np.float64)

    def mean(self) -> FloatArray:
        """Means ``p``, ``[K, d]``."""
        return self.probs

    def variances(self) -> FloatArray:
        """Variances ``p (1 − p)``, ``[K, d]``."""
        return self.probs * (1.0 - self.probs)

    def kl(self, other: BernoulliComponents) -> FloatArray:
        """Divergences ``Σ_g p log(p/p') + (1−p) log((1−p)/(1−p'))`` in nats, ``[K, L]``."""
        self._check_peer(other)
        own = (self.probs * self._linear.T).sum(axis=1) + self._all_zero
        return np.asarray(np.maximum(own[:, None] - self.probs @ other._linear - other._all_zero, 0.0))

    def natural_parameters(self) -> FloatArray:
        """Log-odds, ``[K, d]``."""
        return self._linear.T

    def mean_parameters(self) -> FloatArray:
        """``p``, ``[K, d]``."""
        return self.probs

    def log_partition(self, eta: FloatArray) -> FloatArray:
        """``Σ_g log(1 + exp η_g)`` of natural parameters ``[..., d]``."""
        return np.asarray(np.logaddexp(0.0, eta).sum(axis=-1))


def _settle_reference(components: PoissonComponents) -> None:
    if components.reference is not None:
        check_reference(float(components.reference))
        object.__setattr__(components, "reference", float(components.reference))
