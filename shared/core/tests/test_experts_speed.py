"""Guards against gross slowness: ratios to transformers in one process, by the CPU time of the thread.

The thresholds leave room for a busy machine; the measurement itself is ``benchmarks/bench_experts.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from shared_core import GroupedExperts, Routing

HIDDEN, INNER, EXPERTS, SLOTS = 256, 128, 32, 4


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _contestants(rows: int, backward: bool, peer: str) -> tuple[Callable[[], None], Callable[[], None]]:
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS, num_experts_per_tok=SLOTS
    )
    config._experts_implementation = peer
    theirs, ours = Qwen3MoeExperts(config), GroupedExperts(HIDDEN, INNER, EXPERTS)
    theirs.load_state_dict(ours.state_dict())
    generator = torch.Generator().manual_seed(0)
    indices = torch.rand(rows, EXPERTS, generator=generator).topk(SLOTS).indices
    weights = torch.rand(rows, SLOTS, generator=generator)
    routing = Routing.from_topk(indices, weights, num_experts=EXPERTS)
    x = torch.randn(rows, HIDDEN, generator=generator, requires_grad=backward)

    def step(module: nn.Module, call: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            with torch.set_grad_enabled(backward):
                out = call()
                if backward:
                    module.zero_grad(set_to_none=True)
                    out.sum().backward()

        return run

    return step(ours, lambda: ours(x, routing)), step(theirs, lambda: theirs(x, indices, weights))


def _speed_ratio(rows: int, backward: bool, peer: str) -> float:
    """Peer's best thread CPU time over ours, interleaved."""
    contestants = _contestants(rows, backward, peer)
    best = [float("inf")] * 2
    for _ in range(12):
        for position, run in enumerate(contestants):
            start = time.thread_time()
            run()
            best[position] = min(best[position], time.thread_time() - start)
    return best[1] / best[0]


@pytest.mark.parametrize("rows", [1, 8])
def test_decoding_does_not_copy_matrices_for_each_assignment(rows: int) -> None:
    assert _speed_ratio(rows, backward=False, peer="batched_mm") > 1


def test_backward_does_not_create_a_gradient_of_all_experts_for_each_expert() -> None:
    assert _speed_ratio(64, backward=True, peer="eager") > 2


@pytest.mark.parametrize("rows", [1, 8, 256])
def test_forward_keeps_pace_with_the_grouped_product(rows: int) -> None:
    assert _speed_ratio(rows, backward=False, peer="grouped_mm") > 0.7


def test_training_keeps_pace_with_the_grouped_product() -> None:
    assert _speed_ratio(256, backward=True, peer="grouped_mm") > 0.7
