"""The oracle: every expert on every row, and a choice among the results, with PyTorch's own autograd.

Readable first: it costs E / k times the work of the other backends. It runs on every device and in every floating
dtype, can be traced and differentiated as often as one likes, and is what all other backends are compared with.

Letters: R rows, k slots, E experts, H width in, D width out, I intermediate width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shared_core.kernels.activations import activate
from shared_core.kernels.formula import Formula, Parameters

__all__ = ["forward"]


def forward(x: Tensor, indices: Tensor, weights: Tensor, parameters: Parameters, formula: Formula) -> Tensor:
    r"""``out_r = Σ_j w_{r,j} y_{S_r(j)}(x_r)``, expert by expert.

    Parameters
    ----------
    x : Tensor
        ``[R, H]``.
    indices, weights : Tensor
        ``[R, k]``; index E means "no expert".
    parameters : Parameters
        Of the E experts.
    formula : Formula
        What they compute.

    Returns
    -------
    Tensor
        ``[R, D]`` in the dtype of ``x``, accumulated in float32 (float64 for float64).
    """
    up, down, up_bias, down_bias = parameters
    wide = torch.promote_types(x.dtype, torch.float32)
    out = x.new_zeros(x.shape[0], down.shape[1], dtype=wide)
    # Rows without an expert may hold anything (padding): 0 times NaN would reach the gradients of the weights.
    x = x.masked_fill((indices == up.shape[0]).all(1, keepdim=True), 0.0)
    for expert in range(up.shape[0]):
        chosen = (indices == expert).unsqueeze(-1)  # [R, k, 1]
        weight = weights.unsqueeze(-1)
        # One input for each slot, because the slots of a row weight it differently; else one for the row.
        inputs = (x.unsqueeze(1) * weight).to(x.dtype) if formula.weight_input else x.unsqueeze(1)
        z = F.linear(inputs, up[expert], None if up_bias is None else up_bias[expert])
        if formula.gated:
            gate, value = z.chunk(2, dim=-1)
            hidden = activate(formula.activation, gate) * value
        else:
            hidden = activate(formula.activation, z)
        y = F.linear(hidden, down[expert], None if down_bias is None else down_bias[expert]).to(wide)
        out = out + torch.where(chosen, y if formula.weight_input else y * weight, 0.0).sum(1)
    return out.to(x.dtype)
