"""What balancing does: routers on states of a real language model, as they are and in training.

    python shared/core/benchmarks/bench_balance.py [--part static|trained] [--score softmax|sigmoid] [--seeds 5]
                                                   [--json rows.json]

static   A random sigmoid gate over all states; load before and after 400 updates of the bias (u = 0.002, 1024 rows).
trained  A mixture of 16 experts (k = 2) learns to predict the next token's state from the present one (AdamW 3e-3, 150
         steps of 512 rows), with neither bias nor loss, with the bias (u = 0.005), and with the balance loss (0.02).
         MaxVio of the last 20 training batches and of the held-out sequences (every fourth), and the held-out error.
         With sigmoid scores the loss at this weight does not balance: `--score sigmoid` shows it.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from shared_core import BiasBalancer, GroupedExperts, MoE, Router, load_balance_loss, load_stats
from shared_core.bench import write_rows
from shared_core.doctor import machine

ROOT = Path(__file__).resolve().parents[3]
DATA = Path(os.environ.get("MOE_SHARED_DATA", ROOT.parent / "shared" / "data")) / "core" / "minilm_token_states.npz"

EXPERTS, CHOSEN, INTERMEDIATE = 16, 2, 64
STEPS, ROWS, LAST = 150, 512, 20


def static(states, experts, chosen, seed):
    generator = torch.Generator().manual_seed(seed)
    width = states.shape[1]
    router = Router.linear(width, experts, chosen, score="sigmoid", balancer=BiasBalancer(experts, 0.002))
    torch.nn.init.normal_(router.gate.weight, std=width**-0.5, generator=generator)
    with torch.no_grad():
        before = load_stats(router.eval()(states).counts())
        router.train()
        for _ in range(400):
            router(states[torch.randint(len(states), (1024,), generator=generator)])
            router.balancer.update()
        return before, load_stats(router.eval()(states).counts())


def pairs(states, sequence, held_out):
    """Present and next states within sequences."""
    states = (states - states.mean(0)) / states.std(0)
    inside = (sequence[1:] == sequence[:-1]) & ((sequence[1:] % 4 == 0) == held_out)
    return states[:-1][inside], states[1:][inside]


def trained(states, sequence, seed, *, bias, loss_weight, score="softmax"):
    """Training MaxVio, held-out MaxVio and held-out squared error after training."""
    x, target = pairs(states, sequence, held_out=False)
    x_new, target_new = pairs(states, sequence, held_out=True)
    width = x.shape[1]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        balancer = BiasBalancer(EXPERTS, 0.005) if bias else None
        router = Router.linear(width, EXPERTS, CHOSEN, score=score, renormalize=True, balancer=balancer)
        layer = MoE(router, GroupedExperts(width, INTERMEDIATE, EXPERTS))
    optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-3)
    if bias:
        BiasBalancer.attach(optimizer, layer)
    generator = torch.Generator().manual_seed(seed)
    violations = []
    for _ in range(STEPS):
        batch = torch.randint(len(x), (ROWS,), generator=generator)
        y, routing = layer(x[batch])
        loss = (y - target[batch]).square().mean() + loss_weight * load_balance_loss(routing)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        violations.append(load_stats(routing.counts()).max_violation)
    with torch.no_grad():
        y, routing = layer.eval()(x_new)
        error = (y - target_new).square().mean().item()
    return float(np.mean(violations[-LAST:])), float(load_stats(routing.counts()).max_violation), error


def report_static(states, seeds, records):
    table = Table(title="bias on random gates over real token states (sigmoid)")
    for column in ("E", "k", "seed", "MaxVio before", "MaxVio after", "entropy after"):
        table.add_column(column, justify="right")
    for experts, chosen in ((16, 2), (64, 8)):
        for seed in range(min(seeds, 3)):
            before, after = static(states, experts, chosen, seed)
            numbers = (before.max_violation, after.max_violation, after.entropy)
            table.add_row(str(experts), str(chosen), str(seed), *(f"{number:.3f}" for number in numbers))
            shape = {"experts": experts, "top_k": chosen, "seed": seed}
            names = ("max_violation_before", "max_violation_after", "entropy_after")
            records.append(
                {"what": "bias on a random gate", "shape": shape} | dict(zip(names, map(float, numbers), strict=True))
            )
    Console().print(table)


def report_trained(states, sequence, seeds, score, records):
    variants = {
        "neither": {"bias": False, "loss_weight": 0.0},
        "bias": {"bias": True, "loss_weight": 0.0},
        "balance loss": {"bias": False, "loss_weight": 0.02},
    }
    title = f"predicting the next state: E={EXPERTS}, k={CHOSEN}, {score}, mean over {seeds} seeds"
    table = Table(title=title)
    for column in ("balanced by", "MaxVio, training", "MaxVio, held out", "squared error, held out"):
        table.add_column(column, justify="right")
    jobs = [(name, seed) for seed in range(seeds) for name in variants]
    found = {name: [] for name in variants}
    for name, seed in track(jobs, "training", console=Console(stderr=True)):
        found[name].append(trained(states, sequence, seed, score=score, **variants[name]))
    for name, runs in found.items():
        means = np.mean(runs, axis=0).tolist()
        table.add_row(name, *(f"{mean:.3f}" for mean in means))
        shape = {"experts": EXPERTS, "top_k": CHOSEN, "intermediate": INTERMEDIATE, "score": score, "seeds": seeds}
        names = ("max_violation_training", "max_violation_held_out", "error_held_out")
        records.append({"what": "trained", "shape": shape, "balanced_by": name} | dict(zip(names, means, strict=True)))
    Console().print(table)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=("static", "trained"), help="only this one")
    parser.add_argument("--score", choices=("softmax", "sigmoid"), default="softmax", help="of the trained router")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not DATA.is_file():
        parser.error(f"token states are not here: {DATA} (set MOE_SHARED_DATA to the folder of the shared data)")
    torch.set_num_threads(1)
    with np.load(DATA, allow_pickle=False) as file:
        states = torch.from_numpy(file["hidden"].astype(np.float32))
        sequence = torch.from_numpy(file["sequence"].astype(np.int64))

    records = []
    if args.part != "trained":
        report_static(states, args.seeds, records)
    if args.part != "static":
        report_trained(states, sequence, args.seeds, args.score, records)
    if args.json is not None:
        write_rows(args.json, [record | {"machine": machine()} for record in records])


if __name__ == "__main__":
    main()
