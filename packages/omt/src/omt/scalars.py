"""Numbers that a user hands over: refused in one sentence where they are none, or out of range."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

__all__ = ["finite_at_least_zero", "is_number", "positive", "whole"]


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
    """A number > 0.

    Raises
    ------
    ValueError
        If it is anything else.
    """
    if not is_number(value) or not value > 0.0:
        raise ValueError(f"{name} is {value!r}; it must be > 0")
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
