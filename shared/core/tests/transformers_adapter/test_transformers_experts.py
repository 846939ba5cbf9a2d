"""Every experts module of the installed transformers against its own eager code, and the routes through ours."""

from __future__ import annotations

import ast
import importlib
import logging
import subprocess
import sys
import textwrap
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from shared_core.integrations.transformers import experts as adapter
from shared_core.integrations.transformers import register
from shared_core.kernels import use_backend

ROWS, HIDDEN, EXPERTS, TOP_K = 15, 16, 6, 3


class Config:
    """Answers whatever an experts class asks its configuration for."""

    _experts_implementation = "eager"
    hidden_act = hidden_activation = "silu"
    mlp_hidden_act = "relu2"
    swiglu_limit = 0.4  # small, so that the clamp matters
    swiglu_alpha = 1.702
    moe_latent_size = None
    post_norm_eps = rms_norm_eps = 1e-5

    def __init__(self, **given: Any) -> None:
        self.__dict__.update(given)

    def __getattr__(self, name: str) -> Any:
        for part, value in (("expert", EXPERTS), ("intermediate", 20), ("hidden_size", HIDDEN), ("softcap", 0.5)):
            if part in name:
                return value
        raise AttributeError(name)


@cache
def decorated() -> tuple[tuple[str, str], ...]:
    """Module and class of everything that ``use_experts_implementation`` decorates, read off the sources."""
    found = []
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        text = path.read_text(encoding="utf-8")
        if "@use_experts_implementation" not in text:
            continue
        found += [
            (f"transformers.models.{path.parent.name}.{path.stem}", part.name)
            for part in ast.parse(text).body
            if isinstance(part, ast.ClassDef)
            and any("use_experts_implementation" in ast.unparse(decorator) for decorator in part.decorator_list)
        ]
    return tuple(found)


def module_of(home: str, name: str, **given: Any) -> Any:
    register()
    module = getattr(importlib.import_module(home), name)(Config(**given))
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return module


def mixtral(**given: Any) -> Any:
    return module_of("transformers.models.mixtral.modeling_mixtral", "MixtralExperts", **given)


def gpt_oss(**given: Any) -> Any:
    return module_of("transformers.models.gpt_oss.modeling_gpt_oss", "GptOssExperts", **given)


def problem(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    indices = torch.rand(ROWS, EXPERTS, generator=generator).topk(TOP_K).indices
    return x, indices, torch.rand(ROWS, TOP_K, generator=generator).to(dtype).requires_grad_()


def outcome(module: Any, implementation: str, *inputs: Tensor) -> list[Tensor]:
    """Output and the gradients of rows, weights and every parameter."""
    module.config._experts_implementation = implementation
    out = module(*inputs)
    wanted = [t for t in (*inputs, *module.parameters()) if t.requires_grad]
    return [out.detach(), *torch.autograd.grad(out.square().sum(), wanted)]


def assert_same(ours: list[Tensor], theirs: list[Tensor], share: float = 2e-6) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0.0, atol=share * float(b.abs().max()) + 1e-30)


# --- All classes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("home", "name"), decorated(), ids=[name for _, name in decorated()])
def test_output_and_gradients_are_those_of_the_class(home: str, name: str) -> None:
    module = module_of(home, name)
    assert_same(outcome(module, "shared_core", *problem()), outcome(module, "eager", *problem()))


@pytest.mark.parametrize(("home", "name"), decorated(), ids=[name for _, name in decorated()])
def test_classes_run_fused_exactly_if_their_middle_is_plain(home: str, name: str) -> None:
    module = module_of(home, name)
    own_gate = module.has_gate and type(module)._apply_gate.__qualname__ != "_default_apply_gate"
    plain = not (own_gate or module.has_post_expert_norm or not module.is_concatenated)
    assert (adapter._fused_activation(module) is not None) == plain


@pytest.mark.parametrize("backend", ["reference", "cpu", "grouped_mm"])
@pytest.mark.parametrize("make", [mixtral, gpt_oss])
def test_the_backend_in_use_applies_to_both_routes(make: Callable[..., Any], backend: str) -> None:
    module = make()
    with use_backend(backend):
        ours = outcome(module, "shared_core", *problem())
    assert_same(ours, outcome(module, "eager", *problem()))


# --- Activations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*transformers.activations.ACT2CLS])
def test_every_activation_of_transformers_computes_what_eager_computes(name: str) -> None:
    if name == "xielu":
        pytest.skip("its parameters are bfloat16 whatever the model is, which eager cannot run in float32 either")
    module = mixtral(hidden_act=name)
    assert_same(outcome(module, "shared_core", *problem()), outcome(module, "eager", *problem()), share=5e-6)


