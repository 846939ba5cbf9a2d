"""The main jobs of shared-core on one page: classify real handwritten digits with routed experts, keep them balanced,
run them on a fast backend, and choose under a budget.

    python demo.py --out pictures         # a table, and pictures of who serves what
    python demo.py --json

Needs ``pip install 'shared-core[all]' scikit-learn`` (for the digits that come with it).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from shared_core import GroupedExperts, MoE, Router, Routing, load_balance_loss, load_stats, solve_mckp
from shared_core.kernels import use_backend

EXPERTS, TOP_K, WIDTH = 8, 2, 64


class DigitClassifier(nn.Module):
    """64 pixels → width 64 → one layer of experts → 10 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(64, WIDTH)
        router = Router.linear(WIDTH, EXPERTS, TOP_K, renormalize=True)
        self.layer = MoE(router, GroupedExperts(WIDTH, 32, EXPERTS, init_std=0.1))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Routing]:
        """Logits ``[N, 10]`` and who served each image."""
        hidden = self.embed(pixels)
        served, routing = self.layer(hidden)
        return self.head(hidden + served), routing


def row(job: str, measure: str, value: float, target: str) -> dict[str, Any]:
    """One line of the table, judged."""
    sign, limit = target.split()
    ok = bool(value >= float(limit) if sign == "≥" else value <= float(limit))
    return {"job": job, "measure": measure, "value": float(value), "target": target, "ok": ok}


def train(x: Tensor, y: Tensor, balance: float) -> DigitClassifier:
    """Train for 300 steps, with the balance loss at a weight of ``balance``."""
    torch.manual_seed(0)
    model = DigitClassifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(300):
        batch = torch.randint(len(x), (128,))
        logits, routing = model(x[batch])
        loss = nn.functional.cross_entropy(logits, y[batch]) + balance * load_balance_loss(routing)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def digits(out: Path | None) -> list[dict[str, Any]]:
    """Train with and without the balance loss; compare what the held-out digits are given to."""
    data = load_digits()
    x, y = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    held_out = torch.arange(len(x)) % 4 == 0
    free, model = (train(x[~held_out], y[~held_out], balance) for balance in (0.0, 0.05))
    with torch.no_grad():
        _, unbalanced = free(x[held_out])
        logits, routing = model(x[held_out])
        with use_backend("reference"):
            expected, _ = model(x[held_out])
    load = torch.stack([unbalanced.counts(), routing.counts()])
    if out is not None:
        draw(out, load, routing, y[held_out])
    accuracy = (logits.argmax(1) == y[held_out]).float().mean().item()
    before, after = (load_stats(counts).max_violation for counts in load)
    error = ((logits - expected).norm() / expected.norm()).item()
    return [
        row("digits, 8 experts, 2 a digit", "accuracy on held-out digits", accuracy, "≥ 0.95"),
        row("digits, 8 experts, 2 a digit", "MaxVio, with over without the balance loss", after / before, "≤ 0.8"),
        row("fast experts", "relative error to the reference", error, "≤ 3e-05"),
    ]


def draw(out: Path, load: Tensor, routing: Routing, label: Tensor) -> None:
    """Load of the experts, and which expert serves which digit."""
    import matplotlib.pyplot as plt

    from shared_core.plot import expert_load

    out.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(2, 1, figsize=(7, 6), layout="constrained")
    for ax, counts, name in zip(axes, load, ("without balance loss", "with balance loss"), strict=True):
        expert_load(counts, ax=ax)
        ax.set_title(f"{name}: {ax.get_title()}")
    figure.savefig(out / "load.png", dpi=120)
    plt.close(figure)

    share = torch.stack([routing.dense()[label == digit].mean(0) for digit in range(10)])
    figure, ax = plt.subplots(figsize=(6, 6), layout="constrained")
    image = ax.imshow(share, cmap="viridis", vmin=0)
    ax.set(xlabel="expert", ylabel="digit", yticks=range(10), title="mean routing weight of held-out digits")
    figure.colorbar(image, ax=ax, shrink=0.8)
    figure.savefig(out / "digits_by_expert.png", dpi=120)
    plt.close(figure)


def budget() -> list[dict[str, Any]]:
    """Give each of 400 matrices a bit width within 4.2 bits a weight."""
    rng = np.random.default_rng(0)
    bits = np.arange(2, 9)
    size = rng.choice([1, 3, 4, 11], (400, 1)) * 2**20
    error = size * rng.lognormal(0, 1.5, (400, 1)) * 4.0**-bits
    limit = int(4.2 * size.sum())
    best, quick = (solve_mckp(size * bits, -error, limit, method=method) for method in ("exact", "greedy"))
    return [
        row("bits of 400 matrices", "error over that of 4 bits everywhere", -best.value / error[:, 2].sum(), "≤ 0.8"),
        row(
            "bits of 400 matrices",
            "what greedy may miss, by its own bound",
            1 - quick.upper_bound / quick.value,
            "≤ 0.01",
        ),
    ]


def main() -> None:
    """Run all and print a table or JSON."""
    parser = argparse.ArgumentParser(description="The main jobs of shared-core.")
    parser.add_argument("--out", type=Path, help="folder for pictures; none are drawn when absent")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = [*digits(arguments.out), *budget()]
    if arguments.json:
        print(json.dumps({"rows": rows}))
        return
    for line in rows:
        print(f"{line['job']:<30} {line['measure']:<44} {line['value']:>10.3g}  {line['target']}")


if __name__ == "__main__":
    main()
