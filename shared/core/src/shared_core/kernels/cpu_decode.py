"""Experts for few rows on the CPU, as in decoding: two phases instead of one expert after another.

Every product is then bound by reading its matrix, so what counts is how few operations stand between two products.

Letters: R rows, k slots, E experts, N assignments without sentinels, D width out, I intermediate width, J = 2I or I.
"""

from __future__ import annotations

from collections import Counter
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from shared_core.kernels.assignments import check_range
from shared_core.kernels.formula import Formula, Parameters
from shared_core.kernels.grouped import accepts

__all__ = ["forward"]


def forward(x: Tensor, indices: Tensor, weights: Tensor, parameters: Parameters, formula: Formula) -> Tensor:
    """All up-products into one buffer, one activation, all down-products; outside of autograd.

    Parameters
    ----------
    x : Tensor
        ``[R, H]``, R > 0.
    indices, weights : Tensor
        ``[R, k]``.
    parameters : Parameters
        Of the E experts.
    formula : Formula
        What they compute.

    Returns
    -------
    Tensor
        ``[R, D]``.
    """
    up, down, up_bias, down_bias = parameters
    num_rows, num_slots = indices.shape
    num_experts = up.shape[0]
    chosen = indices.reshape(-1).tolist()
    check_range(min(chosen), max(chosen), num_experts)
    # Python sorts so few numbers faster than a tensor operation starts.
    order = sorted((p for p, expert in enumerate(chosen) if expert < num_experts), key=chosen.__getitem__)
    if not order:
        return x.new_zeros(num_rows, down.shape[1])
    loads = Counter(chosen[p] for p in order)  # keeps the order of first appearance, that is the sorted one
    experts, sizes = list(loads), list(loads.values())
    order_N = torch.tensor(order)
    weight = weights.reshape(-1).index_select(0, order_N).to(x.dtype).unsqueeze(1)
    rows = order_N.div(num_slots, rounding_mode="floor")

    z = _products(x.index_select(0, rows), up, experts, sizes)
    if formula.weight_input:
        z.mul_(weight)
    if up_bias is not None:
        z.add_(_bias(up_bias, experts, sizes))
    h = formula.hidden(z, dim=1)
    if not formula.weight_input:
        h.mul_(weight)
    y = _products(h, down, experts, sizes)
    if down_bias is not None:
        bias = _bias(down_bias, experts, sizes)
        y.add_(bias if formula.weight_input else bias.mul_(weight))

    wide = torch.promote_types(x.dtype, torch.float32)
    if num_rows == 1:
        return y.sum(0, keepdim=True, dtype=wide).to(x.dtype)
    return torch.zeros(num_rows, y.shape[1], dtype=wide).index_add_(0, rows, y.to(wide)).to(x.dtype)


def _bias(stacked: Tensor, experts: list[int], sizes: list[int]) -> Tensor:
    """Bias of each assignment's expert, a new tensor."""
    return stacked[[expert for expert, size in zip(experts, sizes, strict=True) for _ in range(size)]]


def _products(rows: Tensor, matrices: Tensor, experts: list[int], sizes: list[int]) -> Tensor:
    """``rows[block] matrixᵀ`` for every expert's block of consecutive rows, ``[N, K] × [E, M, K] -> [N, M]``."""
    num_experts = matrices.shape[0]
    transposed = matrices.transpose(1, 2)
    # PyTorch's native loop visits all E experts for 2 µs each, ours the touched ones for 5 µs each.
    if 5 * len(experts) > 2 * num_experts and accepts(rows, transposed):
        counts = [0] * num_experts
        for expert, size in zip(experts, sizes, strict=True):
            counts[expert] = size
        return F.grouped_mm(rows, transposed, offs=torch.tensor(list(accumulate(counts)), dtype=torch.int32))
    out = rows.new_empty(rows.shape[0], matrices.shape[1])
    for expert, block, target in zip(experts, rows.split_with_sizes(sizes), out.split_with_sizes(sizes), strict=True):
        torch.mm(block, transposed.select(0, expert), out=target)
    return out
