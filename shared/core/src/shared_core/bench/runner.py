"""Run cases: check that everybody computes the same, then take time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from shared_core.bench.cases import Batch, Case, Weights, make_batches, make_weights
from shared_core.bench.implementations import PEERS, Implementation, implementations, missing_peers_note, why_left_out
from shared_core.bench.limits import GEMM_FLOPS, gemm_candidates, read_weights
from shared_core.bench.timing import Prepare, Timing, interleave

# Relative error (Frobenius norm) up to which two implementations count as computing the same.
_TOLERANCE = {"fp32": 1e-4, "bf16": 4e-2}


@dataclass(frozen=True)
class Measurement:
    """Result of one case.

    Attributes
    ----------
    case : Case
    timings : dict of str to Timing
        Of each implementation, one step. Names with ``transformers`` in front are peers, the others backends of ours.
    limit : float
        Seconds in which the machine could do it at best: by the rate of a large matrix product, or for decode by
        reading the weights.
    limit_by : str
        What set the limit.
    threads : int
    left_out : dict of str to str
        Peers that did not take part, with the reason.
    """

    case: Case
    timings: dict[str, Timing]
    limit: float
    limit_by: str
    threads: int
    left_out: dict[str, str]

    @property
    def clock(self) -> str:
        """``"cpu"`` (time of the thread; others on the machine do not disturb it) with one thread, else ``"wall"``."""
        return "cpu" if self.threads == 1 else "wall"

    def seconds(self, name: str) -> float:
        """Time of one implementation by the clock that counts."""
        timing = self.timings[name]
        return timing.cpu if self.clock == "cpu" else timing.wall

    @property
    def ours(self) -> str:
        """Name of the backend the ratios are about, the first that was asked for."""
        return next(iter(self.timings))

    @property
    def peers(self) -> list[str]:
        """Names of transformers' implementations that took part."""
        return [name for name in self.timings if name.startswith("transformers ")]

    def ratio(self, peer: str) -> float:
        """How many times faster ours is: the peer's time over ours."""
        return self.seconds(peer) / self.seconds(self.ours)

    @property
    def best_ratio(self) -> float | None:
        """Ratio to the fastest peer; None when there was none."""
        return min((self.ratio(peer) for peer in self.peers), default=None)

    @property
    def limit_share(self) -> float:
        """Share of the machine's limit that ours reaches."""
        return self.limit / self.seconds(self.ours)


def run_bench(
    cases: Iterable[Case],
    *,
    backends: Sequence[str] = ("auto",),
    threads: int = 1,
    seconds: float = 2.0,
    seed: int = 0,
    progress: Callable[[Case], None] | None = None,
) -> Iterator[Measurement]:
    """Measure cases one after the other, all implementations of a case in turns.

    Parameters
    ----------
    cases : iterable of Case
        Cases that share shape and dtype should be neighbours: their weights are drawn once.
    backends : sequence of str, default ("auto",)
        Backends of this package; ratios are about the first.
    threads : int, default 1
        For torch; restored afterwards.
    seconds : float, default 2
        Time to spend on a case, about; at least three turns are taken.
    seed : int, default 0
        Of weights, inputs and routings.
    progress : callable, optional
        Told each case before it is run.

    Yields
    ------
    Measurement

    Raises
    ------
    ValueError
        For an unknown backend or fewer than one thread.
    RuntimeError
        When two implementations disagree: a benchmark must not time wrong results.
    """
    if threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    if not backends:
        raise ValueError("backends is empty: name at least one, for example 'auto'")
    held: tuple[object, Weights] | None = None
    with _threads(threads):
        for case in cases:
            if progress is not None:
                progress(case)
            key = (case.shape, case.dtype)
            generator = torch.Generator().manual_seed(seed)
            if held is None or held[0] != key:
                held = None  # free the old weights before new ones are drawn
                held = (key, make_weights(case.shape, case.torch_dtype, generator))
            yield _measure(case, held[1], backends, threads, seconds, generator)


