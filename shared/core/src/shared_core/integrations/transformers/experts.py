"""The experts function that transformers calls, and its registration.

Two routes lead through it. Experts whose middle this package knows (an activation of
:data:`shared_core.kernels.activations.ACTIVATIONS`, gated or not) run fused in :func:`shared_core.experts_forward`.
Others (a clamped gate, interleaved gate and value, a norm after the expert, an activation of the user's own) run their
own Python code between two grouped products.

Letters: R rows, k slots, E experts, H width in, D width out, I intermediate width.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shared_core.checks import check_indices
from shared_core.dispatch import DispatchPlan, combine, permute
from shared_core.experts import experts_forward
from shared_core.integrations.transformers.requirements import activations, moe
from shared_core.integrations.transformers.sites import is_experts
from shared_core.kernels import grouped_linear
from shared_core.routing import Routing

__all__ = ["register", "run_experts"]

_log = logging.getLogger("shared_core")
_announced: set[tuple[type, str]] = set()  # one line a process, class and reason
_FUNCTIONS: tuple[tuple[Callable[..., Tensor], str], ...] = ((F.silu, "silu"), (F.gelu, "gelu"), (F.relu, "relu"))
# Modules of PyTorch and transformers; by exact type, because a subclass may compute anything.
_MODULES: dict[type, str] = {
    nn.SiLU: "silu",
    activations.SiLUActivation: "silu",
    nn.ReLU: "relu",
    activations.ReLUSquaredActivation: "relu2",
    activations.GELUActivation: "gelu",
    activations.GELUTanh: "gelu_tanh",
    activations.NewGELUActivation: "gelu_tanh",
}
_DECODING = 64  # assignments up to which no expert has rows enough to multiply by
_DEFAULT_GATE = getattr(moe, "_default_apply_gate", None)


def register(name: str = "shared_core") -> None:
    """Make this package's experts known to transformers, under a name for ``experts_implementation=``.

    Call it once per process, before a model is loaded or switched with that name. A saved model does not remember its
    experts implementation: give the name to ``from_pretrained`` again.

    Parameters
    ----------
    name : str, default "shared_core"
        What ``from_pretrained(..., experts_implementation=name)`` and ``model.set_experts_implementation(name)`` will
        take. Registering again under the same name changes nothing.

    Raises
    ------
    TypeError
        If ``name`` is no string.
    ValueError
        If it is empty, or already the name of another experts function.

    Notes
    -----
    The backend is the one of :func:`shared_core.kernels.use_backend`, else chosen by device and dtype.

    Examples
    --------
    >>> from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralExperts
    >>> import torch
    >>> register()
    >>> config = MixtralConfig(hidden_size=8, intermediate_size=16, num_local_experts=4)
    >>> config._experts_implementation = "shared_core"  # what from_pretrained(..., experts_implementation=...) does
    >>> experts = MixtralExperts(config)
    >>> for parameter in experts.parameters():
    ...     _ = torch.nn.init.normal_(parameter)
    >>> experts(torch.randn(5, 8), torch.tensor([[0, 2]] * 5), torch.full((5, 2), 0.5)).shape
    torch.Size([5, 8])
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, got {type(name).__name__}")
    if not name:
        raise ValueError("name must not be empty")
    taken = {"eager": None, **dict(moe.ALL_EXPERTS_FUNCTIONS)}
    if name in taken and taken[name] is not run_experts:
        raise ValueError(
            f"{name!r} is already the name of another experts function of transformers; "
            f"choose a name that is none of: {', '.join(sorted(taken))}"
        )
    moe.ALL_EXPERTS_FUNCTIONS.register(name, run_experts)


