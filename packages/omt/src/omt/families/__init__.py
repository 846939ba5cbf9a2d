"""Families of distributions that the components of a mixture can have, one file a family."""

from omt.families.gaussian import GaussianComponents
from omt.families.gaussian_fit import Gaussian

__all__ = ["Gaussian", "GaussianComponents"]
