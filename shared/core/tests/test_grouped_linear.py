"""One matrix per expert on sorted rows, against a loop of plain products and PyTorch's autograd."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from shared_core.kernels import cpu_features
from shared_core.kernels import grouped_linear as module
from shared_core.kernels.grouped_linear import grouped_linear

BACKENDS = ["reference", "cpu", "grouped_mm"]
H, D = 24, 16


@pytest.fixture(params=[False, True], ids=["plain", "transposed"])
def transposed(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def problem(
    counts: list[int],
    behind: int = 0,
    *,
    transposed: bool = False,
    dtype: torch.dtype = torch.float32,
    h: int = H,
    d: int = D,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, offsets and bias for so many rows of each expert and so many behind them."""
    generator = torch.Generator().manual_seed(0)
    rows, experts = sum(counts) + behind, len(counts)
    shape = (experts, h, d) if transposed else (experts, d, h)
    x, weight, bias = (
        (0.3 * torch.randn(*size, generator=generator)).to(dtype).requires_grad_()
        for size in ((rows, h), shape, (experts, d))
    )
    return x, weight, torch.tensor([0, *counts]).cumsum(0), bias


def loop(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    limits = offsets.tolist()
    parts = [
        F.linear(x[start:stop], matrix.t() if transposed else matrix, None if bias is None else bias[e])
        for e, (matrix, start, stop) in enumerate(zip(weight, limits[:-1], limits[1:], strict=True))
    ]
    return torch.cat([*parts, 0.0 * parts[0].new_zeros(x.shape[0] - limits[-1], parts[0].shape[1])])


def outcome(y: Tensor, *inputs: Tensor) -> list[Tensor]:
    weighting = torch.randn(y.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64).to(y.dtype)
    return [y.detach(), *torch.autograd.grad((y * weighting).sum(), inputs)]


def assert_same(ours: list[Tensor], theirs: list[Tensor], share: float) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0.0, atol=share * float(b.abs().max()) + 1e-30, check_dtype=False)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
def test_output_and_every_gradient_are_those_of_a_loop(backend: str, with_bias: bool, transposed: bool) -> None:
    x, weight, offsets, bias = problem([5, 0, 9, 1], behind=3, transposed=transposed)
    inputs = (x, weight, bias) if with_bias else (x, weight)
    ours = outcome(grouped_linear(x, weight, offsets, *inputs[2:], transposed=transposed, backend=backend), *inputs)
    theirs = outcome(loop(x, weight, offsets, bias if with_bias else None, transposed), *inputs)
    assert_same(ours, theirs, 1e-6)


