"""Components of any family from its name and parameters, given by a user or read from a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np

from omt.families.base import Components
from omt.families.counts import BernoulliComponents, MultinomialComponents, PoissonComponents
from omt.families.gaussian import GaussianComponents
from omt.families.negative_binomial import NegativeBinomialComponents
from omt.families.positive import ExponentialComponents, GammaComponents, LogNormalComponents

# How each family's components are rebuilt from their parameters.
_CLASSES: dict[str, Callable[..., Any]] = {
    "gaussian": GaussianComponents,
    "poisson": PoissonComponents,
    "negative_binomial": NegativeBinomialComponents,
    "multinomial": MultinomialComponents,
    "bernoulli": BernoulliComponents,
    "gamma": GammaComponents,
    "exponential": ExponentialComponents,
    "lognormal": LogNormalComponents.of_logarithm,
}
# What a user gives for each family: parameters that must be there, and those that may.
_TAKES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "gaussian": (("means",), ("covariances", "variances", "factors", "noise", "covariance_type")),
    "poisson": (("rates",), ("reference",)),
    "negative_binomial": (("means", "dispersion"), ("reference",)),
    "multinomial": (("probs", "total"), ()),
    "bernoulli": (("probs",), ()),
    "gamma": (("shapes", "rates"), ()),
    "exponential": (("rates",), ()),
    "lognormal": (("means",), ("covariances", "variances", "factors", "noise", "covariance_type")),
}


def components_from(family: str, arrays: Mapping[str, Any]) -> Components:
    """Components of a family from what a user gives.

    Parameters
    ----------
    family
        Its name.
    arrays
        Its parameters; the shape of Gaussian covariances is seen from them where ``covariance_type`` is not given.

    Raises
    ------
    ValueError
        If the family is unknown or a parameter is malformed.
    TypeError
        If a parameter is missing or unknown; the message lists what the family takes.
    """
    if family not in _CLASSES:
        raise ValueError(f"family is {family!r}; it must be one of {', '.join(_CLASSES)}")
    needed, optional = _TAKES[family]
    wrong = [f"needs {name}" for name in needed if name not in arrays]
    wrong += [f"does not know {name}" for name in arrays if name not in (*needed, *optional)]
    if wrong:
        takes = ", ".join(needed) + (f" and optionally {', '.join(optional)}" if optional else "")
        raise TypeError(f"family {family!r} {wrong[0]}; it takes {takes}")
    given = dict(arrays)
    if family in {"gaussian", "lognormal"}:
        given.setdefault("covariance_type", _covariance_type(arrays))
    return cast("Components", _CLASSES[family](**given))


def _covariance_type(arrays: Mapping[str, Any]) -> str:
    """The shape of covariance that the given arrays are parameters of."""
    if "factors" in arrays or "noise" in arrays:
        return "lowrank"
    if "variances" in arrays:
        return "spherical" if np.ndim(arrays["variances"]) == 1 else "diag"
    return "tied" if np.ndim(arrays.get("covariances", ())) == 2 else "full"


def components_of(family: str, parameters: Mapping[str, Any]) -> Components:
    """Components of a family from their stored parameters.

    Raises
    ------
    ValueError
        If the family is unknown, or a parameter is missing, unexpected or malformed.
    """
    if family not in _CLASSES:
        raise ValueError(f"this mixture is of family {family!r}; this version of omt knows {', '.join(_CLASSES)}")
    values = {
        key: str(value) if key == "covariance_type" else np.asarray(value, dtype=np.float64)
        for key, value in parameters.items()
    }
    try:
        return cast("Components", _CLASSES[family](**values))
    except TypeError as error:
        raise ValueError(f"this stored mixture has unexpected parameters: {', '.join(values)}") from error
