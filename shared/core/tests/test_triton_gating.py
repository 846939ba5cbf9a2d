"""The fused gate against a row-by-row version written here and against PyTorch's operators.

Without a CUDA device the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shared_core import (
    BiasBalancer,
    ExpertChoice,
    GroupCappedTopK,
    GroupLimitedTopK,
    Router,
    Routing,
    TopK,
    kernels,
    load_balance_loss,
    route,
)
from shared_core.kernels import gating_ops, use_backend

pytest.importorskip("triton")

INF = math.inf
# Where there is a device the same tests run on it.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Case:
    """One way to route: sizes, arguments of ``route``, and the same policy as data for the brute force."""

    name: str
    num_experts: int
    k: int
    kwargs: dict[str, Any] = field(default_factory=dict)
    offset: int = 0
    limit: tuple[int, int, bool] | None = None  # groups, kept, by the sum of two
    cap: tuple[list[int], int] | None = None  # group of each expert, experts of one group
    bias: bool = False
    mask: bool = False


SIGMOID = {"score": "sigmoid", "renormalize": True, "scale": 2.5}
CASES = [
    Case("softmax", 6, 2),
    Case("softmax renormalised", 6, 3, {"renormalize": True}),
    Case("sigmoid renormalised and scaled", 6, 3, SIGMOID),
    Case("every expert", 5, 5, {"renormalize": True}),
    Case("one expert", 1, 1),
    Case("middle ranks", 7, 3, {"selection": TopK(offset=2)}, offset=2),
    Case("bias and mask", 11, 3, {"score": "sigmoid"}, bias=True, mask=True),
    Case("two of four groups by two best", 12, 4, {"selection": GroupLimitedTopK(4, 2)}, limit=(4, 2, True)),
    Case("one of three groups by best", 9, 2, {"selection": GroupLimitedTopK(3, 1, "max")}, limit=(3, 1, False)),
    Case("groups of one", 5, 2, {"selection": GroupLimitedTopK(5, 2)}, limit=(5, 2, True)),
    Case(
        "DeepSeek-V3 in small",
        20,
        4,
        {**SIGMOID, "selection": GroupLimitedTopK(5, 3)},
        limit=(5, 3, True),
        bias=True,
        mask=True,
    ),
    Case(
        "one of each group",
        7,
        3,
        {"selection": GroupCappedTopK(torch.tensor([4, 4, 9, 4, 1, 9, 1])), "renormalize": True},
        cap=([4, 4, 9, 4, 1, 9, 1], 1),
    ),
    Case(
        "two of each group",
        7,
        4,
        {"selection": GroupCappedTopK(torch.tensor([0, 0, 0, 0, 0, 1, 1]), cap=2)},
        cap=([0, 0, 0, 0, 0, 1, 1], 2),
        bias=True,
    ),
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def some_logits(num_experts: int, *, rows: int = 70) -> Tensor:
    """Random rows (more than one program takes), then the special ones: ties, unavailable experts, neither left."""
    generator = torch.Generator().manual_seed(num_experts)
    logits = torch.randn(rows, num_experts, generator=generator)
    logits[:20] = torch.randint(-1, 2, (20, num_experts), generator=generator).float()
    logits[20] = 0.0
    logits[21:30, ::2] = -INF
    logits[30:35, 1:] = -INF
    logits[35] = -INF
    logits[36] = torch.linspace(200.0, -200.0, num_experts)
    return logits


def biases(case: Case) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    given = {}
    if case.bias:
        given["selection_bias"] = torch.randint(-2, 3, (case.num_experts,), generator=generator) / 2.0
    if case.mask:
        given["mask"] = torch.arange(70) % 5 != 0
    return given


def fused(logits: Tensor, case: Case) -> Routing:
    given = {name: value.to(DEVICE) for name, value in biases(case).items()}
    with use_backend("triton"):
        return route(logits.to(DEVICE), case.k, **case.kwargs, **given).to("cpu")


def best(q: dict[int, float], k: int) -> list[int]:
    """Experts by descending score, equal ones by index."""
    return sorted(q, key=lambda expert: (-q[expert], expert))[:k]


def choose(q: dict[int, float], case: Case) -> list[int]:
    """Available experts of one row, chosen as the case says."""
    if case.limit is not None:
        groups, kept, by_two = case.limit
        size = case.num_experts // groups
        members = [[e for e in q if e // size == group] for group in range(groups)]
        counted = 2 if by_two else 1
        score = {
            group: sum(sorted((q[e] for e in mine), reverse=True)[:counted]) if mine else -INF
            for group, mine in enumerate(members)
        }
        allowed = best(score, kept)
        q = {e: value for e, value in q.items() if e // size in allowed}
    if case.cap is not None:
        groups_of, cap = case.cap
        chosen: list[int] = []
        for expert in best(q, len(q)):
            if sum(groups_of[other] == groups_of[expert] for other in chosen) < cap:
                chosen.append(expert)
        return chosen[: case.k]
    return best(q, case.offset + case.k)[case.offset :]


def brute_force(logits: Tensor, case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Indices and weights, row by row, in plain Python and float64."""
    given = biases(case)
    bias = given.get("selection_bias", torch.zeros(case.num_experts)).tolist()
    keep = given.get("mask", torch.ones(len(logits), dtype=torch.bool)).tolist()
    indices = np.full((len(logits), case.k), case.num_experts)
    weights = np.zeros((len(logits), case.k))
    for row, z in enumerate(logits.tolist()):
        if not keep[row] or max(z) == -INF:
            continue
        exps = [math.exp(value - max(z)) for value in z]
        p = [exp / sum(exps) for exp in exps]
        if case.kwargs.get("score") == "sigmoid":
            p = [0.5 + 0.5 * math.tanh(value / 2) for value in z]
        chosen = choose({e: p[e] + bias[e] for e in range(case.num_experts) if z[e] > -INF}, case)
        total = sum(p[e] for e in chosen) if case.kwargs.get("renormalize") else 1.0
        indices[row, : len(chosen)] = chosen
        weights[row, : len(chosen)] = [case.kwargs.get("scale", 1.0) * p[e] / (total or 1.0) for e in chosen]
    return indices, weights


