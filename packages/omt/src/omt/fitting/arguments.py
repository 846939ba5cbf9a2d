"""What :func:`omt.fitting.em.fit_mixture` is given: checked once, before anything is computed.

Letters: ``N`` samples, ``d`` features, ``K`` components.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from omt.chunks import largest, require_finite
from omt.families import Bernoulli, Exponential, Gamma, Gaussian, LogNormal, Multinomial, NegativeBinomial, Poisson
from omt.families.base import Family, FloatArray
from omt.families.gaussian import CovarianceType
from omt.families.sizes import SizeFactors, totals_of
from omt.fitting.supervision import Supervision
from omt.fitting.sweeps import Data
from omt.mixture import Mixture
from omt.scalars import checked_seed

FamilyName: TypeAlias = Literal[
    "gaussian", "poisson", "negative_binomial", "multinomial", "bernoulli", "gamma", "exponential", "lognormal"
]
_FAMILIES: dict[str, Any] = {
    "gaussian": Gaussian,
    "poisson": Poisson,
    "negative_binomial": NegativeBinomial,
    "multinomial": Multinomial,
    "bernoulli": Bernoulli,
    "gamma": Gamma,
    "exponential": Exponential,
    "lognormal": LogNormal,
}
# Smallest weight of a sample, in units of the largest.
_LIGHTEST = 1e-20


def check_ranges(*, tol: Any, dtype: Any, **counts: Any) -> None:
    """Refuse counts, tolerance and type that are out of range."""
    for name, value in counts.items():
        if name == "random_state":
            checked_seed(value)
        elif isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise ValueError(f"{name} is {value!r}; it must be an integer ≥ 1")
    if not isinstance(tol, (int, float, np.number)) or not (np.isfinite(tol) and tol >= 0):
        raise ValueError(f"tol is {tol!r}; it must be a finite number ≥ 0")
    if dtype not in ("float64", "float32"):
        raise ValueError(f"dtype is {dtype!r}; it must be 'float64' or 'float32'")


def family_named(family: Any, covariance: CovarianceType, size_factors: SizeFactors) -> Family:
    """The recipe that a name or an object means."""
    if isinstance(family, str):
        if family not in _FAMILIES:
            raise ValueError(
                f"family is {family!r}; it must be one of {', '.join(_FAMILIES)}, or a family object such as "
                "omt.families.Gaussian(…)"
            )
        recipe = _FAMILIES[family](covariance) if family in {"gaussian", "lognormal"} else _FAMILIES[family]()
    elif hasattr(family, "m_step"):
        recipe = family
    else:
        raise TypeError(
            f"family is {family!r}; it must be one of {', '.join(_FAMILIES)}, or a family object such as "
            "omt.families.Gaussian(…)"
        )
    if size_factors is not None:
        if not hasattr(recipe, "with_sizes"):
            raise ValueError(
                f"size_factors are for families 'poisson' and 'negative_binomial'; family is {recipe.name!r}"
            )
        if recipe.size_factors is not None:
            raise ValueError("size_factors are given twice: to the family and to fit_mixture; give them once")
        recipe = replace(recipe, size_factors=size_factors)
    return recipe  # type: ignore[no-any-return]  # the protocol was checked by its main method


def family_like(mixture: Mixture) -> Family:
    """Recipe of components like those of a mixture."""
    components: Any = mixture.components
    if mixture.family in {"gaussian", "lognormal"}:
        return _FAMILIES[mixture.family](components.covariance_type)  # type: ignore[no-any-return]  # a recipe
    known: dict[str, Any] = {}
    if mixture.family == "negative_binomial":
        known["dispersion"] = components.dispersion
    if getattr(components, "reference", None) is not None:
        known |= {"size_factors": "total", "reference": components.reference}
    return _FAMILIES[mixture.family](**known)  # type: ignore[no-any-return]  # a recipe


def sized(recipe: Any, totals: FloatArray | None) -> tuple[Family, FloatArray | None]:
    """The recipe for data with these totals, and the size factor of each sample, where the family uses any."""
    if totals is None:
        return recipe, None
    return recipe.with_sizes(totals)  # type: ignore[no-any-return]  # a pair of these types


def mean_one_weights(sample_weight: ArrayLike | None, N: int) -> FloatArray | None:
    """Sample weights ``[N]`` with mean 1, or ``None``."""
    if sample_weight is None:
        return None
    weight = np.array(sample_weight, dtype=np.float64)
    if weight.shape != (N,):
        raise ValueError(f"sample_weight has shape {weight.shape}; X has {N} samples, so it must be [{N}]")
    bad = ~(np.isfinite(weight) & (weight > 0))
    if bad.any():
        i = int(bad.argmax())
        raise ValueError(f"sample_weight[{i}] is {weight[i]:g}; every weight must be positive and finite")
    weight /= weight.max()
    lost = weight < _LIGHTEST
    if lost.any():
        i = int(lost.argmax())
        raise ValueError(
            f"sample_weight[{i}] is {weight[i]:.3g} of the largest weight; below {_LIGHTEST:g} a sample is lost in "
            "float64 sums, so leave it out"
        )
    mean_one: FloatArray = weight / weight.mean()
    return mean_one


def scan(data: Data, family: Family) -> tuple[float, FloatArray | None]:
    """Check every sample once, before anything is computed; give a number that tells data sets apart, and for
    families that were asked to use size factors the total of each sample, ``[N]``.
    """
    total, lowest, highest = 0.0, np.inf, -np.inf
    totals = np.empty(data.N) if getattr(family, "size_factors", None) is not None else None
    for start_row, block in data.source.chunks(data.batch_size):
        require_finite(block, start_row, dtype=data.dtype)
        family.check(block, start_row)
        total += float(block.sum())
        lowest, highest = min(lowest, float(block.min())), max(highest, float(block.max()))
        if totals is not None:
            totals[start_row : start_row + block.shape[0]] = totals_of(block)
    if 0.0 < highest - lowest < 1.0 / largest(data.dtype):
        raise ValueError(
            f"X varies by {highest - lowest:g} only; squares of such numbers underflow, so give X in another unit"
        )
    return total, totals


def checksum_of(supervision: Supervision, weight: FloatArray | None) -> float:
    """A number that tells labels and weights apart."""
    position = 0.0
    for values in (supervision.codes, supervision.soft, weight):
        if values is not None:
            flat = np.nan_to_num(np.asarray(values, dtype=np.float64)).reshape(values.shape[0], -1).sum(axis=1)
            position += float(flat @ np.linspace(1.0, 2.0, flat.size))
    return position


def warn_of_single_samples(supervision: Supervision, names: tuple[str, ...] | None) -> None:
    """Say which labels have one sample, whose spread (and whatever else one sample cannot tell) is that of all."""
    if supervision.codes is None or names is None or supervision.owner is None:
        return
    counts = np.bincount(supervision.codes[supervision.codes >= 0], minlength=int(supervision.owner.max()) + 1)
    single = [names[k] for k in range(len(names)) if counts[supervision.owner[k]] == 1]
    if single:
        warnings.warn(
            f"labels with one sample: {', '.join(single)}; what one sample cannot tell of their components (such as "
            "a covariance) is taken from all samples",
            UserWarning,
            stacklevel=3,
        )
