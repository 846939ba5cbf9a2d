"""Sorted rows times their expert's matrix, each result to the slot it came from: the second product, and dX.

Letters: R rows, k slots, E experts, N = R·k assignments sorted by expert, K width in, M width out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shared_core.kernels.triton.tiles import locate, multiply, routing_weights

__all__ = ["project_kernel"]


@triton.jit(do_not_specialize=["num_experts"])
def project_kernel(
    a_ptr,  # [N, K], sorted
    b_ptr,  # [E, K, M] by strides
    bias_ptr,  # [E, M] or None
    weights_ptr,  # [R·k]: of the bias; None: the bias counts once
    order_ptr,  # [N]
    bounds_ptr,  # [E + 1]
    out_ptr,  # [R·k, M], by slot
    num_experts,
    inner,
    width,
    b_expert,
    b_in,
    b_out,
    PRECISION: tl.constexpr,
    EXPERTS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile of ``a B_e (+ w b_e)``. Slots of sentinels are not written."""
    expert, start, end, column, active = locate(bounds_ptr, num_experts, width, BLOCK_M, BLOCK_N, EXPERTS)
    if not active:
        return
    positions = start + tl.arange(0, BLOCK_M)
    columns = column + tl.arange(0, BLOCK_N)
    valid_row = positions < end
    valid_column = columns < width

    k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + positions[:, None] * inner + k[None, :]
    b_ptrs = b_ptr + expert * b_expert + k[:, None].to(tl.int64) * b_in + columns[None, :].to(tl.int64) * b_out
    y = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    y = multiply(y, a_ptrs, valid_row[:, None], b_ptrs, valid_column[None, :], inner, b_in, EVEN_K, BLOCK_K, PRECISION)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert * width + columns, mask=valid_column, other=0.0).to(tl.float32)[None, :]
        if weights_ptr is not None:
            bias = bias * routing_weights(weights_ptr, order_ptr, positions, valid_row)[:, None]
        y = y + bias
    slots = tl.load(order_ptr + positions, mask=valid_row, other=0).to(tl.int64)
    out_ptrs = out_ptr + slots[:, None] * width + columns[None, :]
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=valid_row[:, None] & valid_column[None, :])