# ---------------------------------------------------------------------------------------------------------- the values
@every_case
def test_choice_is_that_of_the_brute_force(case: Case) -> None:
    logits = some_logits(case.num_experts)
    assert np.array_equal(fused(logits, case).indices.numpy(), brute_force(logits, case)[0])


@every_case
def test_weights_are_those_of_the_brute_force(case: Case) -> None:
    logits = some_logits(case.num_experts)
    np.testing.assert_allclose(fused(logits, case).weights.numpy(), brute_force(logits, case)[1], rtol=2e-6, atol=1e-30)


@every_case
def test_every_field_is_that_of_the_torch_path(case: Case) -> None:
    logits = some_logits(case.num_experts)
    ours, torchs = fused(logits, case), route(logits, case.k, **case.kwargs, **biases(case))
    assert torch.equal(ours.indices, torchs.indices)
    assert torch.equal(ours.logits, torchs.logits)
    assert ours.num_experts == torchs.num_experts
    assert (ours.mask is None) == (torchs.mask is None)
    for name in ("weights", "scores"):
        torch.testing.assert_close(getattr(ours, name), getattr(torchs, name), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("values", [(0.0, math.nan, 1.0), (math.nan, -INF, -INF), (math.nan,) * 3], ids=str)
def test_nan_logits_reach_the_weights_as_on_the_torch_path(score: str, values: tuple[float, ...]) -> None:
    rows = torch.tensor([values, (0.0, 1.0, 2.0)])
    case = Case("", 3, 2, {"score": score, "renormalize": True})
    ours, torchs = fused(rows, case), route(rows, 2, **case.kwargs)
    assert torch.equal(ours.indices, torchs.indices)
    torch.testing.assert_close(ours.weights, torchs.weights, equal_nan=True)
    torch.testing.assert_close(ours.scores, torchs.scores, equal_nan=True)
    assert ours.weights[0].isnan().any()


def test_positive_and_negative_zero_tie() -> None:
    with use_backend("triton"):
        routing = route(
            torch.full((1, 3), -200.0, device=DEVICE),
            3,
            score="sigmoid",
            selection_bias=torch.tensor([-0.0, 0.0, -0.0], device=DEVICE),
        )
    assert routing.indices.tolist() == [[0, 1, 2]]


def test_a_bias_of_every_shape_decides_the_choice() -> None:
    logits = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0))
    for shape in ((6,), (4, 1, 6), (20, 6), (4, 5, 6), (1, 1, 6)):
        bias = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        want = route(logits, 2, selection_bias=bias)
        with use_backend("triton"):
            got = route(logits.to(DEVICE), 2, selection_bias=bias.to(DEVICE))
        assert torch.equal(got.indices.cpu(), want.indices), shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_logits_are_routed_in_float32(dtype: torch.dtype) -> None:
    low = torch.randn(9, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    torch.testing.assert_close(fused(low, CASES[0]).scores, low.float().softmax(-1))


def test_rows_may_lie_apart_in_memory() -> None:
    wide = torch.randn(9, 12, generator=torch.Generator().manual_seed(0))
    assert torch.equal(fused(wide[:, ::2], CASES[0]).indices, fused(wide[:, ::2].clone(), CASES[0]).indices)


def test_no_rows_are_routed_to_no_rows() -> None:
    logits = torch.zeros(0, 6, requires_grad=True)
    routing = fused(logits, CASES[1])
    routing.weights.sum().backward()
    assert (routing.weights.shape, routing.scores.shape, logits.grad.shape) == ((0, 3), (0, 6), (0, 6))


def test_two_runs_agree_to_the_bit() -> None:
    def run() -> tuple[Tensor, Tensor]:
        logits = some_logits(20).requires_grad_()
        routing = fused(logits, CASES[10])
        (routing.weights.square().sum() + routing.scores.square().sum()).backward()
        return routing.weights.detach(), logits.grad

    for first, second in zip(run(), run(), strict=True):
        assert torch.equal(first, second)


# ------------------------------------------------------------------------------------------------------- the gradients
def dense_loss(logits: Tensor, indices: Tensor, case: Case, upstream: dict[str, Tensor]) -> Tensor:
    """The loss of a choice already made, in float64 and by plain indexing."""
    unavailable = logits.isneginf()
    if case.kwargs.get("score") == "sigmoid":
        p = logits.sigmoid()
    else:
        p = logits.masked_fill(unavailable.all(-1, keepdim=True), 0.0).softmax(-1)
    p = p.masked_fill(unavailable, 0.0)
    chosen = torch.nn.functional.one_hot(indices, case.num_experts + 1)[..., :-1]
    weights = (p.unsqueeze(1) * chosen).sum(-1)
    if case.kwargs.get("renormalize"):
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = weights * case.kwargs.get("scale", 1.0)
    return (weights * upstream["weights"].double()).sum() + (p * upstream["scores"].double()).sum()


@every_case
@pytest.mark.parametrize("of", ["weights", "scores", "weights and scores"])
def test_gradient_is_that_of_plain_indexing_in_float64(case: Case, of: str) -> None:
    logits = some_logits(case.num_experts)
    generator = torch.Generator().manual_seed(3)
    widths = {"weights": case.k, "scores": case.num_experts}
    upstream = {name: torch.randn(70, width, generator=generator) * (name in of) for name, width in widths.items()}
    ours, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    routing = fused(ours, case)
    sum((getattr(routing, name) * upstream[name]).sum() for name in widths if name in of).backward()
    dense_loss(exact, routing.indices, case, upstream).backward()
    want = exact.grad
    if case.mask:
        want = want.masked_fill(~biases(case)["mask"].unsqueeze(1), 0.0)
    torch.testing.assert_close(ours.grad.double(), want, rtol=2e-5, atol=2e-6)


def test_gradient_reaches_the_logits_through_an_expanded_upstream_gradient() -> None:
    ours, plain = some_logits(6).requires_grad_(), some_logits(6).requires_grad_()
    fused(ours, CASES[0]).weights.sum().backward()
    route(plain, 2).weights.sum().backward()
    torch.testing.assert_close(ours.grad, plain.grad)


def test_load_balance_loss_has_the_gradient_of_the_torch_path() -> None:
    ours, plain = some_logits(6)[:20].clone().requires_grad_(), some_logits(6)[:20].clone().requires_grad_()
    load_balance_loss(fused(ours, CASES[1])).backward()
    load_balance_loss(route(plain, 3, renormalize=True)).backward()
    torch.testing.assert_close(ours.grad, plain.grad)


@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[2]], ids=lambda case: case.name)
def test_second_derivative_is_that_of_the_torch_path(case: Case) -> None:
    penalties = []
    for path in (fused, lambda logits, case: route(logits, case.k, **case.kwargs)):
        logits = some_logits(case.num_experts)[37:].clone().requires_grad_()
        routing = path(logits, case)
        value = routing.weights.square().sum() + routing.scores.pow(3).sum()
        (slope,) = torch.autograd.grad(value, logits, create_graph=True)
        penalties.append(torch.autograd.grad(slope.square().sum(), logits)[0])
    torch.testing.assert_close(*penalties)


