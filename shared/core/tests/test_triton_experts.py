"""Expert kernels in Triton's interpreter, against a dense float64 evaluation written here.

Fresh memory is filled with NaN (:func:`_poison`), so whatever a kernel reads without having written it is seen.

Letters: R rows, k slots, E experts, H width in, D width out, I intermediate width, J = 2I if gated else I.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shared_core import GroupedExperts, Routing, experts_forward
from shared_core.kernels import interpreted

triton = pytest.importorskip("triton")
if not interpreted():
    pytest.skip("Triton's interpreter is off: test_triton_experts_device.py has the device", allow_module_level=True)

import triton.language as tl  # noqa: E402

from shared_core.kernels.formula import Formula, Parameters  # noqa: E402
from shared_core.kernels.triton import configs, experts, launch, plan, tiles  # noqa: E402

TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda z: z / (1 + torch.exp(-z)),
    "gelu": lambda z: z * 0.5 * (1 + torch.erf(z / 2**0.5)),
    "gelu_tanh": lambda z: 0.5 * z * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (z + 0.044715 * z**3))),
    "relu": lambda z: z.clamp(min=0),
    "relu2": lambda z: z.clamp(min=0) ** 2,
}
WIDE = (23, 3, 6, 40, 34, 36)  # R, k, E, H, D, I: several tiles along every dimension, none of them full
NARROW = (11, 2, 3, 20, 18, 12)


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # torch.empty then holds NaN, or the largest integer
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@dataclass
class Problem:
    """Random tensors of one expert layer, and what a dense float64 evaluation makes of them."""

    sizes: tuple[int, int, int, int, int, int] = NARROW
    dtype: torch.dtype = torch.float32
    activation: str = "silu"
    gated: bool = True
    bias: bool = False
    weight_input: bool = False
    indices: Tensor | None = None
    options: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows, slots, num_experts, hidden, width, inner = self.sizes
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(self.dtype)

        if self.indices is None:  # E is among the choices: some slots hold the sentinel
            self.indices = torch.rand(rows, num_experts + 1, generator=generator).topk(slots).indices
        features = 2 * inner if self.gated else inner
        self.tensors: dict[str, Tensor] = {
            "x": draw(rows, hidden),
            "weights": torch.rand(self.indices.shape, generator=generator),
            "up": draw(num_experts, features, hidden, scale=hidden**-0.5),
            "down": draw(num_experts, width, inner, scale=inner**-0.5),
        }
        if self.bias:
            self.tensors["up_bias"] = draw(num_experts, features, scale=0.3)
            self.tensors["down_bias"] = draw(num_experts, width, scale=0.3)
        self.grad = draw(rows, width)

    def expected(self) -> dict[str, Tensor]:
        """Every expert on every row and slot, then a one-hot selection."""
        leaves = {name: tensor.double().requires_grad_() for name, tensor in self.tensors.items()}
        x, weights, up, down, up_bias, down_bias = [*leaves.values(), None, None][:6]
        chosen = F.one_hot(self.indices, up.shape[0] + 1)[..., :-1].double()  # [R, k, E]
        inputs = torch.einsum("rh,rk->rkh", x, weights if self.weight_input else torch.ones_like(weights))
        z = torch.einsum("rkh,ejh->rkej", inputs, up) + (0 if up_bias is None else up_bias)
        act = ACTIVATIONS[self.activation]
        half = z.shape[-1] // 2
        h = act(z[..., :half]) * z[..., half:] if self.gated else act(z)
        y = torch.einsum("rkei,edi->rked", h, down) + (0 if down_bias is None else down_bias)
        factor = chosen if self.weight_input else chosen * weights.unsqueeze(-1)
        out = torch.einsum("rked,rke->rd", y, factor)
        out.backward(self.grad.double())
        return {"out": out.detach(), **{name: tensor.grad for name, tensor in leaves.items()}}

    def observed(self, backend: str = "triton", **changed: Tensor) -> dict[str, Tensor]:
        leaves = {name: changed.get(name, tensor).detach().requires_grad_() for name, tensor in self.tensors.items()}
        x, weights, up, down, up_bias, down_bias = [*leaves.values(), None, None][:6]
        out = experts_forward(
            x, Routing(self.indices, weights, None, None, up.shape[0]), up, down, up_bias=up_bias, down_bias=down_bias,
            activation=self.activation, gated=self.gated, weight_input=self.weight_input, backend=backend,
            **self.options,
        )  # fmt: skip
        out.backward(changed.get("grad", self.grad))
        return {"out": out.detach(), **{name: tensor.grad for name, tensor in leaves.items()}}


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    errors = {n: float((got[n].double() - want[n].double()).norm() / want[n].norm().clamp(min=1e-30)) for n in want}
    assert all(error <= tolerance for error in errors.values()), errors


# ------------------------------------------------------------------------------------------------ numbers and gradients
CASES = {
    "SwiGLU over several tiles": Problem(WIDE),
    "SwiGLU, bfloat16": Problem(dtype=torch.bfloat16, bias=True),
    "gelu, biases, float16": Problem(activation="gelu", gated=False, bias=True, dtype=torch.float16),
    "tanh GeGLU, biases": Problem(activation="gelu_tanh", bias=True),
    "relu, recomputed": Problem(activation="relu", gated=False, options={"recompute": True}),
    "squared relu": Problem(activation="relu2"),
    "exact GeGLU, recomputed with biases": Problem(activation="gelu", bias=True, options={"recompute": True}),
    "weight on the input": Problem(weight_input=True),
    "weight on the input, biases, bfloat16": Problem(weight_input=True, bias=True, dtype=torch.bfloat16),
    "weight on the input, no gate, biases, recomputed": Problem(
        weight_input=True, gated=False, bias=True, options={"recompute": True}
    ),
    "one slot": Problem((23, 1, 3, 20, 18, 12), bias=True),
    "one row": Problem((1, 2, 3, 20, 18, 12), bias=True),
    "one expert takes everything": Problem(
        (37, 1, 5, 20, 18, 12), indices=torch.full((37, 1), 2), bias=True, dtype=torch.float32
    ),
    "a single expert": Problem((5, 1, 1, 20, 18, 12), indices=torch.zeros(5, 1, dtype=torch.int64)),
}


@pytest.mark.parametrize("case", CASES)
def test_output_and_every_gradient_match_the_dense_formula(case: str) -> None:
    problem = CASES[case]
    assert_close(problem.observed(), problem.expected(), TOLERANCE[problem.dtype])


def test_they_match_the_readable_backend_as_well() -> None:
    problem = Problem(bias=True)
    with_sentinels_at_0 = problem.tensors["weights"].masked_fill(problem.indices == 3, 0.0)
    want = problem.observed("reference", weights=with_sentinels_at_0)
    assert_close(problem.observed(weights=with_sentinels_at_0), want, TOLERANCE[torch.float32])


@pytest.mark.parametrize("weight_input", [False, True], ids=["output", "input"])
def test_rows_without_expert_are_0_and_their_padding_reaches_nothing(weight_input: bool) -> None:
    problem = Problem(bias=True, weight_input=weight_input)
    problem.indices[3:6] = 3
    want = problem.expected()
    x, weights, grad = (t.clone() for t in (problem.tensors["x"], problem.tensors["weights"], problem.grad))
    x[3:6] = weights[3:6] = grad[3:6] = torch.nan
    got = problem.observed(x=x, weights=weights, grad=grad)
    assert not got["out"][3:6].any()
    assert not got["x"][3:6].any()
    assert not got["weights"][3:6].any()
    assert_close(got, want, TOLERANCE[torch.float32])


def test_idle_experts_get_a_gradient_of_exactly_0() -> None:
    got = Problem(
        indices=torch.randint(0, 2, (11, 2), generator=torch.Generator().manual_seed(1)), bias=True
    ).observed()
    for name in ("up", "down", "up_bias", "down_bias"):
        assert got[name][:2].all(0).any()
        assert not got[name][2].any(), name


@pytest.mark.parametrize("slots", [1, 2])
def test_no_rows_give_no_output_and_zero_gradients(slots: int) -> None:
    got = Problem((0, slots, 3, 20, 18, 12), bias=True).observed()
    assert got["out"].shape == (0, 18)
    assert got["weights"].shape == (0, slots)
    assert not any(got[name].any() for name in ("up", "down", "up_bias", "down_bias"))


def test_transposed_weights_and_strided_rows_are_read_where_they_lie() -> None:
    problem = Problem(bias=True)
    as_stored = {
        "x": problem.tensors["x"].t().contiguous().t(),
        "weights": problem.tensors["weights"].repeat_interleave(2, 1)[:, ::2],
        "up": problem.tensors["up"].mT.contiguous().mT,
        "down": problem.tensors["down"].mT.contiguous().mT,
        "up_bias": problem.tensors["up_bias"].t().contiguous().t(),
    }
    assert not any(tensor.is_contiguous() for tensor in as_stored.values())
    assert_close(problem.observed(**as_stored), problem.expected(), TOLERANCE[torch.float32])


def test_an_expanded_gradient_is_read_as_what_it_stands_for() -> None:
    problem = Problem()
    problem.grad = torch.ones(())
    problem.grad = problem.grad.expand(11, 18)
    assert_close(problem.observed(), problem.expected(), TOLERANCE[torch.float32])


def test_only_gradients_that_are_wanted_are_computed() -> None:
    problem = Problem(bias=True)
    x, weights, up, down, up_bias, down_bias = problem.tensors.values()
    down_bias.requires_grad_()
    out = experts_forward(
        x, Routing(problem.indices, weights, None, None, 3), up, down, up_bias=up_bias, down_bias=down_bias,
        backend="triton",
    )  # fmt: skip
    (got,) = torch.autograd.grad(out, down_bias, problem.grad)
    chosen = F.one_hot(problem.indices, 4)[..., :-1].double() * weights.unsqueeze(-1)
    torch.testing.assert_close(got.double(), torch.einsum("rke,rd->ed", chosen, problem.grad.double()))


def test_existing_gradients_are_added_to_in_place() -> None:
    problem = Problem()
    problem.options["accumulate_grad"] = True
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in problem.tensors.items()}
    before = {name: torch.ones_like(leaves[name]) for name in ("up", "down")}
    for name, gradient in before.items():
        leaves[name].grad = gradient
    x, weights, up, down = leaves.values()
    routing = Routing(problem.indices, weights, None, None, 3)
    experts_forward(x, routing, up, down, backend="triton", accumulate_grad=True).backward(problem.grad)
    want = problem.expected()
    for name, gradient in before.items():
        assert leaves[name].grad is gradient
        torch.testing.assert_close(gradient.double(), want[name] + 1.0, rtol=0.0, atol=2e-6)


def test_two_runs_agree_to_the_bit() -> None:
    problem = Problem(dtype=torch.bfloat16, bias=True)
    first, second = problem.observed(), problem.observed()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_one_graph_of_the_compiler_computes_what_eager_computes() -> None:
    torch._dynamo.reset()
    module = GroupedExperts(20, 12, 3, bias=True, backend="triton")
    problem = Problem((11, 2, 3, 20, 20, 12))
    outcomes = []
    for function in (module, torch.compile(module, fullgraph=True, backend="aot_eager")):
        module.zero_grad()
        x, weights = (problem.tensors[name].clone().requires_grad_() for name in ("x", "weights"))
        out = function(x, Routing(problem.indices, weights, None, None, 3))
        out.backward(problem.grad)
        outcomes.append([out.detach(), x.grad, weights.grad, *(p.grad.clone() for p in module.parameters())])
    torch._dynamo.reset()
    for got, want in zip(*reversed(outcomes), strict=True):
        torch.testing.assert_close(got, want)


def test_experts_may_lie_further_apart_than_32_bits_count() -> None:
    num_experts, apart = 72, 2**25  # elements: the last expert starts at 71 · 2²⁵ > 2³¹, from two factors of 32 bits
    no_reserve = 0x4000  # Linux's MAP_NORESERVE, which Python 3.11 does not name
    wrapped = 2**31  # elements below the first expert, where an address that overflowed would read zeros
    try:
        memory = mmap.mmap(-1, 2 * (wrapped + num_experts * apart), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    except OSError as error:  # strict accounting of memory
        pytest.skip(f"this machine does not map addresses without memory behind them: {error}")
    flat = torch.frombuffer(memory, dtype=torch.float16)  # 9 GB of addresses, of which few pages are touched
    problem = Problem((3, 1, 1, 20, 18, 12), dtype=torch.float16, indices=torch.zeros(3, 1, dtype=torch.int64))
    far = {}
    for place, name in enumerate(("up", "down")):
        _, rows, columns = problem.tensors[name].shape
        far[name] = flat.as_strided((num_experts, rows, columns), (apart, columns, 1), wrapped + place * 4096)
        far[name][-1] = problem.tensors[name][0]
    indices, weights = problem.indices + num_experts - 1, problem.tensors["weights"]
    arguments = indices, weights, Parameters(far["up"], far["down"], None, None), Formula("silu", True, False)
    x = problem.tensors["x"]
    out, z, order, bounds = experts.forward(x, *arguments, keep_plan=True, keep_z=True)
    dx, *_ = experts.backward(
        problem.grad, x, *arguments[1:3], z, order, bounds, arguments[3], needs=(True,) + (False,) * 5
    )
    want = problem.expected()
    assert_close({"out": out, "x": dx}, {name: want[name] for name in ("out", "x")}, TOLERANCE[torch.float16])


# ------------------------------------------------------------------------------------------------ plan and map of tiles
@pytest.mark.parametrize("few", [0, plan.FEW], ids=["radix sort", "one launch"])
def test_assignments_are_sorted_by_expert_then_row_then_slot(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "FEW", few)
    indices = torch.randint(0, 41, (35, 4), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    order, bounds = plan.sort_assignments(indices[:, ::2], 40)
    flat = indices[:, ::2].flatten().numpy()
    np.testing.assert_array_equal(order.numpy(), np.argsort(flat, kind="stable"))
    np.testing.assert_array_equal(bounds.numpy(), [(flat < expert).sum() for expert in range(41)])


def test_indices_outside_of_the_experts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"routing.indices must lie in 0..3 \(3 means no expert\), got 0..7"):
        plan.sort_assignments(torch.tensor([[0, 7]]), 3)


@triton.jit
def _map_kernel(
    bounds_ptr, out_ptr, num_experts, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EXPERTS: tl.constexpr
):
    expert, start, end, column, active = tiles.locate(bounds_ptr, num_experts, columns, BLOCK_M, BLOCK_N, EXPERTS)
    place = out_ptr + tl.program_id(0) * 5
    tl.store(place, expert)
    tl.store(place + 1, start)
    tl.store(place + 2, end)
    tl.store(place + 3, column.to(tl.int64))
    tl.store(place + 4, active.to(tl.int64))


@pytest.mark.parametrize("counts", [(5, 0, 40, 0, 0, 16, 3), (170, 1), (0, 0, 0), (1, 1, 1, 1)], ids=str)
def test_active_programs_cover_every_row_and_column_once(counts: tuple[int, ...]) -> None:
    columns, height, breadth = 70, 16, 32
    bounds = torch.tensor([0, *np.cumsum(counts)])
    programs = tiles.max_tiles(sum(counts), len(counts), height) * triton.cdiv(columns, breadth)
    found = torch.empty(programs, 5, dtype=torch.int64)
    if programs:
        padded = triton.next_power_of_2(len(counts))
        _map_kernel[(programs,)](bounds, found, len(counts), columns, height, breadth, padded)
    covered = np.zeros((sum(counts), columns), dtype=int)
    for expert, start, end, column, active in found.tolist():
        if active:
            assert bounds[expert] <= start < end == bounds[expert + 1]
            covered[start : min(start + height, end), column : column + breadth] += 1
    assert (covered == 1).all()


@given(counts=st.lists(st.integers(0, 70), min_size=1, max_size=9), height=st.sampled_from([16, 32, 64]))
def test_no_distribution_of_rows_needs_more_tiles_than_are_launched(counts: list[int], height: int) -> None:
    needed = sum(-(-count // height) for count in counts)
    assert needed <= tiles.max_tiles(sum(counts), len(counts), height)


def test_a_decoding_step_launches_no_tile_for_idle_experts() -> None:
    assert tiles.max_tiles(8, 128, 16) == 8


# ----------------------------------------------------------------------------------------------------- tiles and tuning
@pytest.mark.parametrize("architecture", [80, 86, 90, 100, 120])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", ["up", "project", "hidden_gradient", "weight_gradient"])
def test_every_launch_has_tiles_of_powers_of_two_that_a_product_takes(
    kind: configs.Kind, dtype: torch.dtype, architecture: int
) -> None:
    for assignments in (1, 16, 17, 33, 65, 10**6):
        candidates = configs.tiles(kind, dtype, configs.row_bucket(assignments, 1), architecture)
        assert len(set(candidates)) == len(candidates) >= 2
        for tile in candidates:
            assert all(size >= 16 and size & (size - 1) == 0 for size in tile[:3])


def test_tiles_for_227_kib_are_kept_from_devices_with_99() -> None:
    offered = {each: configs.tiles("up", torch.bfloat16, 128, each) for each in (80, 89, 90, 100, 120)}
    assert offered[80] == offered[89] == offered[120]
    assert offered[90] == offered[100] > offered[80]


@pytest.mark.parametrize("setting", ["ieee", "tf32"])
def test_float32_products_are_exact_unless_pytorchs_own_may_be_shortened(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "interpreted", lambda: False)
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = setting
        assert launch.Setting(torch.device("meta"), torch.float32, 1, 1).precision == setting
        assert launch.Setting(torch.device("meta"), torch.bfloat16, 1, 1).precision == "ieee"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


_RECORD = """
import json, torch
from triton.backends.compiler import GPUTarget
from shared_core.kernels.formula import Formula, Parameters
from shared_core.kernels.triton import experts, launch
from shared_core.kernels.triton.launches import record

