"""The fused gate as a differentiable operation, and the rule for when :func:`shared_core.route` takes it.

Eager code without a gradient goes straight to the kernel; everything else through the operators
``shared_core::gate_forward`` and ``shared_core::gate_backward``, opaque to ``torch.compile``.

Letters: R rows, k slots, E experts, G groups.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from shared_core.checks import forward_ad_active
from shared_core.kernels import announce, prefers_triton
from shared_core.selection import GroupCappedTopK, GroupLimitedTopK, Selection, TopK

__all__ = ["GateSettings", "fused_gate", "gate_settings"]

MAX_COLUMNS = 1024
"""Experts, padded to powers of two, that a program holds in registers."""

MAX_ROUNDS = 64
"""Choices up to which k rounds of argmax beat a sort."""


class GateSettings(NamedTuple):
    """How a gate scores and chooses, apart from the tensors.

    Attributes
    ----------
    top_k, offset : int
        Choices of a row, and ranks skipped before the first.
    sigmoid, renormalize : bool
        Sigmoid instead of softmax; weights divided by their sum.
    scale : float
        Factor on the weights.
    num_groups, top_groups : int
        Equal contiguous groups, and how many of them a row may use (0: no limit).
    two_best : bool
        Whether groups compare by the sum of their two best scores instead of by their best.
    cap : int
        Experts of one group of ``group_ids`` that a row may use (0: no limit).
    """

    top_k: int
    offset: int
    sigmoid: bool
    renormalize: bool
    scale: float
    num_groups: int = 1
    top_groups: int = 0
    two_best: bool = False
    cap: int = 0

    def padded(self, num_experts: int) -> tuple[int, int]:
        """Groups and members of a group, each padded to a power of two."""
        return _power_of_two(self.num_groups), _power_of_two(num_experts // self.num_groups)


def _power_of_two(at_least: int) -> int:
    return 1 << (at_least - 1).bit_length()


def gate_settings(
    num_experts: int, top_k: int, policy: Selection, *, sigmoid: bool, renormalize: bool, scale: float
) -> GateSettings | str:
    """Translate the arguments of :func:`shared_core.route`, or say in a few words why the kernel does not take them.

    What a policy would refuse is not taken either, so that the policy itself can say what is wrong.

    Returns
    -------
    GateSettings or str

    Examples
    --------
    >>> gate_settings(8, 2, TopK(), sigmoid=False, renormalize=True, scale=1.0).num_groups
    1
    >>> gate_settings(4096, 2, TopK(), sigmoid=False, renormalize=True, scale=1.0)
    '4096 experts are more than 1024 columns'
    """
    settings = GateSettings(top_k, 0, sigmoid, renormalize, scale)
    if type(policy) is TopK:
        settings = settings._replace(offset=policy.offset)
        taken = policy.offset + top_k <= num_experts
    elif type(policy) is GroupLimitedTopK:
        size = num_experts // policy.num_groups
        settings = settings._replace(
            num_groups=policy.num_groups,
            top_groups=policy.top_groups,
            two_best=policy.group_score == "top2_sum" and size > 1,
        )
        taken = num_experts % policy.num_groups == 0 and top_k <= policy.top_groups * size
    elif type(policy) is GroupCappedTopK:
        if policy.cap < policy.members.shape[1]:
            settings = settings._replace(cap=policy.cap)
        taken = num_experts == policy.num_experts and top_k <= policy.limit
    else:
        return f"the selection policy {_name(policy)} is not one of the kernel's"
    if not taken:
        return f"{_name(policy)} refuses top_k={top_k} of {num_experts} experts"
    groups, size = settings.padded(num_experts)
    if groups * size > MAX_COLUMNS:
        return f"{num_experts} experts are more than {MAX_COLUMNS} columns"
    if settings.offset + top_k > MAX_ROUNDS:
        return f"top_k={settings.offset + top_k} is more than {MAX_ROUNDS} rounds"
    return settings


def _name(policy: Selection) -> str:
    return getattr(policy, "__name__", type(policy).__name__)


def fused_gate(
    z: Tensor,
    bias: Tensor | None,
    keep: Tensor | None,
    top_k: int,
    policy: Selection,
    *,
    sigmoid: bool,
    renormalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Indices, weights and scores from one kernel, where there is one for this device, policy and size.

    Parameters
    ----------
    z : Tensor
        ``[R, E]`` logits.
    bias : Tensor or None
        ``[R, E]``, for the choice only.
    keep : Tensor or None
        ``[R]`` bool, False for rows that get no expert.
    top_k, policy, sigmoid, renormalize, scale
        As in :func:`shared_core.route`.

    Returns
    -------
    tuple of Tensor, or None
        ``indices [R, k]``, ``weights [R, k]``, ``scores [R, E]``; None where PyTorch's operators must do it.
    """
    if not prefers_triton(z.device, z.dtype) or type(z) not in {Tensor, Parameter}:
        return None
    if torch._C._are_functorch_transforms_active() or forward_ad_active():
        return None
    settings = gate_settings(z.shape[1], top_k, policy, sigmoid=sigmoid, renormalize=renormalize, scale=float(scale))
    if isinstance(settings, str):
        announce(f"routing runs on PyTorch's operators instead of the fused gate: {settings}")
        return None
    group_ids = _group_ids(policy, z.device) if settings.cap else None
    if torch.compiler.is_compiling() or (z.requires_grad and torch.is_grad_enabled()):
        indices, weights, scores = _forward_op(z, bias, keep, group_ids, *settings)
        return indices, weights, scores
    return _forward(z, bias, keep, group_ids, settings)


