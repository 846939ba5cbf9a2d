"""Routing against transformers' Qwen3-MoE router, which leaves ties undefined where ours defines them.

    python shared/core/benchmarks/bench_routing.py [--rows 1,64,512,4096] [--json rows.json]

128 experts, 8 chosen, hidden size 1024, float32, one thread; seconds are CPU time of the thread, the least of the
turns. The target is 4096 rows without gradients: at least 1.3x. "gate" is the product that no router can avoid.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.functional import linear
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeTopKRouter

from shared_core import Router
from shared_core.bench import write_rows
from shared_core.bench.timing import interleave
from shared_core.doctor import machine

EXPERTS, CHOSEN, HIDDEN = 128, 8, 1024
TARGET = 1.3


def routers():
    config = Qwen3MoeConfig(hidden_size=HIDDEN, num_experts=EXPERTS, num_experts_per_tok=CHOSEN, norm_topk_prob=True)
    theirs = Qwen3MoeTopKRouter(config)
    torch.nn.init.normal_(theirs.weight, std=0.05, generator=torch.Generator().manual_seed(0))
    ours = Router.linear(HIDDEN, EXPERTS, CHOSEN, renormalize=True)
    ours.gate.load_state_dict({"weight": theirs.weight.detach()})
    return ours, theirs


def check_agreement(ours, theirs, x):
    """A benchmark must not time wrong results."""
    _, weights, indices = theirs(x)
    dense = torch.zeros(len(x), EXPERTS).scatter(1, indices, weights)
    torch.testing.assert_close(ours(x).dense(), dense, rtol=0.0, atol=1e-5)


def measure(rows, backward, seconds):
    ours, theirs = routers()
    x = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(1))
    check_agreement(ours, theirs, x)
    upstream = torch.randn(rows, CHOSEN, generator=torch.Generator().manual_seed(2))

    def forward(run):
        def timed():
            with torch.no_grad():
                run()

        return lambda: timed

    def training(module, weights_of):
        def prepare():
            module.zero_grad(set_to_none=True)
            leaf = x.detach().requires_grad_()
            return lambda: (weights_of(module(leaf)) * upstream).sum().backward()

        return prepare

    if backward:
        candidates = {
            "ours": training(ours, lambda routing: routing.weights),
            "peer": training(theirs, lambda output: output[1]),
        }
    else:
        candidates = {"ours": forward(lambda: ours(x)), "peer": forward(lambda: theirs(x))}
    candidates["gate product"] = forward(lambda: linear(x, theirs.weight))
    return interleave(candidates, seconds=seconds, max_turns=2000 if rows < 100 else 200)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="1,64,512,4096")
    parser.add_argument("--seconds", type=float, default=3.0, help="per case")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)

    records = []
    table = Table(title=f"routing, E={EXPERTS}, k={CHOSEN}, H={HIDDEN}, float32, 1 thread, CPU ms")
    for column in ("rows", "pass", "ours", "peer", "gate", "ratio", "target"):
        table.add_column(column, justify="right")
    for backward in (False, True):
        for rows in map(int, args.rows.split(",")):
            times = measure(rows, backward, args.seconds)
            ratio = times["peer"].cpu / times["ours"].cpu
            target = TARGET if rows == 4096 and not backward else None
            table.add_row(
                str(rows),
                "+ backward" if backward else "forward",
                *(f"{1e3 * times[name].cpu:.3f}" for name in ("ours", "peer", "gate product")),
                f"{ratio:.2f}",
                "" if target is None else f"{target:.2f} {'met' if ratio >= target else 'MISSED'}",
            )
            records.append(
                {
                    "what": "routing, forward + backward" if backward else "routing, forward",
                    "shape": {"experts": EXPERTS, "top_k": CHOSEN, "hidden": HIDDEN, "rows": rows, "dtype": "fp32"},
                    "ours": times["ours"].cpu,
                    "peer": times["peer"].cpu,
                    "gate_product": times["gate product"].cpu,
                    "ratio": ratio,
                    "target": target,
                    "machine": machine(),
                }
            )
    Console().print(table)
    if args.json is not None:
        write_rows(args.json, records)


if __name__ == "__main__":
    main()