def _measure(
    case: Case, weights: Weights, backends: Sequence[str], threads: int, seconds: float, generator: torch.Generator
) -> Measurement:
    batches = make_batches(case, generator)
    weights.up.requires_grad_(case.backward)
    weights.down.requires_grad_(case.backward)
    found = implementations(case, weights, backends)
    _check_agreement(case, weights, batches, found)

    candidates = {name: _timed(case, weights, batches, implementation) for name, implementation in found.items()}
    limits = {"reading the weights": read_weights(case, weights, batches)} if case.is_decode else {}
    if not limits:
        limits = gemm_candidates(case.torch_dtype)
    timings = interleave(candidates | {f"limit {name}": prepare for name, prepare in limits.items()}, seconds=seconds)
    bounds = {name: timings.pop(f"limit {name}") for name in limits}
    limit_by, bound = min(bounds.items(), key=lambda item: item[1].cpu if threads == 1 else item[1].wall)
    bound_seconds = bound.cpu if threads == 1 else bound.wall
    return Measurement(
        case,
        {name: Timing(t.cpu / len(batches), t.wall / len(batches), t.turns) for name, t in timings.items()},
        bound_seconds / len(batches) if case.is_decode else bound_seconds * case.flops / GEMM_FLOPS,
        limit_by,
        threads,
        {} if missing_peers_note() else {name: why for name in PEERS if (why := why_left_out(case, name))},
    )


def _timed(case: Case, weights: Weights, batches: Sequence[Batch], implementation: Implementation) -> Prepare:
    def prepare() -> Callable[[], object]:
        _clear_grads(weights, batches)
        bound = [implementation(batch) for batch in batches]

        def forward() -> None:
            with torch.no_grad():
                for call in bound:
                    call()

        def forward_backward() -> None:
            for call, batch in zip(bound, batches, strict=True):
                torch.autograd.backward(call(), batch.grad)

        return forward_backward if case.backward else forward

    return prepare


def _check_agreement(case: Case, weights: Weights, batches: Sequence[Batch], found: dict[str, Implementation]) -> None:
    """Compare outputs and gradients on the first batch with those of transformers (or of the readable backend)."""
    names = list(found)
    oracle = next((name for name in ("transformers grouped_mm",) if name in found), names[0])
    expected = _results(case, weights, batches[0], found[oracle])
    for name in names:
        if name == oracle:
            continue
        for what, value in _results(case, weights, batches[0], found[name]).items():
            error = float((value - expected[what]).norm() / expected[what].norm().clamp_min(1e-30))
            if not error <= _TOLERANCE[case.dtype]:
                raise RuntimeError(
                    f"{name} and {oracle} disagree on the {what} of {case.shape.name}, {case.what}: "
                    f"relative error {error:.1e}, at most {_TOLERANCE[case.dtype]:.0e} is expected"
                )
    _clear_grads(weights, batches)


def _results(case: Case, weights: Weights, batch: Batch, implementation: Implementation) -> dict[str, Tensor]:
    with torch.set_grad_enabled(case.backward):
        y = implementation(batch)()
    results = {"output": y.detach().float()}
    if case.backward:
        _clear_grads(weights, [batch])
        torch.autograd.backward(y, batch.grad)
        leaves = {"x": batch.x, "weights": batch.weights, "up": weights.up, "down": weights.down}
        results |= {f"gradient of {name}": _taken(leaf) for name, leaf in leaves.items()}
    return results


def _taken(leaf: Tensor) -> Tensor:
    grad, leaf.grad = leaf.grad, None
    if grad is None:
        raise RuntimeError("an implementation computed no gradient")
    return grad


def _clear_grads(weights: Weights, batches: Sequence[Batch]) -> None:
    for leaf in (weights.up, weights.down, *(batch.x for batch in batches), *(batch.weights for batch in batches)):
        leaf.grad = None


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
