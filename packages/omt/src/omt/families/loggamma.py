"""Logarithms of factorials and rising factorials of counts, from tables: most counts of a cell are one or two."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from omt.families.base import FloatArray

# Counts below these are looked up.
_FACTORIALS = 1024
_RISING = 16
# Counts that are looked up at a time: their indices stay in the cache.
_PIECE = 16384
# Above this argument Stirling's series, cut after two terms, is exact to rounding; the difference of two log-gammas of
# large arguments is not.
_LARGE = 1e3


@cache
def _factorial_table() -> FloatArray:
    table: FloatArray = special.gammaln(np.arange(_FACTORIALS) + 1.0)
    table.setflags(write=False)
    return table


def log_factorials(x: NDArray[Any]) -> FloatArray:
    """``log x!`` of counts of any shape.

    Examples
    --------
    >>> import numpy as np
    >>> log_factorials(np.array([0.0, 1.0, 4.0])).round(4).tolist()
    [0.0, 0.0, 3.1781]
    """
    flat, table = np.ravel(x), _factorial_table()
    values = np.empty(flat.size)
    for start in range(0, flat.size, _PIECE):
        part = flat[start : start + _PIECE]
        index = part.astype(np.intp)
        # "clip" skips the check of every index; what lies beyond the table is computed below.
        table.take(index, out=values[start : start + _PIECE], mode="clip")
        if index.max() >= _FACTORIALS:
            high = np.flatnonzero(index >= _FACTORIALS)
            values[start + high] = special.gammaln(part[high] + 1.0)
    return values.reshape(x.shape)


def rising_table(dispersion: FloatArray) -> FloatArray:
    """``Σ_{j<x} log(1 + φ_g j) − log x!`` for x = 0 … 15 and each feature's dispersion ``φ [d]``, ``[d, 16]``."""
    steps = np.log1p(dispersion[:, None] * np.arange(_RISING - 1))
    rising = np.concatenate([np.zeros((dispersion.size, 1)), np.cumsum(steps, axis=1)], axis=1)
    return np.asarray(rising - _factorial_table()[:_RISING])


def log_rising(x: NDArray[Any], columns: NDArray[Any], dispersion: FloatArray, table: FloatArray) -> FloatArray:
    """``log Γ(x + 1/φ_g) − log Γ(1/φ_g) + x log φ_g − log x! = Σ_{j<x} log(1 + φ_g j) − log x!`` of counts.

    Parameters
    ----------
    x, columns
        Counts ``[m]`` and the feature ``g`` of each.
    dispersion, table
        ``φ [d]`` and its :func:`rising_table`.

    Examples
    --------
    >>> import numpy as np
    >>> phi = np.array([0.5])
    >>> value = log_rising(np.array([3.0, 40.0]), np.array([0, 0]), phi, rising_table(phi))
    >>> rising = [np.log(1.5 * 2.0), np.log1p(0.5 * np.arange(40)).sum()]
    >>> bool(np.allclose(value, rising - log_factorials(np.array([3.0, 40.0]))))
    True
    """
    values = np.zeros(x.shape)
    # Of nought and one both terms are zero, and most counts of a cell are one.
    some = np.flatnonzero(x > 1)
    counts, features = x[some], columns[some].astype(np.intp)
    index = np.minimum(counts, _RISING - 1).astype(np.intp)
    index += features * _RISING
    part = table.ravel().take(index, mode="clip")
    high = np.flatnonzero(counts >= _RISING)
    if high.size:
        count = counts[high].astype(np.float64)
        part[high] = rising(count, dispersion[features[high]]) - log_factorials(count)
    values[some] = part
    return values


def rising(x: FloatArray, phi: FloatArray) -> FloatArray:
    """``log Γ(x + 1/φ) − log Γ(1/φ) + x log φ`` of counts ``x [m]`` and dispersions ``φ [m]``, by no table.

    Examples
    --------
    >>> import numpy as np
    >>> float(np.exp(rising(np.array([3.0]), np.array([0.5])))[0].round(12))  # 1 (1 + φ) (1 + 2φ)
    3.0
    """
    a = 1.0 / phi
    plain = special.gammaln(a + x) - special.gammaln(a) + x * np.log(phi)
    stirling = (a + x - 0.5) * np.log1p(phi * x) - x + _correction(a + x) - _correction(a)
    return np.where(a > _LARGE, stirling, plain)


def _correction(z: FloatArray) -> FloatArray:
    """What ``log Γ(z)`` has beyond ``(z − ½) log z − z + ½ log 2π``."""
    return (1.0 / 12.0 - 1.0 / (360.0 * z**2)) / z