def run_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Run an experts module of transformers; this is what :func:`register` registers.

    Parameters
    ----------
    module : nn.Module
        The experts module; its flags say how its weights are laid out.
    hidden_states : Tensor
        ``[R, H]``.
    top_k_index : Tensor
        ``[R, k]`` integer; E, the number of experts held, means "not here" (expert parallelism).
    top_k_weights : Tensor
        ``[R, k]`` of any floating dtype; keeps its gradient to the router.

    Returns
    -------
    Tensor
        ``[R, D]`` in the dtype of ``hidden_states``.

    Raises
    ------
    ValueError
        On the CPU, if an index lies outside 0 .. E.
    """
    up_name = "gate_up_proj" if module.has_gate else "up_proj"
    up, down = getattr(module, up_name), module.down_proj
    reason = _why_not(up, down)
    if reason is not None:
        return _own_forward(module, reason)(hidden_states, top_k_index, top_k_weights)
    up_bias = getattr(module, up_name + "_bias") if module.has_bias else None
    down_bias = module.down_proj_bias if module.has_bias else None
    routing = Routing(top_k_index.long(), top_k_weights, None, None, down.shape[0])
    # As transformers' own grouped products do: rows of a float32 norm meet bfloat16 experts. Autocast decides for all.
    kind = hidden_states.device.type
    under_autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    x = hidden_states if under_autocast else hidden_states.to(down.dtype)
    activation = _fused_activation(module)
    if activation is not None and (not module.is_transposed or _is_decoding(routing, x, up)):
        out = experts_forward(
            x,
            routing,
            up.mT if module.is_transposed else up,
            down.mT if module.is_transposed else down,
            up_bias=up_bias,
            down_bias=down_bias,
            activation=activation,
            gated=module.has_gate,
        )
        return out.to(hidden_states.dtype)
    if x.device.type == "meta":  # how many rows have an expert is a value; only the shape is asked for
        return hidden_states.new_empty(x.shape[0], down.shape[2 if module.is_transposed else 1])
    check_indices(routing.indices, routing.num_experts)
    plan = routing.plan()
    z = grouped_linear.run(_rows(x, plan), up, plan.offsets, up_bias, transposed=module.is_transposed)
    h = module._apply_gate(z) if module.has_gate else module.act_fn(z)
    y = grouped_linear.run(h.to(z.dtype), down, plan.offsets, down_bias, transposed=module.is_transposed)
    if getattr(module, "has_post_expert_norm", False):
        y = module.post_expert_norm(y)
    return _sum(y, plan).to(hidden_states.dtype)


def _is_decoding(routing: Routing, x: Tensor, up: Tensor) -> bool:
    """Whether only the reading of matrices counts.

    Then transposed views cost the fused kernels nothing. With more rows or a gradient they do (0.8 and 0.55 times the
    speed of ``grouped_mm``, which the products of the other route reach): those take matrices as they are stored.
    """
    recorded = torch.is_grad_enabled() and (x.requires_grad or up.requires_grad)
    return not torch.compiler.is_compiling() and not recorded and routing.indices.numel() <= _DECODING


def _rows(x: Tensor, plan: DispatchPlan) -> Tensor:
    """:func:`shared_core.permute`, without the fixed cost of an autograd function where there is no gradient."""
    return permute(x, plan) if torch.is_grad_enabled() and x.requires_grad else x.index_select(0, plan.rows)


def _sum(y: Tensor, plan: DispatchPlan) -> Tensor:
    """:func:`shared_core.combine`, likewise."""
    recorded = torch.is_grad_enabled() and (y.requires_grad or plan.weights.requires_grad)
    if recorded or y.device.type != "cpu" or torch.compiler.is_compiling():
        return combine(y, plan)
    wide = torch.promote_types(y.dtype, torch.float32)
    weighted = y.to(wide) * plan.weights.to(wide).unsqueeze(1)
    return weighted.new_zeros(plan.num_rows, y.shape[1]).index_add_(0, plan.rows, weighted).to(y.dtype)


def _fused_activation(module: Any) -> str | None:
    """Name of the activation if the whole expert is one that :func:`shared_core.experts_forward` computes."""
    if getattr(module, "has_post_expert_norm", False) or not getattr(module, "is_concatenated", True):
        return None
    # Instances may carry a gate of their own, too.
    if module.has_gate and ("_apply_gate" in module.__dict__ or type(module)._apply_gate is not _DEFAULT_GATE):
        return None
    return _activation_name(getattr(module, "act_fn", None))


def _activation_name(function: Any) -> str | None:
    """What this package calls an activation function or module, or None if it must be called as it is."""
    if not isinstance(function, nn.Module):
        return next((name for known, name in _FUNCTIONS if function is known), None)
    # Someone watches or changes what passes through: it has to be called.
    if function._forward_hooks or function._forward_pre_hooks or function._backward_hooks:
        return None
    if type(function) is nn.GELU:
        return "gelu_tanh" if function.approximate == "tanh" else "gelu"
    return None if "forward" in function.__dict__ else _MODULES.get(type(function))


def _why_not(up: object, down: object) -> str | None:
    """Why these weights cannot be multiplied here, or None if they can."""
    for weight in (up, down):
        if not isinstance(weight, Tensor):
            return f"its weights are {type(weight).__name__} objects"
        if not weight.is_floating_point() or weight.dtype.itemsize < 2:
            return f"its weights are quantised ({weight.dtype})"
        packed: bool = is_traceable_wrapper_subclass(weight)
        if packed:
            return f"its weights are {type(weight).__name__} tensors"
    return None


def _own_forward(module: nn.Module, reason: str) -> Callable[..., Tensor]:
    """The forward that the class was written with, before transformers decorated it."""
    kind = type(module)
    original = getattr(kind.forward, "__wrapped__", None)
    if original is None or not is_experts(module):
        raise TypeError(f"{kind.__name__} cannot run on shared_core: {reason}; use experts_implementation='eager'")
    if not torch.compiler.is_compiling() and (kind, reason) not in _announced:
        _announced.add((kind, reason))
        _log.info("%s runs its own eager code instead of shared_core: %s", kind.__name__, reason)
    bound: Callable[..., Tensor] = original.__get__(module)
    return bound