@pytest.mark.parametrize("name", [*transformers.activations.ACT2CLS])
def test_known_activations_are_named_and_no_others(name: str) -> None:
    """Where a name is given, both functions agree everywhere; where none is given, none of the names would do."""
    from shared_core.kernels.activations import ACTIVATIONS, activate

    function = transformers.activations.ACT2FN[name].float()
    x = torch.linspace(-12.0, 12.0, 2001)
    same = {known for known in ACTIVATIONS if torch.allclose(activate(known, x), function(x), rtol=1e-5, atol=1e-6)}
    given = adapter._activation_name(function)
    assert (given in same) if given is not None else (not same or name in {"gelu_fast", "gelu_accurate"})


def test_an_activation_of_the_users_own_is_called() -> None:
    module = mixtral()
    del module.act_fn
    module.act_fn = torch.sin
    assert_same(outcome(module, "shared_core", *problem()), outcome(module, "eager", *problem()))


def test_a_watched_activation_is_called() -> None:
    module, seen = mixtral(), []
    module.act_fn.register_forward_hook(lambda _, args, out: seen.append(out.shape))
    outcome(module, "shared_core", *problem())
    assert seen == [(ROWS * TOP_K, 20)]


def test_a_gate_of_the_instances_own_is_called() -> None:
    module = mixtral()
    module._apply_gate = lambda z: z.chunk(2, dim=-1)[1]
    x, indices, weights = problem()
    module.config._experts_implementation = "shared_core"
    value = torch.einsum("rh,eih->rei", x, module.gate_up_proj[:, 20:])
    y = torch.einsum("rei,ehi->reh", value, module.down_proj)
    expected = torch.einsum("reh,re->rh", y, torch.zeros(ROWS, EXPERTS).scatter(1, indices, weights))
    torch.testing.assert_close(module(x, indices, weights), expected, rtol=1e-4, atol=1e-4)


# --- Indices, weights, dtypes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [mixtral, gpt_oss])
def test_experts_of_other_ranks_contribute_nothing(make: Callable[..., Any]) -> None:
    module = make()
    x, indices, weights = problem()
    elsewhere = indices >= 4
    local = indices.masked_fill(elsewhere, EXPERTS)
    zeroed = weights.detach().masked_fill(elsewhere, 0.0).requires_grad_()
    module._is_expert_parallel = True
    ours = outcome(module, "shared_core", x, local, zeroed)
    theirs = outcome(module, "eager", x, indices, zeroed)
    ours[2], theirs[2] = (gradient.masked_fill(elsewhere, 0.0) for gradient in (ours[2], theirs[2]))
    assert_same(ours, theirs)


@pytest.mark.parametrize("make", [mixtral, gpt_oss])
def test_routing_weights_elsewhere_get_no_gradient(make: Callable[..., Any]) -> None:
    x, indices, weights = problem()
    indices[:, 0] = EXPERTS
    gradient = outcome(make(), "shared_core", x, indices, weights)[2]
    assert bool((gradient[:, 0] == 0).all())
    assert bool((gradient[:, 1:] != 0).all())


@pytest.mark.parametrize("make", [mixtral, gpt_oss])
def test_a_row_of_experts_elsewhere_is_zero(make: Callable[..., Any]) -> None:
    x, indices, weights = problem()
    indices[2] = EXPERTS
    out = outcome(make(), "shared_core", x, indices, weights)[0]
    assert bool((out[2] == 0).all())


@pytest.mark.parametrize("make", [mixtral, gpt_oss])
def test_no_rows_give_no_rows(make: Callable[..., Any]) -> None:
    x, indices, weights = (t[:0] for t in problem())
    module = make()
    module.config._experts_implementation = "shared_core"
    assert module(x, indices, weights).shape == (0, HIDDEN)


@pytest.mark.parametrize("make", [mixtral, gpt_oss])
@pytest.mark.parametrize("index", [-1, EXPERTS + 1, 2**40])
def test_an_index_of_no_expert_is_refused_by_its_value(make: Callable[..., Any], index: int) -> None:
    x, indices, weights = problem()
    indices[1, 0] = index
    with pytest.raises(ValueError, match=rf"indices must lie in 0\.\.{EXPERTS} .* got .*{index}"):
        outcome(make(), "shared_core", x, indices, weights)


@pytest.mark.parametrize("make", [mixtral, gpt_oss])
def test_experts_without_values_give_the_shape(make: Callable[..., Any]) -> None:
    module = make().to("meta")
    module.config._experts_implementation = "shared_core"
    out = module(*(t.to("meta") for t in problem()))
    assert (out.shape, out.device.type) == ((ROWS, HIDDEN), "meta")


@pytest.mark.parametrize("make", [mixtral, gpt_oss])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_experts_are_as_exact_as_eager(make: Callable[..., Any], dtype: torch.dtype) -> None:
    module = make()
    x, indices, weights = problem(dtype)
    exact = outcome(module.to(dtype).float(), "eager", x.float(), indices, weights.float())[0]
    ours, theirs = (
        outcome(module.to(dtype), name, x, indices, weights)[0].float() for name in ("shared_core", "eager")
    )
    assert (ours - exact).norm() <= 1.25 * (theirs - exact).norm()


