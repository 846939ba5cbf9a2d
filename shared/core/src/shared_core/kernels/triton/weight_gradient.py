"""Gradients of the stacked matrices: for every expert the product of two sets of its rows.

A tile of one expert's gradient has one writer, which walks over all rows of that expert: no atomics, hence the same
bits in every run. Experts without rows get exactly 0.

Letters: R rows, k slots, E experts, N assignments sorted by expert, P and Q widths of the two sets.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shared_core.kernels.triton.tiles import dot, source_rows

__all__ = ["weight_gradient_kernel"]

_GROUP = tl.constexpr(8)  # tiles along P that sweep along Q together


@triton.jit(do_not_specialize=["num_slots"])
def weight_gradient_kernel(
    left_ptr,  # [R, P] if GATHER_LEFT, else [N, P]
    right_ptr,  # [N, Q] if GATHER_LEFT, else [R, Q]
    order_ptr,  # [N]
    bounds_ptr,  # [E + 1]
    out_ptr,  # [E, P, Q]
    num_slots,
    left_width,
    right_width,
    left_row,
    right_row,
    GATHER_LEFT: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile of ``leftᵀ right`` over the rows of one expert, added to what is there if ``ACCUMULATE``."""
    left_blocks = tl.cdiv(left_width, BLOCK_M)
    right_blocks = tl.cdiv(right_width, BLOCK_N)
    program = tl.program_id(0)
    expert = (program // (left_blocks * right_blocks)).to(tl.int64)
    within = program % (left_blocks * right_blocks)
    group = within // (_GROUP * right_blocks)
    height = tl.minimum(left_blocks - group * _GROUP, _GROUP)
    left_block = group * _GROUP + within % (_GROUP * right_blocks) % height
    right_block = within % (_GROUP * right_blocks) // height

    start = tl.load(bounds_ptr + expert).to(tl.int32)
    end = tl.load(bounds_ptr + expert + 1).to(tl.int32)
    lefts = left_block * BLOCK_M + tl.arange(0, BLOCK_M)
    rights = right_block * BLOCK_N + tl.arange(0, BLOCK_N)
    valid_left = lefts < left_width
    valid_right = rights < right_width
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(start, end, BLOCK_K):
        positions = first + tl.arange(0, BLOCK_K)
        valid = positions < end
        gathered = source_rows(order_ptr, positions, valid, num_slots)
        left_rows = gathered if GATHER_LEFT else positions.to(tl.int64)
        right_rows = positions.to(tl.int64) if GATHER_LEFT else gathered
        # Both are masked: 0 times whatever lies behind the last row might be NaN.
        left = tl.load(
            left_ptr + left_rows[None, :] * left_row + lefts[:, None],
            mask=valid[None, :] & valid_left[:, None],
            other=0.0,
        )
        right = tl.load(
            right_ptr + right_rows[:, None] * right_row + rights[None, :],
            mask=valid[:, None] & valid_right[None, :],
            other=0.0,
        )
        acc = dot(left, right, acc, PRECISION)

    out_ptrs = out_ptr + (expert * left_width + lefts[:, None]) * right_width + rights[None, :]
    tile = valid_left[:, None] & valid_right[None, :]
    if ACCUMULATE:
        acc += tl.load(out_ptrs, mask=tile, other=0.0).to(tl.float32)
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=tile)
