"""The bias balances routers on states of a real language model, and on generated states that share a direction."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shared_core import BiasBalancer, LoadStats, Router, load_stats


@pytest.fixture(scope="session")
def anisotropic_states() -> Tensor:
    """States ``a·1 + noise``: a common direction, as hidden states of transformers have it. ``[6144, 96]``."""
    noise = torch.randn(6144, 96, generator=torch.Generator().manual_seed(0))
    return 0.6 * torch.ones(96) + noise


def balance(states: Tensor, experts: int, k: int, seed: int) -> tuple[LoadStats, LoadStats]:
    """Load over all rows before and after 400 updates of 1024 random rows each."""
    generator = torch.Generator().manual_seed(seed)
    width = states.shape[1]
    router = Router.linear(width, experts, k, score="sigmoid", balancer=BiasBalancer(experts, update_rate=0.002))
    nn.init.normal_(router.gate.weight, std=width**-0.5, generator=generator)
    with torch.no_grad():
        before = load_stats(router.eval()(states).counts())
        router.train()
        for _ in range(400):
            router(states[torch.randint(len(states), (1024,), generator=generator)])
            router.balancer.update()
        return before, load_stats(router.eval()(states).counts())


@pytest.mark.data
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("experts", "k"), [(16, 2), (64, 8)])
def test_bias_balances_real_token_states(token_states: tuple[Tensor, Tensor], experts: int, k: int, seed: int) -> None:
    before, after = balance(token_states[0], experts, k, seed)
    assert before.max_violation >= 1.0
    assert after.max_violation <= 0.20
    assert after.entropy >= 0.995


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("experts", "k"), [(16, 2), (64, 8)])
def test_bias_balances_generated_anisotropic_states(
    anisotropic_states: Tensor, experts: int, k: int, seed: int
) -> None:
    before, after = balance(anisotropic_states, experts, k, seed)
    assert before.max_violation >= 1.0
    assert after.max_violation <= 0.20
    assert after.entropy >= 0.995


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.timeout(900)
def test_training_with_bias_or_balance_loss_is_more_even_than_with_neither(shared_data: Path, tmp_path: Path) -> None:
    """Mean MaxVio of the last training batches over five seeds; nothing is claimed about held-out balance."""
    script = Path(__file__).resolve().parents[1] / "benchmarks" / "bench_balance.py"
    report = tmp_path / "balance.json"
    environment = {"MOE_SHARED_DATA": str(shared_data), "OMP_NUM_THREADS": "1", "PATH": ""}
    subprocess.run(
        [sys.executable, script, "--part", "trained", "--json", report], check=True, env=environment, timeout=800
    )
    violation = {row["balanced_by"]: row["max_violation_training"] for row in json.loads(report.read_text())}
    assert violation["bias"] < 0.75 * violation["neither"]
    assert violation["balance loss"] < 0.75 * violation["neither"]
