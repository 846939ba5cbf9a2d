"""What the method claims, as rows of a table: each claim is measured over seeds and judged against its target.

Three kinds of data: inside the dependencies, generated, and files that a user may have (`with_files`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from omt import experiments

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["WITHOUT_FILES", "Job", "Row"]


@dataclass(frozen=True)
class Row:
    """One claim: what was measured over all seeds, and what it must reach.

    Attributes
    ----------
    job, measure
        Data and quantity.
    values
        One for each seed.
    target
        `"≥ 0.94"` or `"≤ 2"`.
    every
        Whether each seed must reach the target (then `value` is the worst of them), or their mean.
    """

    job: str
    measure: str
    values: tuple[float, ...]
    target: str
    every: bool = False

    @property
    def value(self) -> float:
        """The number that is judged."""
        if not self.every:
            return float(np.mean(self.values))
        return min(self.values) if self.target.startswith("≥") else max(self.values)

    @property
    def ok(self) -> bool:
        """Whether the target is reached."""
        sign, limit = self.target.split()
        return self.value >= float(limit) if sign == "≥" else self.value <= float(limit)


Job: TypeAlias = "Callable[[Sequence[int]], list[Row]]"


def halves(seeds: Sequence[int]) -> list[Row]:
    balanced = [experiments.halves(seed=s)[0] for s in seeds]
    unbalanced = [experiments.halves(seed=s, tau=0.9)[0] for s in seeds]
    job = "blood cells, two halves"
    return [
        Row(job, "mass on the same cell type / bound", tuple(c.share / c.bound for c in balanced), "≥ 0.94"),
        Row(job, "mass on the same cell type, tau=0.9", tuple(c.share for c in unbalanced), "≥ 0.97"),
    ]


def digits(seeds: Sequence[int]) -> list[Row]:
    balanced = [experiments.shifted_digits(seed=s) for s in seeds]
    unbalanced = [experiments.shifted_digits(seed=s, tau=0.9) for s in seeds]
    job = "digits, shifted and dimmed"
    return [
        Row(job, "mass on the same digit / bound", tuple(c.share / c.bound for c in balanced), "≥ 0.96"),
        Row(job, "mass on the same digit, tau=0.9", tuple(c.share for c in unbalanced), "≥ 0.99"),
    ]


def known_map(seeds: Sequence[int]) -> list[Row]:
    small = [experiments.known_map(2000, seed=s) for s in seeds]
    large = [experiments.known_map(20_000, seed=s) for s in seeds]
    job = "known maps, K=10, d=20"
    return [
        Row(job, "L2-UVP of the map, n=2000 (%)", tuple(r.uvp for r in small), "≤ 2", every=True),
        Row(job, "L2-UVP of the map, n=20000 (%)", tuple(r.uvp for r in large), "≤ 0.25", every=True),
        Row(job, "mass on true pairs - bound, n=2000", tuple(r.mass - r.bound for r in small), "≥ -0.02", every=True),
    ]


def branching(seeds: Sequence[int]) -> list[Row]:
    plain = [experiments.branching(seed=s) for s in seeds]
    grown = [experiments.branching(seed=s, growth_known=True) for s in seeds]
    job = "branching, five times"
    return [
        Row(job, "mass on possible descents / bound", tuple(r.share / r.bound for r in plain), "≥ 0.98"),
        Row(job, "error of the fates, growth unknown", tuple(r.fate_error for r in plain), "≤ 0.2"),
        Row(job, "error of the fates, growth given", tuple(r.fate_error for r in grown), "≤ 0.08"),
    ]


WITHOUT_FILES: tuple[tuple[str, Job], ...] = (
    ("blood cells (pbmc68k), two halves", halves),
    ("handwritten digits, shifted and dimmed", digits),
    ("generated components with known maps", known_map),
    ("generated branching process", branching),
)
"""Jobs that need no file, with what to call them."""
