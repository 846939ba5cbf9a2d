"""What the exchange between processes costs on gloo, and what sending a row once a process saves.

    python shared/core/benchmarks/bench_parallel.py [--processes 2] [--json rows.json]

CPU time of all processes together (gloo's own threads included), forward and backward, minimum over interleaved
repetitions. "single" is one process with all experts and the rows of all processes. "choice" is the plain exchange that
sends a row once for each choice and combines at its origin. Loopback, not a network: no statement about bandwidth.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd, wait_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing import start_processes

from shared_core import GroupedExperts, Routing, combine, doctor, experts_forward, permute
from shared_core.bench import write_rows
from shared_core.bench.cases import Shape, draw_routing
from shared_core.parallel import ExpertParallel, route_to_ranks

SHAPES = (
    Shape("mid", 16, 4, 512, 512),
    Shape("olmoe", 64, 8, 1024, 512),
    Shape("mixtral/4", 8, 2, 1024, 896),
)
REPETITIONS = {64: 15, 512: 5}  # short steps are disturbed more easily


def once_a_choice(experts: ExpertParallel, x: Tensor, routing: Routing) -> Tensor:
    """Every choice travels by itself; weights and the combination stay where the row comes from."""
    group, held = experts.group, len(experts.local_experts)
    plan = routing.plan()
    counts = plan.counts().view(-1, held)
    arriving = wait_tensor(all_to_all_single(counts, None, None, group))
    send, receive = counts.sum(1).tolist(), arriving.sum(1).tolist()
    rows = wait_tensor(all_to_all_single_autograd(permute(x, plan), receive, send, group))
    owner = torch.arange(held).repeat(arriving.shape[0]).repeat_interleave(arriving.flatten())[:, None]
    local = Routing.from_topk(owner, torch.ones(owner.shape), num_experts=held)
    y = experts_forward(rows, local, experts.gate_up_proj.to_local(), experts.down_proj.to_local())
    return combine(wait_tensor(all_to_all_single_autograd(y, send, receive, group)), plan)


def cpu_time(call: Callable[[], Tensor]) -> tuple[float, float]:
    """CPU seconds of all processes, wall seconds of the slowest."""
    dist.barrier()
    wall, start = time.perf_counter(), time.process_time()
    y = call()
    y.backward(y.detach())
    spent = torch.tensor([time.process_time() - start])
    slowest = torch.tensor([time.perf_counter() - wall])
    dist.all_reduce(spent)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return spent.item(), slowest.item()


def measure(shape: Shape, rows: int, rank: int) -> dict[str, float]:
    processes = dist.get_world_size()
    torch.manual_seed(0)
    whole = GroupedExperts(shape.hidden_size, shape.intermediate_size, shape.num_experts)
    shared = ExpertParallel(whole, init_device_mesh("cpu", (processes,)))
    generator = torch.Generator().manual_seed(1)
    drawn = [draw_routing(rows, shape, "uniform", generator) for _ in range(processes)]
    x = torch.randn(processes * rows, shape.hidden_size, generator=generator)
    joint = [torch.cat(parts) for parts in zip(*drawn, strict=True)]
    routing = Routing.from_topk(*drawn[rank], num_experts=shape.num_experts)
    everything = Routing.from_topk(*joint, num_experts=shape.num_experts)
    own = x.chunk(processes)[rank].clone().requires_grad_()
    x.requires_grad_()

    def single() -> Tensor:  # the others wait: their time is not that of one process
        return whole(x, everything) if rank == 0 else torch.zeros(1, requires_grad=True)

    calls = {
        "single": single,
        "ours": lambda: shared(own, routing),
        "choice": lambda: once_a_choice(shared, own, routing),
    }
    torch.testing.assert_close(calls["ours"](), calls["choice"](), atol=1e-5, rtol=1e-4)
    best = dict.fromkeys(calls, (float("inf"), float("inf")))
    for _ in range(REPETITIONS[rows]):
        for name, call in calls.items():
            best[name] = tuple(map(min, best[name], cpu_time(call)))  # type: ignore[assignment]
            for parameter in (*whole.parameters(), *shared.parameters()):
                parameter.grad = None
    elsewhere = torch.arange(processes) != rank
    sent = torch.stack(
        [route_to_ranks(routing, processes).counts()[elsewhere], routing.counts().view(processes, -1).sum(1)[elsewhere]]
    ).sum(1)
    dist.all_reduce(sent)
    return {
        **{f"{name}_cpu_ms": 1000 * seconds for name, (seconds, _) in best.items()},
        **{f"{name}_wall_ms": 1000 * seconds for name, (_, seconds) in best.items()},
        # A row is followed by at most k weights and k numbers of experts; a choice by nothing.
        "sent_mb": sent[0].item() * 4 * (shape.hidden_size + 2 * shape.top_k) / 1e6,
        "choice_sent_mb": sent[1].item() * 4 * shape.hidden_size / 1e6,
    }


def work(rank: int, processes: int, folder: str, output: Path | None) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes)
    table = Table(
        *("shape", "rows", "single ms", "ours ms", "cost", "choice ms", "vs choice", "MB sent", "MB choice"),
        title=f"{processes} processes, gloo, fp32, forward+backward, CPU time",
    )
    records = []
    for shape in SHAPES:
        for rows in REPETITIONS:
            found = measure(shape, rows, rank)
            cost = found["ours_cpu_ms"] / found["single_cpu_ms"]
            ratio = found["choice_cpu_ms"] / found["ours_cpu_ms"]
            records.append(
                {"what": "parallel", "shape": shape.name, "rows": rows, "cost": cost, "ratio": ratio, **found}
            )
            figures = [found["single_cpu_ms"], found["ours_cpu_ms"], cost, found["choice_cpu_ms"], ratio]
            figures += [found["sent_mb"], found["choice_sent_mb"]]
            table.add_row(shape.name, str(rows), *(f"{figure:.3g}" for figure in figures))
    dist.destroy_process_group()
    if rank == 0:
        Console(width=120).print(table)
        if output is not None:
            write_rows(output, [{**record, "machine": doctor.machine()} for record in records])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, help="append records to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        start_processes(
            work,
            (arguments.processes, folder, arguments.json),
            nprocs=arguments.processes,
            start_method="fork",
        )


if __name__ == "__main__":
    main()
