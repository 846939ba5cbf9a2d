"""Experts on the CPU, forward and backward, one expert after another on its own rows.

Where that does not pay, one of two other ways is taken, by sizes alone (:func:`_way`): few rows run in two phases
(:mod:`shared_core.kernels.cpu_decode`), small products as grouped ones (:mod:`shared_core.kernels.grouped`).

Letters: R rows, k slots, E experts, N = R·k assignments, H width in, D width out, I intermediate width, J = 2I if gated
else I, n rows of one expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from shared_core.kernels import cpu_decode, grouped
from shared_core.kernels.assignments import sort_by_expert
from shared_core.kernels.cpu import accumulate_product, product
from shared_core.kernels.cpu_layout import WIDEN_ROWS, Layout
from shared_core.kernels.formula import Formula, Parameters

__all__ = ["backward", "forward"]

# Numbers of a product (n·H·J) below which the twenty to forty operations of an expert cost more than they save.
_SMALL_FORWARD = 1 << 22
_SMALL_TRAINING = 1 << 24


def _way(num_assignments: int, up: Tensor, training: bool) -> Literal["decode", "grouped", "experts"]:
    """The fastest way for these sizes, measured on the machine that :class:`Layout` names."""
    num_experts, width, hidden = up.shape
    if not training and 0 < num_assignments <= max(64, 4 * num_experts):
        return "decode"
    load = num_assignments / num_experts
    if up.dtype in {torch.bfloat16, torch.float16} and load < WIDEN_ROWS:
        return "grouped"
    small = load * width * hidden < (_SMALL_TRAINING if training else _SMALL_FORWARD)
    return "grouped" if small and up.dtype != torch.float64 else "experts"


def forward(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    parameters: Parameters,
    formula: Formula,
    *,
    keep_plan: bool = False,
    keep_z: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Evaluate the experts, outside of autograd.

    Parameters
    ----------
    x : Tensor
        ``[R, H]``.
    indices, weights : Tensor
        ``[R, k]``.
    parameters : Parameters
        Of the E experts.
    formula : Formula
        What they compute.
    keep_plan, keep_z : bool
        What :func:`backward` will need: the sorted assignments always, the pre-activations unless recomputed.

    Returns
    -------
    out : Tensor
        ``[R, D]``.
    z : Tensor
        Flat, ``[N·J]``, in an order private to the kernel; empty unless kept.
    order, bounds : Tensor
        Of :func:`sort_by_expert`; empty unless kept.
    """
    up, down, _, down_bias = parameters
    way = _way(indices.numel(), up, keep_plan)
    if way == "decode":
        nothing = indices.new_empty(0)
        return cpu_decode.forward(x, indices, weights, parameters, formula), x.new_empty(0), nothing, nothing.clone()
    if way == "grouped":
        return grouped.forward(x, indices, weights, parameters, formula, keep_plan=keep_plan, keep_z=keep_z)
    order, bounds = sort_by_expert(indices, up.shape[0])
    rows, weights_N = _rows_and_weights(order, weights, x.dtype)
    layout = Layout.of(x.dtype, down.shape[2])
    out = torch.zeros(x.shape[0], down.shape[1], dtype=torch.promote_types(x.dtype, torch.float32))
    width = up.shape[1]
    kept_z = x.new_empty(indices.numel() * width if keep_z else 0)
    x_wide = x.to(out.dtype)
    for expert, start, stop in _loads(bounds):
        if start == stop:
            continue
        mine, weight = rows[start:stop], weights_N[start:stop]
        x_n = (x_wide if layout.widened(stop - start) else x).index_select(0, mine)
        place = layout.matrix(kept_z[start * width : stop * width], width) if keep_z else None
        z = _pre_activations(x_n, weight, expert, parameters, formula, layout, place)
        h = formula.hidden(z, dim=0)
        if not formula.weight_input:
            h.mul_(weight)
        y = layout.rows_of_product(down[expert], h)
        if down_bias is not None:
            y.add_(down_bias[expert] if formula.weight_input else torch.outer(weight, down_bias[expert]))
        out.index_add_(0, mine, y.to(out.dtype))
    if not keep_plan:
        order, bounds = order.new_empty(0), order.new_empty(0)
    return out.to(x.dtype), kept_z, order, bounds


