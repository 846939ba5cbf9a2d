"""Sorting few assignments by expert in one launch.

A radix sort and the search of its bounds are a handful of launches, which is longer than the products of a decoding
step; below a few thousand assignments, comparing all pairs is cheaper. Above, :func:`sort_by_expert` sorts.

Letters: N assignments, E experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shared_core.kernels.assignments import check_range, sort_by_expert

__all__ = ["sort_assignments"]

FEW = 4096
"""Assignments up to which all pairs are compared."""

_BLOCK, _OTHERS = 32, 64  # pairs of a step: 16 a thread, which fit its registers


@triton.jit(do_not_specialize=["num_assignments", "num_experts"])
def plan_kernel(
    indices_ptr,  # [N]
    order_ptr,  # [N]
    bounds_ptr,  # [E + 1]
    num_assignments,
    num_experts,
    BLOCK: tl.constexpr,
    OTHERS: tl.constexpr,
):
    """Rank of a block of assignments, and number of assignments below each of a block of experts."""
    mine = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(indices_ptr + mine, mask=mine < num_assignments, other=0).to(tl.int32)
    rank = tl.zeros((BLOCK,), tl.int32)
    below = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, num_assignments, OTHERS):
        others = first + tl.arange(0, OTHERS)
        known = (others < num_assignments)[None, :]
        other = tl.load(indices_ptr + others, mask=others < num_assignments, other=0).to(tl.int32)[None, :]
        earlier = (other < index[:, None]) | ((other == index[:, None]) & (others[None, :] < mine[:, None]))
        rank += tl.sum((earlier & known).to(tl.int32), 1)
        below += tl.sum(((other < mine[:, None]) & known).to(tl.int32), 1)
    tl.store(order_ptr + rank, mine.to(tl.int64), mask=mine < num_assignments)
    tl.store(bounds_ptr + mine, below.to(tl.int64), mask=mine <= num_experts)


def sort_assignments(indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Order and bounds as :func:`shared_core.kernels.assignments.sort_by_expert` gives them, without a synchronisation.

    Parameters
    ----------
    indices : Tensor
        ``[R, k]`` integer, 0 .. E; E means "no expert".
    num_experts : int
        E.

    Returns
    -------
    order : Tensor
        ``[N]`` int64.
    bounds : Tensor
        ``[E + 1]`` int64.

    Raises
    ------
    ValueError
        On the CPU (the interpreter), if an index is outside 0 .. E.
    """
    count = indices.numel()
    if count > FEW:
        return sort_by_expert(indices, num_experts)
    flat = indices.reshape(-1).contiguous()
    if flat.device.type == "cpu" and count > 0:
        low, high = flat.aminmax()
        check_range(int(low), int(high), num_experts)
    order = torch.empty(count, dtype=torch.int64, device=flat.device)
    bounds = torch.empty(num_experts + 1, dtype=torch.int64, device=flat.device)
    grid = (triton.cdiv(max(count, num_experts + 1), _BLOCK),)
    plan_kernel[grid](
        flat, order, bounds, count, num_experts, BLOCK=_BLOCK, OTHERS=_OTHERS, num_warps=4, enable_fp_fusion=True
    )
    return order, bounds
