"""Fitting components of counts: Poisson, multinomial and Bernoulli. Nothing is ever densified.

Letters: ``n`` rows of a block, ``d`` features, ``K`` components.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from omt.families.base import FloatArray, Prior, Statistics
from omt.families.conjugate import UNSEEN, ConjugateFamily, check_shrinkage
from omt.families.counts import BernoulliComponents, MultinomialComponents, PoissonComponents
from omt.families.embedding import embed_binary, embed_counts
from omt.families.sizes import SizeFactors, check_size_factors, resolve_sizes
from omt.families.support import require_binary, require_counts


@dataclass(frozen=True)
class Poisson(ConjugateFamily):
    """The Poisson family: what to fit.

    Parameters
    ----------
    size_factors
        Size ``s_i`` of each sample, whose means are ``s_i λ``: ``None`` (all one), ``"total"`` (the sample's total
        count over the mean total: cells of different depth become comparable), or ``[N]`` positive factors near one.
    reference
        Total of a sample of size one, kept with the components so that new samples get their size; default: the mean
        total, or for given factors their totals' sum over the factors' sum.
    shrinkage
        Pseudo-samples ν, of the mean size ``s̄``, by which the rates of each component are pulled to the pooled ones:
        ``λ = (Σ r x + ν s̄ λ̄) / (Σ r s + ν s̄)``. A rate is never zero.

    Examples
    --------
    >>> Poisson(size_factors="total").name
    'poisson'
    """

    size_factors: SizeFactors = field(default=None, repr=False)
    reference: float | None = None
    shrinkage: float = 1e-2

    def __post_init__(self) -> None:
        check_size_factors(self.size_factors, self.reference)
        check_shrinkage(self.shrinkage)

    @property
    def name(self) -> str:
        """``"poisson"``."""
        return "poisson"

    def with_sizes(self, totals: FloatArray) -> tuple[Self, FloatArray | None]:
        """The recipe with its reference, and the size of each sample, for data with these totals ``[N]``."""
        if self.size_factors is None:
            return self, None
        sizes, reference = resolve_sizes(self.size_factors, self.reference, totals)
        return replace(self, reference=reference), sizes

    def check(self, X: Any, first_row: int) -> None:
        """Raise ``ValueError`` for entries that are no counts."""
        require_counts(X, first_row, self.name)

    def features(self, X: Any, seed: int) -> FloatArray:
        """Coordinates for k-means, ``[n, r]``."""
        return embed_counts(X, seed)

    def m_step(self, statistics: Statistics, prior: Prior, previous: Any = None) -> PoissonComponents:
        """Average counts of each component, with the pseudo-samples."""
        return PoissonComponents(self.averages(statistics, prior), self.reference)


@dataclass(frozen=True)
class Multinomial(ConjugateFamily):
    """The multinomial family: proportions of a total that is given with each sample.

    Parameters
    ----------
    shrinkage
        Pseudo-samples (of the mean total) by which proportions are pulled to the pooled ones.

    Examples
    --------
    >>> Multinomial().name
    'multinomial'
    """

    shrinkage: float = 1e-2

    def __post_init__(self) -> None:
        check_shrinkage(self.shrinkage)

    @property
    def name(self) -> str:
        """``"multinomial"``."""
        return "multinomial"

    def check(self, X: Any, first_row: int) -> None:
        """Raise ``ValueError`` for entries that are no counts."""
        require_counts(X, first_row, self.name)

    def features(self, X: Any, seed: int) -> FloatArray:
        """Coordinates for k-means, ``[n, r]``."""
        return embed_counts(X, seed)

    def m_step(self, statistics: Statistics, prior: Prior, previous: Any = None) -> MultinomialComponents:
        """Proportions of each component's counts, with the pseudo-samples."""
        mass = statistics.sums["first"] + float(prior["shrinkage"]) * prior["pooled"]
        return MultinomialComponents(mass / mass.sum(axis=1, keepdims=True), float(prior["pooled"].sum()))


@dataclass(frozen=True)
class Bernoulli(ConjugateFamily):
    """The Bernoulli family: features that are on or off.

    Parameters
    ----------
    shrinkage
        Pseudo-samples by which probabilities are pulled to the pooled ones; they never become 0 or 1.

    Examples
    --------
    >>> Bernoulli().name
    'bernoulli'
    """

    shrinkage: float = 1e-2

    def __post_init__(self) -> None:
        check_shrinkage(self.shrinkage)

    @property
    def name(self) -> str:
        """``"bernoulli"``."""
        return "bernoulli"

    def check(self, X: Any, first_row: int) -> None:
        """Raise ``ValueError`` for entries other than 0 and 1."""
        require_binary(X, first_row, self.name)

    def features(self, X: Any, seed: int) -> FloatArray:
        """Coordinates for k-means, ``[n, r]``."""
        return embed_binary(X, seed)

    def prior(self, statistics: Statistics) -> Prior:
        """Pooled probabilities ``[d]``, away from 0 and 1, and the number ν of pseudo-samples."""
        prior = super().prior(statistics)
        prior["pooled"] = np.minimum(prior["pooled"], 1.0 - UNSEEN / float(statistics.weight.sum()))
        return prior

    def place(self, statistics: Statistics, k: int, x: FloatArray, prior: Prior, weight: float) -> None:
        """Make component ``k`` one of ``weight`` samples, half like ``x [d]`` and half like all others, in place."""
        statistics.sums["weight"][k] = statistics.sums["size"][k] = weight
        statistics.sums["first"][k] = weight * 0.5 * (x + prior["pooled"])

    def m_step(self, statistics: Statistics, prior: Prior, previous: Any = None) -> BernoulliComponents:
        """Share of each component's samples that show a feature, with the pseudo-samples."""
        return BernoulliComponents(self.averages(statistics, prior))
