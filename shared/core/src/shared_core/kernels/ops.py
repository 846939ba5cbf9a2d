"""From kernels to differentiable operations.

Eager code with plain tensors goes straight to a kernel (no gradient) or through one autograd function; under
``torch.compile`` and with fake or meta tensors the same kernels run as the opaque operators
``shared_core::experts_forward`` and ``shared_core::experts_backward`` (their dispatch costs tens of microseconds, which
is the time of a whole decoding step of a small model).

Letters: R rows, k slots, E experts, H width in, D width out, I intermediate width, J = 2I if gated else I.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from shared_core.checks import forward_ad_active
from shared_core.kernels import cpu_experts, grouped, reference
from shared_core.kernels.formula import Formula, Parameters

__all__ = ["Settings", "run"]

_KERNELS: dict[str, Any] = {"cpu": cpu_experts, "grouped_mm": grouped}  # others are imported when first used
_NOTHING = nullcontext()
_TWICE = (
    "the gradient of experts_forward cannot be differentiated again on this backend; "
    "use backend='reference' where second derivatives are needed"
)

_FORWARD = "experts_forward has no forward-mode derivative on this backend; use backend='reference' where one is needed"


def _kernels(backend: str) -> Any:
    """Module with ``forward`` and ``backward`` of a backend."""
    if backend not in _KERNELS:
        from shared_core.kernels.triton import experts

        _KERNELS["triton"] = experts
    return _KERNELS[backend]


class Settings(NamedTuple):
    """How experts are evaluated, apart from the tensors."""

    formula: Formula
    recompute: bool
    accumulate_grad: bool
    backend: str


def run(x: Tensor, indices: Tensor, weights: Tensor, parameters: Parameters, settings: Settings) -> Tensor:
    """Evaluate experts on checked arguments.

    Parameters
    ----------
    x : Tensor
        ``[R, H]``.
    indices, weights : Tensor
        ``[R, k]``.
    parameters : Parameters
        Of the E experts.
    settings : Settings
        With a resolved backend.

    Returns
    -------
    Tensor
        ``[R, D]``.
    """
    formula, recompute, _, backend = settings
    if backend == "reference":
        with _without_autocast(x.device.type):
            return reference.forward(x, indices, weights, parameters, formula)
    tensors = (x, weights, *parameters)
    training = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if _must_stay_opaque(x, parameters.up):
        out: Tensor = _forward_op(
            x, indices, weights, *parameters, *formula, backend, training, training and not recompute
        )[0]
        return out
    with _without_autocast(x.device.type):
        if training or torch._C._are_functorch_transforms_active() or forward_ad_active():
            result: Tensor = _Experts.apply(x, indices, weights, *parameters, settings)[0]
            return result
        only: Tensor = _kernels(backend).forward(x, indices, weights, parameters, formula)[0]
        return only


def _without_autocast(device: str) -> AbstractContextManager[object]:
    """Products inside a kernel have the dtype that was decided at its door."""
    active = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if active else _NOTHING


def _must_stay_opaque(x: Tensor, up: Tensor) -> bool:
    plain = type(x) in {Tensor, Parameter} and type(up) in {Tensor, Parameter} and x.device.type != "meta"
    return torch.compiler.is_compiling() or not plain


class _Experts(torch.autograd.Function):
    """Eager path: keeps x, the pre-activations and the plan."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, indices, weights, *parameters, settings = arguments
        result: tuple[Tensor, Tensor, Tensor, Tensor] = _kernels(settings.backend).forward(
            x,
            indices,
            weights,
            Parameters(*parameters),
            settings.formula,
            keep_plan=True,
            keep_z=not settings.recompute,
        )
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, _, *parameters, ctx.settings = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *parameters, *output[1:])

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> None:
        raise NotImplementedError(_FORWARD)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        if grads[0] is None:
            return (None,) * 8
        need_x, _, *need_others = ctx.needs_input_grad[:7]
        dx, *others = _ExpertsGradient.apply(grads[0], *ctx.saved_tensors, ctx.settings, (need_x, *need_others))
        return dx, None, *others, None