def test_without_a_gradient_nothing_is_recorded() -> None:
    with torch.no_grad():
        assert not fused(some_logits(6).requires_grad_(), CASES[0]).weights.requires_grad


# ----------------------------------------------------------------------------------------------------- its place
@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[gating_ops.GateSettings]:
    """What the kernel was launched with."""
    from shared_core.kernels.triton import gating

    seen: list[gating_ops.GateSettings] = []
    original = gating.forward

    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        seen.append(arguments[-1])
        return original(*arguments)

    monkeypatch.setattr(gating, "forward", forward)
    return seen


def test_on_a_cpu_the_kernel_runs_only_where_triton_is_asked_for(launches: list) -> None:
    logits = some_logits(6)
    route(logits, 2)
    with use_backend("reference"):
        route(logits, 2)
    assert launches == []
    fused(logits, CASES[0])
    assert len(launches) == 1


@pytest.mark.parametrize(
    ("logits", "k", "selection"),
    [
        (torch.zeros(2, 6, dtype=torch.float64), 2, None),
        (torch.zeros(2, 1025), 2, None),
        (torch.zeros(2, 100), 65, None),
        (torch.zeros(2, 60), 2, TopK(offset=58)),
        (torch.zeros(2, 3 * 257), 2, GroupLimitedTopK(3, 1)),
        (torch.zeros(2, 6), 2, lambda q, k: q.topk(k).indices),
        (torch.zeros(2, 6), 2, ExpertChoice()),
    ],
    ids=["float64", "1025 experts", "65 choices", "offset in reach", "padded groups", "a function", "expert choice"],
)
def test_what_the_kernel_does_not_take_goes_to_torch(
    launches: list, logits: Tensor, k: int, selection: Callable[[Tensor, int], Tensor] | None
) -> None:
    want = route(logits, k, selection=selection)
    with use_backend("triton"):
        got = route(logits.to(DEVICE), k, selection=selection).to("cpu")
    assert torch.equal(got.indices, want.indices)
    torch.testing.assert_close(got.weights, want.weights)
    assert len(launches) == (selection == TopK(offset=58))