def _rows_and_weights(order: Tensor, weights: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Row and weight of every sorted assignment."""
    rows = order.div(weights.shape[1], rounding_mode="floor")
    return rows, weights.reshape(-1).index_select(0, order).to(torch.promote_types(dtype, torch.float32))


def _loads(bounds: Tensor) -> Iterator[tuple[int, int, int]]:
    """Expert, first and last (excluded) of its sorted assignments."""
    limits = bounds.tolist()
    return zip(range(len(limits) - 1), limits[:-1], limits[1:], strict=True)


def _pre_activations(
    x_n: Tensor,
    weight: Tensor,
    expert: int,
    parameters: Parameters,
    formula: Formula,
    layout: Layout,
    place: Tensor | None = None,
) -> Tensor:
    """``z = W1 x (· w) + b1``, ``[J, n]`` in the dtype of ``x_n``; also in ``place``, if possible without a copy."""
    num_rows, width = x_n.shape[0], parameters.up.shape[1]
    direct = place is not None and place.dtype == x_n.dtype
    z = place if place is not None and direct else layout.matrix(x_n.new_empty(num_rows * width), width)
    product(parameters.up[expert], layout.columns(x_n), out=z)
    if formula.weight_input:
        z.mul_(weight)
    if parameters.up_bias is not None:
        z.add_(parameters.up_bias[expert].unsqueeze(1))
    if place is not None and not direct:
        place.copy_(z)
    return z


def backward(
    grad: Tensor,
    x: Tensor,
    weights: Tensor,
    parameters: Parameters,
    kept_z: Tensor,
    order: Tensor,
    bounds: Tensor,
    formula: Formula,
    *,
    needs: tuple[bool, bool, bool, bool, bool, bool],
    up_grad: Tensor | None = None,
    down_grad: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients, outside of autograd.

    Parameters
    ----------
    grad : Tensor
        ``[R, D]``.
    x, weights, parameters, formula
        As in :func:`forward`.
    kept_z, order, bounds : Tensor
        Returned by :func:`forward`; ``kept_z`` empty: computed again.
    needs : tuple of bool
        Which of the six gradients are wanted.
    up_grad, down_grad : Tensor, optional
        Gradients that exist already; they are added to in place and None is returned for them.

    Returns
    -------
    tuple of Tensor or None
        For x, weights, up, down, up_bias, down_bias.
    """
    up, down, up_bias, down_bias = parameters
    if _way(order.shape[0], up, training=True) == "grouped":
        return grouped.backward(
            grad, x, weights, parameters, kept_z, order, bounds, formula,
            needs=needs, up_grad=up_grad, down_grad=down_grad,
        )  # fmt: skip
    need_x, need_w, need_up, need_down, need_up_bias, need_down_bias = needs
    width, inner = up.shape[1], down.shape[2]
    wide = torch.promote_types(x.dtype, torch.float32)
    rows, weights_N = _rows_and_weights(order, weights, x.dtype)
    layout = Layout.of(x.dtype, inner)
    x_wide, grad_wide = x.to(wide), grad.to(wide)
    dx = torch.zeros(x.shape, dtype=wide) if need_x else None
    dw_N = torch.zeros(order.shape[0], dtype=wide) if need_w else None
    dup = torch.empty_like(up, memory_format=torch.contiguous_format) if need_up and up_grad is None else None
    ddown = torch.empty_like(down, memory_format=torch.contiguous_format) if need_down and down_grad is None else None
    dup_bias = torch.zeros_like(up_bias) if need_up_bias and up_bias is not None else None
    ddown_bias = torch.zeros_like(down_bias) if need_down_bias and down_bias is not None else None
    for expert, start, stop in _loads(bounds):
        if start == stop:
            for gradient in (dup, ddown):
                if gradient is not None:
                    gradient[expert].zero_()
            continue
        mine, weight = rows[start:stop], weights_N[start:stop]
        widened = layout.widened(stop - start)
        x_n = (x_wide if widened else x).index_select(0, mine)
        g_n = (grad_wide if widened else grad).index_select(0, mine)
        if kept_z.numel():
            z = layout.matrix(kept_z[start * width : stop * width], width).to(x_n.dtype)
        else:
            z = _pre_activations(x_n, weight, expert, parameters, formula, layout)
        # A = g W2 before the weight: <A, h> is the gradient of the weight, without any stored output. Row-major first,
        # whatever the layout: that product needs no transposition inside the BLAS and is up to twice as fast.
        dh = product(down[expert].t(), g_n.t(), out=g_n.new_empty(stop - start, inner).t())
        if layout.feature_major(stop - start):
            dh = dh.contiguous()
        h, activated = formula.hidden_for_gradient(z, dim=0)
        if not formula.weight_input:
            if dw_N is not None:
                dw = (dh * h).sum(0, dtype=wide)
                if down_bias is not None:
                    dw += torch.mv(g_n, down_bias[expert].to(g_n.dtype))
                dw_N[start:stop] = dw
            h.mul_(weight)
            dh.mul_(weight)
        if need_down:
            _weight_gradient(g_n.t(), h.t(), expert, ddown, down_grad)
        if ddown_bias is not None:
            ddown_bias[expert] = g_n.sum(0) if formula.weight_input else torch.mv(g_n.t(), weight.to(g_n.dtype))
        if not (need_x or need_up or need_up_bias or need_w):
            continue
        dz = formula.gradient(z, activated, dh, dim=0)
        if dup_bias is not None:
            dup_bias[expert] = dz.sum(1)
        if need_x or (need_w and formula.weight_input):
            dx_n = layout.rows_of_product(up[expert].t(), dz)
            if formula.weight_input:
                if dw_N is not None:
                    dw_N[start:stop] = (dx_n * x_n).sum(1, dtype=wide)
                dx_n.mul_(weight.unsqueeze(1))
            if dx is not None:
                dx.index_add_(0, mine, dx_n.to(wide))
        if need_up:
            _weight_gradient(dz.mul_(weight) if formula.weight_input else dz, x_n, expert, dup, up_grad)
    dweights = None
    if dw_N is not None:
        dweights = torch.empty_like(dw_N).index_copy_(0, order, dw_N).view(weights.shape).to(weights.dtype)
    return None if dx is None else dx.to(x.dtype), dweights, dup, ddown, dup_bias, ddown_bias


def _weight_gradient(a: Tensor, b: Tensor, expert: int, fresh: Tensor | None, existing: Tensor | None) -> None:
    if existing is not None:
        accumulate_product(a, b, existing[expert])
    elif fresh is not None:
        product(a, b, out=fresh[expert])