def decode():
    indices = torch.empty(4, 2, dtype=torch.int64, device="meta")
    x, up, down = (torch.empty(s, dtype=torch.bfloat16, device="meta") for s in ((4, 64), (8, 64, 64), (8, 64, 32)))
    experts.forward(x, indices, indices.float(), Parameters(up, down, None, None), Formula("silu", True, False))

for deterministic in (False, True):
    torch.use_deterministic_algorithms(deterministic)
    launch._chosen.clear()
    launches = record(GPUTarget("cuda", 90, 32), {"decode": decode})
    print(json.dumps({k: len({l.tile for l in launches if l.name == k}) for k in ("up", "project")}))
"""


@pytest.mark.parametrize("autotune", ["1", "0"])
def test_candidates_are_tried_unless_the_user_wants_one_table(autotune: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "SHARED_CORE_AUTOTUNE": autotune}
    done = subprocess.run([sys.executable, "-c", _RECORD], env=environment, capture_output=True, text=True, check=True)
    tuned, deterministic = map(json.loads, done.stdout.splitlines())
    table = {kind: len(configs.tiles(kind, torch.bfloat16, 16, 90)) for kind in ("up", "project")}
    assert tuned == (table if autotune == "1" else {"up": 1, "project": 1})
    assert deterministic == {"up": 1, "project": 1}


# ------------------------------------------------------------------------------------------------------------ bad input
def test_float64_is_refused_by_name() -> None:
    problem = Problem()
    with pytest.raises(ValueError, match=r"backend 'triton' does not take torch\.float64"):
        problem.observed(**{name: tensor.double() for name, tensor in problem.tensors.items()})


def test_more_assignments_than_31_bits_count_are_refused() -> None:
    x = torch.empty(2**30, 4, device="meta")
    indices = torch.empty(2**30, 2, device="meta", dtype=torch.int64)
    matrices = torch.empty(3, 4, 4, device="meta")
    with pytest.raises(ValueError, match=r"fewer than 2\*\*31 assignments .*, got 2147483648"):
        experts.forward(x, indices, indices, Parameters(matrices, matrices, None, None), Formula("relu", False, False))


def test_a_second_derivative_is_refused() -> None:
    problem = Problem()
    x, weights, up, down = problem.tensors.values()
    x.requires_grad_()
    out = experts_forward(x, Routing(problem.indices, weights, None, None, 3), up, down, backend="triton")
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="cannot be differentiated again"):
        gradient.sum().backward()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")  # of PyTorch's own forward mode
@pytest.mark.parametrize("trained", [False, True])
def test_a_forward_mode_derivative_is_refused_instead_of_lost(trained: bool) -> None:
    experts = GroupedExperts(8, 4, 3, backend="triton").requires_grad_(trained)
    routing = Routing.from_topk(torch.tensor([[0], [2]]), torch.ones(2, 1), num_experts=3)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        experts(torch.autograd.forward_ad.make_dual(torch.randn(2, 8), torch.ones(2, 8)), routing)
