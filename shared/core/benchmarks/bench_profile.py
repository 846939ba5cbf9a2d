"""Where the time of the experts goes: the share of matrix products, and how near they come to the machine's best one.

    python shared/core/benchmarks/bench_profile.py

It answers why a ratio to transformers is what it is. The rate of products is what a library (MKL, oneDNN) gives for
these sizes; only the rest of the time, and the choice of the product, is in our hands. "possible" is the ratio to
grouped_mm if that rest cost nothing and every product ran at its present rate.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from shared_core import GroupedExperts, Routing

PRODUCTS = ("mm", "addmm", "bmm", "linear", "_grouped_mm", "grouped_mm", "_linear_pointwise", "addmm_", "mv")
HEAD = f"{'shape':<8} {'pass':<8} {'dtype':<5} {'ours ms':>8} {'products':>9} {'of limit':>9}"
HEAD += f" {'grouped_mm ms':>14} {'products':>9} {'ratio':>6} {'possible':>9}"


@dataclass(frozen=True)
class Case:
    """Sizes of experts and batch."""

    name: str
    experts: int
    slots: int
    hidden: int
    inner: int
    backward: bool
    rows: int = 512

    @property
    def flops(self) -> int:
        """Floating-point operations of all products."""
        return 2 * self.rows * self.slots * 3 * self.hidden * self.inner * (3 if self.backward else 1)


CASES = [
    Case("mid", 16, 4, 512, 512, backward=False),
    Case("olmoe", 64, 8, 1024, 512, backward=False),
    Case("mixtral", 8, 2, 1024, 3584, backward=False),
    Case("mid", 16, 4, 512, 512, backward=True),
    Case("olmoe", 64, 8, 1024, 512, backward=True),
]


def best_rate(dtype: torch.dtype) -> float:
    """FLOP/s of the best 1024 × 2048 × 2048 product, by CPU time of the thread."""
    a, b = torch.randn(1024, 2048).to(dtype), torch.randn(2048, 2048).to(dtype)
    times = []
    for _ in range(8):
        start = time.thread_time()
        torch.mm(a, b)
        times.append(time.thread_time() - start)
    return 2 * 1024 * 2048 * 2048 / min(times)


def product_share(step: Callable[[], object], repeats: int = 5) -> tuple[float, float]:
    """CPU seconds of one step, the fastest of some, and the share of them that matrix products take."""
    step()
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        step()
        times.append(time.thread_time() - start)
    with profile(activities=[ProfilerActivity.CPU]) as record:
        step()
    own = {
        event.key.removeprefix("aten::").split("::")[-1]: event.self_cpu_time_total for event in record.key_averages()
    }
    return min(times), sum(own.get(name, 0) for name in PRODUCTS) / sum(own.values())


def contest(case: Case, dtype: torch.dtype) -> dict[str, float]:
    """Seconds and product shares of ours and of transformers' grouped_mm, on the same weights."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=case.hidden,
        moe_intermediate_size=case.inner,
        num_experts=case.experts,
        num_experts_per_tok=case.slots,
    )
    config._experts_implementation = "grouped_mm"
    ours = GroupedExperts(case.hidden, case.inner, case.experts).to(dtype)
    theirs = Qwen3MoeExperts(config).to(dtype)
    theirs.load_state_dict(ours.state_dict())
    indices = torch.rand(case.rows, case.experts).topk(case.slots).indices
    weights = torch.rand(case.rows, case.slots)
    routing = Routing.from_topk(indices, weights, num_experts=case.experts)
    x = torch.randn(case.rows, case.hidden).to(dtype).requires_grad_(case.backward)
    grad = torch.randn(case.rows, case.hidden).to(dtype)

    def step(module: torch.nn.Module, *arguments: object) -> None:
        with torch.set_grad_enabled(case.backward):
            out = module(x, *arguments)
            if case.backward:
                module.zero_grad(set_to_none=True)
                out.backward(grad.to(out.dtype))

    seconds, share = product_share(lambda: step(ours, routing))
    peer, peer_share = product_share(lambda: step(theirs, indices, weights.to(dtype)))
    return {"ours": seconds, "products": share, "peer": peer, "peer_products": peer_share}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="append the rows to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(HEAD)
    for dtype, label in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        peak = max(best_rate(dtype), best_rate(torch.float32))
        for case in CASES:
            row = contest(case, dtype)
            in_products = row["ours"] * row["products"]
            row |= {
                "limit": case.flops / in_products / peak,
                "ratio": row["peer"] / row["ours"],
                "possible": row["peer"] / in_products,
            }
            step = "fwd+bwd" if case.backward else "fwd"
            print(
                f"{case.name:<8} {step:<8} {label:<5} {1e3 * row['ours']:>8.1f} {row['products']:>9.0%}"
                f" {row['limit']:>9.2f} {1e3 * row['peer']:>14.1f} {row['peer_products']:>9.0%} {row['ratio']:>6.2f}"
                f" {row['possible']:>9.2f}"
            )
            if arguments.json:
                with arguments.json.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps({"what": step, "shape": case.name, "dtype": label} | row) + "\n")


if __name__ == "__main__":
    main()
