"""First product of the experts: gathered rows times W1, activation, routing weight.

Letters: R rows, k slots, E experts, N assignments sorted by expert, H width in, I intermediate width, J = 2I if gated
else I.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shared_core.kernels.triton.activation import activate, pre_activation
from shared_core.kernels.triton.tiles import dot, locate, routing_weights, source_rows

__all__ = ["up_kernel"]


@triton.jit(do_not_specialize=["num_experts", "num_slots"])
def up_kernel(
    x_ptr,  # [R, H]
    up_ptr,  # [E, J, H]
    bias_ptr,  # [E, J] or None
    weights_ptr,  # [R·k]
    order_ptr,  # [N]
    bounds_ptr,  # [E + 1]
    z_ptr,  # [N, J] or None: the bare product
    h_ptr,  # [N, I] or None
    num_experts,
    num_slots,
    hidden,
    inner,
    x_row,
    up_expert,
    up_out,
    up_in,
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
    """One tile of ``h = act(W1 x) · w``; with a gate, two accumulators share the loaded rows."""
    expert, start, end, column, active = locate(bounds_ptr, num_experts, inner, BLOCK_M, BLOCK_N, EXPERTS)
    if not active:
        return
    positions = start + tl.arange(0, BLOCK_M)
    columns = column + tl.arange(0, BLOCK_N)
    valid_row = positions < end
    valid_column = columns < inner
    rows = source_rows(order_ptr, positions, valid_row, num_slots)

    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + rows[:, None] * x_row + k[None, :]
    k_ptrs = up_ptr + expert * up_expert + k[:, None].to(tl.int64) * up_in
    gate_ptrs = k_ptrs + columns[None, :].to(tl.int64) * up_out
    value_ptrs = k_ptrs + (columns + inner)[None, :].to(tl.int64) * up_out
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    value = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for offset in range(0, hidden, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptrs, mask=valid_row[:, None], other=0.0)
            w = tl.load(gate_ptrs, mask=valid_column[None, :], other=0.0)
        else:
            inside = k < hidden - offset
            x = tl.load(x_ptrs, mask=valid_row[:, None] & inside[None, :], other=0.0)
            w = tl.load(gate_ptrs, mask=valid_column[None, :] & inside[:, None], other=0.0)
        gate = dot(x, w, gate, PRECISION)
        if GATED:
            if EVEN_K:
                w = tl.load(value_ptrs, mask=valid_column[None, :], other=0.0)
            else:
                w = tl.load(value_ptrs, mask=valid_column[None, :] & inside[:, None], other=0.0)
            value = dot(x, w, value, PRECISION)
            value_ptrs += BLOCK_K * up_in
        x_ptrs += BLOCK_K
        gate_ptrs += BLOCK_K * up_in

    tile = valid_row[:, None] & valid_column[None, :]
    width = 2 * inner if GATED else inner
    if z_ptr is not None:
        z_ptrs = z_ptr + positions[:, None] * width + columns[None, :]
        tl.store(z_ptrs, gate.to(z_ptr.dtype.element_ty), mask=tile)
        if GATED:
            tl.store(z_ptrs + inner, value.to(z_ptr.dtype.element_ty), mask=tile)
    if h_ptr is not None:
        weight = routing_weights(weights_ptr, order_ptr, positions, valid_row)
        bias_ptrs = None if bias_ptr is None else bias_ptr + expert * width + columns
        h = activate(pre_activation(gate, weight, bias_ptrs, valid_column, WEIGHT_INPUT), ACTIVATION)
        if GATED:
            bias_ptrs = None if bias_ptr is None else bias_ptr + expert * width + inner + columns
            h = h * pre_activation(value, weight, bias_ptrs, valid_column, WEIGHT_INPUT)
        if not WEIGHT_INPUT:
            h = h * weight[:, None]
        tl.store(h_ptr + positions[:, None] * inner + columns[None, :], h.to(h_ptr.dtype.element_ty), mask=tile)
