"""Gradient of the hidden layer: gathered output gradients times W2, the activation's derivative in the epilogue.

With ``A = g W2`` (before any routing weight), the gradient of a routing weight is ``⟨A, h⟩``: no stored output of an
expert is needed. That sum runs over column blocks of other programs, so each writes its part for
:mod:`shared_core.kernels.triton.routing_gradient` to add in a fixed order.

Letters: R rows, k slots, E experts, N assignments sorted by expert, D width out, I intermediate width, J = 2I if gated
else I, C column blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shared_core.kernels.triton.activation import activate_with_slope, pre_activation
from shared_core.kernels.triton.tiles import locate, multiply, routing_weights, source_rows

__all__ = ["hidden_gradient_kernel"]


@triton.jit(do_not_specialize=["num_assignments", "num_experts", "num_slots"])
def hidden_gradient_kernel(
    g_ptr,  # [R, D]
    down_ptr,  # [E, D, I]
    z_ptr,  # [N, J], the bare product
    bias_ptr,  # [E, J] or None
    weights_ptr,  # [R·k]
    order_ptr,  # [N]
    bounds_ptr,  # [E + 1]
    h_ptr,  # [N, I] or None: what multiplies g in dW2
    dz_ptr,  # [N, J] or None: what multiplies x in dW1, and W1 in dX
    dz_bare_ptr,  # [N, J] or None: gradient of the pre-activation where dz has the weight in it
    parts_ptr,  # [C, N] float32 or None: of the routing weights' gradient
    num_assignments,
    num_experts,
    num_slots,
    inner,
    width,
    g_row,
    down_expert,
    down_out,
    down_in,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    WEIGHT_INPUT: tl.constexpr,
    PRECISION: tl.constexpr,
    EXPERTS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile of the gradients of z, with h as a by-product; ``inner`` is I, ``width`` is D."""
    expert, start, end, column, active = locate(bounds_ptr, num_experts, inner, BLOCK_M, BLOCK_N, EXPERTS)
    if not active:
        return
    positions = start + tl.arange(0, BLOCK_M)
    columns = column + tl.arange(0, BLOCK_N)
    valid_row = positions < end
    valid_column = columns < inner
    rows = source_rows(order_ptr, positions, valid_row, num_slots)

    k = tl.arange(0, BLOCK_K)
    g_ptrs = g_ptr + rows[:, None] * g_row + k[None, :]
    down_ptrs = down_ptr + expert * down_expert + k[:, None].to(tl.int64) * down_out
    down_ptrs += columns[None, :].to(tl.int64) * down_in
    a = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    a = multiply(
        a, g_ptrs, valid_row[:, None], down_ptrs, valid_column[None, :], width, down_out, EVEN_K, BLOCK_K, PRECISION
    )

    tile = valid_row[:, None] & valid_column[None, :]
    features = 2 * inner if GATED else inner
    z_at = positions[:, None] * features + columns[None, :]
    weight = routing_weights(weights_ptr, order_ptr, positions, valid_row)
    gate_product = tl.load(z_ptr + z_at, mask=tile, other=0.0).to(tl.float32)
    bias_ptrs = None if bias_ptr is None else bias_ptr + expert * features + columns
    h, slope = activate_with_slope(
        pre_activation(gate_product, weight, bias_ptrs, valid_column, WEIGHT_INPUT), ACTIVATION
    )
    dh = a if WEIGHT_INPUT else a * weight[:, None]
    if GATED:
        value_product = tl.load(z_ptr + z_at + inner, mask=tile, other=0.0).to(tl.float32)
        bias_ptrs = None if bias_ptr is None else bias_ptr + expert * features + inner + columns
        value = pre_activation(value_product, weight, bias_ptrs, valid_column, WEIGHT_INPUT)
        d_value = dh * h
        d_gate = dh * value * slope
        h = h * value
    else:
        d_gate = dh * slope

    if parts_ptr is not None:
        part = a * h
        if WEIGHT_INPUT:  # z = w · product + b, hence dw = ⟨dz, product⟩
            part = d_gate * gate_product
            if GATED:
                part += d_value * value_product
        part = tl.sum(tl.where(tile, part, 0.0), 1)
        block = (column // BLOCK_N).to(tl.int64)
        tl.store(parts_ptr + block * num_assignments + positions, part, mask=valid_row)
    if h_ptr is not None:
        if not WEIGHT_INPUT:
            h = h * weight[:, None]
        h_at = positions[:, None] * inner + columns[None, :]
        tl.store(h_ptr + h_at, h.to(h_ptr.dtype.element_ty), mask=tile)
    if dz_bare_ptr is not None:
        tl.store(dz_bare_ptr + z_at, d_gate.to(dz_bare_ptr.dtype.element_ty), mask=tile)
        if GATED:
            tl.store(dz_bare_ptr + z_at + inner, d_value.to(dz_bare_ptr.dtype.element_ty), mask=tile)
    if dz_ptr is not None:
        if WEIGHT_INPUT:
            d_gate = d_gate * weight[:, None]
        tl.store(dz_ptr + z_at, d_gate.to(dz_ptr.dtype.element_ty), mask=tile)
        if GATED:
            if WEIGHT_INPUT:
                d_value = d_value * weight[:, None]
            tl.store(dz_ptr + z_at + inner, d_value.to(dz_ptr.dtype.element_ty), mask=tile)
