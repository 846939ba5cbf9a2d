"""Balance losses against transformers, closed forms and brute force; the bias balancer step by step."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from shared_core import (
    BiasBalancer,
    NoisyGate,
    Router,
    Routing,
    importance_loss,
    load_balance_loss,
    load_stats,
    noisy_load_loss,
    route,
    z_loss,
)

E, K = 6, 2


@pytest.fixture
def logits(generator: torch.Generator) -> Tensor:
    return torch.randn(40, E, generator=generator)


def bare() -> Routing:
    return Routing.from_topk(torch.tensor([[0]]), torch.ones(1, 1), num_experts=E)


# ------------------------------------------------------------------------------------------------- load_balance_loss
def test_balance_loss_is_transformers_loss_over_k(logits: Tensor) -> None:
    theirs = load_balancing_loss_func((logits,), E, K)
    torch.testing.assert_close(load_balance_loss(route(logits, K)), theirs / K)


def test_balance_loss_with_a_mask_is_transformers_loss_over_k(logits: Tensor) -> None:
    keep = torch.arange(40) % 4 != 1
    theirs = load_balancing_loss_func((logits,), E, K, attention_mask=keep.view(4, 10).long())
    torch.testing.assert_close(load_balance_loss(route(logits, K, mask=keep)), theirs / K)


def test_gradient_of_the_balance_loss_is_transformers_gradient_over_k(logits: Tensor) -> None:
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    load_balance_loss(route(ours, K)).backward()
    (load_balancing_loss_func((theirs,), E, K) / K).backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_balance_loss_of_sigmoid_scores_divides_rows_by_their_sum() -> None:
    z = torch.tensor([[2.0, 0.0, -1.0], [0.0, 1.0, 0.5]])
    p = z.sigmoid()
    shares = (p / p.sum(1, keepdim=True)).mean(0)
    expected = 3 * (0.5 * shares[0] + 0.5 * shares[1])  # experts 0 and 1 have one row each
    torch.testing.assert_close(load_balance_loss(route(z, 1, score="sigmoid")), expected)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_balance_loss_is_one_at_perfect_balance(k: int) -> None:
    z = torch.stack([torch.eye(4).roll(shift, 1) + torch.eye(4).roll(shift + 1, 1) for shift in range(4)]).view(-1, 4)
    assert load_balance_loss(route(9.0 * z, k)).item() == pytest.approx(1.0, abs=1e-5)


def test_balance_loss_is_the_number_of_experts_at_collapse() -> None:
    assert load_balance_loss(route(torch.tensor([[99.0, 0.0, 0.0]] * 5), 1)).item() == pytest.approx(3.0)


def test_sequence_loss_is_the_mean_of_the_losses_of_single_sequences(logits: Tensor) -> None:
    ids = torch.randint(-3, 4, (40,), generator=torch.Generator().manual_seed(2)) * 1000
    keep = torch.arange(40) % 5 != 0
    keep &= ids != 3000  # one sequence takes no part at all
    single = [load_balance_loss(route(logits[ids == i], K, mask=keep[ids == i])) for i in ids.unique() if i != 3000]
    whole = load_balance_loss(route(logits, K, mask=keep), sequence=ids)
    torch.testing.assert_close(whole, torch.stack(single).mean())


def test_sequence_loss_of_one_sequence_is_the_plain_loss(logits: Tensor) -> None:
    routing = route(logits, K, score="sigmoid")
    torch.testing.assert_close(load_balance_loss(routing, sequence=torch.zeros(40).long()), load_balance_loss(routing))


@pytest.mark.parametrize("loss", [load_balance_loss, z_loss, importance_loss])
def test_losses_of_an_all_masked_batch_are_zero_with_zero_gradient(logits: Tensor, loss: Callable) -> None:
    z = logits.requires_grad_()
    value = loss(route(z, K, mask=torch.zeros(40, dtype=torch.bool)))
    value.backward()
    assert value.item() == 0.0
    assert (z.grad == 0).all()


def test_descending_the_balance_loss_lowers_the_worst_load(generator: torch.Generator) -> None:
    x = torch.randn(512, 16, generator=generator) + 0.7
    gate = (0.4 * torch.randn(8, 16, generator=generator)).requires_grad_()
    before = load_stats(route(x @ gate.T, 2).counts()).max_violation
    for _ in range(50):
        (gradient,) = torch.autograd.grad(load_balance_loss(route(x @ gate.T, 2)), gate)
        gate = (gate - 0.2 * gradient).detach().requires_grad_()
    after = load_stats(route(x @ gate.T, 2).counts()).max_violation
    assert before > 0.8
    assert after < 0.5 * before


# ------------------------------------------------------------------------------------------------------ other losses
def test_z_loss_is_the_mean_squared_log_partition(logits: Tensor) -> None:
    expected = np.mean([math.log(sum(math.exp(v) for v in row)) ** 2 for row in logits.tolist()])
    assert z_loss(route(logits, K)).item() == pytest.approx(expected, rel=1e-5)


def test_z_loss_leaves_masked_and_unavailable_rows_out(logits: Tensor) -> None:
    keep = torch.arange(40) != 5
    bias = torch.zeros(40, E)
    bias[7] = -math.inf
    z = logits.clone().requires_grad_()
    value = z_loss(route(z, K, mask=keep, logit_bias=bias))
    value.backward()
    torch.testing.assert_close(value.detach(), z_loss(route(torch.cat([logits[:5], logits[6:7], logits[8:]]), K)))
    assert z.grad.isfinite().all()


def test_importance_loss_is_the_squared_coefficient_of_variation(logits: Tensor) -> None:
    totals = logits.softmax(-1).sum(0).double().numpy()
    assert importance_loss(route(logits, K)).item() == pytest.approx((totals.std() / totals.mean()) ** 2, rel=1e-4)


def test_noisy_load_loss_equals_its_definition_by_loops(generator: torch.Generator) -> None:
    gate = NoisyGate(8, E, generator=generator)
    nn.init.normal_(gate.noise_weight, generator=generator)
    x = torch.randn(30, 8, generator=generator)
    keep = torch.arange(30) != 4
    routing = Router(gate, E, K)(x, mask=keep)
    mean, std = (part.detach() for part in gate.distribution(x))
    noisy = routing.logits.tolist()
    load = np.zeros(E)
    for row in range(30):
        if not keep[row]:
            continue
        for expert in range(E):
            others = sorted((noisy[row][e] for e in range(E) if e != expert), reverse=True)
            load[expert] += norm.cdf((float(mean[row, expert]) - others[K - 1]) / float(std[row, expert]))
    loss = noisy_load_loss(routing, mean, std)
    assert loss.item() == pytest.approx((load.std() / load.mean()) ** 2, rel=1e-3)


def test_noisy_load_loss_trains_gate_and_noise(generator: torch.Generator) -> None:
    gate = NoisyGate(8, E, generator=generator)
    x = torch.randn(30, 8, generator=generator)
    noisy_load_loss(Router(gate, E, K)(x), *gate.distribution(x)).backward()
    assert gate.weight.grad.abs().sum() > 0
    assert gate.noise_weight.grad.abs().sum() > 0


def test_noisy_load_loss_is_zero_when_every_expert_is_chosen(generator: torch.Generator) -> None:
    gate, x = NoisyGate(8, E, generator=generator), torch.randn(30, 8, generator=generator)
    assert noisy_load_loss(Router(gate, E, E)(x), *gate.distribution(x)).item() == 0.0


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda r: load_balance_loss(torch.zeros(2, E)), TypeError, "routing must be a Routing, got Tensor"),
        (lambda r: z_loss(torch.zeros(2, E)), TypeError, "routing must be a Routing, got Tensor"),
        (lambda r: load_balance_loss(bare()), ValueError, "needs routing.scores"),
        (lambda r: importance_loss(bare()), ValueError, "needs routing.scores"),
        (lambda r: z_loss(bare()), ValueError, "z_loss needs routing.logits"),
        (lambda r: noisy_load_loss(bare(), torch.zeros(1, E), torch.ones(1, E)), ValueError, "needs routing.logits"),
        (lambda r: noisy_load_loss(r, torch.zeros(3, E), torch.ones(3, E)), ValueError, r"must be \[R, E\] = \[2, 6\]"),
        (
            lambda r: load_balance_loss(r, sequence=torch.zeros(3).long()),
            ValueError,
            r"one id for each of 2 rows, got \[3\]",
        ),
        (lambda r: load_balance_loss(r, sequence=torch.zeros(2)), TypeError, "sequence must hold integer ids"),
        (lambda r: load_balance_loss(r, sequence=torch.zeros(2).long(), group=object()), ValueError, "not both"),
    ],
)
def test_losses_refuse(call: Callable, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        call(route(torch.zeros(2, E), K))


# ------------------------------------------------------------------------------------------------------ BiasBalancer
def counted(counts: list[int], **kwargs: object) -> BiasBalancer:
    balancer = BiasBalancer(len(counts), **kwargs)
    indices = torch.tensor([[e] for e, n in enumerate(counts) for _ in range(n)], dtype=torch.int64).view(-1, 1)
    balancer.observe(Routing.from_topk(indices, torch.ones(len(indices), 1), num_experts=len(counts)))
    return balancer


def test_sign_rule_moves_every_expert_by_one_step_towards_the_mean() -> None:
    balancer = counted([8, 1, 1, 2], update_rate=0.5, centered=False)  # mean 3
    balancer.update()
    assert balancer.expert_bias.tolist() == [-0.5, 0.5, 0.5, 0.5]


def test_proportional_rule_moves_by_the_relative_distance_to_the_mean() -> None:
    balancer = counted([6, 1, 2, 3], update_rate=0.5, rule="proportional", centered=False)  # mean 3
    balancer.update()
    torch.testing.assert_close(balancer.expert_bias, torch.tensor([-0.5, 1 / 3, 1 / 6, 0.0]))


def test_centered_bias_has_mean_zero() -> None:
    balancer = counted([8, 1, 1, 2], update_rate=0.5)
    balancer.update()
    assert balancer.expert_bias.tolist() == [-0.75, 0.25, 0.25, 0.25]


def test_expert_at_the_mean_load_does_not_move() -> None:
    balancer = counted([3, 2, 4], update_rate=0.5)
    balancer.update()
    assert balancer.expert_bias.tolist() == [0.0, 0.5, -0.5]


def test_update_starts_counting_anew() -> None:
    balancer = counted([3, 2, 4])
    balancer.update()
    assert balancer.tokens_per_expert.tolist() == [0, 0, 0]


def test_bias_stays_bit_identical_when_no_token_was_seen() -> None:
    balancer = BiasBalancer(3)
    balancer.expert_bias.copy_(torch.tensor([0.1, 1e-7, -0.3]))  # not centred: centring would show
    before = balancer.expert_bias.clone()
    balancer.update()
    assert torch.equal(balancer.expert_bias, before)


def test_sentinels_and_evaluation_mode_are_not_counted(logits: Tensor) -> None:
    router = Router(nn.Identity(), E, K, balancer=BiasBalancer(E))
    router(logits, mask=torch.arange(40) < 10)
    assert router.balancer.tokens_per_expert.sum() == 10 * K
    router.eval()(logits)
    assert router.balancer.tokens_per_expert.sum() == 10 * K


def test_bias_changes_the_choice_but_not_the_weights_of_an_expert(logits: Tensor) -> None:
    router = Router(nn.Identity(), E, K, score="sigmoid", balancer=BiasBalancer(E))
    router.balancer.expert_bias[3] = 5.0
    routing = router(logits)
    assert (routing.indices[:, 0] == 3).all()
    assert torch.equal(routing.weights, logits.sigmoid().gather(1, routing.indices))


def test_balancer_bias_and_the_calls_own_bias_add_up(logits: Tensor) -> None:
    router = Router(nn.Identity(), E, K, balancer=BiasBalancer(E))
    router.balancer.expert_bias.copy_(torch.linspace(-0.2, 0.2, E))
    own = torch.linspace(0.3, -0.3, E)
    expected = route(logits, K, selection_bias=own + torch.linspace(-0.2, 0.2, E))
    assert torch.equal(router(logits, selection_bias=own).indices, expected.indices)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            Router.linear(4, E, K, balancer=BiasBalancer(E, 0.25, centered=False)) for _ in range(2)
        )


def test_attached_balancer_sees_all_micro_batches_of_a_step(generator: torch.Generator) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    BiasBalancer.attach(optimizer, model)
    counts = torch.zeros(E)
    for _ in range(3):  # gradient accumulation
        routing = model.layers[0](torch.randn(7, 4, generator=generator))
        routing.weights.sum().backward()
        counts += torch.bincount(routing.indices.flatten(), minlength=E)
        assert not model.layers[0].balancer.expert_bias.any()
    optimizer.step()
    assert torch.equal(model.layers[0].balancer.expert_bias, 0.25 * (counts.mean() - counts).sign())
    assert not model.layers[1].balancer.expert_bias.any()  # routed nothing


def test_module_given_twice_is_updated_once(generator: torch.Generator) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    BiasBalancer.attach(optimizer, [model, model.layers[0]])
    model.layers[0](torch.randn(7, 4, generator=generator))
    optimizer.step()
    assert model.layers[0].balancer.expert_bias.abs().max() == 0.25


def test_removed_handle_ends_the_updates(generator: torch.Generator) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    BiasBalancer.attach(optimizer, model).remove()
    model.layers[0](torch.randn(7, 4, generator=generator))
    optimizer.step()
    assert not model.layers[0].balancer.expert_bias.any()


@pytest.mark.parametrize("cast", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.double()])
def test_casting_a_model_leaves_the_bias_in_float32_bit_for_bit(cast: Callable) -> None:
    router = Router.linear(4, E, K, balancer=BiasBalancer(E))
    router.balancer.expert_bias.copy_(torch.linspace(0.9, 1.1, E))
    exact = router.balancer.expert_bias.clone()
    cast(router)
    assert router.gate.weight.dtype != torch.float32
    assert torch.equal(router.balancer.expert_bias, exact)
    assert router.balancer.tokens_per_expert.dtype == torch.int64


def test_steps_of_a_thousandth_survive_near_one_where_bfloat16_loses_them() -> None:
    balancer = counted([0, 2], update_rate=1e-3, centered=False).to(torch.bfloat16)
    balancer.expert_bias.fill_(1.0)
    low = torch.ones(2, dtype=torch.bfloat16)
    for _ in range(100):
        balancer.observe(Routing.from_topk(torch.tensor([[1]]), torch.ones(1, 1), num_experts=2))
        balancer.update()
        low += torch.tensor([1e-3, -1e-3], dtype=torch.bfloat16)
    torch.testing.assert_close(balancer.expert_bias, torch.tensor([1.1, 0.9]), rtol=0.0, atol=1e-4)
    assert low[0] == 1.0  # what float32 buffers are for


def test_bias_is_saved_and_the_running_counts_are_not() -> None:
    balancer = counted([3, 2, 4])
    assert list(balancer.state_dict()) == ["expert_bias"]
    balancer.update()
    restored = BiasBalancer(3)
    restored.load_state_dict(balancer.state_dict())
    assert torch.equal(restored.expert_bias, balancer.expert_bias)


def test_copied_balancer_counts_on_its_own() -> None:
    balancer = counted([3, 2, 4])
    other = copy.deepcopy(balancer)
    other.update()
    assert balancer.tokens_per_expert.tolist() == [3, 2, 4]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BiasBalancer(0), "num_experts must be at least 1, got 0"),
        (lambda: BiasBalancer(4, 0.0), "update_rate must be positive and finite, got 0.0"),
        (lambda: BiasBalancer(4, math.inf), "update_rate must be positive and finite, got inf"),
        (lambda: BiasBalancer(4).observe(route(torch.zeros(2, 1), 1)), "is for 4 experts, the routing for 1"),
        (lambda: BiasBalancer(4, rule="linear"), "rule must be 'sign' or 'proportional', got 'linear'"),
        (
            lambda: BiasBalancer.attach(torch.optim.SGD([torch.zeros(1)]), nn.Linear(2, 2)),
            r"no BiasBalancer inside modules: give Router\(..., balancer=BiasBalancer\(num_experts\)\)",
        ),
    ],
)
def test_balancer_refuses(make: Callable, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("load", [5592407, 16777217, 123456789])  # beyond 2**24, and whose sums float32 rounds
@pytest.mark.parametrize("experts", [3, 7, 48])
def test_equal_loads_of_any_size_move_no_bias(experts: int, load: int) -> None:
    balancer = BiasBalancer(experts, centered=False)
    balancer.tokens_per_expert += load
    balancer.update()
    assert not balancer.expert_bias.any()


def test_noisy_load_loss_counts_no_unavailable_expert_and_its_gradient_is_finite(generator: torch.Generator) -> None:
    mean = torch.randn(9, 4, generator=generator, requires_grad=True)
    std = torch.rand(9, 4, generator=generator).requires_grad_()
    routing = route(mean.detach().index_fill(1, torch.tensor([1, 3]), -math.inf), 2)  # both others are always chosen
    loss = noisy_load_loss(routing, mean, std)
    assert loss.item() == pytest.approx(1.0)  # loads 9, 0, 9, 0: variance 4.5², mean 4.5
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(loss, [mean, std]))


def test_noisy_load_loss_with_vanishing_noise_has_a_finite_gradient(generator: torch.Generator) -> None:
    mean = torch.randn(9, 4, generator=generator, requires_grad=True)
    std = torch.full((9, 4), 1e-30, requires_grad=True)
    gradients = torch.autograd.grad(noisy_load_loss(route(mean.detach(), 2), mean, std), [mean, std])
    assert all(grad.isfinite().all() for grad in gradients)
