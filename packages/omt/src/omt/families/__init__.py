"""Families of distributions that the components of a mixture can have.

A family is a pair: its *components* (K fitted distributions, stacked) and its *recipe* (how to fit them).
"""

from omt.families.counts import BernoulliComponents, MultinomialComponents, PoissonComponents
from omt.families.counts_fit import Bernoulli, Multinomial, Poisson
from omt.families.gaussian import GaussianComponents
from omt.families.gaussian_fit import Gaussian
from omt.families.negative_binomial import NegativeBinomialComponents
from omt.families.negative_binomial_fit import NegativeBinomial
from omt.families.positive import ExponentialComponents, GammaComponents, LogNormalComponents
from omt.families.positive_fit import Exponential, Gamma, LogNormal

__all__ = [
    "Bernoulli",
    "BernoulliComponents",
    "Exponential",
    "ExponentialComponents",
    "Gamma",
    "GammaComponents",
    "Gaussian",
    "GaussianComponents",
    "LogNormal",
    "LogNormalComponents",
    "Multinomial",
    "MultinomialComponents",
    "NegativeBinomial",
    "NegativeBinomialComponents",
    "Poisson",
    "PoissonComponents",
]
