"""Experts on the CPU, forward and backward, one expert after another on its own rows.

Everything between the two products has the logical shape ``[features, n]``; how it lies in memory is chosen for each expert
from its number of rows (:class:`_Layout`), because the speed of a product depends on it by up to a factor of two.

Letters: R rows, k slots, E experts, N assignments, H width in, D width out, I intermediate width (J = 2I if gated, else I),
n rows of one expert.
"""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shared_core.kernels import grouped
from shared_core.kernels.activations import activate, activation_gradient
from shared_core.kernels.assignments import check_range, sort_by_expert
from shared_core.kernels.cpu import accumulate_product, product
from shared_core.kernels.cpu_features import cpu_features

__all__ = ["backward", "forward"]

_WIDEN = 56  # rows of an expert from which bfloat16 matrices are widened, where the CPU multiplies float32 faster
_FEW = 64  # assignments up to which two phases beat one expert after another …
_FEW_PER_EXPERT = 4  # … or so many for each of the E experts


class _Layout(NamedTuple):
    """Where the features of one expert's ``n`` rows lie, and in which dtype they are multiplied.

    Measured on a Sapphire Rapids core (MKL, oneDNN), matrices coming from main memory. Row-major (``[n, ·]``) products read
    few rows' matrix fastest. From 8 to 64 rows in float32, feature-major (``[·, n]``) ones are up to 1.7 times as fast: the
    matrix is then the left operand, which is packed with less effort. Beyond, both are equal, unless the expert is ``long``:
    then it even pays to transpose x and y. 16-bit products lose more by rows that do not fill a register than they gain.
    """

    narrow: bool
    long: bool

    @classmethod
    def of(cls, dtype: torch.dtype, intermediate_size: int) -> _Layout:
        return cls(narrow=dtype in {torch.bfloat16, torch.float16}, long=intermediate_size >= 1024)

    def feature_major(self, num_rows: int) -> bool:
        if self.narrow and not self.widened(num_rows):
            return False
        return num_rows >= 8 and (num_rows <= 64 or self.long)

    def widened(self, num_rows: int) -> bool:
        """Whether these rows run in float32 on matrices widened on the fly."""
        return self.narrow and num_rows >= _WIDEN and cpu_features().widen_bf16

    def matrix(self, flat: Tensor, width: int) -> Tensor:
        """``[width, n]`` on flat memory."""
        num_rows = flat.shape[0] // width
        return flat.view(width, num_rows) if self.feature_major(num_rows) else flat.view(num_rows, width).t()

    def columns(self, rows: Tensor) -> Tensor:
        """``[n, ·]`` as the right operand ``[·, n]`` of a long product."""
        turned = rows.t()
        return turned.contiguous() if self.long and self.feature_major(rows.shape[0]) else turned

    def outputs(self, matrix: Tensor, columns: Tensor) -> Tensor:
        """``(matrix · columns)ᵀ``, ``[n, M]``, row-major because rows are what is added up afterwards."""
        num_rows = columns.shape[1]
        if self.long and self.feature_major(num_rows):
            return product(matrix, columns).t().contiguous()
        y = columns.new_empty(num_rows, matrix.shape[0])
        product(matrix, columns, out=y.t())
        return y


