"""Numbers that a user hands over: refused in one sentence where they are none, or out of range."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

__all__ = ["checked_seed", "finite_at_least_zero", "generator", "is_number", "positive", "whole"]

# Seeds are stored with the results, and h5ad holds integers of 64 bits.
_SEEDS = 2**63


def is_number(value: Any) -> bool:
    """Whether ``value`` is one real number, not a truth value, text or an array."""
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def finite_at_least_zero(value: Any, name: str, remark: str = "") -> float:
    """A finite number ≥ 0; `remark` ends the sentence.

    Raises
    ------
    ValueError
        If it is anything else.

    Examples
    --------
    >>> finite_at_least_zero("a", "reg")
    Traceback (most recent call last):
        ...
    ValueError: reg is 'a'; it must be a finite number ≥ 0
    """
    if not is_number(value) or not (math.isfinite(value) and value >= 0.0):
        raise ValueError(f"{name} is {value!r}; it must be a finite number ≥ 0{remark}")
    return float(value)


def positive(value: Any, name: str) -> float:
    """A finite number > 0.

    Raises
    ------
    ValueError
        If it is anything else.
    """
    if not is_number(value) or not (math.isfinite(value) and value > 0.0):
        raise ValueError(f"{name} is {value!r}; it must be a finite number > 0")
    return float(value)


def whole(value: Any, name: str, least: int = 1) -> int:
    """A whole number of at least ``least``.

    Raises
    ------
    ValueError
        If it is anything else.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {least}")
    return int(value)


def checked_seed(value: Any, name: str = "random_state") -> int:
    """A seed: an integer ≥ 0 that a file can hold.

    Raises
    ------
    ValueError
        If it is anything else.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
        raise ValueError(f"{name} is {value!r}; it must be an integer ≥ 0")
    if value >= _SEEDS:
        raise ValueError(f"{name} is {value}; it must be below 2⁶³")
    return int(value)


def generator(value: Any, name: str = "rng") -> np.random.Generator:
    """A generator of random numbers as it is, or a new one from a seed; ``None`` gives one that differs every time.

    Raises
    ------
    ValueError
        If it is anything else.

    Examples
    --------
    >>> generator(-1)
    Traceback (most recent call last):
        ...
    ValueError: rng is -1; it must be an integer ≥ 0 or a numpy.random.Generator
    """
    if isinstance(value, np.random.Generator):
        return value
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0):
        raise ValueError(f"{name} is {value!r}; it must be an integer ≥ 0 or a numpy.random.Generator")
    return np.random.default_rng(value)
