"""route and Router: the arithmetic of routing, its edge cases and the transforms it passes through."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shared_core import BiasBalancer, NoisyGate, Router, TopK, load_balance_loss, route

E, K = 6, 2


@pytest.fixture
def logits(generator: torch.Generator) -> Tensor:
    return torch.randn(40, E, generator=generator)


# ------------------------------------------------------------------------------------------------------ arithmetic
def test_softmax_weights_are_the_chosen_probabilities(logits: Tensor) -> None:
    best = logits.softmax(-1).sort(-1, descending=True).values[:, :K]
    torch.testing.assert_close(route(logits, K).weights, best)


def test_sigmoid_weights_renormalised_and_scaled(logits: Tensor) -> None:
    best = logits.sigmoid().sort(-1, descending=True).values[:, :K]
    routing = route(logits, K, score="sigmoid", renormalize=True, scale=2.5)
    torch.testing.assert_close(routing.weights, 2.5 * best / best.sum(-1, keepdim=True))


def test_softmax_and_renormalize_equal_a_softmax_over_the_chosen_logits(logits: Tensor) -> None:
    chosen = logits.sort(-1, descending=True).values[:, :K]
    torch.testing.assert_close(route(logits, K, renormalize=True).weights, chosen.softmax(-1))


def test_gradient_of_the_weights_equals_that_of_plain_indexing(logits: Tensor) -> None:
    upstream = torch.randn(40, K, generator=torch.Generator().manual_seed(1))
    ours, plain = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    route(ours, K, renormalize=True).weights.mul(upstream).sum().backward()
    chosen = plain.softmax(-1)[torch.arange(40)[:, None], plain.argsort(-1, descending=True)[:, :K]]
    (chosen / chosen.sum(-1, keepdim=True)).mul(upstream).sum().backward()
    torch.testing.assert_close(ours.grad, plain.grad)


def test_all_equal_logits_choose_the_first_experts() -> None:
    assert route(torch.zeros(3, E), 3).indices.tolist() == [[0, 1, 2]] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_routed_in_float32(logits: Tensor, dtype: torch.dtype) -> None:
    low = logits.to(dtype)
    assert torch.equal(route(low, K).scores, low.float().softmax(-1))


def test_float64_logits_stay_float64_and_pass_gradcheck(generator: torch.Generator) -> None:
    rows = torch.randn(4, E, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: route(z, K, renormalize=True, scale=1.5).weights, rows)


# ----------------------------------------------------------------------------------------------- biases and shapes
def test_rows_follow_the_leading_shape_in_row_major_order(logits: Tensor) -> None:
    assert torch.equal(route(logits.view(4, 10, E), K).indices, route(logits, K).indices)


@pytest.mark.parametrize("shape", [(E,), (4, 1, E), (10, E), (4, 10, E), (40, E), (1, 1, E)])
def test_logit_bias_of_every_shape_is_added_to_the_logits(logits: Tensor, shape: tuple[int, ...]) -> None:
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    full = bias.view(4, 10, E) if shape == (40, E) else bias.expand(4, 10, E)
    routing = route(logits.view(4, 10, E), K, logit_bias=bias)
    assert torch.equal(routing.logits, logits + full.reshape(40, E))


@pytest.mark.parametrize("shape", [(E,), (4, 1, E), (40, E)])
def test_selection_bias_of_every_shape_decides_the_choice(logits: Tensor, shape: tuple[int, ...]) -> None:
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    full = bias.view(4, 10, E) if shape == (40, E) else bias.expand(4, 10, E)
    expected = (logits.softmax(-1) + full.reshape(40, E)).argsort(-1, descending=True)[:, :K]
    assert torch.equal(route(logits.view(4, 10, E), K, selection_bias=bias).indices, expected)


def test_selection_bias_gets_no_gradient_and_logit_bias_does(logits: Tensor) -> None:
    choice, shift = torch.zeros(E, requires_grad=True), torch.zeros(E, requires_grad=True)
    route(logits, K, selection_bias=choice, logit_bias=shift).weights.square().sum().backward()
    assert choice.grad is None
    assert shift.grad.abs().sum() > 0


def test_policy_may_be_any_function(logits: Tensor) -> None:
    worst = route(logits, K, selection=lambda q, k: q.argsort(-1)[:, :k])
    assert torch.equal(worst.indices, logits.argsort(-1)[:, :K])


# -------------------------------------------------------------------------------------------------------- sentinels
def test_masked_rows_get_no_expert_whatever_they_hold(logits: Tensor) -> None:
    keep = torch.arange(40) % 3 != 0
    padded = logits.masked_fill(~keep[:, None], math.nan)
    routing = route(padded, K, mask=keep)
    assert (routing.indices[~keep] == E).all()
    assert (routing.weights[~keep] == 0).all()
    assert torch.equal(routing.indices[keep], route(logits[keep], K).indices)


def test_masked_rows_of_nan_leave_the_gradient_clean(logits: Tensor) -> None:
    keep = torch.arange(40) % 3 != 0
    padded = logits.masked_fill(~keep[:, None], math.nan).requires_grad_()
    routing = route(padded, K, mask=keep, renormalize=True)
    (routing.weights.square().sum() + load_balance_loss(routing)).backward()
    assert padded.grad.isfinite().all()
    assert (padded.grad[~keep] == 0).all()


def test_mask_of_the_leading_shape_equals_the_flat_one(logits: Tensor) -> None:
    keep = torch.arange(40) % 3 != 0
    shaped = route(logits.view(4, 10, E), K, mask=keep.view(4, 10))
    assert torch.equal(shaped.indices, route(logits, K, mask=keep).indices)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_fewer_available_experts_than_k_leave_sentinels(score: str) -> None:
    rows = torch.tensor([[1.0, -math.inf, -math.inf], [-math.inf, 0.0, 3.0]])
    routing = route(rows, 2, score=score, renormalize=True)
    assert routing.indices.tolist() == [[0, 3], [2, 1]]
    assert routing.weights[0].tolist() == [1.0, 0.0]


def test_unavailable_experts_are_not_chosen_even_with_the_largest_selection_bias() -> None:
    rows = torch.tensor([[0.0, -math.inf, 0.0]])
    assert route(rows, 2, selection_bias=torch.tensor([0.0, 100.0, -100.0])).indices.tolist() == [[0, 2]]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_row_without_any_available_expert_has_scores_and_gradient_zero(score: str) -> None:
    rows = torch.zeros(2, 3, requires_grad=True)
    unavailable = torch.tensor([[-math.inf] * 3, [0.0] * 3])
    routing = route(rows, 2, score=score, logit_bias=unavailable, renormalize=True)
    (routing.weights.square().sum() + routing.scores.square().sum()).backward()
    assert routing.indices[0].tolist() == [3, 3]
    assert routing.scores[0].tolist() == [0.0] * 3
    assert rows.grad[0].tolist() == [0.0] * 3
    assert rows.grad.isfinite().all()


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_nan_logits_reach_the_weights(score: str) -> None:
    rows = torch.tensor([[0.0, math.nan, 1.0], [0.0, 1.0, 2.0]])
    routing = route(rows, 2, score=score)
    assert routing.weights[0].isnan().any()
    assert routing.weights[1].isfinite().all()


def test_no_rows_are_routed_to_no_rows() -> None:
    assert route(torch.empty(0, E), K, renormalize=True).weights.shape == (0, K)


# ---------------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"top_k": 0}, ValueError, "top_k must be at least 1, got 0"),
        ({"top_k": 9}, ValueError, "top_k=9 exceeds num_experts=6"),
        ({"top_k": 2.0}, TypeError, "top_k must be an int, got float"),
        ({"logits": torch.zeros(3, E).long()}, TypeError, "logits must be floating point, got torch.int64"),
        ({"logits": torch.zeros(3, 0)}, ValueError, r"\[..., E\] with E >= 1, got \[3, 0\]"),
        ({"score": "tanh"}, ValueError, "score must be one of 'softmax', 'sigmoid', got 'tanh'"),
        (
            {"logit_bias": torch.zeros(5)},
            ValueError,
            r"last size of logit_bias must be the number of experts, 6; got.*\[5\]",
        ),
        (
            {"selection_bias": torch.zeros(4, E)},
            ValueError,
            r"selection_bias of shape \[4, 6\].*logits of shape \[3, 6\]",
        ),
        (
            {"logit_bias": torch.zeros(2, 3, E)},
            ValueError,
            r"logit_bias of shape \[2, 3, 6\].*logits of shape \[3, 6\]",
        ),
        ({"mask": torch.ones(3)}, TypeError, r"mask must be bool \(True for rows that take part\), got torch.float32"),
        ({"mask": torch.ones(2, dtype=torch.bool)}, ValueError, r"leading shape of the logits, \[3\].*got \[2\]"),
        ({"selection": lambda q, k: q[:, :k]}, TypeError, "indices must be integers, got torch.float32"),
        ({"selection": lambda q, k: q.argsort(-1) + 4}, ValueError, "indices must lie in 0..6"),
        ({"selection": lambda q, k: q.argmax()}, ValueError, r"must return indices \[R, k\] with R=3, got \[\]"),
        ({"logits": [[0.0] * E]}, TypeError, "logits must be a torch.Tensor, got list"),
        ({"logit_bias": np.zeros(E)}, TypeError, "logit_bias must be a torch.Tensor, got ndarray"),
        ({"selection_bias": 0.5}, TypeError, "selection_bias must be a torch.Tensor, got float"),
        ({"mask": np.ones(3, bool)}, TypeError, "mask must be a torch.Tensor, got ndarray"),
        ({"selection": lambda q, k: None}, ValueError, "must return indices .* got NoneType"),
        ({"selection": TopK(offset=5)}, ValueError, "offset=5 and top_k=2 need 7 experts, got 6"),
    ],
)
def test_route_refuses(kwargs: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        route(**{"logits": torch.zeros(3, E), "top_k": K} | kwargs)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Router.linear(8, 8, 9), "top_k=9 exceeds num_experts=8"),
        (lambda: Router.linear(8, 8, 0), "top_k must be at least 1, got 0"),
        (lambda: Router.linear(8, 8, 2, score="relu"), "score must be one of 'softmax', 'sigmoid', got 'relu'"),
        (lambda: Router.linear(8, 8, 2, balancer=BiasBalancer(4)), "the balancer is for 4 experts, but num_experts=8"),
        (lambda: Router(nn.Linear(8, 4), 8, 2)(torch.zeros(1, 8)), r"must be num_experts=8, got shape \[1, 4\]"),
        (lambda: Router.linear(8, 4, 2)(torch.zeros(1, 7)), r"x must have shape \[..., H\] with H=8, got \[1, 7\]"),
    ],
)
def test_router_refuses(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# --------------------------------------------------------------------------------------------- precision, transforms
def test_gate_product_stays_float32_under_autocast(generator: torch.Generator) -> None:
    router, x = Router.linear(64, E, K), torch.randn(9, 64, generator=generator)
    with torch.autocast("cpu", torch.bfloat16):
        routing = router(x)
    exact = x.double() @ router.gate.weight.detach().double().T
    assert routing.logits.dtype == routing.weights.dtype == torch.float32
    torch.testing.assert_close(routing.logits.double(), exact, rtol=1e-5, atol=1e-6)


def test_bfloat16_router_differs_from_float32_only_by_the_rounding_of_its_inputs(generator: torch.Generator) -> None:
    router, x = Router.linear(64, E, K).bfloat16(), torch.randn(9, 64, generator=generator).bfloat16()
    exact = x.double() @ router.gate.weight.detach().double().T
    torch.testing.assert_close(router(x).logits.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_router_compiles_to_one_graph_with_equal_results(score: str, generator: torch.Generator) -> None:
    router = Router.linear(8, E, K, score=score, renormalize=True, balancer=BiasBalancer(E))
    x = torch.randint(-2, 3, (5, 4, 8), generator=generator) / 4.0  # coarse values: ties are likely
    keep = torch.arange(20).view(5, 4) != 7
    bias = torch.zeros(5, 1, E)
    bias[2, 0, :5] = -math.inf
    compiled = torch.compile(router, fullgraph=True, backend="aot_eager")(x, logit_bias=bias, mask=keep)
    eager = router(x, logit_bias=bias, mask=keep)
    assert torch.equal(compiled.indices, eager.indices)
    torch.testing.assert_close(compiled.weights, eager.weights)


def test_compiled_gradient_equals_eager_gradient(logits: Tensor) -> None:
    ours, eager = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    weights = torch.compile(lambda z: route(z, K, renormalize=True).weights, fullgraph=True, backend="aot_eager")
    weights(ours).square().sum().backward()
    route(eager, K, renormalize=True).weights.square().sum().backward()
    torch.testing.assert_close(ours.grad, eager.grad)


def test_inductor_and_eager_choose_the_same_experts(generator: torch.Generator) -> None:
    rows = torch.randint(-3, 4, (64, E), generator=generator) / 2.0
    compiled = torch.compile(lambda z: route(z, K, score="sigmoid").indices, fullgraph=True)
    assert torch.equal(compiled(rows), route(rows, K, score="sigmoid").indices)


def test_functional_call_routes_with_other_parameters(generator: torch.Generator) -> None:
    router, x = Router.linear(8, E, K), torch.randn(5, 8, generator=generator)
    other = torch.randn(E, 8, generator=generator)
    routing = torch.func.functional_call(router, {"gate.weight": other}, (x,))
    torch.testing.assert_close(routing.logits, x @ other.T)


def test_gradients_of_an_ensemble_of_routers_by_vmap(generator: torch.Generator) -> None:
    weights, x = torch.randn(3, E, 8, generator=generator), torch.randn(5, 8, generator=generator)

    def loss(weight: Tensor) -> Tensor:
        return route(x @ weight.T, K, renormalize=True).weights.square().sum()

    stacked = torch.stack([torch.func.grad(loss)(weight) for weight in weights])
    torch.testing.assert_close(torch.vmap(torch.func.grad(loss))(weights), stacked)


def test_router_on_the_meta_device_routes_shapes() -> None:
    with torch.device("meta"):
        router = Router.linear(8, E, K, renormalize=True, balancer=BiasBalancer(E))
        assert router(torch.empty(5, 8)).indices.shape == (5, K)


def test_state_dict_holds_gate_and_bias_only() -> None:
    router = Router.linear(8, E, K, balancer=BiasBalancer(E))
    assert list(router.state_dict()) == ["gate.weight", "balancer.expert_bias"]


# --------------------------------------------------------------------------------------------------------- NoisyGate
def test_noisy_gate_without_training_is_its_linear_part(generator: torch.Generator) -> None:
    gate, x = NoisyGate(8, E, bias=True).eval(), torch.randn(5, 8, generator=generator)
    torch.testing.assert_close(gate(x), x @ gate.weight.T + gate.bias)


def test_noisy_gate_draws_from_its_generator(generator: torch.Generator) -> None:
    gate, x = NoisyGate(8, E, generator=generator), torch.randn(5, 8)
    state = generator.get_state()
    first = gate(x)
    generator.set_state(state)
    assert torch.equal(gate(x), first)


def test_noise_has_the_standard_deviation_that_the_gate_states() -> None:
    gate = NoisyGate(4, 3, generator=torch.Generator().manual_seed(0))
    nn.init.normal_(gate.noise_weight, generator=torch.Generator().manual_seed(1))
    x = torch.ones(40_000, 4)
    mean, std = gate.distribution(x)
    torch.testing.assert_close(std[0], (x[0] @ gate.noise_weight.T).exp().log1p())
    drawn = gate(x)
    torch.testing.assert_close(drawn.std(0), std[0], rtol=0.02, atol=0.0)
    torch.testing.assert_close(drawn.mean(0), mean[0], rtol=0.0, atol=0.05)


def test_noisy_router_can_be_copied() -> None:
    router = Router(NoisyGate(8, E, generator=torch.Generator().manual_seed(0)), E, K)
    x = torch.ones(3, 8)
    assert torch.equal(copy.deepcopy(router)(x).logits, router(x).logits)
