"""What is captured is what the model did: compared with the router called by hand and with transformers' own record."""

from __future__ import annotations

import contextlib
import copy
import io
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shared_core import Routing, load_stats
from shared_core.integrations.transformers import capture_routing

Build = Callable[..., Any]
GATE = "model.layers.0.mlp.gate"


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def forwards(model: nn.Module) -> dict[str, Any]:
    """Instances whose forward is not their class's."""
    return {name: part.__dict__["forward"] for name, part in model.named_modules() if "forward" in part.__dict__}


def seen_by(module: nn.Module, run: Callable[[], object]) -> list[tuple[Any, Any]]:
    """Arguments and results of a module's calls, by PyTorch's own hook."""
    seen: list[tuple[Any, Any]] = []
    handle = module.register_forward_hook(lambda _, args, out: seen.append((args, out)))
    run()
    handle.remove()
    return seen


def test_indices_and_weights_are_what_the_experts_received(build: Build, family: str, tokens: Tensor) -> None:
    model = build(family)
    with capture_routing(model) as routings, torch.no_grad():
        for name in list(dict(model.named_modules())):
            if name.endswith(".experts"):
                parent = name.rpartition(".")[0]
                (((_, indices, weights), _),) = seen_by(model.get_submodule(name), lambda: model(tokens))
                (router,) = [n for n in routings if n.startswith(parent + ".")]
                assert torch.equal(routings[router].indices, indices)
                torch.testing.assert_close(routings[router].weights, weights, rtol=0.0, atol=0.0)
                routings.clear()


def test_logits_are_the_ones_that_transformers_records(build: Build, family: str, tokens: Tensor) -> None:
    model = build(family)
    with capture_routing(model) as routings, torch.no_grad():
        recorded = model(tokens, output_router_logits=True).router_logits
    assert len(recorded) == len(routings)
    for logits, routing in zip(recorded, routings.values(), strict=True):
        torch.testing.assert_close(routing.logits, logits.view(-1, 6), rtol=0.0, atol=0.0)


def test_names_are_qualified_names_of_routers(build: Build, family: str, tokens: Tensor) -> None:
    model = build(family)
    with capture_routing(model) as routings:
        model(tokens)
    assert routings.keys() == {n for n, m in model.named_modules() if type(m).__name__.lower().endswith("topkrouter")}


def test_there_is_one_row_a_token(build: Build, family: str, tokens: Tensor) -> None:
    with capture_routing(model := build(family)) as routings:
        model(tokens)
    assert {routing.indices.shape for routing in routings.values()} == {(tokens.numel(), 3)}


def test_generation_appends_a_row_for_each_new_token(build: Build, family: str, tokens: Tensor) -> None:
    model = build(family)
    with capture_routing(model) as routings:
        out = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=4, min_new_tokens=4)
    # The last token is chosen, but not routed any more.
    assert {r.num_rows for r in routings.values()} == {out.numel() - out.shape[0]}