def forward(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    *,
    activation: str,
    gated: bool,
    weight_input: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, pre-activations (empty unless ``save``), order and bounds of the sorted assignments."""
    num_assignments = indices.numel()
    if not save and 0 < num_assignments <= max(_FEW, _FEW_PER_EXPERT * up.shape[0]):
        out = _few_rows(
            x,
            indices,
            weights,
            up,
            down,
            up_bias,
            down_bias,
            activation=activation,
            gated=gated,
            weight_input=weight_input,
        )
        return out, x.new_empty(0), indices.new_empty(0), indices.new_empty(0)
    order, bounds = sort_by_expert(indices, up.shape[0])
    rows, weights_N = _rows_and_weights(order, weights, x.dtype)
    layout = _Layout.of(x.dtype, down.shape[2])
    width = up.shape[1]
    out = torch.zeros(x.shape[0], down.shape[1], dtype=torch.promote_types(x.dtype, torch.float32))
    saved = x.new_empty(num_assignments * width if save else 0)
    limits = bounds.tolist()
    x_wide = x.to(out.dtype)
    for expert in range(up.shape[0]):
        start, stop = limits[expert], limits[expert + 1]
        if start == stop:
            continue
        mine, weight = rows[start:stop], weights_N[start:stop]
        x_n = (x_wide if layout.widened(stop - start) else x).index_select(0, mine)
        kept = layout.matrix(saved[start * width : stop * width], width) if save else None
        z = _pre_activations(x_n, up[expert], _row(up_bias, expert), weight if weight_input else None, layout, kept)
        h = _hidden(z, activation, gated)
        if not weight_input:
            h.mul_(weight)
        y = layout.outputs(down[expert], h)
        if down_bias is not None:
            y.add_(down_bias[expert] if weight_input else torch.outer(weight, down_bias[expert]))
        out.index_add_(0, mine, y.to(out.dtype))
    return out.to(x.dtype), saved, order, bounds


def _row(bias: Tensor | None, expert: int) -> Tensor | None:
    return None if bias is None else bias[expert]


def _rows_and_weights(order: Tensor, weights: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows = order.div(weights.shape[1], rounding_mode="floor")
    return rows, weights.reshape(-1).index_select(0, order).to(torch.promote_types(dtype, torch.float32))


def _few_rows(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    *,
    activation: str,
    gated: bool,
    weight_input: bool,
) -> Tensor:
    """Decoding, in two phases: all up-products into one buffer, one activation, all down-products.

    Every product is bound by reading its matrix, so what counts is how few operations stand between two products.
    """
    num_rows, num_slots = indices.shape
    num_experts = up.shape[0]
    chosen = indices.reshape(-1).tolist()
    check_range(min(chosen), max(chosen), num_experts)
    order = sorted((p for p, expert in enumerate(chosen) if expert < num_experts), key=chosen.__getitem__)
    wide = torch.promote_types(x.dtype, torch.float32)
    if not order:
        return x.new_zeros(num_rows, down.shape[1])
    loads = Counter(chosen[p] for p in order)  # keeps the order of first appearance, that is the sorted one
    experts, sizes = list(loads), list(loads.values())
    order_N = torch.tensor(order)
    weight = weights.reshape(-1).index_select(0, order_N).to(x.dtype).unsqueeze(1)
    rows = order_N.div(num_slots, rounding_mode="floor")
    x_N = x.index_select(0, rows)

    z = _products(x_N, up, experts, sizes)
    if weight_input:
        z.mul_(weight)
    if up_bias is not None:
        z.add_(up_bias.repeat_interleave(torch.bincount(indices.reshape(-1), minlength=num_experts + 1)[:-1], 0))
    h = _hidden(z, activation, gated, dim=1)
    if not weight_input:
        h.mul_(weight)
    y = _products(h, down, experts, sizes)
    if down_bias is not None:
        bias = down_bias.repeat_interleave(torch.bincount(indices.reshape(-1), minlength=num_experts + 1)[:-1], 0)
        y.add_(bias if weight_input else bias.mul_(weight))
    if num_rows == 1:
        return y.sum(0, keepdim=True, dtype=wide).to(x.dtype)
    return torch.zeros(num_rows, y.shape[1], dtype=wide).index_add_(0, rows, y.to(wide)).to(x.dtype)


def _products(rows: Tensor, matrices: Tensor, experts: list[int], sizes: list[int]) -> Tensor:
    """``rows[block] matrixᵀ`` for every expert's block of consecutive rows, ``[N, K] × [E, M, K] -> [N, M]``."""
    num_experts = matrices.shape[0]
    transposed = matrices.transpose(1, 2)
    # PyTorch's native loop visits all E experts for 2 µs each, ours the touched ones for 5 µs each.
    if 5 * len(experts) > 2 * num_experts and grouped.accepts(rows, transposed):
        counts = [0] * num_experts
        for expert, size in zip(experts, sizes, strict=True):
            counts[expert] = size
        return F.grouped_mm(rows, transposed, offs=torch.tensor(list(accumulate(counts)), dtype=torch.int32))
    out = rows.new_empty(rows.shape[0], matrices.shape[1])
    for expert, block, target in zip(experts, rows.split_with_sizes(sizes), out.split_with_sizes(sizes), strict=True):
        torch.mm(block, transposed.select(0, expert), out=target)
    return out


def _pre_activations(
    x_n: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    input_weight: Tensor | None,
    layout: _Layout,
    kept: Tensor | None = None,
) -> Tensor:
    """``z = W1 x (· w) + b1``, ``[J, n]`` in the dtype of ``x_n``; a copy goes to ``kept``, if possible without copying."""
    num_rows, width = x_n.shape[0], up.shape[0]
    direct = kept is not None and kept.dtype == x_n.dtype
    z = kept if kept is not None and direct else layout.matrix(x_n.new_empty(num_rows * width), width)
    product(up, layout.columns(x_n), out=z)
    if input_weight is not None:
        z.mul_(input_weight)
    if up_bias is not None:
        z.add_(up_bias.unsqueeze(1))
    if kept is not None and not direct:
        kept.copy_(z)
    return z


def _hidden(z: Tensor, activation: str, gated: bool, dim: int = 0) -> Tensor:
    """``act(gate) · value`` or ``act(z)`` with features along ``dim``, a new tensor."""
    if not gated:
        return activate(activation, z)
    gate, value = z.chunk(2, dim)
    return activate(activation, gate).mul_(value)


def backward(
    grad: Tensor,
    x: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    saved: Tensor,
    order: Tensor,
    bounds: Tensor,
    *,
    activation: str,
    gated: bool,
    weight_input: bool,
    needs: tuple[bool, bool, bool, bool, bool, bool],
    up_grad: Tensor | None = None,
    down_grad: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of x, weights, up, down, up_bias, down_bias (None where not needed)."""
    need_x, need_w, need_up, need_down, need_up_bias, need_down_bias = needs
    width = up.shape[1]
    wide = torch.promote_types(x.dtype, torch.float32)
    rows, weights_N = _rows_and_weights(order, weights, x.dtype)
    x_wide, grad_wide = x.to(wide), grad.to(wide)
    layout = _Layout.of(x.dtype, down.shape[2])
    dx = torch.zeros(x.shape, dtype=wide) if need_x else None
    dw_N = torch.zeros(order.shape[0], dtype=wide) if need_w else None
    dup = torch.empty_like(up, memory_format=torch.contiguous_format) if need_up and up_grad is None else None
    ddown = torch.empty_like(down, memory_format=torch.contiguous_format) if need_down and down_grad is None else None
    dup_bias = torch.zeros_like(up_bias) if need_up_bias and up_bias is not None else None
    ddown_bias = torch.zeros_like(down_bias) if need_down_bias and down_bias is not None else None
    limits = bounds.tolist()
    for expert in range(up.shape[0]):
        start, stop = limits[expert], limits[expert + 1]
        if start == stop:
            for gradient in (dup, ddown):
                if gradient is not None:
                    gradient[expert].zero_()
            continue
        mine, weight = rows[start:stop], weights_N[start:stop]
        widened = layout.widened(stop - start)
        x_n = (x_wide if widened else x).index_select(0, mine)
        g_n = (grad_wide if widened else grad).index_select(0, mine)
        if saved.numel():
            z = layout.matrix(saved[start * width : stop * width], width).to(x_n.dtype)
        else:
            z = _pre_activations(x_n, up[expert], _row(up_bias, expert), weight if weight_input else None, layout)
        # A = g W2 before the weight: <A, h> is the gradient of the weight, without any stored output.
        # Row-major first, whatever the layout: that product needs no transposition inside the BLAS and is up to twice as fast.
        dh = product(down[expert].t(), g_n.t(), out=g_n.new_empty(stop - start, down.shape[2]).t())
        if layout.feature_major(stop - start):
            dh = dh.contiguous()
        if gated:
            gate, value = z.chunk(2)
            act = activate(activation, gate)
            h = act * value
        else:
            h = activate(activation, z)
        if not weight_input:
            if dw_N is not None:
                dw = (dh * h).sum(0, dtype=wide)
                if down_bias is not None:
                    dw += torch.mv(g_n, down_bias[expert].to(g_n.dtype))
                dw_N[start:stop] = dw
            h.mul_(weight)
            dh.mul_(weight)
        if need_down:
            _weight_gradient(g_n.t(), h.t(), expert, ddown, down_grad)
        if ddown_bias is not None:
            ddown_bias[expert] = g_n.sum(0) if weight_input else torch.mv(g_n.t(), weight.to(g_n.dtype))
        if gated:
            dz = torch.empty_like(z)
            d_gate, d_value = dz.chunk(2)
            torch.mul(dh, act, out=d_value)
            activation_gradient(activation, gate, dh.mul_(value), out=d_gate)
        else:
            dz = activation_gradient(activation, z, dh)
        if dup_bias is not None:
            dup_bias[expert] = dz.sum(1)
        if need_x or (need_w and weight_input):
            dx_n = layout.outputs(up[expert].t(), dz)
            if weight_input:
                if dw_N is not None:
                    dw_N[start:stop] = (dx_n * x_n).sum(1, dtype=wide)
                dx_n.mul_(weight.unsqueeze(1))
            if dx is not None:
                dx.index_add_(0, mine, dx_n.to(wide))
        if need_up:
            _weight_gradient(dz.mul_(weight) if weight_input else dz, x_n, expert, dup, up_grad)
    dweights = None
    if dw_N is not None:
        dweights = torch.empty_like(dw_N).index_copy_(0, order, dw_N).view(weights.shape).to(weights.dtype)
    return None if dx is None else dx.to(x.dtype), dweights, dup, ddown, dup_bias, ddown_bias


def _weight_gradient(a: Tensor, b: Tensor, expert: int, fresh: Tensor | None, existing: Tensor | None) -> None:
    if existing is not None:
        accumulate_product(a, b, existing[expert])
    elif fresh is not None:
        product(a, b, out=fresh[expert])
