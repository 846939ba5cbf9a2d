"""The fused gate on a CUDA device: what the interpreter cannot show."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shared_core import load_balance_loss, route

pytest.importorskip("triton")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def cuda_logits() -> Tensor:
    """``[4096, 128]`` on the device, with a gradient."""
    return torch.randn(4096, 128, generator=torch.Generator().manual_seed(0)).cuda().requires_grad_()


def step(logits: Tensor) -> Tensor:
    """Forward and backward of a router's loss."""
    logits.grad = None
    routing = route(logits, 8, renormalize=True)
    (routing.weights.square().sum() + load_balance_loss(routing)).backward()
    return routing.weights.detach()


def test_auto_takes_the_kernel(monkeypatch: pytest.MonkeyPatch, cuda_logits: Tensor) -> None:
    from shared_core.kernels.triton import gating

    def refuse(*_: object) -> None:
        raise AssertionError("the kernel ran")

    monkeypatch.setattr(gating, "forward", refuse)
    with pytest.raises(AssertionError, match="the kernel ran"):
        route(cuda_logits.detach(), 8)


def test_a_step_never_waits(cuda_logits: Tensor) -> None:
    step(cuda_logits)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(cuda_logits)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_two_steps_agree_to_the_bit(cuda_logits: Tensor) -> None:
    first, first_grad = step(cuda_logits), cuda_logits.grad.clone()
    assert torch.equal(first, step(cuda_logits))
    assert torch.equal(first_grad, cuda_logits.grad)


def test_the_gate_is_captured_in_a_graph(cuda_logits: Tensor) -> None:
    logits = cuda_logits.detach()
    route(logits, 8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = route(logits, 8)
    logits.copy_(torch.randn_like(logits))
    graph.replay()
    assert torch.equal(captured.indices, route(logits, 8).indices)
