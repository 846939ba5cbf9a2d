"""Experts by PyTorch's grouped product: every expert's rows in one call, without a synchronisation on an accelerator.

``torch.nn.functional.grouped_mm`` refuses some dtypes, row strides and layouts; a product that it refuses runs as a
loop of ``mm`` (with one synchronisation), so the backend accepts everything.

Letters: R rows, k slots, E experts, N = R·k assignments sorted by expert (sentinels last), H width in, D width out,
I intermediate width, J = 2I if gated else I.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from shared_core.kernels.assignments import sort_by_expert
from shared_core.kernels.formula import Formula, Parameters

__all__ = ["accepts", "backward", "forward", "rows_times_experts", "rows_times_rows"]

_ALIGNMENT = 16  # bytes


def accepts(a: Tensor, b: Tensor) -> bool:
    """Whether ``grouped_mm(a, b)`` takes these operands; otherwise the product runs as a loop.

    Parameters
    ----------
    a, b : Tensor
        Two- or three-dimensional operands.

    Returns
    -------
    bool
    """
    if not hasattr(F, "grouped_mm") or a.device.type not in {"cpu", "cuda"}:
        return False
    if a.device.type == "cuda":
        if a.dtype != torch.bfloat16 or torch.cuda.get_device_capability(a.device) < (8, 0):
            return False
    elif a.dtype not in {torch.bfloat16, torch.float32, torch.float16}:
        return False
    return _aligned(a) and _aligned(b)


def _aligned(matrix: Tensor) -> bool:
    """One of the last two strides is 1, the other a multiple of 16 bytes, as is the start."""
    size = matrix.element_size()
    row, column = matrix.stride(-2), matrix.stride(-1)
    other = row if column == 1 else column if row == 1 else None
    extent = matrix.shape[-1] if column == 1 else matrix.shape[-2]
    return (
        other is not None
        and other >= max(1, extent)
        and other * size % _ALIGNMENT == 0
        and matrix.data_ptr() % _ALIGNMENT == 0
        and (matrix.ndim == 2 or matrix.stride(0) * size % _ALIGNMENT == 0)
    )


def rows_times_experts(rows_NK: Tensor, experts_EKM: Tensor, bounds: Tensor) -> Tensor:
    """``[N, K] × [E, K, M] -> [N, M]``; what belongs to no expert is left undefined."""
    if rows_NK.shape[0] > 0 and accepts(rows_NK, experts_EKM):
        return F.grouped_mm(rows_NK, experts_EKM, offs=bounds[1:].to(torch.int32))
    out = rows_NK.new_empty(rows_NK.shape[0], experts_EKM.shape[2])
    limits = bounds.tolist()
    for expert in range(experts_EKM.shape[0]):
        start, stop = limits[expert], limits[expert + 1]
        if start < stop:
            torch.mm(rows_NK[start:stop], experts_EKM[expert], out=out[start:stop])
    return out


def rows_times_rows(left_NM: Tensor, right_NP: Tensor, bounds: Tensor) -> Tensor:
    """Per expert ``leftᵀ right``: ``[N, M] × [N, P] -> [E, M, P]``, exactly 0 for idle experts."""
    if left_NM.shape[0] > 0 and accepts(left_NM, right_NP):
        stacked = F.grouped_mm(left_NM.t(), right_NP, offs=bounds[1:].to(torch.int32))
        # An empty sum is 0 on the CPU; the device kernels do not promise it.
        return (
            stacked if stacked.device.type == "cpu" else stacked.masked_fill_((bounds.diff() == 0)[:, None, None], 0.0)
        )
    stacked = left_NM.new_zeros(bounds.shape[0] - 1, left_NM.shape[1], right_NP.shape[1])
    limits = bounds.tolist()
    for expert in range(stacked.shape[0]):
        start, stop = limits[expert], limits[expert + 1]
        if start < stop:
            torch.mm(left_NM[start:stop].t(), right_NP[start:stop], out=stacked[expert])
    return stacked


class _Sorted:
    """Sorted assignments with what both passes derive from them."""

    def __init__(self, order: Tensor, bounds: Tensor, weights: Tensor, num_experts: int) -> None:
        self.order, self.bounds = order, bounds
        self.num_rows, self.num_slots = weights.shape
        self.rows = order // self.num_slots
        self.num_experts = num_experts
        self.weights = self.clear(weights.reshape(-1).index_select(0, order).unsqueeze(1))

    @functools.cached_property
    def absent(self) -> Tensor | None:
        """``[N, 1]``, True for sentinels, which stand behind the last bound; None where there is none for certain."""
        num_assignments = self.order.shape[0]
        # Looking costs nothing on a CPU; on an accelerator it would be a synchronisation.
        if self.order.device.type == "cpu" and int(self.bounds[-1]) == num_assignments:
            return None
        return (torch.arange(num_assignments, device=self.order.device) >= self.bounds[-1]).unsqueeze(1)

    @functools.cached_property
    def experts(self) -> Tensor:
        """Expert of each assignment, ``[N]`` (any expert for sentinels)."""
        position = torch.arange(self.order.shape[0], device=self.order.device)
        return torch.searchsorted(self.bounds[1:], position, right=True).clamp_(max=self.num_experts - 1)

    def clear(self, values: Tensor) -> Tensor:
        """Set what belongs to sentinels to 0, in place: products leave it undefined, possibly NaN."""
        return values if self.absent is None else values.masked_fill_(self.absent, 0.0)

    def gather(self, values: Tensor) -> Tensor:
        """``[R, ·] -> [N, ·]``."""
        return values.index_select(0, self.rows)

    def unsort(self, values: Tensor) -> Tensor:
        """``[N, ·]`` in sorted order back to ``[R, k, ·]``."""
        spread = torch.empty_like(values).index_copy_(0, self.order, values)
        return spread.view(self.num_rows, self.num_slots, *spread.shape[1:])

    def combine(self, values: Tensor) -> Tensor:
        """Sum of every row's slots, ``[N, ·] -> [R, ·]``; no atomics, hence reproducible.

        PyTorch accumulates sums of 16-bit numbers in float32 and rounds once.
        """
        return self.unsort(self.clear(values)).sum(1)


def forward(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    parameters: Parameters,
    formula: Formula,
    *,
    keep_plan: bool = False,
    keep_z: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Evaluate the experts outside of autograd, as :func:`shared_core.kernels.cpu_experts.forward` does."""
    _, down, _, down_bias = parameters
    order, bounds = sort_by_expert(indices, down.shape[0])
    plan = _Sorted(order, bounds, weights, down.shape[0])
    z = _pre_activations(plan.gather(x), parameters, formula, plan)
    h = formula.hidden(z, dim=1)
    if not formula.weight_input:
        h.mul_(plan.weights.to(x.dtype))
    y = rows_times_experts(h, down.mT, bounds)
    if down_bias is not None:
        bias = down_bias.index_select(0, plan.experts)
        y.add_(bias if formula.weight_input else bias.mul_(plan.weights.to(x.dtype)))
    out = plan.combine(y)
    if not keep_plan:
        order, bounds = order.new_empty(0), order.new_empty(0)
    return out, z.reshape(-1) if keep_z else x.new_empty(0), order, bounds


