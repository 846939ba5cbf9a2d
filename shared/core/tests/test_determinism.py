"""Same seed, same bits: twice in one process, in two processes, and whatever other rows are in the batch."""

import hashlib
import os
import subprocess
import sys

import pytest
import torch

from shared_core import BiasBalancer, GroupedExperts, LoRAExperts, MoE, Router

# Prints a digest of outputs, routings and gradients of a few training steps.
TRAINING = """
import hashlib, torch
from shared_core import BiasBalancer, GroupedExperts, LoRAExperts, MoE, Router, load_balance_loss

torch.set_num_threads(1)
torch.manual_seed(3)
router = Router.linear(24, 16, 2, score="sigmoid", renormalize=True, balancer=BiasBalancer(16))
layer = MoE(router, GroupedExperts(24, 20, 16, init_std=0.2))
adapters = LoRAExperts(24, 24, 16, [2, 3] * 8, alpha=4, dropout=0.1)
parameters = [*layer.parameters(), *adapters.parameters()]
digest = hashlib.sha256()
for _ in range(3):
    x = torch.randn(600, 24)
    y, routing = layer(x)
    loss = (y + adapters(x, routing)).square().mean() + 0.01 * load_balance_loss(routing)
    gradients = torch.autograd.grad(loss, parameters)
    for tensor in [y, routing.indices, *gradients]:
        digest.update(tensor.detach().numpy().tobytes())
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients):
            parameter -= 0.1 * gradient
    router.balancer.update()
print(digest.hexdigest())
"""


def run_in_new_process(script):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "random"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_training_gives_the_same_bits_in_two_processes():
    first, second = run_in_new_process(TRAINING), run_in_new_process(TRAINING)
    assert len(first) == 64
    assert first == second


def step(layer, x):
    leaf = x.clone().requires_grad_()
    y, routing = layer(leaf)
    return [y, routing.weights, *torch.autograd.grad(y.sin().sum(), [leaf, *layer.parameters()])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["reference", "cpu", "grouped_mm"])
def test_forward_and_backward_give_the_same_bits_twice(backend, dtype):
    torch.manual_seed(0)
    layer = MoE(Router.linear(16, 8, 2), GroupedExperts(16, 24, 8, init_std=0.3, backend=backend)).to(dtype)
    x = torch.randn(64, 16).to(dtype)
    for first, second in zip(step(layer, x), step(layer, x), strict=True):
        assert torch.equal(first, second)


def test_seeded_construction_gives_the_same_parameters():
    def digest():
        torch.manual_seed(5)
        modules = [
            MoE(Router.linear(16, 8, 2, balancer=BiasBalancer(8)), GroupedExperts(16, 24, 8)),
            LoRAExperts(16, 16, 8, 4, alpha=4),
        ]
        return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for m in modules for p in m.parameters())).digest()

    assert digest() == digest()


def test_building_and_running_layers_leaves_global_state_alone():
    torch.manual_seed(0)
    layer = MoE(Router.linear(16, 8, 2), GroupedExperts(16, 24, 8))
    x = torch.randn(32, 16)
    before = torch.get_rng_state(), torch.get_num_threads(), torch.get_default_dtype()
    step(layer, x)
    after = torch.get_rng_state(), torch.get_num_threads(), torch.get_default_dtype()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
