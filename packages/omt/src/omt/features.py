"""Names of features: what keeps two data sets from being compared gene by wrong gene."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def require_same(first: tuple[str, ...], second: tuple[str, ...], here: str, there: str) -> None:
    """Raise ``ValueError`` naming the first feature whose name differs between two sides."""
    if first == second:
        return
    if len(first) != len(second):
        raise ValueError(f"{here} has {len(first)} features and {there} {len(second)}; they must be the same")
    j = next(j for j, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
    raise ValueError(
        f"feature {j} is {first[j]!r} in {here} and {second[j]!r} in {there}; fit both on the same features in the "
        "same order"
    )


def column_names(X: Any) -> tuple[str, ...] | None:
    """Names of the columns of a table, or ``None`` if ``X`` has none."""
    columns = getattr(X, "columns", None)
    return None if columns is None or not hasattr(X, "iloc") else tuple(str(name) for name in columns)


def checked_feature_names(names: Iterable[str] | None, d: int) -> tuple[str, ...] | None:
    """Names of ``d`` features as text.

    Raises
    ------
    ValueError
        If their number is not ``d`` or a name occurs twice.
    """
    if names is None:
        return None
    if isinstance(names, str):
        raise ValueError(f"feature_names is {names!r}; it must be a list of {d} names")
    given = tuple(str(name) for name in names)
    if len(given) != d:
        raise ValueError(f"feature_names has {len(given)} entries; there are {d} features")
    if len(set(given)) != d:
        seen: set[str] = set()
        twice = next(name for name in given if name in seen or seen.add(name))  # type: ignore[func-returns-value]  # add gives None
        raise ValueError(f"feature_names has {twice!r} twice; every feature needs its own name")
    return given
