"""Checks of what a user gives to a :class:`omt.plans.sample.SamplePlan`, each with a sentence that says what to do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy import sparse

from omt.families.base import FloatArray

_TOLERANCE = 1e-6


def checked_responsibilities(value: ArrayLike, name: str) -> FloatArray:
    """Responsibilities [N, K] with rows that sum to one, to rounding."""
    array = np.asarray(value, dtype=np.float64)
    if array.ndim != 2 or 0 in array.shape:
        raise ValueError(
            f"{name} has shape {array.shape}; responsibilities are [samples, components], with at least one of each"
        )
    sums = array.sum(axis=1)
    wrong = ~(np.abs(sums - 1.0) <= _TOLERANCE) | (array.min(axis=1) < 0.0)
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise ValueError(
            f"row {row} of {name} sums to {sums[row]:.6g}; responsibilities are ≥ 0 and sum to 1 in each row"
        )
    if np.abs(sums - 1.0).max() > 1e-14:
        array = array / sums[:, None]
    return array


def checked_weights(value: ArrayLike | None, n: int, name: str) -> FloatArray:
    """Sample weights [n] ≥ 0; equal ones that sum to one if none are given."""
    if value is None:
        return np.full(n, 1.0 / n)
    weights = np.array(value, dtype=np.float64)
    if weights.shape != (n,):
        raise ValueError(f"{name} has shape {weights.shape}; it must hold one weight for each of the {n} samples")
    if not (np.isfinite(weights).all() and (weights >= 0.0).all() and weights.sum() > 0.0):
        raise ValueError(f"{name} must hold finite weights ≥ 0 with a positive sum")
    return weights


def checked_vectors(v: ArrayLike, n: int, what: str) -> FloatArray:
    """A vector [n] or a set of vectors [n, c]."""
    values = np.asarray(v, dtype=np.float64)
    if values.ndim not in {1, 2} or values.shape[0] != n:
        raise ValueError(f"v has shape {values.shape}; there are {n} {what}, so it must be [{n}] or [{n}, c]")
    return values


def one_hot(labels: Any, n: int, name: str) -> tuple[sparse.csr_array, NDArray[Any]]:
    """Indicator matrix [n, groups] of labels, and the names of the groups."""
    values = labels if isinstance(labels, (pd.Series, pd.Categorical)) else np.asarray(labels)
    categorical = pd.Categorical(values)
    if len(categorical) != n:
        raise ValueError(f"{name} has {len(categorical)} entries; there are {n} samples")
    codes = np.asarray(categorical.codes)
    known = np.flatnonzero(codes >= 0)
    names = np.asarray(categorical.categories)
    indicator = sparse.csr_array((np.ones(known.size), (known, codes[known])), shape=(n, len(names)))
    return indicator, names