def _pre_activations(x_N: Tensor, parameters: Parameters, formula: Formula, plan: _Sorted) -> Tensor:
    z = rows_times_experts(x_N, parameters.up.mT, plan.bounds)
    if formula.weight_input:
        z.mul_(plan.weights.to(z.dtype))
    if parameters.up_bias is not None:
        z.add_(parameters.up_bias.index_select(0, plan.experts))
    return plan.clear(z)


def backward(
    grad: Tensor,
    x: Tensor,
    weights: Tensor,
    parameters: Parameters,
    kept_z: Tensor,
    order: Tensor,
    bounds: Tensor,
    formula: Formula,
    *,
    needs: tuple[bool, bool, bool, bool, bool, bool],
    up_grad: Tensor | None = None,
    down_grad: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients, outside of autograd; arguments and results as in :func:`shared_core.kernels.cpu_experts.backward`."""
    up, down, up_bias, down_bias = parameters
    need_x, need_w, need_up, need_down, need_up_bias, need_down_bias = needs
    plan = _Sorted(order, bounds, weights, up.shape[0])
    wide = torch.promote_types(x.dtype, torch.float32)
    weight = plan.weights.to(x.dtype)
    g, x_N = plan.gather(grad), plan.gather(x)
    z = kept_z.view(order.shape[0], up.shape[1]) if kept_z.numel() else _pre_activations(x_N, parameters, formula, plan)
    dh = plan.clear(rows_times_experts(g, down, bounds))
    h, activated = formula.hidden_for_gradient(z, dim=1)
    dw: Tensor | None = None
    if not formula.weight_input:
        if need_w:
            dw = (dh * h).sum(1, dtype=wide)
            if down_bias is not None:
                dw += (g * down_bias.index_select(0, plan.experts)).sum(1, dtype=wide)
        h.mul_(weight)
        dh.mul_(weight)
    ddown = _deliver(rows_times_rows(g, h, bounds), down_grad) if need_down else None
    ddown_bias = None
    if need_down_bias and down_bias is not None:
        weighted = plan.clear(g.clone()) if formula.weight_input else g * weight
        ddown_bias = _sum_by_expert(weighted, plan, down_bias)
    dz = formula.gradient(z, activated, dh, dim=1)
    dup_bias = _sum_by_expert(dz, plan, up_bias) if need_up_bias and up_bias is not None else None
    dx: Tensor | None = None
    if need_x or (need_w and formula.weight_input):
        dx_N = plan.clear(rows_times_experts(dz, up, bounds))
        if formula.weight_input:
            if need_w:
                dw = (dx_N * x_N).sum(1, dtype=wide)
            dx_N.mul_(weight)
        if need_x:
            dx = plan.combine(dx_N)
    if formula.weight_input:
        dz.mul_(weight)
    dup = _deliver(rows_times_rows(dz, x_N, bounds), up_grad) if need_up else None
    dweights = None
    if dw is not None:
        dweights = plan.unsort(plan.clear(dw.unsqueeze(1)).squeeze(1)).to(weights.dtype)
    return dx, dweights, dup, ddown, dup_bias, ddown_bias


def _deliver(gradient: Tensor, existing: Tensor | None) -> Tensor | None:
    """Add to an existing gradient (then there is none to return) or hand the new one over."""
    if existing is None:
        return gradient
    existing.add_(gradient)
    return None


def _sum_by_expert(values: Tensor, plan: _Sorted, like: Tensor) -> Tensor:
    """Sum of every expert's rows, ``[N, M] -> [E, M]``, as a product with ones: no atomics, hence reproducible."""
    ones = values.new_ones(values.shape[0], _ALIGNMENT)  # as wide as grouped_mm's strides demand
    return rows_times_rows(ones, values, plan.bounds)[:, 0].to(like.dtype)
