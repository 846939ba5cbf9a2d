"""What the machine could do at best: the rate of a large matrix product, and the time to read the weights once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import linear

from shared_core.bench.cases import Batch, Case, Weights
from shared_core.bench.timing import Prepare
from shared_core.kernels.cpu import onednn_usable

# Rows, columns and depth of the product whose rate counts as the peak.
_GEMM = (1024, 2048, 2048)
GEMM_FLOPS = 2 * _GEMM[0] * _GEMM[1] * _GEMM[2]


def gemm_candidates(dtype: torch.dtype) -> dict[str, Prepare]:
    """Return ways to compute one 1024 × 2048 × 2048 product, by name.

    The best of them is the peak: ``torch.mm`` and oneDNN in the dtype, and for bfloat16 also ``torch.mm`` in float32,
    because on CPUs without a full-rate bfloat16 unit that is the faster way to the same product.
    """
    rows, columns, depth = _GEMM
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, depth, generator=generator).to(dtype)
    weight = torch.randn(columns, depth, generator=generator).to(dtype)
    candidates: dict[str, Prepare] = {"torch.mm": lambda: lambda: torch.mm(x, weight.T)}
    if onednn_usable():
        product = torch.ops.mkldnn._linear_pointwise
        candidates["oneDNN"] = lambda: lambda: product(x, weight, None, "none", [], "")
    if dtype is torch.bfloat16:
        wide_x, wide_weight = x.float(), weight.float()
        candidates["torch.mm in fp32"] = lambda: lambda: torch.mm(wide_x, wide_weight.T)
    return candidates


def read_weights(case: Case, weights: Weights, batches: Sequence[Batch]) -> Prepare:
    """Return a pass over the weights that a decode case needs: one-row products with each chosen expert's two matrices.

    These are the same bytes, read by the library's own product, without sorting, weighting, activation or summation.
    """
    up, down = weights.up.detach(), weights.down.detach()
    row_H = torch.ones(1, case.shape.hidden_size, dtype=up.dtype)
    row_I = torch.ones(1, case.shape.intermediate_size, dtype=up.dtype)
    products = []
    for batch in batches:
        for expert in sorted(set(batch.indices.flatten().tolist())):
            products += [(row_H, up[expert]), (row_I, down[expert])]

    def run() -> None:
        for row, weight in products:
            linear(row, weight)

    return lambda: run
