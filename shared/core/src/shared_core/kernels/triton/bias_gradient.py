"""Gradients of the stacked biases: for every expert the sum of its rows, weighted or not.

Letters: R rows, k slots, E experts, N assignments sorted by expert, P width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shared_core.kernels.triton.tiles import routing_weights, source_rows

__all__ = ["bias_gradient_kernel"]


@triton.jit(do_not_specialize=["num_slots"])
def bias_gradient_kernel(
    values_ptr,  # [R, P] if GATHER, else [N, P]
    weights_ptr,  # [R·k] or None
    order_ptr,  # [N]
    bounds_ptr,  # [E + 1]
    out_ptr,  # [E, P]
    num_slots,
    width,
    values_row,
    GATHER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Columns of one expert's sum, by one program that adds its rows in order."""
    expert = tl.program_id(0).to(tl.int64)
    start = tl.load(bounds_ptr + expert)
    end = tl.load(bounds_ptr + expert + 1)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    valid_column = columns < width
    total = tl.zeros((BLOCK_N,), tl.float32)
    for first in range(start, end, BLOCK_M):
        positions = first + tl.arange(0, BLOCK_M)
        valid_row = positions < end
        rows = source_rows(order_ptr, positions, valid_row, num_slots) if GATHER else positions
        values = tl.load(
            values_ptr + rows[:, None] * values_row + columns[None, :],
            mask=valid_row[:, None] & valid_column[None, :],
            other=0.0,
        ).to(tl.float32)
        if weights_ptr is not None:
            values = values * routing_weights(weights_ptr, order_ptr, positions, valid_row)[:, None]
        total += tl.sum(values, 0)
    tl.store(out_ptr + expert * width + columns, total.to(out_ptr.dtype.element_ty), mask=valid_column)
