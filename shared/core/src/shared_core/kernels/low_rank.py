"""Low-rank experts of which each row uses a few: run only the chosen ones, forward and backward.

Legend: ``R`` rows, ``E`` experts, ``k`` experts per row, ``D`` input width, ``O`` output width, ``P`` sum of all ranks,
``n`` rows of one expert, ``r`` its rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shared_core.dispatch import sort_assignments


def chosen_adapters(
    x: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    indices: Tensor,
    weights: Tensor,
    ranks: Sequence[int],
    scalings: Sequence[float],
) -> Tensor:
    """Sum over each row's experts ``w · s_e · B_e A_e x``.

    Parameters
    ----------
    x : Tensor ``[R, D]``
    lora_A : Tensor ``[P, D]``
    lora_B : Tensor ``[O, P]``
        Expert ``e`` owns ``ranks[e]`` consecutive rows of ``A`` and columns of ``B``.
    indices, weights : Tensor ``[R, k]``
        Index ``E`` is the sentinel.
    ranks, scalings : sequence of length ``E``

    Returns
    -------
    Tensor ``[R, O]``
        In the dtype of `x`. Differentiable once in all four floating tensors.
    """
    run = _forward_op if torch.compiler.is_compiling() else _ChosenAdapters.apply
    y: Tensor = run(x, lora_A, lora_B, indices, weights, ranks, scalings)[0]
    return y


def _forward(
    x: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    indices: Tensor,
    weights: Tensor,
    ranks: Sequence[int],
    scalings: Sequence[float],
) -> tuple[Tensor, Tensor]:
    """Run each expert on its own rows: ``y [R, O]``, and ``A_e x [R·k, r_max]`` (sorted by expert) for backward."""
    # float32 holds the sum over a row's experts; it is cast once.
    y = x.new_zeros(x.shape[0], lora_B.shape[0], dtype=_wide(x))
    hidden = x.new_zeros(indices.numel(), max(ranks))
    order, segments = _segments(indices, ranks, scalings)
    rows, sorted_weights = order // indices.shape[1], weights.reshape(-1)[order]
    for own, columns, scaling in segments:
        hidden_nr = torch.mm(x.index_select(0, rows[own]), lora_A[columns].T)
        hidden[own, : hidden_nr.shape[1]] = hidden_nr
        mixed_nr = (hidden_nr * (sorted_weights[own, None] * scaling)).to(x.dtype)
        y.index_add_(0, rows[own], torch.mm(mixed_nr, lora_B[:, columns].T).to(y.dtype))
    return y.to(x.dtype), hidden


def _backward(
    grad: Tensor,
    x: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    indices: Tensor,
    weights: Tensor,
    hidden: Tensor,
    ranks: Sequence[int],
    scalings: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of ``x``, ``lora_A``, ``lora_B`` and the routing weights."""
    grad_x = x.new_zeros(x.shape, dtype=_wide(x))
    grad_A, grad_B = torch.zeros_like(lora_A), torch.zeros_like(lora_B)
    grad_weights = weights.new_zeros(weights.shape)
    order, segments = _segments(indices, ranks, scalings)
    rows, sorted_weights = order // indices.shape[1], weights.reshape(-1)[order]
    for own, columns, scaling in segments:
        grad_nO, x_nD = grad.index_select(0, rows[own]), x.index_select(0, rows[own])
        hidden_nr = hidden[own, : columns.stop - columns.start]
        factor_n1 = sorted_weights[own, None] * scaling
        # With v = Bᵀg: dw = s·⟨v, A x⟩ needs no stored expert output, and w·s·v is the gradient of A x.
        v_nr = torch.mm(grad_nO, lora_B[:, columns])
        grad_weights.view(-1)[order[own]] = scaling * (v_nr.to(weights.dtype) * hidden_nr).sum(1)
        grad_hidden_nr = (v_nr * factor_n1).to(x.dtype)
        grad_B[:, columns] = torch.mm(grad_nO.T, (hidden_nr * factor_n1).to(x.dtype))
        grad_A[columns] = torch.mm(grad_hidden_nr.T, x_nD)
        grad_x.index_add_(0, rows[own], torch.mm(grad_hidden_nr, lora_A[columns]).to(grad_x.dtype))
    return grad_x.to(x.dtype), grad_A, grad_B, grad_weights


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.ranks, ctx.scalings = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad: Tensor | None, backward: Callable[..., tuple[Tensor, ...]]) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 7
    x, lora_A, lora_B, weights = backward(grad, *ctx.saved_tensors, ranks=ctx.ranks, scalings=ctx.scalings)
    return x, lora_A, lora_B, None, weights, None, None


class _ChosenAdapters(torch.autograd.Function):
    """The eager form: the first call of an operator below costs seconds of imports, which only compiling should pay."""

    forward = staticmethod(_forward)
    setup_context = staticmethod(_setup_context)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, grad, _backward)


# The compiled form: the rows per expert are data, so a graph holds the whole as one operator.
_forward_op = torch.library.custom_op("shared_core::chosen_adapters", mutates_args=())(_forward)
_backward_op = torch.library.custom_op("shared_core::chosen_adapters_backward", mutates_args=())(_backward)


@_forward_op.register_fake
def _(
    x: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    indices: Tensor,
    weights: Tensor,
    ranks: Sequence[int],
    scalings: Sequence[float],
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], lora_B.shape[0]), x.new_empty(indices.numel(), max(ranks))


@_backward_op.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    indices: Tensor,
    weights: Tensor,
    hidden: Tensor,
    ranks: Sequence[int],
    scalings: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(lora_A), torch.empty_like(lora_B), weights.new_empty(weights.shape)


_forward_op.register_autograd(lambda ctx, grad, _: _gradients(ctx, grad, _backward_op), setup_context=_setup_context)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _segments(
    indices: Tensor, ranks: Sequence[int], scalings: Sequence[float]
) -> tuple[Tensor, Iterator[tuple[slice, slice, float]]]:
    """Sort the assignments by expert; for each expert in use give its assignments, columns of ``P``, scaling."""
    order, offsets = sort_assignments(indices, len(ranks))
    bounds, columns = offsets.tolist(), (0, *accumulate(ranks))
    segments = (
        (slice(bounds[e], bounds[e + 1]), slice(columns[e], columns[e + 1]), scalings[e])
        for e in range(len(ranks))
        if ranks[e] and bounds[e] < bounds[e + 1]
    )
    return order, segments