@pytest.mark.parametrize("make", [mixtral, gpt_oss])
def test_float64_is_exact(make: Callable[..., Any]) -> None:
    module, inputs = make().double(), problem(torch.float64)
    assert_same(outcome(module, "shared_core", *inputs), outcome(module, "eager", *inputs), share=1e-13)


@pytest.mark.parametrize("make", [mixtral, gpt_oss])
def test_weights_of_another_dtype_keep_their_gradient(make: Callable[..., Any]) -> None:
    x, indices, weights = problem()
    ours = outcome(make(), "shared_core", x, indices, weights.detach().bfloat16().requires_grad_())
    theirs = outcome(make(), "eager", x, indices, weights.detach().bfloat16().float().requires_grad_())
    assert ours[2].dtype == torch.bfloat16
    torch.testing.assert_close(ours[2].float(), theirs[2], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(ours[0], theirs[0])


@pytest.mark.parametrize("make", [mixtral, gpt_oss])
def test_rows_of_a_wider_dtype_are_rounded_as_grouped_mm_rounds_them(make: Callable[..., Any]) -> None:
    module = make(intermediate_size=24).bfloat16()  # grouped_mm refuses strides that are no multiple of 16 bytes
    x, indices, weights = problem()
    found = []
    for name in ("shared_core", "grouped_mm"):
        module.config._experts_implementation = name
        found.append(module(x, indices, weights.bfloat16()))
    assert found[0].dtype == torch.float32
    torch.testing.assert_close(*found, rtol=3e-2, atol=3e-2)


# --- Weights that cannot be multiplied here --------------------------------------------------------------------------


class Packed(Tensor):
    """A tensor whose numbers lie somewhere else, as torchao's quantised weights do."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Packed:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> Packed:
        return Packed(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = torch.utils._pytree.tree_map_only(Packed, lambda packed: packed.inner, (args, kwargs or {}))
        return function(*plain[0], **plain[1])


def test_packed_weights_run_in_eager_with_one_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(adapter, "_announced", set())
    module = mixtral()
    x, indices, weights = problem()
    expected = outcome(module, "eager", x, indices, weights)[0]
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(module, name).detach()
        del module._parameters[name]
        setattr(module, name, Packed(weight))
    module.config._experts_implementation = "shared_core"
    with caplog.at_level(logging.INFO, logger="shared_core"), torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(module(x, indices, weights), expected)
    assert [record.getMessage() for record in caplog.records] == [
        "MixtralExperts runs its own eager code instead of shared_core: its weights are Packed tensors"
    ]


def test_integer_weights_are_never_multiplied_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    module = mixtral()
    del module._parameters["down_proj"]
    module.down_proj = torch.zeros(EXPERTS, HIDDEN, 20, dtype=torch.uint8)
    monkeypatch.delattr(type(module).forward, "__wrapped__")
    with pytest.raises(TypeError, match=r"MixtralExperts cannot run on shared_core: its weights are quantised \(torch"):
        adapter.run_experts(module, *problem())


# --- register --------------------------------------------------------------------------------------------------------


def test_registering_again_changes_nothing() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    register()
    before = dict(ALL_EXPERTS_FUNCTIONS)
    register()
    assert dict(ALL_EXPERTS_FUNCTIONS) == before


def test_another_name_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations.moe import ExpertsInterface

    monkeypatch.setattr(ExpertsInterface, "_global_mapping", dict(ExpertsInterface._global_mapping))
    register("mine")
    module = mixtral()
    assert_same(outcome(module, "mine", *problem()), outcome(module, "eager", *problem()))


@pytest.mark.parametrize("name", ["eager", "grouped_mm", "batched_mm"])
def test_names_of_others_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is already the name of another experts function"):
        register(name)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [("", ValueError, "name must not be empty"), (3, TypeError, "name must be a string, got int")],
)
def test_what_is_no_name_is_refused(name: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        register(name)


@pytest.mark.parametrize(
    ("arrange", "message"),
    [
        (
            "sys.modules['transformers'] = None",
            "shared_core.integrations.transformers needs transformers: pip install 'shared-core[transformers]'",
        ),
        (
            "sys.modules['transformers'] = types.SimpleNamespace(__version__='4.57.1')",
            "shared_core.integrations.transformers needs transformers>=5.10, but 4.57.1 is installed: "
            "pip install 'shared-core[transformers]'",
        ),
    ],
    ids=["missing", "too old"],
)
def test_a_missing_or_old_library_is_named_with_the_command_that_installs_it(arrange: str, message: str) -> None:
    program = f"""
        import sys, types
        {arrange}
        try:
            import shared_core.integrations.transformers
        except ImportError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == message
