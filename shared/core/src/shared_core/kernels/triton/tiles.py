"""Device code that the expert kernels share: which tile a program computes, and the loop of a matrix product.

The tile map (expert, first row, number of rows) is not a tensor: every program derives its own entry from the E + 1
bounds of the sorted assignments, which costs one short load and a scan, no launch and no look at the host, and leaves
the height of a tile free for tuning.

Letters: R rows, k slots, E experts, N = R·k assignments sorted by expert, n of one expert.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["dot", "locate", "max_tiles", "multiply", "routing_weights", "source_rows"]

_GROUP = tl.constexpr(8)  # tiles of rows that sweep the columns together, so that weights and rows stay in the L2 cache


def max_tiles(num_assignments: int, num_experts: int, block_m: int) -> int:
    r"""Tiles of ``block_m`` rows that N assignments can need, however they fall on the experts.

    Parameters
    ----------
    num_assignments, num_experts : int
        N and E.
    block_m : int
        Rows of a tile; a tile belongs to one expert.

    Returns
    -------
    int
        :math:`\max Σ_e ⌈n_e / b⌉` over all :math:`n_e ≥ 0` with sum N.

    Examples
    --------
    >>> max_tiles(8, 128, block_m=16)  # eight experts with a row each
    8
    >>> max_tiles(33, 2, block_m=16)
    3
    """
    touched = min(num_assignments, num_experts)
    return (num_assignments + touched * (block_m - 1)) // block_m


@triton.jit
def locate(
    bounds_ptr,
    num_experts,
    columns,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EXPERTS: tl.constexpr,  # E, padded to a power of two
):
    """Expert (int64), first and end of its rows in this tile, first column, and whether there is such a tile at all."""
    experts = tl.arange(0, EXPERTS)
    known = experts < num_experts
    firsts = tl.load(bounds_ptr + experts, mask=known, other=0)
    ends = tl.load(bounds_ptr + experts + 1, mask=known, other=0)
    tiles = ((ends - firsts).to(tl.int32) + (BLOCK_M - 1)) // BLOCK_M
    tile_ends = tl.cumsum(tiles, 0)
    total = tl.sum(tiles, 0)

    column_blocks = tl.cdiv(columns, BLOCK_N)
    program = tl.program_id(0)
    group = program // (_GROUP * column_blocks)
    within = program % (_GROUP * column_blocks)
    height = tl.maximum(tl.minimum(total - group * _GROUP, _GROUP), 1)
    tile = group * _GROUP + within % height
    block = within // height

    expert = tl.sum((tile_ends <= tile).to(tl.int32), 0)
    mine = experts == expert
    first = tl.sum(tl.where(mine, firsts, 0), 0)
    end = tl.sum(tl.where(mine, ends, 0), 0)
    first_tile = tl.sum(tl.where(mine, tile_ends - tiles, 0), 0)
    start = first + (tile - first_tile) * BLOCK_M
    active = (tile < total) & (block < column_blocks)
    return expert.to(tl.int64), start.to(tl.int64), end.to(tl.int64), block * BLOCK_N, active


@triton.jit
def source_rows(order_ptr, positions, valid, num_slots):
    """Row (int64) that each sorted assignment reads."""
    # N < 2³¹ is checked at the launch, and a division of 32 bits is several times cheaper.
    order = tl.load(order_ptr + positions, mask=valid, other=0).to(tl.int32)
    return (order // num_slots).to(tl.int64)


@triton.jit
def routing_weights(weights_ptr, order_ptr, positions, valid):
    """Routing weight of each sorted assignment in float32."""
    order = tl.load(order_ptr + positions, mask=valid, other=0)
    return tl.load(weights_ptr + order, mask=valid, other=0).to(tl.float32)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """``acc + a b`` in float32, products of float32 as ``PRECISION`` says: "ieee", "tf32", or "widen"."""
    if PRECISION == "widen":  # the interpreter multiplies bfloat16 as if its bits were integers
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def multiply(
    acc,
    a_ptrs,
    a_valid,
    b_ptrs,
    b_valid,
    inner,
    b_step,
    EVEN_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``acc [M, N] + a [M, K] b [K, N]`` in float32; ``a`` is contiguous along K, ``b`` has ``b_step`` there."""
    k = tl.arange(0, BLOCK_K)
    for start in range(0, inner, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptrs, mask=a_valid, other=0.0)
            b = tl.load(b_ptrs, mask=b_valid, other=0.0)
        else:
            inside = k < inner - start
            a = tl.load(a_ptrs, mask=a_valid & inside[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=b_valid & inside[:, None], other=0.0)
        acc = dot(a, b, acc, PRECISION)
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K * b_step
    return acc
