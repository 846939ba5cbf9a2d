"""The Triton kernels on the CUDA device at hand: first whether they are right, then how fast they are.

    python shared/core/benchmarks/bench_device.py [--json rows.json]          # about five minutes, most of it tuning
    python shared/core/benchmarks/bench_device.py --only parity
    python shared/core/benchmarks/bench_device.py --shape olmoe --rows 1,2048 --only times

Parity: the fused gate against PyTorch's operators, the experts against ``reference`` in a wider dtype, outputs and all
gradients, also of rows without an expert; and that a step never waits for the device. Times: CUDA events around a step,
implementations in turns, the second-level cache cleared before each, the median counts; bfloat16. A ratio is the peer's
time over ours: above 1, ours is faster. The limit of a step is what this card, measured in the same run, needs to read
the chosen experts' weights or to multiply as fast as one large matrix product, whichever takes longer.

Ends with 1 if anything is wrong, and with 2, in one line, where there is no device that could run the kernels.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from shared_core import Router, doctor
from shared_core.bench import SHAPES, Case, Shape, missing_peers_note, parse_shape, write_rows
from shared_core.bench.cases import Batch, Weights, draw_routing
from shared_core.bench.implementations import Implementation, ours, peer
from shared_core.bench.parity import Parity, experts_parity, gate_parity
from shared_core.kernels import triton_obstacle, use_backend

DEVICE = "cuda"
GEMM_SIZE = 8192
COPIED_BYTES = 2**31
L2_BYTES = 2**28  # more than any card caches
MAX_COPIED_WEIGHTS = 2e10  # batched_mm copies the weights of every assignment
WARM_UPS = 3


# --- what the card could do at best


@dataclass(frozen=True)
class Limits:
    """Measured bytes and floating-point operations a second."""

    bandwidth: float
    flops: float

    def seconds(self, case: Case, touched: int) -> tuple[float, str]:
        """Least time of a step that reads the weights of ``touched`` experts, and what sets it."""
        sizes = case.shape
        expert_bytes = 3 * sizes.hidden_size * sizes.intermediate_size * case.torch_dtype.itemsize
        # Gradients read the weights once more and write them once.
        reading = touched * expert_bytes * (3 if case.backward else 1) / self.bandwidth
        multiplying = case.flops / self.flops
        return (reading, "bandwidth") if reading > multiplying else (multiplying, "matrix products")


def measure_limits(turns: int) -> Limits:
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    a, b = (torch.randn(GEMM_SIZE, GEMM_SIZE, device=DEVICE).bfloat16() for _ in range(2))
    times = medians({"copy": lambda: target.copy_(source), "product": lambda: torch.mm(a, b)}, turns)
    return Limits(2 * COPIED_BYTES / times["copy"], 2 * GEMM_SIZE**3 / times["product"])


# --- taking time


def medians(calls: dict[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """Median seconds of each call by CUDA events, in turns."""
    cache = torch.empty(L2_BYTES, dtype=torch.uint8, device=DEVICE)
    for call in calls.values():
        for _ in range(WARM_UPS):  # compiles and tunes
            call()
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            cache.zero_()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            stop.record()
            events[name].append((start, stop))
    torch.cuda.synchronize()
    return {
        name: statistics.median(start.elapsed_time(stop) for start, stop in pairs) / 1e3
        for name, pairs in events.items()
    }


def peak_bytes(call: Callable[[], object]) -> int:
    """Memory that a step allocates on top of what is there."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


# --- experts


def draw_weights(shape: Shape, generator: torch.Generator) -> Weights:
    sizes = shape.num_experts, shape.hidden_size, shape.intermediate_size
    up = torch.empty(sizes[0], 2 * sizes[2], sizes[1], dtype=torch.bfloat16, device=DEVICE)
    down = torch.empty(sizes, dtype=torch.bfloat16, device=DEVICE)
    up.normal_(0.0, sizes[1] ** -0.5, generator=generator)
    down.normal_(0.0, sizes[2] ** -0.5, generator=generator)
    return Weights(torch.nn.Parameter(up), torch.nn.Parameter(down))


def draw_batch(case: Case) -> Batch:
    generator = torch.Generator().manual_seed(0)
    indices, weights = draw_routing(case.rows, case.shape, case.routing, generator)
    x, grad = (torch.randn(case.rows, case.shape.hidden_size, generator=generator) for _ in range(2))
    return Batch(
        x.to(DEVICE, torch.bfloat16).requires_grad_(case.backward),
        indices.to(DEVICE),
        weights.to(DEVICE).requires_grad_(case.backward),
        grad.to(DEVICE, torch.bfloat16),
    )


