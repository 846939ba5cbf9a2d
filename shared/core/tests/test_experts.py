"""Experts against a dense float64 reference written here, which knows nothing of sorting, kernels or saved tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shared_core import GroupedExperts, Routing, experts_forward, route

BACKENDS = ["reference", "cpu", "grouped_mm"]
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 4e-2, torch.float64: 1e-12}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda z: z / (1 + torch.exp(-z)),
    "gelu": lambda z: z * 0.5 * (1 + torch.erf(z / 2**0.5)),
    "gelu_tanh": lambda z: 0.5 * z * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (z + 0.044715 * z**3))),
    "relu": lambda z: z.clamp(min=0),
    "relu2": lambda z: z.clamp(min=0) ** 2,
}


class Problem:
    """Random tensors of one expert layer and what a dense float64 evaluation of it gives."""

    def __init__(
        self,
        *,
        sizes: tuple[int, int, int, int, int] = (23, 3, 6, 40, 28),
        dtype: torch.dtype = torch.float32,
        gated: bool = True,
        bias: bool = False,
        activation: str = "silu",
        weight_input: bool = False,
        indices: Tensor | None = None,
        seed: int = 0,
    ) -> None:
        rows, slots, experts, hidden, inner = sizes
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)

        if indices is None:  # E is among the choices: some slots hold the sentinel
            indices = torch.rand(rows, experts + 1, generator=generator).topk(min(slots, experts + 1)).indices
        self.indices, self.num_experts = indices, experts
        weights = torch.rand(indices.shape, generator=generator, dtype=torch.float64)
        width = 2 * inner if gated else inner
        self.tensors: dict[str, Tensor | None] = {
            "x": draw(rows, hidden),
            "weights": weights.masked_fill(indices == experts, 0.0).to(
                torch.float64 if dtype == torch.float64 else torch.float32
            ),
            "up": draw(experts, width, hidden, scale=hidden**-0.5),
            "down": draw(experts, hidden, inner, scale=inner**-0.5),
            "up_bias": draw(experts, width, scale=0.3) if bias else None,
            "down_bias": draw(experts, hidden, scale=0.3) if bias else None,
        }
        self.grad = draw(rows, hidden)
        self.formula = {"activation": activation, "gated": gated, "weight_input": weight_input}

    def leaves(self) -> dict[str, Tensor | None]:
        return {n: None if t is None else t.clone().requires_grad_() for n, t in self.tensors.items()}

    def run(self, leaves: dict[str, Tensor | None], **options: object) -> Tensor:
        x, weights, up, down, up_bias, down_bias = leaves.values()
        routing = Routing(self.indices, weights, None, None, self.num_experts)
        return experts_forward(x, routing, up, down, up_bias=up_bias, down_bias=down_bias, **self.formula, **options)

    def dense(self, leaves: dict[str, Tensor | None]) -> Tensor:
        """Every expert on every row and slot, then a one-hot selection."""
        x, weights, up, down, up_bias, down_bias = leaves.values()
        chosen = F.one_hot(self.indices, self.num_experts + 1)[..., :-1].to(x.dtype)  # [R, k, E]
        inputs = torch.einsum("rh,rk->rkh", x, weights if self.formula["weight_input"] else torch.ones_like(weights))
        z = torch.einsum("rkh,ejh->rkej", inputs, up) + (0 if up_bias is None else up_bias)
        act = ACTIVATIONS[str(self.formula["activation"])]
        if self.formula["gated"]:
            half = z.shape[-1] // 2
            z = act(z[..., :half]) * z[..., half:]
        else:
            z = act(z)
        y = torch.einsum("rkei,edi->rked", z, down) + (0 if down_bias is None else down_bias)
        factor = chosen if self.formula["weight_input"] else chosen * weights.unsqueeze(-1)
        return torch.einsum("rked,rke->rd", y, factor)

    def expected(self) -> dict[str, Tensor]:
        leaves = {
            n: None if t is None else t.to(torch.float64, copy=True).requires_grad_() for n, t in self.tensors.items()
        }
        out = self.dense(leaves)
        out.backward(self.grad.double())
        gradients = {n: t.grad for n, t in leaves.items() if t is not None}
        # The weight of "no expert" is no parameter: its derivative is 0 in every backend and in the formula.
        return {"out": out.detach(), **gradients}

    def observed(self, **options: object) -> dict[str, Tensor]:
        leaves = self.leaves()
        out = self.run(leaves, **options)
        out.backward(self.grad)
        return {"out": out.detach(), **{n: t.grad for n, t in leaves.items() if t is not None}}


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm().clamp(min=1e-30))


def assert_matches(problem: Problem, tolerance: float, **options: object) -> None:
    want, got = problem.expected(), problem.observed(**options)
    errors = {name: relative_error(got[name], want[name]) for name in want}
    assert max(errors.values()) <= tolerance, errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("gated", [False, True], ids=["two-layer", "gated"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_output_and_every_gradient_match_the_dense_formula(
    backend: str, gated: bool, bias: bool, dtype: torch.dtype
) -> None:
    assert_matches(Problem(dtype=dtype, gated=gated, bias=bias), TOLERANCE[dtype], backend=backend)


@pytest.mark.parametrize("gated", [False, True], ids=["two-layer", "gated"])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_activation_matches_its_formula(backend: str, activation: str, gated: bool) -> None:
    assert_matches(Problem(activation=activation, gated=gated), 3e-5, backend=backend)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_weight_on_the_input_matches_the_dense_formula(backend: str, dtype: torch.dtype, bias: bool) -> None:
    assert_matches(Problem(dtype=dtype, bias=bias, weight_input=True), TOLERANCE[dtype], backend=backend)


@pytest.mark.parametrize("weight_input", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_recomputed_pre_activations_give_the_same_gradients(backend: str, weight_input: bool) -> None:
    problem = Problem(bias=True, weight_input=weight_input)
    assert_matches(problem, 3e-5, backend=backend, recompute=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "sizes",
    [(9, 2, 8, 48, 32), (60, 2, 8, 48, 32), (200, 2, 8, 48, 32), (500, 2, 8, 48, 32), (300, 2, 8, 16, 1032)],
    ids=["2 rows an expert", "15", "50", "125", "75, long"],
)
def test_cpu_layouts_for_all_loads_match_the_dense_formula(
    sizes: tuple[int, int, int, int, int], dtype: torch.dtype
) -> None:
    assert_matches(Problem(sizes=sizes, dtype=dtype, bias=True), TOLERANCE[dtype], backend="cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("rows", [1, 2, 5, 30, 400])
@pytest.mark.parametrize("backend", BACKENDS)
def test_inference_matches_the_dense_formula(backend: str, rows: int, bias: bool, dtype: torch.dtype) -> None:
    problem = Problem(sizes=(rows, 3, 6, 40, 28), bias=bias, dtype=dtype)
    with torch.no_grad():
        got = problem.run(problem.tensors, backend=backend)
    assert relative_error(got, problem.expected()["out"]) <= TOLERANCE.get(dtype, 4e-3)


@pytest.mark.parametrize("backend", BACKENDS)
@given(data=st.data())
def test_any_sizes_and_any_routing_match_the_dense_formula(backend: str, data: st.DataObject) -> None:
    rows, experts = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 7))
    slots = data.draw(st.integers(1, experts + 1))
    hidden, inner = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    row = st.permutations(range(experts + 1)).map(lambda order: order[:slots])
    indices = torch.tensor(data.draw(st.lists(row, min_size=rows, max_size=rows)))
    gated, bias, weight_input = (data.draw(st.booleans()) for _ in range(3))
    problem = Problem(
        sizes=(rows, slots, experts, hidden, inner),
        dtype=torch.float64,
        gated=gated,
        bias=bias,
        weight_input=weight_input,
        indices=indices,
    )
    assert_matches(problem, 1e-10, backend=backend)


@pytest.mark.parametrize("weight_input", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradcheck_passes_in_float64(backend: str, weight_input: bool) -> None:
    problem = Problem(sizes=(5, 2, 3, 4, 3), dtype=torch.float64, bias=True, weight_input=weight_input)
    leaves = problem.leaves()

    def function(*tensors: Tensor) -> Tensor:
        return problem.run(dict(zip(leaves, tensors, strict=True)), backend=backend)

    assert torch.autograd.gradcheck(function, tuple(leaves.values()))


@pytest.mark.parametrize("backend", ["cpu", "grouped_mm"])
def test_a_second_derivative_is_refused_with_the_way_out(backend: str) -> None:
    problem = Problem()
    leaves = problem.leaves()
    (first,) = torch.autograd.grad(problem.run(leaves, backend=backend).square().sum(), leaves["x"], create_graph=True)
    with pytest.raises(NotImplementedError, match="use backend='reference' where second derivatives are needed"):
        first.sum().backward()


def test_the_reference_has_second_derivatives() -> None:
    problem = Problem(sizes=(3, 2, 3, 3, 2), dtype=torch.float64)
    x = problem.tensors["x"].clone().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda t: problem.run({**problem.tensors, "x": t}, backend="reference"), (x,))


@pytest.mark.parametrize("backend", BACKENDS)
def test_zero_rows_give_zero_rows_and_zero_gradients(backend: str) -> None:
    problem = Problem(sizes=(0, 2, 3, 8, 4), bias=True, indices=torch.empty(0, 2, dtype=torch.int64))
    got = problem.observed(backend=backend)
    assert got["out"].shape == (0, 8)
    assert all(got[name].abs().sum() == 0 for name in ("up", "down", "up_bias", "down_bias"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "indices",
    [torch.tensor([[1, 4]]), torch.full((70, 1), 2), torch.tensor([[0], [4], [4], [0]]), torch.tensor([[3, 0, 1, 2]])],
    ids=["one row", "all rows to one expert", "idle experts and sentinels", "every expert"],
)
def test_extreme_loads_match_the_dense_formula(backend: str, indices: Tensor) -> None:
    problem = Problem(sizes=(indices.shape[0], indices.shape[1], 4, 24, 16), bias=True, indices=indices)
    assert_matches(problem, 3e-5, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_expert_is_a_plain_network(backend: str) -> None:
    problem = Problem(sizes=(7, 1, 1, 12, 8), indices=torch.zeros(7, 1, dtype=torch.int64))
    x, weights, up, down, *_ = problem.tensors.values()
    gate, value = F.linear(x, up[0]).chunk(2, -1)
    want = weights * F.linear(F.silu(gate) * value, down[0])
    torch.testing.assert_close(problem.run(problem.tensors, backend=backend), want)


@pytest.mark.parametrize("rows", [1, 3, 90])
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_sentinels_are_exactly_zero_whatever_they_hold(backend: str, rows: int) -> None:
    problem = Problem(sizes=(rows, 2, 3, 16, 8), bias=True, indices=torch.full((rows, 2), 3))
    x = torch.full_like(problem.tensors["x"], torch.nan)
    out = problem.run({**problem.tensors, "x": x}, backend=backend)
    assert torch.equal(out, torch.zeros(rows, 16))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_nan_row_does_not_reach_its_neighbours(backend: str) -> None:
    problem = Problem()
    clean = problem.run(problem.tensors, backend=backend)
    x = problem.tensors["x"].clone()
    x[4] = torch.nan
    spoiled = problem.run({**problem.tensors, "x": x}, backend=backend)
    others = torch.arange(x.shape[0]) != 4
    torch.testing.assert_close(spoiled[others], clean[others])


@pytest.mark.parametrize("backend", BACKENDS)
def test_idle_experts_get_a_gradient_of_exact_zeros(backend: str) -> None:
    problem = Problem(sizes=(20, 1, 4, 24, 16), indices=torch.ones(20, 1, dtype=torch.int64), bias=True)
    got = problem.observed(backend=backend)
    assert all(got[name][[0, 2, 3]].abs().max() == 0 for name in ("up", "down", "up_bias", "down_bias"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [13, 40], ids=["strides that grouped_mm refuses", "aligned"])
def test_an_expanded_gradient_is_accepted(backend: str, width: int) -> None:
    problem = Problem(sizes=(6, 2, 3, width, 5))
    problem.grad = torch.ones(6, width)
    want = problem.expected()
    leaves = problem.leaves()
    problem.run(leaves, backend=backend).sum().backward()
    assert relative_error(leaves["up"].grad, want["up"]) <= 3e-5


@pytest.mark.parametrize("rows", [4, 200])
@pytest.mark.parametrize("backend", BACKENDS)
def test_non_contiguous_rows_and_matrices_match_contiguous_ones(backend: str, rows: int) -> None:
    problem = Problem(sizes=(rows, 3, 6, 40, 28))
    want = problem.expected()
    strided = {
        "x": problem.tensors["x"].t().contiguous().t(),
        "up": problem.tensors["up"].transpose(1, 2).contiguous().transpose(1, 2),
        "down": problem.tensors["down"].repeat(1, 1, 2)[:, :, : problem.tensors["down"].shape[2]],
    }
    leaves = {**problem.leaves(), **{name: tensor.detach().requires_grad_() for name, tensor in strided.items()}}
    out = problem.run(leaves, backend=backend)
    out.backward(problem.grad)
    errors = [relative_error(out.detach(), want["out"])] + [
        relative_error(leaves[name].grad, want[name]) for name in strided
    ]
    assert max(errors) <= 3e-5


@pytest.mark.parametrize("needed", ["x", "weights", "up", "down", "up_bias", "down_bias"])
@pytest.mark.parametrize("backend", ["cpu", "grouped_mm"])
def test_a_single_required_gradient_is_computed_alone(backend: str, needed: str) -> None:
    problem = Problem(bias=True)
    leaves = {n: t if n != needed else t.clone().requires_grad_() for n, t in problem.tensors.items()}
    problem.run(leaves, backend=backend).backward(problem.grad)
    assert relative_error(leaves[needed].grad, problem.expected()[needed]) <= 3e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_leading_dimensions_are_rows_in_row_major_order(backend: str) -> None:
    problem = Problem(sizes=(24, 2, 4, 16, 8))
    flat = problem.run(problem.tensors, backend=backend)
    shaped = problem.run({**problem.tensors, "x": problem.tensors["x"].view(2, 3, 4, 16)}, backend=backend)
    assert torch.equal(shaped.view(24, 16), flat)


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_computes_in_its_dtype_and_returns_gradients_in_theirs(backend: str) -> None:
    problem = Problem(bias=True)
    leaves = problem.leaves()
    with torch.autocast("cpu", torch.bfloat16):
        out = problem.run(leaves, backend=backend)
    out.backward(problem.grad.to(out.dtype))
    assert out.dtype == torch.bfloat16
    assert {t.grad.dtype for t in leaves.values()} == {torch.float32}
    want = problem.expected()
    assert max(relative_error(t.grad, want[n]) for n, t in leaves.items()) <= 4e-2


@pytest.mark.parametrize("backend", ["cpu", "grouped_mm"])
def test_a_backward_pass_inside_autocast_does_not_narrow_float32(backend: str) -> None:
    problem = Problem()
    leaves = problem.leaves()
    out = problem.run(leaves, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        out.backward(problem.grad)
    assert relative_error(leaves["up"].grad, problem.expected()["up"]) <= 3e-5


@pytest.mark.parametrize("backend", ["cpu", "grouped_mm"])
def test_checkpointing_gives_the_same_gradients(backend: str) -> None:
    problem = Problem()
    leaves = problem.leaves()
    checkpoint(lambda: problem.run(leaves, backend=backend), use_reentrant=False).backward(problem.grad)
    want = problem.expected()
    assert max(relative_error(t.grad, want[n]) for n, t in leaves.items() if t is not None) <= 3e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_functional_gradients_equal_those_of_backward(backend: str) -> None:
    problem = Problem(sizes=(9, 2, 4, 16, 12))
    module = GroupedExperts(16, 12, 4, backend=backend)
    routing = Routing(problem.indices, problem.tensors["weights"], None, None, 4)
    x = problem.tensors["x"]

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(module, parameters, (x, routing)).square().sum()

    functional = torch.func.grad(loss)(dict(module.named_parameters()))
    module(x, routing).square().sum().backward()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(functional[name], parameter.grad)


@pytest.mark.parametrize("backend", ["cpu", "grouped_mm"])
def test_inference_mode_gives_the_values_of_no_grad(backend: str) -> None:
    problem = Problem()
    with torch.no_grad():
        want = problem.run(problem.tensors, backend=backend)
    with torch.inference_mode():
        got = problem.run(problem.tensors, backend=backend)
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["cpu", "grouped_mm"])
def test_accumulated_gradients_are_the_sum_in_the_same_memory(backend: str, dtype: torch.dtype) -> None:
    problem = Problem(sizes=(300, 2, 4, 24, 16), dtype=dtype)
    want = problem.expected()
    leaves = problem.leaves()
    addresses = []
    for _ in range(2):
        problem.run(leaves, backend=backend, accumulate_grad=True).backward(problem.grad)
        addresses.append([leaves[name].grad.data_ptr() for name in ("up", "down")])
    assert addresses[0] == addresses[1]
    for name in ("up", "down", "x", "weights"):
        assert relative_error(leaves[name].grad, 2 * want[name]) <= TOLERANCE[dtype]


@pytest.mark.parametrize("backend", ["cpu", "grouped_mm"])
def test_the_same_inputs_give_the_same_bits(backend: str) -> None:
    problem = Problem(sizes=(200, 3, 6, 40, 28), bias=True)
    first, second = problem.observed(backend=backend), problem.observed(backend=backend)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("backend", ["cpu", "grouped_mm"])
def test_saved_memory_is_the_rows_and_the_pre_activations(backend: str) -> None:
    problem = Problem(sizes=(64, 2, 4, 32, 16))
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    leaves = problem.leaves()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        problem.run(leaves, backend=backend)
    inputs = {t.data_ptr() for t in leaves.values() if t is not None}
    extra = sum(t.numel() for t in saved if t.is_floating_point() and t.data_ptr() not in inputs)
    assert extra == 64 * 2 * 32


@pytest.mark.parametrize("backend", ["cpu", "grouped_mm"])
def test_recompute_saves_nothing_but_the_rows(backend: str) -> None:
    problem = Problem(sizes=(64, 2, 4, 32, 16))
    saved: list[Tensor] = []
    leaves = problem.leaves()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        problem.run(leaves, backend=backend, recompute=True)
    inputs = {t.data_ptr() for t in leaves.values() if t is not None}
    assert sum(t.numel() for t in saved if t.is_floating_point() and t.data_ptr() not in inputs) == 0


def test_the_same_parameters_give_the_output_of_transformers() -> None:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(hidden_size=24, moe_intermediate_size=20, num_experts=6, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    theirs = Qwen3MoeExperts(config)
    ours = GroupedExperts(24, 20, 6)
    ours.load_state_dict({name: torch.randn_like(value) * 0.1 for name, value in ours.state_dict().items()})
    theirs.load_state_dict(ours.state_dict())
    indices, weights = torch.rand(30, 6).topk(2).indices, torch.rand(30, 2)
    x = torch.randn(30, 24)
    got = ours(x, Routing.from_topk(indices, weights, num_experts=6))
    torch.testing.assert_close(got, theirs(x, indices, weights), rtol=1e-5, atol=1e-6)


def test_initial_weights_have_the_asked_spread_and_biases_are_zero() -> None:
    module = GroupedExperts(64, 48, 8, bias=True, init_std=0.05)
    module.reset_parameters(torch.Generator().manual_seed(3))
    assert module.gate_up_proj.std().item() == pytest.approx(0.05, rel=0.02)
    assert module.gate_up_proj_bias.abs().max() == module.down_proj_bias.abs().max() == 0


def test_a_generator_decides_the_initial_weights() -> None:
    modules = [GroupedExperts(8, 4, 2) for _ in range(2)]
    for module in modules:
        module.reset_parameters(torch.Generator().manual_seed(5))
    assert torch.equal(modules[0].down_proj, modules[1].down_proj)


@pytest.mark.parametrize(
    ("gated", "bias", "names"),
    [
        (True, False, ["gate_up_proj", "down_proj"]),
        (False, False, ["up_proj", "down_proj"]),
        (True, True, ["gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"]),
    ],
)
def test_parameters_have_the_names_of_transformers(gated: bool, bias: bool, names: list[str]) -> None:
    assert list(GroupedExperts(8, 4, 2, gated=gated, bias=bias).state_dict()) == names


def test_a_module_on_the_meta_device_computes_shapes() -> None:
    module = GroupedExperts(8, 4, 2, device="meta")
    routing = Routing(
        torch.zeros(5, 1, dtype=torch.int64, device="meta"), torch.ones(5, 1, device="meta"), None, None, 2
    )
    assert module(torch.empty(5, 8, device="meta"), routing).shape == (5, 8)


@pytest.mark.parametrize("backend", ["reference", "cpu", "grouped_mm"])
def test_nan_in_rows_without_an_expert_reaches_nothing(backend: str) -> None:
    x = torch.randn(33, 8)
    present = torch.arange(33) % 3 > 0
    x[~present] = torch.nan
    up, down = torch.randn(4, 12, 8, requires_grad=True), torch.randn(4, 8, 6, requires_grad=True)
    out = experts_forward(x, route(torch.randn(33, 4), 2, mask=present), up, down, backend=backend)
    out.sum().backward()
    assert (out[~present] == 0).all()
    assert out[present].isfinite().all()
    assert up.grad is not None
    assert up.grad.isfinite().all()
    assert down.grad is not None
    assert down.grad.isfinite().all()


def _call(**changes: object) -> None:
    problem = Problem(sizes=(4, 2, 3, 8, 6), gated=True)
    x, weights, up, down, *_ = problem.tensors.values()
    arguments: dict[str, object] = {
        "x": x, "routing": Routing(problem.indices, weights, None, None, 3), "up": up, "down": down, **changes
    }  # fmt: skip
    experts_forward(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"backend": "cuda"},
            ValueError,
            "unknown backend 'cuda'; valid are: auto, reference, cpu, grouped_mm, triton",
        ),
        (
            {"activation": "swish"},
            ValueError,
            "unknown activation 'swish'; valid are: silu, gelu, gelu_tanh, relu, relu2",
        ),
        ({"x": torch.zeros(4, 9)}, ValueError, r"x has shape \[4, 9\], but up \[3, 12, 8\] takes rows of width 8"),
        ({"x": torch.zeros(5, 8)}, ValueError, r"x of shape \[5, 8\] has 5 rows, but routing has 4"),
        ({"x": torch.zeros(4, 8).double()}, TypeError, "x is torch.float64 but up is torch.float32; .*autocast"),
        ({"x": torch.zeros(4, 8).long()}, TypeError, "x must be floating point, got torch.int64"),
        ({"down": torch.zeros(3, 8, 6).bfloat16()}, TypeError, "x is torch.float32 but down is torch.bfloat16"),
        ({"down": torch.zeros(3, 8, 7)}, ValueError, r"up \[3, 12, 8\] and down \[3, 8, 7\] do not fit \[E, 2I, H\]"),
        ({"gated": False}, ValueError, r"do not fit \[E, I, H\] and \[E, D, I\] \(gated=False\)"),
        ({"up": torch.zeros(12, 8)}, ValueError, r"must be stacked matrices \[E, ·, ·\], got \[12, 8\]"),
        ({"up_bias": torch.zeros(3, 6)}, ValueError, r"up_bias must be \[E, 12\] = \[3, 12\], got \[3, 6\]"),
        ({"down_bias": torch.zeros(8)}, ValueError, r"down_bias must be \[E, D\] = \[3, 8\], got \[8\]"),
        (
            {"routing": Routing(torch.zeros(4, 2).long(), torch.ones(4, 2), None, None, 5)},
            ValueError,
            "routing has num_experts=5, but up holds 3 experts",
        ),
        ({"x": [1.0]}, TypeError, "x must be a torch.Tensor, got list"),
        ({"routing": torch.zeros(4, 3)}, TypeError, r"routing must be a Routing, as router\(x\) .* give, got Tensor"),
        (
            {"routing": Routing(torch.zeros(4, 2).long(), torch.ones(4, 1), None, None, 3)},
            ValueError,
            r"routing has indices \[4, 2\] but weights \[4, 1\]",
        ),
    ],
)
def test_bad_input_is_named(changes: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        _call(**changes)


@pytest.mark.parametrize("rows", [1, 200])
@pytest.mark.parametrize("index", [-1, 4])
@pytest.mark.parametrize("backend", ["cpu", "grouped_mm"])
def test_an_index_outside_the_experts_is_named(backend: str, index: int, rows: int) -> None:
    indices = torch.zeros(rows, 2, dtype=torch.int64)
    indices[0, 1] = index
    problem = Problem(sizes=(rows, 2, 3, 8, 4), indices=torch.zeros(rows, 2, dtype=torch.int64))
    problem.indices = indices
    with pytest.raises(ValueError, match=r"routing.indices must lie in 0\.\.3 \(3 means no expert\), got"):
        problem.run(problem.tensors, backend=backend)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hidden_size": 0}, "hidden_size must be at least 1, got 0"),
        ({"num_experts": -1}, "num_experts must be at least 1, got -1"),
        ({"activation": "tanh"}, "unknown activation 'tanh'; valid are: silu"),
        ({"backend": "gpu"}, "unknown backend 'gpu'; valid are: auto"),
    ],
)
def test_bad_module_arguments_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GroupedExperts(**{"hidden_size": 8, "intermediate_size": 4, "num_experts": 2, **arguments})  # type: ignore[arg-type]
