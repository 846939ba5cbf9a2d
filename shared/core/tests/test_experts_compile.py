"""Experts under ``torch.compile``: one graph, the eager numbers, and no compilation for each number of rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode

from shared_core import GroupedExperts, Routing, kernels
from shared_core.kernels import ops

BACKENDS = ["auto", "reference", "cpu", "grouped_mm"]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _inputs(rows: int) -> tuple[Tensor, Routing]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 16, generator=generator, requires_grad=True)
    indices = torch.rand(rows, 7, generator=generator).topk(3).indices  # 6 is the sentinel
    weights = torch.rand(rows, 3, generator=generator).masked_fill(indices == 6, 0.0).requires_grad_()
    return x, Routing(indices, weights, None, None, 6)


def _outcome(function: torch.nn.Module, module: torch.nn.Module, rows: int) -> list[Tensor]:
    """Output and every gradient."""
    x, routing = _inputs(rows)
    module.zero_grad()
    out = function(x, routing)
    out.square().sum().backward()
    return [out.detach(), *[t.grad.clone() for t in (x, routing.weights, *module.parameters())]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_graph_computes_what_eager_computes(backend: str) -> None:
    module = GroupedExperts(16, 24, 6, bias=True, backend=backend)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for got, want in zip(_outcome(compiled, module, 9), _outcome(module, module, 9), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("backend", ["cpu", "grouped_mm"])
def test_a_changed_number_of_rows_recompiles_at_most_once(backend: str) -> None:
    module = GroupedExperts(16, 24, 6, backend=backend)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    for rows in (5, 9, 14, 40):
        _outcome(compiled, module, rows)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("recompute", [False, True])
def test_recompute_is_kept_under_compile(recompute: bool) -> None:
    module = GroupedExperts(16, 24, 6, recompute=recompute)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for got, want in zip(_outcome(compiled, module, 9), _outcome(module, module, 9), strict=True):
        torch.testing.assert_close(got, want)


def test_inductor_code_computes_what_eager_computes() -> None:
    module = GroupedExperts(16, 24, 6)
    x, routing = _inputs(9)
    with torch.no_grad():
        got = torch.compile(module, fullgraph=True)(x, routing)
        torch.testing.assert_close(got, module(x, routing))


def test_use_backend_reaches_compiled_code() -> None:
    module = GroupedExperts(16, 24, 6)
    compiled = torch.compile(module, fullgraph=True, backend=(counter := CompileCounterWithBackend("aot_eager")))
    x, routing = _inputs(9)
    want = compiled(x, routing)
    with kernels.use_backend("reference"):
        torch.testing.assert_close(compiled(x, routing), want)
    assert counter.frame_count == 2  # another backend is another graph


@pytest.mark.parametrize("backend", ["cpu", "grouped_mm"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck itself looks at it
def test_the_operator_passes_torchs_own_checks(backend: str, training: bool) -> None:
    x, routing = _inputs(9)
    up, down = torch.randn(6, 48, 16), torch.randn(6, 16, 24)
    tensors = [t.detach().requires_grad_(training) for t in (x, routing.weights, up, down)]
    x, weights, up, down = tensors
    flags = ("silu", True, False, backend, training, training)
    arguments = (x, routing.indices, weights, up, down, None, None, *flags)
    torch.library.opcheck(ops._forward_op, arguments)


def test_fake_tensors_get_shapes_without_any_computation() -> None:
    with FakeTensorMode():
        module = GroupedExperts(16, 24, 6)
        routing = Routing(torch.zeros(9, 3, dtype=torch.int64), torch.ones(9, 3), None, None, 6)
        out = module(torch.empty(9, 16), routing)
    assert out.shape == (9, 16)
