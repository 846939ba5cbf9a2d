"""Gradient of the routing weights, from the parts that the tiles of the hidden gradient left; and which slots count.

Letters: R rows, k slots, E experts, N = R·k assignments sorted by expert, D width out, C column blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shared_core.kernels.triton.tiles import source_rows

__all__ = ["routing_gradient_kernel"]


@triton.jit(do_not_specialize=["num_assignments", "num_experts", "num_slots", "num_parts"])
def routing_gradient_kernel(
    parts_ptr,  # [C, N] float32, or None: only mark the slots
    g_ptr,  # [R, D]: only read with a bias
    bias_ptr,  # [E, D] or None
    order_ptr,  # [N]
    bounds_ptr,  # [E + 1]
    dw_ptr,  # [R·k] or None
    absent_ptr,  # [R·k] int8 or None: 1 for sentinels
    num_assignments,
    num_experts,
    num_slots,
    num_parts,
    width,
    g_row,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """``dw = Σ_c part_c (+ ⟨g, b2⟩)`` of a block of assignments, 0 for sentinels, each to its slot."""
    positions = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    known = positions < num_assignments
    slots = tl.load(order_ptr + positions, mask=known, other=0).to(tl.int64)
    counts = known & (positions >= tl.load(bounds_ptr)) & (positions < tl.load(bounds_ptr + num_experts))
    if dw_ptr is not None:
        dw = tl.zeros((BLOCK_M,), tl.float32)
        for part in range(num_parts):
            dw += tl.load(parts_ptr + tl.cast(part, tl.int64) * num_assignments + positions, mask=counts, other=0.0)
        if bias_ptr is not None:
            experts = tl.arange(0, EXPERTS)
            ends = tl.load(bounds_ptr + 1 + experts, mask=experts < num_experts, other=num_assignments)
            expert = tl.sum((ends[None, :] <= positions[:, None]).to(tl.int64), 1)
            rows = source_rows(order_ptr, positions, counts, num_slots)
            for first in range(0, width, BLOCK_N):
                columns = first + tl.arange(0, BLOCK_N)
                valid = counts[:, None] & (columns < width)[None, :]
                g = tl.load(g_ptr + rows[:, None] * g_row + columns[None, :], mask=valid, other=0.0)
                b = tl.load(bias_ptr + expert[:, None] * width + columns[None, :], mask=valid, other=0.0)
                dw += tl.sum(g.to(tl.float32) * b.to(tl.float32), 1)
        tl.store(dw_ptr + slots, dw.to(dw_ptr.dtype.element_ty), mask=known)
    if absent_ptr is not None:
        tl.store(absent_ptr + slots, (counts == 0).to(tl.int8), mask=known)
