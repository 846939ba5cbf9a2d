"""One Router, seven needs: what each of seven kinds of mixture expects of its routing, as behaviour."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shared_core import (
    BiasBalancer,
    GroupCappedTopK,
    GroupedExperts,
    GroupLimitedTopK,
    LoRAExperts,
    MoE,
    Router,
    load_stats,
    prior_kl,
)

H = 24


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def seeded(router: Router, seed: int = 0) -> Router:
    nn.init.normal_(router.gate.weight, std=0.3, generator=torch.Generator().manual_seed(seed))
    return router


# -------------------------------------------------- 1. DeepSeek-V3: sigmoid, group-limited, balanced by a bias, no loss
@pytest.fixture(scope="module")
def deepseek() -> Router:
    policy = GroupLimitedTopK(8, 4)
    balancer = BiasBalancer(64, update_rate=5e-3)
    return seeded(
        Router.linear(H, 64, 8, score="sigmoid", renormalize=True, scale=2.5, selection=policy, balancer=balancer)
    )


def test_deepseek_rows_use_at_most_four_of_eight_groups(deepseek: Router) -> None:
    groups = deepseek(normal(200, H)).indices // 8
    assert max(len(set(row)) for row in groups.tolist()) == 4


def test_deepseek_weights_sum_to_the_scale(deepseek: Router) -> None:
    torch.testing.assert_close(deepseek(normal(200, H)).weights.sum(-1), torch.full((200,), 2.5))


def test_deepseek_bias_attached_to_an_optimizer_evens_the_load_without_a_loss() -> None:
    model = nn.ModuleDict(
        {"router": seeded(Router.linear(H, 16, 2, score="sigmoid", balancer=BiasBalancer(16, update_rate=5e-3)))}
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    BiasBalancer.attach(optimizer, model)
    x = normal(2048, H) + 0.5  # anisotropic: some experts are favoured by every row
    router = model["router"]
    before = load_stats(router.eval()(x).counts()).max_violation
    router.train()
    for step in range(150):
        router(x[torch.randperm(2048, generator=torch.Generator().manual_seed(step))[:512]])
        optimizer.step()
    after = load_stats(router.eval()(x).counts()).max_violation
    assert before > 1.0
    assert after < 0.25


# ------------------------------------------------------------------- 2. DivMoE: at most one expert of each domain group
def test_divmoe_rows_have_one_expert_of_each_of_four_domains() -> None:
    domains = torch.arange(4).repeat_interleave(4)
    router = seeded(Router.linear(H, 16, 4, renormalize=True, selection=GroupCappedTopK(domains)))
    chosen = domains[router(normal(200, H)).indices]
    assert (chosen.sort(-1).values == torch.arange(4)).all()


def test_divmoe_takes_the_best_expert_within_each_domain() -> None:
    router = seeded(Router.linear(H, 16, 4, selection=GroupCappedTopK(torch.arange(4).repeat_interleave(4))))
    routing = router(normal(200, H))
    best = routing.logits.view(200, 4, 4).argmax(-1) + 4 * torch.arange(4)
    assert torch.equal(routing.indices.sort(-1).values, best)


# -------------------------------------------- 3. AME-TS: a prior of every series shapes training through the loss alone
def test_ame_ts_prior_in_the_loss_is_what_the_router_does_without_it_later() -> None:
    series, length, experts = 8, 16, 4
    prior = torch.softmax(2.0 * normal(series, experts, seed=1), -1)
    tokens = normal(series, 1, H, seed=2) + 0.3 * normal(series, length, H, seed=3)
    series_id = torch.arange(series).repeat_interleave(length)
    router = seeded(Router.linear(H, experts, 2))
    optimizer = torch.optim.Adam(router.parameters(), lr=0.05)
    before = prior_kl(router(tokens).logits, prior, group=series_id).item()
    for _ in range(150):
        optimizer.zero_grad()
        prior_kl(router(tokens).logits, prior, group=series_id).backward()
        optimizer.step()
    routing = router(tokens)  # no prior handed over
    used = routing.scores.view(series, length, experts).mean(1)
    assert before > 0.3
    assert prior_kl(routing.logits, prior, group=series_id).item() < 0.02
    assert torch.equal(used.argmax(-1), prior.argmax(-1))


# ---------------------------------------------- 4. SaMoE: the gate sees an image's style, its prompt tokens get adapted
def test_samoe_every_prompt_token_is_adapted_by_its_images_mixture() -> None:
    images, tokens, prompts_each, experts = 3, 10, 4, 5
    features = normal(images, tokens, H)
    style = torch.cat([features.mean(1), features.std(1).log()], -1)
    routing = seeded(Router.linear(2 * H, experts, 2, renormalize=True))(style)
    adapters = LoRAExperts(H, H, experts, rank=2, alpha=4.0)
    nn.init.normal_(adapters.lora_B, generator=torch.Generator().manual_seed(4))
    prompts = normal(images * prompts_each, H, seed=5)
    adapted = prompts + adapters(prompts, routing.expand(prompts_each))
    for image in range(images):
        mixture = sum(
            w * adapters.delta_weight(int(e))
            for e, w in zip(routing.indices[image], routing.weights[image], strict=True)
        )
        own = prompts[image * prompts_each : (image + 1) * prompts_each]
        torch.testing.assert_close(adapted[image * prompts_each : (image + 1) * prompts_each], own + own @ mixture.T)


def test_samoe_decision_depends_on_style_and_not_on_the_order_of_patches() -> None:
    features = normal(2, 10, H)
    shuffled = features[:, torch.randperm(10, generator=torch.Generator().manual_seed(0))]
    router = seeded(Router.linear(2 * H, 5, 2))
    style, again = (torch.cat([f.mean(1), f.std(1).log()], -1) for f in (features, shuffled))
    torch.testing.assert_close(router(style).dense(), router(again).dense())


# --------------------------------------------------------- 5. A²MoE: rows are crops, all tokens of a crop share experts
def test_a2moe_tokens_of_a_crop_share_the_decision_made_from_its_context() -> None:
    crops, length, organs, experts_count = 4, 6, 7, 5
    context, histogram = normal(crops, H), torch.softmax(normal(crops, organs, seed=1), -1)
    tokens = normal(crops, length, H, seed=2)
    experts = GroupedExperts(H, 16, experts_count, init_std=0.3)
    routing = seeded(Router.linear(H + organs, experts_count, 2))(torch.cat([context, histogram.sqrt()], -1))
    y = experts(tokens.flatten(0, 1), routing.expand(length)).view(crops, length, H)
    for crop in range(crops):
        alone = routing.dense()[crop]
        expected = sum(alone[e] * swiglu(experts, int(e), tokens[crop]) for e in alone.nonzero().flatten())
        torch.testing.assert_close(y[crop], expected, rtol=1e-4, atol=1e-5)


def swiglu(experts: GroupedExperts, e: int, x: Tensor) -> Tensor:
    gate, up = (x @ experts.gate_up_proj[e].T).chunk(2, -1)
    return (nn.functional.silu(gate) * up) @ experts.down_proj[e].T


# ---------------------------------------------- 6. CECAR: prefer experts in the cache; the weights stay the model's own
@pytest.fixture
def reuse_distance() -> Tensor:
    return torch.tensor([0.0] * 4 + [1.0] * 12)  # experts 0-3 are resident


def test_cecar_hits_rise_with_the_strength_of_the_preference(reuse_distance: Tensor) -> None:
    router, x = seeded(Router.linear(H, 16, 4)), normal(300, H)
    hits = [
        (router(x, selection_bias=-beta * reuse_distance).indices < 4).float().mean().item()
        for beta in (0.0, 0.02, 0.1, 1.0)
    ]
    assert hits == sorted(hits)
    assert hits[0] < 0.5
    assert hits[-1] == 1.0


def test_cecar_selection_bias_keeps_the_models_own_mixture_weights(reuse_distance: Tensor) -> None:
    router, x = seeded(Router.linear(H, 16, 4)), normal(300, H)
    plain, preferring = router(x), router(x, selection_bias=-0.1 * reuse_distance)
    assert not torch.equal(plain.indices, preferring.indices)
    assert torch.equal(preferring.weights, plain.scores.gather(1, preferring.indices))


def test_cecar_logit_bias_changes_the_mixture_weights_too(reuse_distance: Tensor) -> None:
    router, x = seeded(Router.linear(H, 16, 4)), normal(300, H)
    biased = router(x, logit_bias=-reuse_distance)
    odds = biased.scores[:, 0] / biased.scores[:, 4]
    plain = router(x).scores
    torch.testing.assert_close(odds, plain[:, 0] / plain[:, 4] * torch.e, rtol=1e-4, atol=0.0)


# ------------------------------------- 7. DISTMOE: dense mixture of public and private experts, some clients are absent
def test_distmoe_absent_experts_leave_a_softmax_over_the_present_ones() -> None:
    router, x = seeded(Router.linear(H, 6, 6)), normal(50, H)
    available = torch.tensor([True, True, False, True, False, True])
    routing = router(x, logit_bias=torch.where(available, 0.0, -torch.inf))
    expected = torch.zeros(50, 6)
    expected[:, available] = (x @ router.gate.weight.T)[:, available].softmax(-1)
    torch.testing.assert_close(routing.dense(), expected)


def test_distmoe_output_and_gradient_do_not_touch_the_absent_experts() -> None:
    layer = MoE(seeded(Router.linear(H, 6, 6)), GroupedExperts(H, 16, 6, init_std=0.3))
    layer.experts.gate_up_proj.data[2] = torch.nan  # nobody knows what an absent client holds
    available = torch.tensor([True, True, False, True, True, True])
    y, _ = layer(normal(50, H), logit_bias=torch.where(available, 0.0, -torch.inf))
    y.square().sum().backward()
    assert y.isfinite().all()
    assert (layer.experts.gate_up_proj.grad[2] == 0).all()
    assert layer.router.gate.weight.grad.isfinite().all()
    assert (layer.router.gate.weight.grad[2] == 0).all()