def test_leaving_the_kernel_is_announced_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels, "_announced", set())
    with caplog.at_level(logging.INFO, logger="shared_core"), use_backend("triton"):
        for _ in range(3):
            route(torch.zeros(2, 2000, device=DEVICE), 2)
    assert [record.getMessage() for record in caplog.records] == [
        "routing runs on PyTorch's operators instead of the fused gate: 2000 experts are more than 1024 columns"
    ]


@pytest.mark.parametrize(
    ("num_experts", "k", "selection", "message"),
    [
        (6, 2, TopK(offset=5), "offset=5 and top_k=2 need 7 experts, got 6"),
        (6, 2, GroupLimitedTopK(4, 2), "num_experts=6 is not divisible by num_groups=4"),
        (6, 5, GroupLimitedTopK(3, 2), "top_k=5 exceeds the 4 experts of top_groups=2"),
        (6, 2, GroupCappedTopK(torch.tensor([0, 1, 2])), "groups has 3 ids, but there are 6 experts"),
        (3, 3, GroupCappedTopK(torch.tensor([0, 0, 1])), "top_k=3 exceeds the 2 experts that cap=1 allows"),
    ],
)
def test_policies_refuse_with_their_own_words(
    num_experts: int, k: int, selection: Callable[[Tensor, int], Tensor], message: str
) -> None:
    with use_backend("triton"), pytest.raises(ValueError, match=message):
        route(torch.zeros(2, num_experts, device=DEVICE), k, selection=selection)