def contestants(case: Case, weights: Weights) -> dict[str, Implementation]:
    found = {name: ours(weights, name) for name in ("triton", "grouped_mm")}
    if missing_peers_note() is None:
        found |= {f"transformers {name}": peer(weights, name) for name in ("grouped_mm", "eager")}
        expert_bytes = 6 * case.shape.hidden_size * case.shape.intermediate_size
        if not case.backward and case.rows * case.shape.top_k * expert_bytes <= MAX_COPIED_WEIGHTS:
            found["transformers batched_mm"] = peer(weights, "batched_mm")
    return found


def step(case: Case, weights: Weights, batch: Batch, implementation: Implementation) -> Callable[[], object]:
    leaves = (weights.up, weights.down, batch.x, batch.weights)

    def forward() -> object:
        with torch.no_grad():
            return implementation(batch)()

    def forward_backward() -> object:
        for leaf in leaves:
            leaf.grad = None
        y = implementation(batch)()
        torch.autograd.backward(y, batch.grad)
        return y

    return forward_backward if case.backward else forward


def measure_experts(shapes: list[Shape], rows: list[int], limits: Limits, turns: int) -> Iterator[dict[str, Any]]:
    for shape in shapes:
        weights = draw_weights(shape, torch.Generator(DEVICE).manual_seed(0))
        for case in [Case(shape, r) for r in rows] + [Case(shape, r, backward=True) for r in rows if r >= 512]:
            print(f"{shape.name}: {case.what}", file=sys.stderr, flush=True)
            batch = draw_batch(case)
            steps = {name: step(case, weights, batch, each) for name, each in contestants(case, weights).items()}
            seconds = medians(steps, turns)
            limit, limit_by = limits.seconds(case, int(batch.indices.unique().numel()))
            yield {
                "what": case.what,
                "shape": shape.name,
                "sizes": shape.sizes,
                "rows": case.rows,
                "seconds": seconds,
                "limit_share": limit / seconds["triton"],
                "limit_by": limit_by,
                "peak_bytes": {name: peak_bytes(steps[name]) for name in ("triton", "grouped_mm")},
            }


# --- the gate


def measure_gate(rows: list[int], turns: int) -> Iterator[dict[str, Any]]:
    shape = SHAPES["qwen3-30b-a3b"]
    router = Router.linear(shape.hidden_size, shape.num_experts, shape.top_k, renormalize=True, device=DEVICE)
    theirs: Any = None
    if missing_peers_note() is None:
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeTopKRouter

        config = Qwen3MoeConfig(
            hidden_size=shape.hidden_size,
            num_experts=shape.num_experts,
            num_experts_per_tok=shape.top_k,
            norm_topk_prob=True,
        )
        theirs = Qwen3MoeTopKRouter(config).to(DEVICE)
        theirs.load_state_dict({"weight": router.gate.weight.detach()})

    def with_operators(x: torch.Tensor) -> object:
        with use_backend("reference"):
            return router(x)

    for count in rows:
        x = torch.randn(count, shape.hidden_size, device=DEVICE)
        calls: dict[str, Callable[[torch.Tensor], object]] = {"triton": router, "PyTorch's operators": with_operators}
        if theirs is not None:
            calls["transformers router"] = theirs
        with torch.no_grad():
            seconds = medians({name: lambda call=call, x=x: call(x) for name, call in calls.items()}, turns)
        yield {
            "what": f"router fp32, {count} rows",
            "shape": shape.name,
            "sizes": shape.sizes,
            "rows": count,
            "seconds": seconds,
        }


# --- right or wrong


def parity(shapes: list[Shape]) -> Iterator[Parity]:
    ragged = Shape("ragged", num_experts=7, top_k=3, hidden_size=200, intermediate_size=136)
    yield from gate_parity(DEVICE)
    yield from gate_parity(DEVICE, rows=333, num_experts=60, top_k=4)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        yield from experts_parity(DEVICE, dtype, ragged, rows=257)
    for shape in shapes:
        for rows in (4, 512):
            for each in experts_parity(DEVICE, torch.bfloat16, shape, rows=rows, variants=("SwiGLU",)):
                yield Parity(f"{shape.name}, {rows} rows, {each.what}", each.error, each.tolerance)
    yield Parity("steps that wait for the device", waits(shapes[0]), 0.0)


