"""The rooms below the experts: overriding the backend, products on the CPU, activations, sorting, grouped products."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shared_core import Routing, experts_forward, kernels
from shared_core.kernels import activations, assignments, cpu, cpu_experts, cpu_features, cpu_layout, grouped
from shared_core.kernels.cpu_features import CpuFeatures


@pytest.fixture
def problem() -> tuple[Tensor, Routing, Tensor, Tensor]:
    """x ``[150, 24]``, a routing to two of three experts, up and down projections."""
    generator = torch.Generator().manual_seed(0)
    x, up, down = (torch.randn(*s, generator=generator) * 0.3 for s in ((150, 24), (3, 32, 24), (3, 24, 16)))
    indices = torch.rand(150, 3, generator=generator).topk(2).indices
    return x, Routing.from_topk(indices, torch.rand(150, 2, generator=generator), num_experts=3), up, down


def test_use_backend_overrides_the_callers_choice_and_restores_it() -> None:
    device = torch.device("cpu")
    with kernels.use_backend("reference"):
        inside = kernels.resolve_backend("grouped_mm", device, torch.float32)
    assert (inside, kernels.resolve_backend("grouped_mm", device, torch.float32)) == ("reference", "grouped_mm")


def test_use_backend_restores_after_an_error() -> None:
    with pytest.raises(RuntimeError, match="inside"), kernels.use_backend("reference"):
        raise RuntimeError("inside")
    assert kernels.resolve_backend("cpu", torch.device("cpu"), torch.float32) == "cpu"


def test_use_backend_names_the_valid_backends() -> None:
    with pytest.raises(ValueError, match="unknown backend 'fast'; valid are: auto, reference, cpu, grouped_mm, triton"):
        kernels.use_backend("fast").__enter__()


def test_use_backend_changes_what_experts_run_on(
    monkeypatch: pytest.MonkeyPatch, problem: tuple[Tensor, Routing, Tensor, Tensor]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the cpu kernel ran")

    monkeypatch.setattr(cpu_experts, "forward", refuse)
    x, routing, up, down = problem
    with pytest.raises(AssertionError, match="the cpu kernel ran"):
        experts_forward(x, routing, up, down)
    with kernels.use_backend("reference"):
        assert experts_forward(x, routing, up, down).shape == x.shape


@pytest.mark.parametrize("leading", [(1,), (5,), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("onednn", [False, True])
def test_linear_is_that_of_float64(
    monkeypatch: pytest.MonkeyPatch, onednn: bool, bias: bool, dtype: torch.dtype, leading: tuple[int, ...]
) -> None:
    monkeypatch.setattr(cpu, "_onednn_first", lambda: onednn and cpu.onednn_usable())
    x, weight, b = torch.randn(*leading, 20), torch.randn(12, 20), torch.randn(12) if bias else None
    got = cpu.linear(x.to(dtype), weight.to(dtype), None if b is None else b.to(dtype))
    want = F.linear(x.double(), weight.double(), None if b is None else b.double())
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance * 5)


def test_linear_records_gradients() -> None:
    x, weight = torch.randn(4, 6, requires_grad=True), torch.randn(3, 6, requires_grad=True)
    cpu.linear(x, weight).sum().backward()
    torch.testing.assert_close(weight.grad, x.detach().sum(0).expand(3, 6))


@pytest.mark.parametrize("onednn", [False, True])
@pytest.mark.parametrize("columns", [1, 5, 40])
@pytest.mark.parametrize("turned", ["", "a", "b", "out", "a out", "a b out"])
@pytest.mark.parametrize("narrow", [False, True], ids=["float32", "widened"])
def test_product_is_a_times_b_for_all_strides(
    monkeypatch: pytest.MonkeyPatch, narrow: bool, turned: str, columns: int, onednn: bool
) -> None:
    monkeypatch.setattr(cpu, "_onednn_first", lambda: onednn and cpu.onednn_usable())
    monkeypatch.setattr(cpu, "_BLOCK", 24 * 20)  # several blocks of the widened operand
    a, b, out = torch.randn(50, 24), torch.randn(24, columns), torch.empty(50, columns)
    a, b, out = (
        t.t().contiguous().t() if name in turned.split() else t for name, t in (("a", a), ("b", b), ("out", out))
    )
    a = a.bfloat16() if narrow else a
    cpu.product(a, b, out=out)
    torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_accumulate_product_adds(dtype: torch.dtype) -> None:
    a, b, into = torch.randn(20, 8), torch.randn(8, 20), torch.randn(20, 20).to(dtype)
    want = into.double() + a.double() @ b.double()
    cpu.accumulate_product(a, b, into)
    torch.testing.assert_close(into.double(), want, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=2e-2)


def test_the_probe_rejects_an_operator_that_computes_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_onednn_linear", lambda x, weight, bias: F.linear(x, weight) + 1)
    assert cpu.onednn_usable.__wrapped__() is False


def test_the_probe_rejects_an_operator_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Tensor:
        raise RuntimeError("could not create a primitive")

    monkeypatch.setattr(cpu, "_onednn_linear", refuse)
    assert cpu.onednn_usable.__wrapped__() is False


@pytest.mark.parametrize("features", [{"onednn_fp32": True}, {"widen_bf16": False}, {"widen_bf16": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_kind_of_cpu_computes_the_same(
    monkeypatch: pytest.MonkeyPatch,
    problem: tuple[Tensor, Routing, Tensor, Tensor],
    dtype: torch.dtype,
    features: dict[str, bool],
) -> None:
    chosen = CpuFeatures(name="any", **{"onednn_fp32": False, "widen_bf16": False, **features})
    monkeypatch.setattr(cpu_layout, "cpu_features", lambda: chosen)
    monkeypatch.setattr(cpu, "_onednn_first", lambda: chosen.onednn_fp32 and cpu.onednn_usable())
    x, routing, up, down = problem
    gradients = []
    for backend, kind in (("cpu", dtype), ("reference", torch.float64)):
        leaves = [t.to(kind, copy=True).requires_grad_() for t in (x, up, down)]
        out = experts_forward(leaves[0], routing, leaves[1], leaves[2], backend=backend)
        out.backward(torch.ones_like(out))
        gradients.append([out.detach(), *[t.grad for t in leaves]])
    for got, want in zip(*gradients, strict=True):
        assert (got.double() - want).norm() / want.norm() <= (3e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize(
    ("facts", "onednn_fp32", "widen_bf16"),
    [
        ({"cpu_name": "Intel Xeon", "avx512_f": True, "avx512_bf16": True, "amx_bf16": True}, False, False),
        ({"cpu_name": "Intel Xeon", "avx512_f": True, "avx512_bf16": True, "amx_bf16": False}, False, True),
        ({"cpu_name": "Intel Core", "avx512_f": False}, False, True),
        ({"cpu_name": "AMD EPYC", "avx512_f": True, "avx512_bf16": True}, True, False),
        ({"cpu_name": "AMD EPYC", "avx512_f": False}, False, True),
    ],
    ids=["Intel with AMX", "Intel without AMX", "Intel AVX2", "AMD Zen 4", "AMD Zen 3"],
)
def test_products_follow_the_features_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch, facts: dict[str, object], onednn_fp32: bool, widen_bf16: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "x86_64", **facts}, raising=False)
    got = cpu_features.cpu_features.__wrapped__()
    assert (got.onednn_fp32, got.widen_bf16) == (onednn_fp32, widen_bf16)


def test_an_unknown_cpu_takes_the_plain_library_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert cpu_features.cpu_features.__wrapped__() == CpuFeatures(name="", onednn_fp32=False, widen_bf16=False)


@pytest.mark.parametrize("name", activations.ACTIVATIONS)
def test_activation_gradients_are_those_of_autograd(name: str) -> None:
    z = torch.linspace(-4, 4, 101, dtype=torch.float64, requires_grad=True)
    grad = torch.linspace(1, 2, 101, dtype=torch.float64)
    (want,) = torch.autograd.grad(activations.activate(name, z), z, grad)
    torch.testing.assert_close(activations.activation_gradient(name, z.detach(), grad), want)


@pytest.mark.parametrize("num_experts", [3, 300, 40000])
def test_sorting_groups_assignments_by_expert_in_stable_order(num_experts: int) -> None:
    indices = torch.randint(num_experts + 1, (50, 4), generator=torch.Generator().manual_seed(1))
    order, bounds = assignments.sort_by_expert(indices, num_experts)
    flat = indices.flatten().tolist()
    assert order.tolist() == sorted(range(200), key=lambda position: flat[position])
    assert bounds.tolist() == [sum(expert < limit for expert in flat) for limit in range(num_experts + 1)]


@pytest.mark.parametrize(
    ("a", "b", "accepted"),
    [
        (torch.zeros(4, 8), torch.zeros(2, 8, 16), True),
        (torch.zeros(4, 8).double(), torch.zeros(2, 8, 16).double(), False),
        (torch.zeros(4, 7), torch.zeros(2, 7, 16), False),
        (torch.zeros(1, 8).expand(4, 8), torch.zeros(2, 8, 16), False),
        (torch.zeros(4, 8, device="meta"), torch.zeros(2, 8, 16, device="meta"), False),
    ],
    ids=["aligned", "float64", "row stride of 28 bytes", "expanded", "meta"],
)
def test_grouped_products_are_left_to_torch_only_where_it_takes_them(a: Tensor, b: Tensor, accepted: bool) -> None:
    assert grouped.accepts(a, b) is accepted


@pytest.mark.parametrize("width", [8, 7], ids=["torch's product", "loop"])
def test_both_grouped_products_are_those_of_every_expert(width: int) -> None:
    rows, matrices, bounds = torch.randn(10, width), torch.randn(3, width, 16), torch.tensor([0, 4, 4, 9])
    got = grouped.rows_times_experts(rows, matrices, bounds)[:9]
    torch.testing.assert_close(got, torch.cat([rows[:4] @ matrices[0], rows[4:9] @ matrices[2]]))
    right = torch.randn(10, 16)
    stacked = grouped.rows_times_rows(rows, right, bounds)
    want = torch.stack([rows[:4].t() @ right[:4], torch.zeros(width, 16), rows[4:9].t() @ right[4:9]])
    torch.testing.assert_close(stacked, want)