def test_an_ensemble_by_vmap_goes_to_torch(launches: list) -> None:
    logits = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0))
    with use_backend("triton"):
        weights = torch.vmap(lambda z: route(z, 2).weights)(logits.to(DEVICE))
    torch.testing.assert_close(weights.cpu(), torch.stack([route(z, 2).weights for z in logits]))
    assert launches == []


def test_router_counts_what_the_kernel_chose() -> None:
    router = Router.linear(8, 6, 2, score="sigmoid", balancer=BiasBalancer(6)).to(DEVICE)
    with use_backend("triton"):
        routing = router(torch.randn(20, 8, device=DEVICE))
    assert torch.equal(router.balancer.tokens_per_expert.long(), routing.counts())


def test_compiled_router_is_one_graph_with_the_kernel_inside(launches: list) -> None:
    router = Router.linear(8, 6, 2, renormalize=True, device=DEVICE)
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)).to(DEVICE)

    def loss(x: Tensor) -> Tensor:
        routing = router(x)
        return routing.weights.square().sum() + load_balance_loss(routing)

    gradients = []
    for function in (torch.compile(loss, fullgraph=True, backend="aot_eager"), loss):
        router.zero_grad()
        with use_backend("triton"):
            function(x).backward()
        gradients.append(router.gate.weight.grad.clone())
    assert len(launches) == 2
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("case", [CASES[2], CASES[10], CASES[11]], ids=lambda case: case.name)
def test_operators_keep_the_promises_of_torch_library(case: Case) -> None:
    policy = case.kwargs.get("selection", TopK())
    settings = gating_ops.gate_settings(case.num_experts, case.k, policy, sigmoid=False, renormalize=True, scale=1.0)
    ids = gating_ops._group_ids(policy, DEVICE) if case.cap else None
    logits = torch.randn(5, case.num_experts, device=DEVICE, requires_grad=True)
    # The fourth check adds float outputs onto the integer one in place; the compiled router above stands for it.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(gating_ops._forward_op, (logits, None, None, ids, *settings), test_utils=checks)


@pytest.mark.parametrize("groups", [torch.tensor([7, 7, 3, 7]), torch.tensor([0, 1, 2, 3]), torch.tensor([5] * 4)])
def test_group_ids_tell_the_same_groups_apart(groups: Tensor) -> None:
    ids = gating_ops._group_ids(GroupCappedTopK(groups), torch.device("cpu"))
    for a, b in itertools.combinations(range(4), 2):
        assert (ids[a] == ids[b]) == (groups[a] == groups[b])


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")  # of PyTorch's own forward mode
def test_forward_mode_tangent_is_that_of_the_torch_path() -> None:
    z, tangent = torch.randn(3, 5), torch.randn(3, 5)
    tangents = []
    for backend in ("cpu", "triton"):
        with use_backend(backend), torch.autograd.forward_ad.dual_level():
            weights = route(torch.autograd.forward_ad.make_dual(z, tangent), 2).weights
            tangents.append(torch.autograd.forward_ad.unpack_dual(weights).tangent)
    assert torch.equal(*tangents)
