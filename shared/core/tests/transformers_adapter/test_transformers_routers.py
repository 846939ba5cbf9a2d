"""Other rules in place of a model's routers: the same rule changes nothing, another one only what it should."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_core import BiasBalancer, GroupCappedTopK, Router, Routing, route
from shared_core.integrations.transformers import as_router, capture_routing, replace_routers

Build = Callable[..., Any]


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=["eager", "shared_core", "grouped_mm"])
def implementation(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class RoutesInBlock(nn.Module):
    """A block that routes by itself from the logits of a plain linear gate, as several families did and some do."""

    def __init__(self, implementation: str) -> None:
        from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralExperts

        from shared_core.integrations.transformers import register

        super().__init__()
        register()
        config = MixtralConfig(hidden_size=32, intermediate_size=20, num_local_experts=6)
        config._experts_implementation = implementation
        self.gate = nn.Linear(32, 6, bias=False)
        self.experts = MixtralExperts(config)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            for parameter in self.parameters():
                nn.init.normal_(parameter, std=0.3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.gate(x)
        weights, indices = logits.sigmoid().view(-1, 6).topk(2)
        return self.experts(x.view(-1, 32), indices, weights).view(x.shape), logits


def states() -> Tensor:
    return torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(5))


def logits_of(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(tokens).logits
    return out


def same_rule(_: str, router: nn.Module) -> Router:
    return as_router(router)


# --- as_router -------------------------------------------------------------------------------------------------------


def test_the_same_rule_on_the_same_weights_leaves_logits_unchanged(
    build: Build, family: str, implementation: str, tokens: Tensor
) -> None:
    model = build(family, implementation)
    expected = logits_of(model, tokens)
    with replace_routers(model, same_rule) as rules:
        got = logits_of(model, tokens)
    assert len(rules) >= 1
    torch.testing.assert_close(got, expected, rtol=0.0, atol=1e-5)


def test_gradients_reach_the_models_own_gate_through_the_replacement(build: Build, family: str, tokens: Tensor) -> None:
    model, found = build(family), []
    for factory in (same_rule, lambda *_: None):
        model.zero_grad()
        with replace_routers(model, factory):
            model(tokens).logits.square().sum().backward()
        found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    ours, theirs = found
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(ours[name], gradient, rtol=0.0, atol=1e-5 * scale + 1e-9, msg=name)


def test_the_correction_bias_is_shared_with_the_balancer(build: Build) -> None:
    model = build("deepseek_v3")
    gate = model.model.layers[1].mlp.gate
    router = as_router(gate)
    assert isinstance(router.balancer, BiasBalancer)
    router.balancer.expert_bias.add_(1.5)
    expected = as_router(gate).balancer.expert_bias
    assert torch.equal(gate.e_score_correction_bias, expected)
    assert gate.e_score_correction_bias.mean() > 1.0


def test_balancing_a_models_router_evens_its_load(build: Build) -> None:
    model = build("deepseek_v3").train()
    gate = model.model.layers[1].mlp.gate
    router = as_router(gate)
    router.balancer.update_rate = 0.005
    x = torch.randn(400, 32, generator=torch.Generator().manual_seed(2)) + 0.2
    before = torch.bincount(gate(x)[2].flatten(), minlength=6).float()
    for _ in range(200):
        router(x)
        router.balancer.update()
    after = torch.bincount(gate(x)[2].flatten(), minlength=6).float()  # transformers' own router, with the shared bias
    assert before.max() / before.mean() > 1.3
    assert after.max() / after.mean() < 1.1


def test_the_gate_is_the_models_own_parameter(build: Build, family: str) -> None:
    with replace_routers(model := build(family), same_rule) as rules:
        for name, rule in rules.items():
            assert rule.gate.weight is model.get_submodule(name).weight


def test_the_rule_is_found_under_autocast_and_in_any_default_dtype(build: Build, family: str) -> None:
    sites = [part for part in build(family).modules() if type(part).__name__.lower().endswith("router")]
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(3))
    expected = as_router(sites[-1])(x).dense()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            ours = as_router(sites[-1])
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(ours(x).dense(), expected)


def test_a_router_made_in_inference_mode_can_be_trained_later(build: Build) -> None:
    theirs = build("deepseek_v3").model.layers[1].mlp.gate
    with torch.inference_mode():
        ours = as_router(theirs).train()
    ours(torch.ones(5, 32)).weights.square().sum().backward()
    assert int(ours.balancer.tokens_per_expert.sum()) == 15


def test_a_router_without_values_is_refused(build: Build) -> None:
    with pytest.raises(ValueError, match="MixtralTopKRouter are on the meta device"):
        as_router(build("mixtral").model.layers[0].mlp.gate.to("meta"))


def test_a_router_that_softcaps_is_refused_by_its_class() -> None:
    from transformers.models.laguna.modeling_laguna import LagunaConfig, LagunaTopKRouter

    config = LagunaConfig(hidden_size=16, num_experts=4, num_experts_per_tok=2, moe_router_logit_softcapping=1.0)
    with pytest.raises(ValueError, match="LagunaTopKRouter decides by a rule that Router does not have"):
        as_router(LagunaTopKRouter(config))


def test_a_bias_that_the_block_keeps_can_be_given() -> None:
    from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2Config, MiniMaxM2TopKRouter

    theirs = MiniMaxM2TopKRouter(MiniMaxM2Config(hidden_size=16, num_local_experts=6, num_experts_per_tok=2))
    nn.init.normal_(theirs.weight)
    bias = torch.tensor([0.5, 0.0, -0.5, 0.0, 0.2, 0.0])
    x = torch.randn(50, 16)
    ours = as_router(theirs, correction_bias=bias)(x)
    _, weights, indices = theirs(x, bias)
    torch.testing.assert_close(ours.dense(), torch.zeros(50, 6).scatter(1, indices, weights))


def test_a_router_that_needs_more_than_rows_says_so() -> None:
    from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2Config, MiniMaxM2TopKRouter

    router = MiniMaxM2TopKRouter(MiniMaxM2Config(hidden_size=16, num_local_experts=6, num_experts_per_tok=2))
    with pytest.raises(ValueError, match=r"does not run on rows \[R, H\] alone .*e_score_correction_bias"):
        as_router(router)


def test_a_gate_whose_block_routes_has_no_rule_to_find() -> None:
    with pytest.raises(ValueError, match=r"Linear has no linear gate to share .* or no `top_k`"):
        as_router(RoutesInBlock("eager").gate)


def test_what_is_no_module_is_no_router() -> None:
    with pytest.raises(TypeError, match=r"router must be a torch.nn.Module, got str"):
        as_router("gate")  # type: ignore[arg-type]


# --- replace_routers -------------------------------------------------------------------------------------------------


def test_a_bias_moves_tokens_to_resident_experts(build: Build, family: str, tokens: Tensor) -> None:
    resident = torch.tensor([0.0, 0.0, 0.0, 100.0, 100.0, 100.0])

    def prefer(_: str, router: nn.Module) -> Callable[[Tensor], Routing]:
        ours = as_router(router)
        ours.selection = None  # groups would keep experts away
        return lambda x: ours(x, selection_bias=resident)

    model = build(family)
    with replace_routers(model, prefer), capture_routing(model) as routings:
        logits_of(model, tokens)
    assert {tuple((r.counts() > 0).tolist()) for r in routings.values()} == {(False,) * 3 + (True,) * 3}


def test_a_group_cap_holds_in_every_layer(build: Build, tokens: Tensor) -> None:
    groups = torch.tensor([0, 0, 1, 1, 2, 2])

    def capped(_: str, router: nn.Module) -> Router:
        ours = as_router(router)
        ours.selection = GroupCappedTopK(groups)
        return ours

    model = build("qwen3_moe")
    with replace_routers(model, capped), capture_routing(model) as routings:
        logits_of(model, tokens)
    for routing in routings.values():
        assert {len(set(row)) for row in groups[routing.indices].tolist()} == {3}


def test_a_row_may_have_more_experts_than_the_model_was_trained_with(build: Build, tokens: Tensor) -> None:
    model = build("olmoe")
    everything = {"eager": None, "shared_core": None}
    for name in everything:
        model.set_experts_implementation(name)
        with replace_routers(model, lambda _, router: lambda x: route(F.linear(x, router.weight), 6)):
            everything[name] = logits_of(model, tokens)
    torch.testing.assert_close(*everything.values(), rtol=0.0, atol=1e-5)


def test_slots_without_an_expert_are_skipped_by_every_implementation(
    build: Build, family: str, implementation: str, tokens: Tensor
) -> None:
    def drop_the_last(_: str, router: nn.Module) -> Callable[[Tensor], Routing]:
        ours = as_router(router)

        def rule(x: Tensor) -> Routing:
            routing = ours(x)
            indices, weights = routing.indices.clone(), routing.weights.clone()
            indices[:, -1], weights[:, -1] = 6, 0.0
            return Routing(indices, weights, routing.logits, None, 6)

        return rule

    def two_only(_: str, router: nn.Module) -> Callable[[Tensor], Routing]:
        ours = as_router(router)

        def rule(x: Tensor) -> Routing:
            routing = ours(x)
            return Routing(routing.indices[:, :-1], routing.weights[:, :-1], routing.logits, None, 6)

        return rule

    model = build(family, implementation)
    with replace_routers(model, drop_the_last):
        dropped = logits_of(model, tokens)
    with replace_routers(model, two_only):
        shorter = logits_of(model, tokens)
    torch.testing.assert_close(dropped, shorter, rtol=0.0, atol=1e-5)


def test_router_logits_and_the_auxiliary_loss_are_the_rules(build: Build, tokens: Tensor) -> None:
    model = build("mixtral")
    with replace_routers(model, lambda _, router: lambda x: route(-F.linear(x, router.weight), 3)), torch.no_grad():
        out = model(tokens, output_router_logits=True)
    hidden = build("mixtral")
    with capture_routing(hidden) as routings, torch.no_grad():
        plain = hidden(tokens, output_router_logits=True)
    # The first layer sees the same states in both.
    torch.testing.assert_close(out.router_logits[0], -routings["model.layers.0.mlp.gate"].logits)
    assert out.aux_loss != plain.aux_loss


def test_generation_follows_the_rule(build: Build, tokens: Tensor) -> None:
    model = build("qwen3_moe")
    first = torch.tensor([100.0, 100.0, 100.0, 0.0, 0.0, 0.0])

    def rule(_: str, router: nn.Module) -> Callable[[Tensor], Routing]:
        ours = as_router(router)
        return lambda x: ours(x, selection_bias=first)

    with replace_routers(model, rule), capture_routing(model) as routings:
        model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=3, min_new_tokens=3)
    assert all(int(r.counts()[3:].sum()) == 0 and r.num_rows == 22 for r in routings.values())


def test_a_rule_may_be_a_module_with_parameters_of_its_own(build: Build, tokens: Tensor) -> None:
    model = build("mixtral")
    with replace_routers(model, lambda *_: Router.linear(32, 6, 3, renormalize=True)) as rules:
        model(tokens).logits.square().sum().backward()
    assert all(rule.gate.weight.grad.abs().max() > 0 for rule in rules.values())
    assert all(layer.mlp.gate.weight.grad is None for layer in model.model.layers)


def test_none_leaves_a_router_alone(build: Build, tokens: Tensor) -> None:
    model = build("mixtral")
    expected = logits_of(model, tokens)
    with replace_routers(model, lambda *_: None) as rules:
        assert torch.equal(logits_of(model, tokens), expected)
    assert rules == {}


def test_the_model_keeps_its_modules_parameters_and_keys(build: Build, family: str, tokens: Tensor) -> None:
    model = build(family)

    def state() -> tuple[Any, ...]:
        return (
            {k: v.data_ptr() for k, v in model.state_dict().items()},
            {n: id(m) for n, m in model.named_modules()},
            [n for n, m in model.named_modules() if "forward" in m.__dict__],
        )

    before, expected = state(), logits_of(model, tokens)
    with replace_routers(model, lambda *_: Router.linear(32, 6, 3)):
        assert state()[:2] == before[:2]
        assert not torch.allclose(logits_of(model, tokens), expected)
    assert state() == before
    assert torch.equal(logits_of(model, tokens), expected)


def test_the_model_is_as_before_although_the_block_failed(build: Build) -> None:
    model = build("mixtral")
    with pytest.raises(RuntimeError, match="interrupted"), replace_routers(model, same_rule):
        raise RuntimeError("interrupted")
    assert not any("forward" in part.__dict__ for part in model.modules())


def test_the_model_is_as_before_although_the_factory_failed_halfway(build: Build) -> None:
    model = build("mixtral")

    def factory(name: str, router: nn.Module) -> Router:
        if "layers.1" in name:
            raise RuntimeError("halfway")
        return as_router(router)

    with pytest.raises(RuntimeError, match="halfway"), replace_routers(model, factory):
        pass
    assert not any("forward" in part.__dict__ for part in model.modules())


def test_a_replacement_that_ends_inside_of_a_capture_is_over(build: Build, tokens: Tensor) -> None:
    model = build("mixtral")
    before = logits_of(model, tokens)
    replaced, captured = contextlib.ExitStack(), contextlib.ExitStack()
    replaced.enter_context(replace_routers(model, lambda _, gate: lambda x: route(-F.linear(x, gate.weight), 3)))
    captured.enter_context(capture_routing(model))
    assert not torch.allclose(logits_of(model, tokens), before)
    replaced.close()
    assert torch.equal(logits_of(model, tokens), before)
    captured.close()
    assert torch.equal(logits_of(model, tokens), before)


def test_no_rows_are_routed(build: Build, family: str) -> None:
    model = build(family)
    name = next(n for n, _ in model.named_modules() if n.endswith((".gate", ".router")))
    block = model.get_submodule(name.rpartition(".")[0])
    with replace_routers(block, lambda _, theirs: as_router(theirs)):
        out = block(torch.empty(1, 0, 32))
    assert (out[0] if isinstance(out, tuple) else out).shape == (1, 0, 32)


def test_capturing_outside_of_a_replacement_sees_the_rule(build: Build, tokens: Tensor) -> None:
    model = build("mixtral")
    opposite = lambda _, router: lambda x: route(-F.linear(x, router.weight), 3)  # noqa: E731
    with replace_routers(model, opposite), capture_routing(model) as inside:
        logits_of(model, tokens)
    with capture_routing(model) as outside, replace_routers(model, opposite):
        logits_of(model, tokens)
    for name, routing in inside.items():
        assert torch.equal(routing.indices, outside[name].indices)
        assert outside[name].logits is None  # rather than those of the router that did not decide


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_compiled_model_follows_the_rule_and_returns(build: Build, tokens: Tensor) -> None:
    model = build("mixtral", "shared_core")
    compiled = torch.compile(model, backend="aot_eager")
    opposite = lambda _, router: lambda x: route(-F.linear(x, router.weight), 3)  # noqa: E731
    before = logits_of(compiled, tokens)
    with replace_routers(model, opposite):
        expected, got = logits_of(model, tokens), logits_of(compiled, tokens)
    torch.testing.assert_close(got, expected, rtol=0.0, atol=1e-5)
    torch.testing.assert_close(logits_of(compiled, tokens), before, rtol=0.0, atol=1e-5)


# --- Blocks that route by themselves ---------------------------------------------------------------------------------


def test_where_the_block_routes_the_rule_decides_all_the_same(implementation: str) -> None:
    block, x = RoutesInBlock(implementation), states()
    with replace_routers(block, lambda _, gate: lambda x: route(-F.linear(x, gate.weight), 3)), torch.no_grad():
        out, logits = block(x)
        routing = route(-F.linear(x, block.gate.weight), 3)
        expected = block.experts(x.view(-1, 32), routing.indices, routing.weights).view(x.shape)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(logits, -block.gate(x))


def test_where_the_block_routes_captures_are_right_too() -> None:
    block, x = RoutesInBlock("eager"), states()
    with capture_routing(block) as routings, torch.no_grad():
        _, logits = block(x)
    weights, indices = logits.sigmoid().view(-1, 6).topk(2)
    assert torch.equal(routings["gate"].indices, indices)
    torch.testing.assert_close(routings["gate"].weights, weights)
    torch.testing.assert_close(routings["gate"].logits, logits.view(-1, 6))


# --- Bad input -------------------------------------------------------------------------------------------------------


def test_a_dense_model_is_refused_by_its_class() -> None:
    with (
        pytest.raises(ValueError, match="Linear has no mixture-of-experts layer"),
        replace_routers(nn.Linear(2, 2), same_rule),
    ):
        pass


def test_a_rule_for_another_number_of_experts_is_refused_before_it_runs(build: Build) -> None:
    message = r"the rule for 'model.layers.0.mlp.gate' chooses among num_experts=5, but the layer has 6"
    with (
        pytest.raises(ValueError, match=message),
        replace_routers(build("mixtral"), lambda *_: Router.linear(32, 5, 3)),
    ):
        pass


def test_a_routing_over_another_number_of_experts_is_refused(build: Build, tokens: Tensor) -> None:
    with (
        replace_routers(model := build("mixtral"), lambda *_: lambda x: route(x[:, :7], 2)),
        pytest.raises(ValueError, match="chooses among num_experts=7, but the layer has 6"),
    ):
        model(tokens)


def test_a_rule_that_is_not_callable_is_refused(build: Build) -> None:
    with (
        pytest.raises(TypeError, match=r"factory must return a callable x -> Routing or None for .*, got int"),
        replace_routers(build("mixtral"), lambda *_: 3),
    ):  # type: ignore[arg-type,return-value]
        pass


@pytest.mark.parametrize("factory", [None, {}, nn.Linear(2, 2)])
def test_a_factory_that_is_no_function_is_refused(build: Build, factory: Any) -> None:
    with (
        pytest.raises(TypeError, match=f"factory must be a function .* got {type(factory).__name__}"),
        replace_routers(build("mixtral"), factory),
    ):
        pass


def test_the_router_itself_is_refused_as_its_replacement(build: Build) -> None:
    with (
        pytest.raises(TypeError, match=r"'model\.layers\.0\.mlp\.gate' is the very router"),
        replace_routers(build("mixtral"), lambda _, router: router),
    ):
        pass


def test_an_index_of_no_expert_is_refused(build: Build, tokens: Tensor, implementation: str) -> None:
    def wrong(x: Tensor) -> Routing:
        rows = x.shape[:-1].numel()
        return Routing(torch.full((rows, 1), 9), torch.ones(rows, 1), None, None, 6)

    model = build("mixtral", implementation)
    with (
        replace_routers(model, lambda *_: wrong),
        pytest.raises(ValueError, match=r"indices must lie in 0\.\.6 .* 9 to 9"),
    ):
        model(tokens)


def test_a_rule_that_returns_no_routing_is_refused(build: Build, tokens: Tensor) -> None:
    with (
        replace_routers(model := build("mixtral"), lambda *_: lambda x: x),  # type: ignore[arg-type,return-value]
        pytest.raises(TypeError, match=r"the rule for 'model.layers.0.mlp.gate' must return a Routing, got Tensor"),
    ):
        model(tokens)


def test_a_rule_that_routes_too_few_rows_is_refused(build: Build, tokens: Tensor) -> None:
    with (
        replace_routers(model := build("mixtral"), lambda *_: lambda x: route(x[:3, :6], 2)),
        pytest.raises(ValueError, match=r"must route all 18 rows of x \[18, 32\], got 3"),
    ):
        model(tokens)