class _ExpertsGradient(torch.autograd.Function):
    """First derivative, with a clear refusal of the second."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor | None, ...]:
        grad, x, weights, *parameters, kept_z, order, bounds, settings, needs = arguments
        stacked = Parameters(*parameters)
        into = {}
        if settings.accumulate_grad:
            into = {"up_grad": _existing_gradient(stacked.up), "down_grad": _existing_gradient(stacked.down)}
        with _without_autocast(grad.device.type):
            gradients: tuple[Tensor | None, ...] = _kernels(settings.backend).backward(
                grad, x, weights, stacked, kept_z, order, bounds, settings.formula, needs=needs, **into
            )
        return gradients

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        raise NotImplementedError(_TWICE)


def _existing_gradient(weight: Tensor) -> Tensor | None:
    """The gradient that a leaf holds already, if it can be added to in place."""
    if not (weight.is_leaf and weight.requires_grad) or weight.grad is None:
        return None
    usable = weight.grad.dtype == weight.dtype and weight.grad.is_contiguous() and not weight.grad.requires_grad
    return weight.grad if usable else None


# ---------------------------------------------------------------------------------------------------------------------
# The same, as opaque operators.


@torch.library.custom_op("shared_core::experts_forward", mutates_args=())
def _forward_op(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    gated: bool,
    weight_input: bool,
    backend: str,
    keep_plan: bool,
    keep_z: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with _without_autocast(x.device.type):
        result: tuple[Tensor, Tensor, Tensor, Tensor] = _kernels(backend).forward(
            x,
            indices,
            weights,
            Parameters(up, down, up_bias, down_bias),
            Formula(activation, gated, weight_input),
            keep_plan=keep_plan,
            keep_z=keep_z,
        )
        return result


@_forward_op.register_fake
def _forward_fake(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    gated: bool,
    weight_input: bool,
    backend: str,
    keep_plan: bool,
    keep_z: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out = x.new_empty(x.shape[0], down.shape[1])
    num_assignments = indices.shape[0] * indices.shape[1]
    order = indices.new_empty(num_assignments if keep_plan else 0, dtype=torch.int64)
    bounds = indices.new_empty(up.shape[0] + 1 if keep_plan else 0, dtype=torch.int64)
    return out, x.new_empty(num_assignments * up.shape[1] if keep_z else 0), order, bounds


@torch.library.custom_op("shared_core::experts_backward", mutates_args=())
def _backward_op(
    grad: Tensor,
    x: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    kept_z: Tensor,
    order: Tensor,
    bounds: Tensor,
    activation: str,
    gated: bool,
    weight_input: bool,
    backend: str,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    with _without_autocast(x.device.type):
        gradients = _kernels(backend).backward(
            grad,
            x,
            weights,
            Parameters(up, down, up_bias, down_bias),
            kept_z,
            order,
            bounds,
            Formula(activation, gated, weight_input),
            needs=tuple(needs),
        )
    return tuple(x.new_empty(0) if g is None else g for g in gradients)  # type: ignore[return-value]


@_backward_op.register_fake
def _backward_fake(
    grad: Tensor,
    x: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    kept_z: Tensor,
    order: Tensor,
    bounds: Tensor,
    activation: str,
    gated: bool,
    weight_input: bool,
    backend: str,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = (x, weights, up, down, up_bias, down_bias)
    return tuple(  # type: ignore[return-value]
        t.new_empty(t.shape) if t is not None and need else x.new_empty(0)
        for t, need in zip(inputs, needs, strict=True)
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, (ctx.activation, ctx.gated, ctx.weight_input, ctx.backend, *_) = inputs[:7], inputs[7:]
    x, _, *parameters = tensors
    ctx.save_for_backward(x, *parameters, *output[1:])
    ctx.set_materialize_grads(False)


def _op_backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 13
    need_x, _, *need_others = ctx.needs_input_grad[:7]
    needs = [need_x, *need_others]
    gradients = _backward_op(grad, *ctx.saved_tensors, ctx.activation, ctx.gated, ctx.weight_input, ctx.backend, needs)
    dx, *others = (g if need else None for g, need in zip(gradients, needs, strict=True))
    return dx, None, *others, *(None,) * 6


_forward_op.register_autograd(_op_backward, setup_context=_setup_context)
