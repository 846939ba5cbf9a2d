"""What the experts should reach, case by case; `bench_experts.py` reports against it, `guard.py` fails far below it.

The float32 ratios marked `needs_onednn` come from CPUs on which float32 products by oneDNN are about twice as fast as
those by MKL, which PyTorch and therefore the peers call. On the others (Intel) both sides run the same MKL product; the
ratios are reported there as well, but only the share of the limit can be asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from shared_core.bench import Case, Measurement
from shared_core.kernels.cpu_features import cpu_features


@dataclass(frozen=True)
class Target:
    """A ratio (`metric` other than "limit": how many times faster than that peer) that a kind of case should reach."""

    kind: str
    metric: str
    at_least: float
    applies: Callable[[Case], bool]
    needs_onednn: bool = False  # the ratio comes from CPUs where oneDNN is the faster float32 product

    @property
    def binding(self) -> bool:
        """Whether the target is meant for this machine."""
        return cpu_features().onednn_fp32 or not self.needs_onednn

    def measured(self, m: Measurement) -> float | None:
        """Return the value of a measurement, or None when the peer did not take part."""
        if self.metric == "limit":
            return m.limit_share
        if self.metric == "best":
            return m.best_ratio
        peer = f"transformers {self.metric}"
        return m.ratio(peer) if peer in m.timings else None


def _prefill(dtype: str, low: float = 0.0, min_k: int = 1) -> Callable[[Case], bool]:
    return lambda c: (
        not (c.is_decode or c.backward) and c.dtype == dtype and c.rows_per_expert >= low and c.shape.top_k >= min_k
    )


def _bf16_prefill_rest(c: Case) -> bool:
    return _prefill("bf16")(c) and not _prefill("bf16", 128, 4)(c)


def _training(dtype: str, low: float, high: float = float("inf")) -> Callable[[Case], bool]:
    return lambda c: c.backward and c.dtype == dtype and low <= c.rows_per_expert < high


def _decode(low: int, high: int) -> Callable[[Case], bool]:
    return lambda c: c.is_decode and low <= c.rows <= high


TARGETS = (
    Target("fp32 prefill, ≥ 32 rows per expert", "best", 1.6, _prefill("fp32", 32), True),
    Target("fp32 prefill, ≥ 32 rows per expert", "limit", 0.45, _prefill("fp32", 32)),
    Target("bf16 prefill, ≥ 128 rows per expert, k ≥ 4", "grouped_mm", 1.15, _prefill("bf16", 128, 4)),
    Target("bf16 prefill, ≥ 128 rows per expert, k ≥ 4", "best", 1.05, _prefill("bf16", 128, 4)),
    Target("bf16 prefill, ≥ 128 rows per expert, k ≥ 4", "limit", 0.55, _prefill("bf16", 128, 4)),
    Target("bf16 prefill, fewer rows or k = 2", "best", 0.97, _bf16_prefill_rest),
    Target(
        "fp32 forward+backward, ≥ 128 rows per expert", "grouped_mm", 1.4, _training("fp32", 128), needs_onednn=True
    ),
    Target(
        "fp32 forward+backward, 64-127 rows per expert",
        "grouped_mm",
        1.25,
        _training("fp32", 64, 128),
        needs_onednn=True,
    ),
    Target(
        "fp32 forward+backward, 32-63 rows per expert", "grouped_mm", 1.15, _training("fp32", 32, 64), needs_onednn=True
    ),
    Target("bf16 forward+backward, ≥ 64 rows per expert", "grouped_mm", 1.05, _training("bf16", 64)),
    Target("bf16 forward+backward, 32-63 rows per expert", "grouped_mm", 0.95, _training("bf16", 32, 64)),
    Target("decode, 1 row", "best", 1.0, _decode(1, 1)),
    Target("decode, 1 row", "batched_mm", 3.0, _decode(1, 1)),
    Target("decode, 1 row", "limit", 0.65, _decode(1, 1)),
    Target("decode, 4-8 rows", "best", 0.95, _decode(4, 8)),
    Target("decode, 4-8 rows", "batched_mm", 6.0, _decode(4, 8)),
    Target("decode, 4-8 rows", "limit", 0.7, _decode(4, 8)),
    Target("every case", "best", 0.95, lambda _: True),
)


@dataclass(frozen=True)
class Outcome:
    """A target and every case it applies to, with what was measured, worst first."""

    target: Target
    measured: tuple[tuple[float, Case], ...]

    @property
    def missed(self) -> tuple[tuple[float, Case], ...]:
        """The cases below the target."""
        return tuple((value, case) for value, case in self.measured if value < self.target.at_least)


def outcomes(measurements: Iterable[Measurement]) -> list[Outcome]:
    """Sort measurements under the targets; targets that no case falls under are left out."""
    found = list(measurements)
    result = []
    for target in TARGETS:
        values = [(target.measured(m), m.case) for m in found if target.applies(m.case)]
        measured = sorted(((v, case) for v, case in values if v is not None), key=lambda pair: pair[0])
        if measured:
            result.append(Outcome(target, tuple(measured)))
    return result