def waits(shape: Shape) -> float:
    """1 if a step forward and backward reads anything back from the device, else 0."""
    case = Case(shape, 512, backward=True)
    weights, batch = draw_weights(shape, torch.Generator(DEVICE).manual_seed(0)), draw_batch(case)
    router = Router.linear(shape.hidden_size, shape.num_experts, shape.top_k, device=DEVICE)
    run = step(case, weights, batch, ours(weights, "triton"))

    def everything() -> None:
        router(batch.x.detach().float()).weights.sum().backward()
        run()

    everything()  # compiling and tuning do wait
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        print(f"a step waits for the device: {error}", file=sys.stderr)
        return 1.0
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return 0.0


# --- what is printed


def parity_table(found: list[Parity]) -> Table:
    table = Table("comparison", "error", "at most", "", title="parity")
    for each in found:
        table.add_row(each.what, f"{each.error:.1e}", f"{each.tolerance:.0e}", "" if each.holds else "WRONG")
    return table


def times_table(rows: list[dict[str, Any]], title: str) -> Table:
    peers = [name for name in dict.fromkeys(n for row in rows for n in row["seconds"]) if name != "triton"]
    measured_limit = "limit_share" in rows[0]
    table = Table(title=title)
    for name in ("shape", "step", "triton ms", *(("of limit", "limit by", "peak MiB") if measured_limit else ())):
        table.add_column(name)
    for name in peers:
        table.add_column(f"vs {name}", justify="right")
    for row in rows:
        times = row["seconds"]
        cells = [row["shape"], row["what"], f"{times['triton'] * 1e3:.3f}"]
        if measured_limit:
            cells += [f"{row['limit_share']:.2f}", row["limit_by"], f"{row['peak_bytes']['triton'] / 2**20:.0f}"]
        cells += [f"{times[name] / times['triton']:.2f}×" if name in times else "–" for name in peers]
        table.add_row(*cells)
    return table


def json_rows(rows: list[dict[str, Any]], limits: Limits, card: str) -> Iterator[dict[str, Any]]:
    machine = doctor.machine() | {"device": card, "triton": doctor.report()["versions"]["triton"]}
    for row in rows:
        times = row["seconds"]
        for name in times:
            if name != "triton":
                yield {key: value for key, value in row.items() if key != "seconds"} | {
                    "ours": "triton",
                    "peer": name,
                    "ratio": times[name] / times["triton"],
                    "ours_seconds": times["triton"],
                    "peer_seconds": times[name],
                    "bandwidth": limits.bandwidth,
                    "flops": limits.flops,
                    "machine": machine,
                }


def obstacle() -> str | None:
    if not torch.cuda.is_available():
        return "needs a CUDA device, and there is none here"
    return triton_obstacle(DEVICE, torch.cuda.get_device_capability(), torch.bfloat16)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", help=f"one of {', '.join(SHAPES)}, or E,k,H,I; may be repeated")
    parser.add_argument("--rows", default="1,4,8,512,2048,8192")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--only", choices=("parity", "times"))
    parser.add_argument("--json", type=Path, help="append records to this file")
    arguments = parser.parse_args()
    try:
        shapes = [parse_shape(name) for name in arguments.shape or ("qwen3-30b-a3b", "olmoe", "mixtral")]
        rows = [Case(shapes[0], int(part)).rows for part in arguments.rows.split(",")]  # refuses less than one
    except ValueError as error:
        print(f"bench_device.py: {error}", file=sys.stderr)
        return 2
    if (why := obstacle()) is not None:
        print(f"bench_device.py {why}", file=sys.stderr)
        return 2

    card = torch.cuda.get_device_name()
    console = Console(width=200)
    wrong = False
    # Products of float32 are exact on both sides, so that only the kernels differ.
    torch.backends.cuda.matmul.allow_tf32 = False
    if arguments.only != "times":
        found = list(parity(shapes))
        console.print(parity_table(found))
        wrong = not all(each.holds for each in found)
    if arguments.only != "parity" and not wrong:  # a benchmark must not time wrong results
        limits = measure_limits(arguments.turns)
        measured = list(measure_experts(shapes, rows, limits, arguments.turns))
        gated = list(measure_gate(rows, arguments.turns))
        speeds = f"{limits.bandwidth / 1e9:.0f} GB/s copied, {limits.flops / 1e12:.0f} TFLOP/s in bfloat16 products"
        console.print(f"{card}: {speeds}")
        console.print(times_table(measured, f"experts in bfloat16 on {card}"))
        console.print(times_table(gated, f"router in float32 on {card}"))
        if arguments.json:
            write_rows(arguments.json, list(json_rows(measured + gated, limits, card)))
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