def _group_ids(policy: Selection, device: torch.device) -> Tensor:
    """Number of each expert's group, ``[E]`` int32."""
    assert isinstance(policy, GroupCappedTopK)  # noqa: S101 - for the type checker
    members = policy.members.to(device)  # [G, M], padded with E
    group = torch.arange(members.shape[0], dtype=torch.int32, device=members.device)
    ids = group.new_empty(policy.num_experts + 1)
    return ids.scatter_(0, members.reshape(-1), group.repeat_interleave(members.shape[1]))[:-1]


def _forward(
    z: Tensor, bias: Tensor | None, keep: Tensor | None, group_ids: Tensor | None, settings: GateSettings
) -> tuple[Tensor, Tensor, Tensor]:
    from shared_core.kernels.triton import gating

    return gating.forward(z, bias, keep, group_ids, settings)


@torch.library.custom_op("shared_core::gate_forward", mutates_args=())
def _forward_op(
    z: Tensor,
    bias: Tensor | None,
    keep: Tensor | None,
    group_ids: Tensor | None,
    top_k: int,
    offset: int,
    sigmoid: bool,
    renormalize: bool,
    scale: float,
    num_groups: int,
    top_groups: int,
    two_best: bool,
    cap: int,
) -> tuple[Tensor, Tensor, Tensor]:
    settings = GateSettings(top_k, offset, sigmoid, renormalize, scale, num_groups, top_groups, two_best, cap)
    return _forward(z, bias, keep, group_ids, settings)


@_forward_op.register_fake
def _forward_fake(
    z: Tensor, bias: Tensor | None, keep: Tensor | None, group_ids: Tensor | None, top_k: int, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (z.shape[0], top_k)
    return z.new_empty(shape, dtype=torch.int64), z.new_empty(shape), z.new_empty(z.shape)


@torch.library.custom_op("shared_core::gate_backward", mutates_args=())
def _backward_op(
    scores: Tensor,
    indices: Tensor,
    weights_grad: Tensor | None,
    scores_grad: Tensor | None,
    sigmoid: bool,
    renormalize: bool,
    scale: float,
) -> Tensor:
    from shared_core.kernels.triton import gating

    settings = GateSettings(indices.shape[1], 0, sigmoid, renormalize, scale)
    return gating.backward(scores, indices, weights_grad, scores_grad, settings)


@_backward_op.register_fake
def _backward_fake(scores: Tensor, *_: Any) -> Tensor:
    return scores.new_empty(scores.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    indices, _, scores = output
    ctx.sigmoid, ctx.renormalize, ctx.scale = inputs[6:9]
    ctx.mark_non_differentiable(indices)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(scores, indices)


def _op_backward(
    ctx: Any, _: Tensor | None, weights_grad: Tensor | None, scores_grad: Tensor | None
) -> tuple[Tensor | None, ...]:
    scores, indices = ctx.saved_tensors
    nothing = (None,) * 12
    if weights_grad is None and scores_grad is None:
        return None, *nothing
    arguments = (scores, indices, weights_grad, scores_grad, ctx.sigmoid, ctx.renormalize, ctx.scale)
    # Under create_graph=True the gradient is made of operators that can be differentiated again.
    return (_gradient if torch.is_grad_enabled() else _backward_op)(*arguments), *nothing


_forward_op.register_autograd(_op_backward, setup_context=_setup_context)


def _gradient(
    scores: Tensor,
    indices: Tensor,
    weights_grad: Tensor | None,
    scores_grad: Tensor | None,
    sigmoid: bool,
    renormalize: bool,
    scale: float,
) -> Tensor:
    """What ``gate_backward`` computes, by PyTorch's operators."""
    dp = torch.zeros_like(scores) if scores_grad is None else scores_grad
    if weights_grad is not None:
        nobody = indices == scores.shape[1]
        inside = indices.masked_fill(nobody, 0)
        g = weights_grad * scale
        if renormalize:
            raw = scores.gather(1, inside).masked_fill(nobody, 0.0)
            total = raw.sum(1, keepdim=True) + 1e-20
            g = (g - (g * (raw / total)).sum(1, keepdim=True)) / total
        dp = dp.scatter_add(1, inside, g.masked_fill(nobody, 0.0))
    if sigmoid:
        return dp * scores * (1.0 - scores)
    return scores * (dp - (scores * dp).sum(1, keepdim=True))
