"""The comparisons that are made on a new device before anything is timed: they hold, and they see wrong results."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from shared_core.bench.cases import Shape
from shared_core.bench.parity import TOLERANCES, Parity, experts_parity, gate_parity
from shared_core.kernels import cpu_experts

TINY = Shape("tiny", num_experts=6, top_k=2, hidden_size=40, intermediate_size=28)


def test_the_fused_gate_agrees_with_torch_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = list(gate_parity(device, rows=65, num_experts=12, top_k=3))
    assert len({each.what for each in found}) == 28  # seven ways to route, four results each
    assert [each for each in found if not each.holds] == []


def test_a_gate_that_weights_wrongly_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from shared_core.kernels.triton import gating

    right = gating.forward

    def wrong(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        indices, weights, scores = right(*arguments)
        return indices, weights * 1.001, scores

    monkeypatch.setattr(gating, "forward", wrong)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = list(gate_parity(device, rows=65, num_experts=12, top_k=3))
    assert {each.what.split(": ")[1] for each in found if not each.holds} == {"weights"}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_experts_agree_with_the_wider_reference(dtype: torch.dtype) -> None:
    found = list(experts_parity("cpu", dtype, TINY, rows=23, backend="grouped_mm"))
    assert len(found) == 24  # output and four or six gradients in four variants
    assert [each for each in found if not each.holds] == []


def test_an_expert_gradient_that_is_slightly_wrong_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = cpu_experts.backward

    def wrong(*arguments: Any, **keywords: Any) -> tuple[Tensor | None, ...]:
        dx, *others = right(*arguments, **keywords)
        return (dx * 1.001, *others)

    monkeypatch.setattr(cpu_experts, "backward", wrong)
    found = experts_parity("cpu", torch.float32, TINY, rows=23, backend="cpu", variants=("SwiGLU",))
    assert [each.what for each in found if not each.holds] == ["experts float32, SwiGLU: gradient of x"]


def test_nan_does_not_hold() -> None:
    assert not Parity("", math.nan, 1.0).holds