@pytest.mark.parametrize("backend", ["cpu", "grouped_mm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_products_are_those_of_a_loop(
    backend: str, dtype: torch.dtype, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Large enough for the CPU's own way, on any CPU.
    monkeypatch.setattr(module, "_SMALL", 1)
    x, weight, offsets, bias = problem([70, 0, 130], behind=5, transposed=transposed, dtype=dtype)
    ours = outcome(grouped_linear(x, weight, offsets, bias, transposed=transposed, backend=backend), x, weight, bias)
    wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    theirs = outcome(loop(wide[0], wide[1], offsets, wide[2], transposed), *wide)
    assert_same(ours, theirs, 1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("widen", [False, True])
def test_bfloat16_does_not_depend_on_how_the_cpu_multiplies(
    widen: bool, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = cpu_features.CpuFeatures(name="any", onednn_fp32=False, widen_bf16=widen)
    monkeypatch.setattr("shared_core.kernels.cpu_layout.cpu_features", lambda: facts)
    x, weight, offsets, bias = problem([64, 80], transposed=transposed, dtype=torch.bfloat16)
    ours = outcome(grouped_linear(x, weight, offsets, bias, transposed=transposed), x, weight, bias)
    wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    assert_same(ours, outcome(loop(wide[0], wide[1], offsets, wide[2], transposed), *wide), 2e-2)


@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    behind=st.integers(0, 3),
    backend=st.sampled_from(BACKENDS),
    transposed=st.booleans(),
)
def test_any_loads_give_what_a_loop_gives(counts: list[int], behind: int, backend: str, transposed: bool) -> None:
    x, weight, offsets, bias = problem(counts, behind, transposed=transposed)
    ours = grouped_linear(x, weight, offsets, bias, transposed=transposed, backend=backend)
    torch.testing.assert_close(ours, loop(x, weight, offsets, bias, transposed), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_behind_the_last_expert_are_zero_and_reach_nothing(backend: str) -> None:
    x, weight, offsets, bias = problem([2, 3], behind=4)
    with torch.no_grad():
        x[5:] = float("nan")  # padding may hold anything
    y = grouped_linear(x, weight, offsets, bias, backend=backend)
    dx, dweight, dbias = torch.autograd.grad(y.square().sum(), (x, weight, bias))
    assert bool((y[5:] == 0).all())
    assert bool((dx[5:] == 0).all())
    assert bool(dweight.isfinite().all() & dbias.isfinite().all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradcheck_in_float64(backend: str, transposed: bool) -> None:
    x, weight, offsets, bias = problem([2, 0, 3], behind=1, transposed=transposed, dtype=torch.float64, h=3, d=2)
    function = lambda *t: grouped_linear(t[0], t[1], offsets, t[2], transposed=transposed, backend=backend)  # noqa: E731
    assert torch.autograd.gradcheck(function, (x, weight, bias))


def test_the_reference_can_be_differentiated_twice() -> None:
    x, weight, offsets, bias = problem([2, 1], dtype=torch.float64, h=3, d=2)
    function = lambda *t: grouped_linear(t[0], t[1], offsets, t[2], backend="reference").square()  # noqa: E731
    assert torch.autograd.gradgradcheck(function, (x, weight, bias))


@pytest.mark.parametrize("backend", ["cpu", "grouped_mm"])
def test_a_second_derivative_is_refused_elsewhere(backend: str) -> None:
    x, weight, offsets, _ = problem([2, 1])
    y = grouped_linear(x, weight, offsets, backend=backend).square().sum()
    (dx,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(NotImplementedError, match="use backend='reference' where second derivatives are needed"):
        torch.autograd.grad(dx.sum(), weight)


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_compiled_graph_has_the_output_and_gradients_of_eager(backend: str, transposed: bool) -> None:
    x, weight, offsets, bias = problem([5, 0, 9], behind=2, transposed=transposed)
    function = lambda x, offsets: grouped_linear(x, weight, offsets, bias, transposed=transposed, backend=backend)  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    ours, theirs = (outcome(f(x, offsets), x, weight, bias) for f in (compiled, function))
    assert_same(ours, theirs, 1e-6)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck's own look at one
def test_the_operators_keep_what_torch_library_asks_of_them(transposed: bool) -> None:
    x, weight, offsets, bias = problem([2, 0, 3], behind=1, transposed=transposed)
    for given_bias in (bias, None):
        torch.library.opcheck(module._forward_op, (x, weight, offsets, given_bias, transposed, "cpu"))


def test_fake_tensors_give_the_shape() -> None:
    with FakeTensorMode():
        y = grouped_linear(torch.empty(7, H), torch.empty(3, D, H), torch.empty(4, dtype=torch.int64))
    assert y.shape == (7, D)


def test_autocast_decides_the_dtype() -> None:
    x, weight, offsets, bias = problem([4, 4])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = grouped_linear(x, weight, offsets, bias)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert (x.grad.dtype, weight.grad.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(y.float(), loop(x, weight, offsets, bias, False), rtol=2e-2, atol=2e-2)


def test_an_expanded_gradient_is_taken() -> None:
    x, weight, offsets, _ = problem([4, 4])
    grouped_linear(x, weight, offsets).sum().backward()
    torch.testing.assert_close(x.grad[:4], weight[0].sum(0).expand(4, H))


def test_no_matrix_is_copied(transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, offsets, _ = problem([4, 4], transposed=transposed)
    seen = []
    original = module.rows_times_experts
    monkeypatch.setattr(module, "rows_times_experts", lambda a, b, c: seen.append(b.data_ptr()) or original(a, b, c))
    grouped_linear(x, weight, offsets, transposed=transposed)
    assert seen == [weight.data_ptr()]


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (
            {"x": torch.zeros(3, 5)},
            ValueError,
            r"x must be \[N, 4\] for weight \[E, D, H\] = \[2, 6, 4\], got \[3, 5\]",
        ),
        ({"x": torch.zeros(3, 4).long()}, TypeError, "x must be floating point, got torch.int64"),
        ({"x": [1.0]}, TypeError, "x must be a torch.Tensor, got list"),
        ({"x": torch.zeros(3, 4).double()}, TypeError, "x is torch.float64 but weight is torch.float32"),
        ({"weight": torch.zeros(6, 4)}, ValueError, r"weight must be stacked matrices \[E, D, H\], got \[6, 4\]"),
        ({"offsets": torch.tensor([0, 1])}, ValueError, r"offsets must be \[E \+ 1\] = \[3\], got \[2\]"),
        ({"offsets": torch.tensor([0, 1, 3]).int()}, TypeError, "offsets must be int64, got torch.int32"),
        ({"offsets": torch.tensor([0, 2, 1])}, ValueError, "offsets must ascend from 0 to at most N=3"),
        ({"offsets": torch.tensor([1, 2, 3])}, ValueError, "offsets must ascend from 0 to at most N=3"),
        ({"offsets": torch.tensor([0, 2, 4])}, ValueError, "offsets must ascend from 0 to at most N=3"),
        ({"bias": torch.zeros(2, 5)}, ValueError, r"bias must be \[E, D\] = \[2, 6\], got \[2, 5\]"),
        ({"bias": torch.zeros(2, 6).bfloat16()}, TypeError, "x is torch.float32 but bias is torch.bfloat16"),
        ({"backend": "fast"}, ValueError, "unknown backend 'fast'"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, object], kind: type[Exception], message: str) -> None:
    given = {"x": torch.zeros(3, 4), "weight": torch.zeros(2, 6, 4), "offsets": torch.tensor([0, 1, 3])} | change
    with pytest.raises(kind, match=message):
        grouped_linear(**given)  # type: ignore[arg-type]
