"""Whole models of seven families: what they compute with our experts is what they compute with their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shared_core.integrations.transformers import experts as adapter

Build = Callable[..., Any]


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference, as a share of the largest entry."""
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))


def gradients(model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(tokens).logits.square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def block_of(model: nn.Module) -> nn.Module:
    """The last module that holds experts."""
    return [module for module in model.modules() if hasattr(module, "experts")][-1]


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_logits_are_those_of_eager(build: Build, family: str, tokens: Tensor) -> None:
    with torch.no_grad():
        ours, theirs = (build(family, name)(tokens).logits for name in ("shared_core", "eager"))
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=1e-5)


def test_every_gradient_is_that_of_eager(build: Build, family: str, tokens: Tensor) -> None:
    ours, theirs = (gradients(build(family, name), tokens) for name in ("shared_core", "eager"))
    assert ours.keys() == theirs.keys()
    errors = {name: relative(ours[name], theirs[name]) for name in theirs}
    assert {name: error for name, error in errors.items() if error > 1e-5} == {}


def test_experts_and_routers_have_gradients_that_are_not_zero(build: Build, family: str, tokens: Tensor) -> None:
    found = gradients(build(family, "shared_core"), tokens)
    routed = [found[n] for n in found if ".experts." in n or n.endswith(("gate.weight", "router.weight"))]
    assert len(routed) >= 3
    assert min(float(gradient.abs().max()) for gradient in routed) > 1e-4  # the parity above is about something


def test_greedy_generation_is_equal_token_for_token(build: Build, family: str, tokens: Tensor) -> None:
    ours, theirs = (
        build(family, name).generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=8, do_sample=False)
        for name in ("shared_core", "eager")
    )
    assert torch.equal(ours, theirs)


def test_a_saved_model_computes_the_same_when_loaded(build: Build, family: str, tokens: Tensor, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = build(family, "shared_core")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="shared_core").eval()
    assert loaded.get_experts_implementation()[""] == "shared_core"
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, rtol=0.0, atol=0.0)


def test_a_loaded_model_forgets_the_implementation_unless_it_is_named(build: Build, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    build("mixtral", "shared_core").save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.get_experts_implementation()[""] != "shared_core"


def test_bfloat16_is_as_close_to_float32_as_eager_is(build: Build, family: str, tokens: Tensor) -> None:
    # Routing is decided in bfloat16 by transformers' own routers in both cases, so the same experts are compared.
    with torch.no_grad():
        exact = build(family, "eager", torch.bfloat16).float()(tokens).logits
        ours, theirs = (build(family, name, torch.bfloat16)(tokens).logits.float() for name in ("shared_core", "eager"))
    error_of_ours, error_of_theirs = ((logits - exact).square().mean().sqrt() for logits in (ours, theirs))
    assert error_of_ours <= 1.25 * error_of_theirs + 1e-4


@pytest.mark.usefixtures("_fresh_compiler")
def test_the_block_compiles_to_one_graph_with_the_same_output(build: Build, family: str) -> None:
    block = block_of(build(family, "shared_core"))
    x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(3))
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        ours, theirs = compiled(x), block(x)
    if isinstance(theirs, tuple):  # GPT-OSS also returns router scores
        ours, theirs = ours[0], theirs[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])  # the fused route and the one through Python
def test_the_compiled_block_has_the_gradients_of_the_block(build: Build, family: str) -> None:
    block = block_of(build(family, "shared_core"))
    found = []
    for function in (torch.compile(block, fullgraph=True, backend="aot_eager"), block):
        block.zero_grad()
        x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(3), requires_grad=True)
        out = function(x)
        (out[0] if isinstance(out, tuple) else out).square().sum().backward()
        found.append([x.grad, *(p.grad for p in block.parameters())])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_gradient_checkpointing_changes_no_gradient(build: Build, tokens: Tensor) -> None:
    model = build("qwen3_moe", "shared_core").train()
    plain = gradients(model, tokens)
    model.activation_checkpointing_enable({"use_reentrant": False})
    again = gradients(model, tokens)
    assert all(torch.equal(plain[name], again[name]) for name in plain)


def test_autocast_is_as_close_to_float32_as_eager_under_autocast(build: Build, tokens: Tensor) -> None:
    with torch.no_grad():
        exact = build("qwen3_moe", "eager")(tokens).logits
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ours, theirs = (build("qwen3_moe", name)(tokens).logits.float() for name in ("shared_core", "eager"))
    errors = [(logits - exact).square().mean().sqrt() for logits in (ours, theirs)]
    assert errors[0] <= 1.5 * errors[1] + 1e-4


def test_a_live_model_switches_to_ours_and_back(build: Build, tokens: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    fused = adapter.experts_forward
    monkeypatch.setattr(adapter, "experts_forward", lambda *a, **k: calls.append(1) or fused(*a, **k))
    model = build("mixtral", "eager")
    for name in ("shared_core", "eager"):
        model.set_experts_implementation(name)
        model(tokens)
    assert len(calls) == 2  # one for each of the two layers, none after switching back


def test_only_the_named_part_of_a_composite_model_switches() -> None:
    from transformers import Qwen3VLMoeConfig

    text = {"hidden_size": 32, "num_hidden_layers": 1}
    config = Qwen3VLMoeConfig(text_config=text, vision_config={"depth": 1})
    config._experts_implementation = {"": "eager", "text_config": "shared_core"}
    assert config._experts_implementation == "eager"
    assert config.text_config._experts_implementation == "shared_core"


def test_a_name_that_nobody_registered_is_refused_by_transformers(build: Build) -> None:
    with pytest.raises(ValueError, match='experts_implementation="nobody"` is not supported'):
        build("mixtral", "nobody")
