"""Sum over the slots of a row, without atomics: one program owns a piece of one row and adds in the order of slots.

Letters: R rows, k slots, M width.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["combine_kernel"]


@triton.jit(do_not_specialize=["num_slots", "limit"])
def combine_kernel(
    y_ptr,  # [R·k, M]
    chosen_ptr,  # [R·k] integer: a slot counts if 0 <= chosen < limit
    out_ptr,  # [R, M]
    num_slots,
    limit,
    width,
    BLOCK_N: tl.constexpr,
):
    """``out_r = Σ_j y_{r,j}`` over the slots that count, in float32, rounded once; exactly 0 if none does."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = columns < width
    total = tl.zeros((BLOCK_N,), tl.float32)
    for slot in range(num_slots):
        place = row * num_slots + slot
        chosen = tl.load(chosen_ptr + place)
        # What does not count was never written: it is not read either, since it might be NaN.
        written = tl.where((chosen >= 0) & (chosen < limit), width, 0)
        total += tl.load(y_ptr + place * width + columns, mask=columns < written, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + columns, total.to(out_ptr.dtype.element_ty), mask=valid)