def test_the_rows_of_generation_are_those_of_the_whole_text(build: Build, tokens: Tensor) -> None:
    model, prompt = build("qwen3_moe"), tokens[:1]
    with capture_routing(model) as stepwise:
        text = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5, do_sample=False)
    with capture_routing(model) as at_once, torch.no_grad():
        model(text[:, :-1])
    for name, routing in at_once.items():
        torch.testing.assert_close(stepwise[name].dense(), routing.dense(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_counts_every_token_once(build: Build, tokens: Tensor, reentrant: bool) -> None:
    model = build("mixtral").train()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    again = []
    model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: again.append(1))
    with capture_routing(model) as routings:
        model.get_input_embeddings().requires_grad_(True)
        model(tokens).logits.square().sum().backward()
    assert len(again) == 2  # the layer did run twice
    assert {routing.num_rows for routing in routings.values()} == {tokens.numel()}


def test_several_calls_are_joined_in_their_order(build: Build, tokens: Tensor) -> None:
    model = build("olmoe")
    parts = []
    with torch.no_grad():
        for row in tokens:
            with capture_routing(model) as alone:
                model(row[None])
            parts.append({name: routing.indices for name, routing in alone.items()})
        with capture_routing(model) as together:
            for row in tokens:
                model(row[None])
    for name, routing in together.items():
        assert torch.equal(routing.indices, torch.cat([part[name] for part in parts]))


def test_reading_in_between_loses_nothing(build: Build, tokens: Tensor) -> None:
    model = build("olmoe")
    with capture_routing(model) as routings:
        seen = []
        for _ in range(3):
            model(tokens)
            seen.append(routings["model.layers.0.mlp.gate"].num_rows)
    assert seen == [18, 36, 54]


def test_captures_nest(build: Build, tokens: Tensor) -> None:
    model = build("mixtral")
    with capture_routing(model) as outer:
        model(tokens)
        with capture_routing(model.model.layers[0]) as inner:
            model(tokens)
        model(tokens)
    assert list(inner) == ["mlp.gate"]
    assert (inner["mlp.gate"].num_rows, outer["model.layers.0.mlp.gate"].num_rows) == (18, 54)


def test_nothing_is_captured_after_the_block(build: Build, tokens: Tensor) -> None:
    model = build("mixtral")
    with capture_routing(model) as routings:
        model(tokens)
    model(tokens)
    assert routings["model.layers.0.mlp.gate"].num_rows == 18


def test_the_model_is_as_before_although_the_block_failed(build: Build) -> None:
    model = build("mixtral")
    with pytest.raises(IndexError), capture_routing(model):
        model(torch.tensor([[10**6]]))  # no such token
    assert forwards(model) == {}


def test_a_forward_that_was_replaced_before_is_back_afterwards(build: Build, tokens: Tensor) -> None:
    model = build("mixtral")
    gate = model.model.layers[0].mlp.gate
    mine = gate.forward
    gate.forward = mine  # as accelerate's hooks do
    with capture_routing(model):
        model(tokens)
    assert gate.__dict__["forward"] is mine


def test_blocks_may_end_in_the_order_in_which_they_began(build: Build, tokens: Tensor) -> None:
    model, rows = build("mixtral", "shared_core"), tokens.numel()
    one, other = contextlib.ExitStack(), contextlib.ExitStack()
    early, late = one.enter_context(capture_routing(model)), other.enter_context(capture_routing(model))
    model(tokens)
    one.close()
    model(tokens)
    other.close()
    model(tokens)
    assert [routings[GATE].num_rows for routings in (early, late)] == [rows, 2 * rows]
    assert not forwards(model)


def test_a_copy_made_inside_runs_on_its_own_weights_and_is_not_recorded(build: Build, tokens: Tensor) -> None:
    model = build("mixtral", "shared_core")
    expected = model(tokens).logits
    with capture_routing(model) as routings:
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        torch.testing.assert_close(twin(tokens).logits, expected)
    assert not routings


def test_a_model_can_be_pickled_inside(build: Build, tokens: Tensor) -> None:
    model, file = build("mixtral", "shared_core"), io.BytesIO()
    with capture_routing(model) as routings:
        torch.save(model, file)
        loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
        logits = loaded(tokens).logits
    assert not routings
    torch.testing.assert_close(logits, model(tokens).logits)


@pytest.mark.parametrize("inside", [False, True])
def test_a_forward_of_somebody_elses_is_copied_with_its_instance(build: Build, tokens: Tensor, inside: bool) -> None:
    model = build("mixtral", "shared_core")
    gate = model.model.layers[0].mlp.gate
    original = type(gate).forward
    gate.forward = types.MethodType(lambda self, x: original(self, -x), gate)
    expected = model(tokens).logits
    with capture_routing(model) if inside else contextlib.nullcontext():
        twin = copy.deepcopy(model)
    torch.testing.assert_close(twin(tokens).logits, expected)


def test_no_rows_have_logits(build: Build) -> None:
    block = build("mixtral", "shared_core").model.layers[0].mlp
    with capture_routing(block) as routings:
        block(torch.empty(1, 0, 32))
    assert routings["gate"].logits.shape == (0, 6)


def test_nothing_captured_is_part_of_a_graph(build: Build, tokens: Tensor) -> None:
    with capture_routing(model := build("mixtral")) as routings:
        model(tokens)
    routing = routings["model.layers.0.mlp.gate"]
    assert routing.logits is not None
    assert not any(t.requires_grad for t in (routing.weights, routing.logits))


def test_capturing_changes_no_gradient(build: Build, tokens: Tensor) -> None:
    model, found = build("qwen3_moe", "shared_core"), []
    for context in (capture_routing(model), contextlib.nullcontext()):
        model.zero_grad()
        with context:
            model(tokens).logits.square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("when", ["compiled before", "compiled inside"])
def test_a_compiled_model_is_captured_too(build: Build, tokens: Tensor, when: str) -> None:
    model = build("mixtral", "shared_core")
    with capture_routing(model) as expected, torch.no_grad():
        model(tokens)
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        if when == "compiled before":
            compiled(tokens)
        with capture_routing(compiled) as routings:
            compiled(tokens)
        compiled(tokens)
    assert routings.keys() == expected.keys()
    for name, routing in routings.items():
        assert torch.equal(routing.indices, expected[name].indices)


def test_softmax_that_a_router_returns_first_is_not_taken_for_logits(tokens: Tensor) -> None:
    from transformers import Gemma4TextConfig
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextDecoderLayer

    config = Gemma4TextConfig(
        hidden_size=32, intermediate_size=40, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        enable_moe_block=True, num_experts=6, top_k_experts=3, moe_intermediate_size=20, num_hidden_layers=1,
        hidden_size_per_layer_input=0, layer_types=["full_attention"],
    )  # fmt: skip
    layer = Gemma4TextDecoderLayer(config, 0)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    x = torch.randn(10, 32)
    with capture_routing(layer) as routings, torch.no_grad():
        probabilities, weights, indices = layer.router(x)
        layer.experts(x, indices, weights)
    routing = routings["router"]
    assert routing.logits is None
    torch.testing.assert_close(routing.scores, probabilities)


def test_a_captured_routing_can_be_counted_and_saved(build: Build, tokens: Tensor, tmp_path: Path) -> None:
    with capture_routing(model := build("mixtral")) as routings:
        model(tokens)
    routing = routings["model.layers.0.mlp.gate"]
    assert load_stats(routing.counts()).cv > 0
    routing.save(tmp_path / "trace.npz")
    assert torch.equal(Routing.load(tmp_path / "trace.npz").indices, routing.indices)


def test_an_unknown_name_lists_the_known_ones(build: Build, tokens: Tensor) -> None:
    with capture_routing(model := build("mixtral")) as routings:
        model(tokens)
    with pytest.raises(KeyError, match=r"no routing was captured for 'gate'; names are: model.layers.0.mlp.gate, "):
        routings["gate"]


def test_a_model_that_has_not_run_has_no_routing(build: Build) -> None:
    with capture_routing(build("mixtral")) as routings:
        assert len(routings) == 0
    with pytest.raises(KeyError, match="the model has not run inside the block"):
        routings["model.layers.0.mlp.gate"]


def test_a_dense_model_is_refused_by_its_class() -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=8, hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    with (
        pytest.raises(ValueError, match="Qwen3ForCausalLM has no mixture-of-experts layer"),
        capture_routing(Qwen3ForCausalLM(config)),
    ):
        pass


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got str"), capture_routing("mixtral"):
        pass
