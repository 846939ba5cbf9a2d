"""Whole decoders of transformers with our experts and with its own: a prompt, one token, one training step.

    python shared/core/benchmarks/bench_transformers.py [--dtype bf16] [--seconds 0.4] [--json rows.json]

Attention, norms and embeddings are the same in all of them and are part of the time. Qwen3-MoE takes the fused route,
GPT-OSS (interleaved gate, clamp) runs its gate in Python between two grouped products, Aria stores its matrices
transposed. Implementations take turns in one process on one thread; the fastest turn of each counts, by CPU time of the
thread. A ratio is the peer's time over ours: above 1, ours is faster. Before timing, all outputs are compared.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AriaTextConfig, AutoModelForCausalLM, GptOssConfig, Qwen3MoeConfig
from transformers.utils import logging

from shared_core import doctor
from shared_core.bench import write_rows
from shared_core.bench.cases import DTYPES
from shared_core.bench.timing import Prepare, interleave
from shared_core.integrations.transformers import register

PEERS = ("eager", "grouped_mm", "batched_mm")
ROWS = 256
# batched_mm copies the matrices of every assignment: 2 GB for each of the two products of a prompt.
LEFT_OUT = {"prompt": {"batched_mm"}, "training": {"batched_mm"}, "token": set()}
COMMON: dict[str, Any] = {
    "vocab_size": 1000, "hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 64, "num_experts_per_tok": 4,
}  # fmt: skip
EXPERTS, INNER = 16, 512


def configs() -> dict[str, Any]:
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    inner = {"intermediate_size": INNER}
    qwen3_moe = Qwen3MoeConfig(**COMMON, moe_intermediate_size=INNER, num_experts=EXPERTS)
    gpt_oss = GptOssConfig(
        **COMMON, **inner, num_local_experts=EXPERTS, rope_parameters=plain, max_position_embeddings=1024
    )
    aria = AriaTextConfig(**COMMON, **inner, moe_num_experts=EXPERTS, moe_topk=4, moe_num_shared_experts=1)
    return {"Qwen3-MoE": qwen3_moe, "GPT-OSS": gpt_oss, "Aria": aria}


def drawn(config: Any, dtype: torch.dtype) -> Any:
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.05, generator=generator)
    return model.to(dtype)


def step(model: Any, what: str, tokens: torch.Tensor) -> Callable[[], torch.Tensor]:
    """One pass, which returns logits."""

    def training() -> torch.Tensor:
        for parameter in model.parameters():
            parameter.grad = None
        out = model(input_ids=tokens, labels=tokens, use_cache=False)
        out.loss.backward()
        logits: torch.Tensor = out.logits.detach()
        return logits

    @torch.no_grad()
    def forward() -> torch.Tensor:
        logits: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
        return logits

    return training if what == "training" else forward


def compare(model: Any, run: Callable[[], torch.Tensor], names: list[str], tolerance: float) -> None:
    model.set_experts_implementation("eager")
    expected = run().float()
    for name in names:
        model.set_experts_implementation(name)
        error = float((run().float() - expected).norm() / expected.norm())
        if error > tolerance:
            raise RuntimeError(f"{name} and eager disagree: relative error {error:.1e}")


def prepared(model: Any, name: str, run: Callable[[], torch.Tensor]) -> Prepare:
    def prepare() -> Callable[[], object]:
        model.set_experts_implementation(name)
        return run

    return prepare


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="both by default")
    parser.add_argument("--seconds", type=float, default=0.4, help="a case, about")
    parser.add_argument("--json", type=Path, help="append records to this file")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    register()
    generator = torch.Generator().manual_seed(1)
    table = Table(
        "model", "dtype", "pass", "tokens", "ours ms", *(f"vs {peer}" for peer in PEERS),
        title=f"{EXPERTS} experts, 4 a token, hidden 512, intermediate {INNER}, 2 layers, 1 thread",
    )  # fmt: skip
    records, started = [], time.monotonic()
    for family, config in configs().items():
        for dtype in [arguments.dtype] if arguments.dtype else ["fp32", "bf16"]:
            model = drawn(config, DTYPES[dtype])
            for what, rows in (("prompt", ROWS), ("token", 1), ("training", ROWS)):
                tokens = torch.randint(0, 1000, (1, rows), generator=generator)
                names = ["shared_core", *(peer for peer in PEERS if peer not in LEFT_OUT[what])]
                run = step(model, what, tokens)
                # Routers in bfloat16 round close logits: a token in a hundred may go elsewhere.
                compare(model, run, names, 1e-4 if dtype == "fp32" else 1e-1)
                print(f"[{time.monotonic() - started:.0f} s] {family} {dtype} {what}", file=sys.stderr, flush=True)
                # A token takes milliseconds: the minimum settles only after many turns.
                seconds = arguments.seconds * (2.5 if what == "token" else 1)
                took = interleave({n: prepared(model, n, run) for n in names}, seconds=seconds, max_turns=200)
                ours = took["shared_core"].cpu
                ratios = {peer: took[peer].cpu / ours for peer in PEERS if peer in took}
                cells = [f"{ratios[peer]:.2f}×" if peer in ratios else "–" for peer in PEERS]
                table.add_row(family, dtype, what, str(rows), f"{ours * 1e3:.3g}", *cells)
                common = {"what": f"{family} {what} {dtype}", "shape": [EXPERTS, 4, 512, INNER, rows], "ours": ours}
                records += [
                    common | {"peer": peer, "peer_cpu": took[peer].cpu, "ratio": ratio, "machine": doctor.machine()}
                    for peer, ratio in ratios.items()
                ]
    Console(width=120).print(table)
    print("Not run (–): batched_mm copies the matrices of every assignment, gigabytes a step.")
    if arguments.json:
        write_rows(arguments.json, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
