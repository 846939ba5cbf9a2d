"""LoRA experts: the two ways to run them, and where `LoRAExperts` changes from one to the other.

    python shared/core/benchmarks/bench_lora.py [--dtype bf16] [--backward] [--json rows.json]

"loop" is what one writes on top of separate adapters: for each expert, select its rows, two small products, add.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from shared_core import LoRAExperts, Routing, doctor
from shared_core.bench import write_rows
from shared_core.bench.cases import DTYPES, Shape, draw_routing
from shared_core.bench.timing import Prepare, interleave
from shared_core.kernels.low_rank import chosen_adapters

# (E, k, rank, width): prompts and classes of a medical model up to one adapter for each expert of a language model.
SHAPES = ((8, 2, 8, 768), (8, 1, 16, 768), (16, 2, 16, 768), (64, 2, 8, 1024), (64, 8, 16, 1024))
ROWS = (8, 64, 256, 512, 2048)


def loop(layer: LoRAExperts, x: torch.Tensor, routing: Routing) -> torch.Tensor:
    y = x.new_zeros(len(x), layer.out_features)
    for e in range(layer.num_experts):
        rows, slots = torch.where(routing.indices == e)
        own = slice(layer.offsets[e], layer.offsets[e + 1])
        part = (x[rows] @ layer.lora_A[own].T) @ layer.lora_B[:, own].T * layer.scalings[e]
        y = y.index_add(0, rows, (part * routing.weights[rows, slots, None]).to(y.dtype))
    return y


def ways(layer: LoRAExperts, x: torch.Tensor, routing: Routing) -> dict[str, Callable[[], torch.Tensor]]:
    plain = (layer.ranks, layer.scalings)
    return {
        "chosen": lambda: layer(x, routing),
        "dense": lambda: layer._all_adapters(x, layer.lora_A, layer.lora_B, routing.dense()),
        "sparse": lambda: chosen_adapters(x, layer.lora_A, layer.lora_B, routing.indices, routing.weights, *plain),
        "loop": lambda: loop(layer, x, routing),
    }


def prepared(call: Callable[[], torch.Tensor], backward: bool) -> Prepare:
    def run() -> None:
        with torch.set_grad_enabled(backward):
            y = call()
        if backward:
            y.backward(y.detach())

    return lambda: run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="fp32")
    parser.add_argument("--backward", action="store_true", help="forward and backward")
    parser.add_argument("--json", type=Path, help="append records to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    step = "forward+backward" if arguments.backward else "forward"
    table = Table(
        "E", "k", "rank", "width", "rows", "ours ms", "dense ms", "sparse ms", "loop ms", "vs loop", title=step
    )
    records = []
    for num_experts, top_k, rank, width in SHAPES:
        layer = LoRAExperts(width, width, num_experts, rank, alpha=rank, dtype=DTYPES[arguments.dtype])
        torch.nn.init.normal_(layer.lora_B)
        for rows in ROWS:
            shape = Shape("lora", num_experts, top_k, width, rank)
            routing = Routing.from_topk(*draw_routing(rows, shape, "uniform", generator), num_experts=num_experts)
            x = torch.randn(rows, width, generator=generator).to(layer.lora_A.dtype).requires_grad_(arguments.backward)
            calls = ways(layer, x, routing)
            for name, call in calls.items():
                error = (call() - calls["loop"]()).detach().float().norm() / calls["loop"]().detach().float().norm()
                if error > (1e-5 if arguments.dtype == "fp32" else 3e-2):
                    raise RuntimeError(f"{name} and loop disagree: relative error {error:.1e}")
            took = interleave({name: prepared(call, arguments.backward) for name, call in calls.items()}, seconds=0.3)
            ms = {name: timing.cpu * 1e3 for name, timing in took.items()}
            sizes = (num_experts, top_k, rank, width, rows)
            ratio = ms["loop"] / ms["chosen"]
            table.add_row(*map(str, sizes), *(f"{value:.3g}" for value in ms.values()), f"{ratio:.2f}×")
            what = f"LoRA experts {step} {arguments.dtype}"
            record = {"what": what, "shape": sizes, "ours": ms["chosen"], "peer": ms["loop"], "ratio": ratio}
            records.append(record | {"machine": doctor.machine()})
    Console(width=120).print(table)
    if arguments.json:
        write_rows(arguments.json, records)


if __name__ == "__main__":
    main()
