"""One linear map per expert on rows sorted by expert, differentiable: for experts whose middle is any Python function.

:func:`shared_core.experts_forward` fuses two such maps with a known activation. Where the activation is not known (a
clamped gate, a norm after the expert), it runs in Python between two calls of :func:`grouped_linear`.

Letters: N rows sorted by expert, E experts, H width in, D width out, n rows of one expert.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from shared_core.checks import check_tensor, may_check_values
from shared_core.kernels import resolve_backend
from shared_core.kernels.cpu import product
from shared_core.kernels.cpu_layout import Layout
from shared_core.kernels.grouped import rows_times_experts, rows_times_rows

__all__ = ["grouped_linear", "run"]

# Numbers of one expert's product (n·H·D) below which PyTorch's native loop over experts beats one in Python.
_SMALL = 1 << 22
_TWICE = (
    "the gradient of grouped_linear cannot be differentiated again on this backend; "
    "use backend='reference' where second derivatives are needed"
)


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    *,
    transposed: bool = False,
    backend: str = "auto",
) -> Tensor:
    r"""Apply to every row the matrix of the expert that owns it: :math:`y_n = W_{e(n)}\,x_n + b_{e(n)}`.

    Parameters
    ----------
    x : Tensor
        ``[N, H]``, sorted by expert, as :func:`shared_core.permute` gives.
    weight : Tensor
        ``[E, D, H]``, or ``[E, H, D]`` if ``transposed``.
    offsets : Tensor
        ``[E + 1]`` int64, starting at 0: expert ``e`` owns the rows ``offsets[e]:offsets[e + 1]``, as in
        :class:`shared_core.DispatchPlan`.
    bias : Tensor, optional
        ``[E, D]``.
    transposed : bool, default False
        Whether the matrices are stored as ``[H, D]``; neither layout is copied.
    backend : str
        ``auto`` or a name of :data:`shared_core.kernels.BACKENDS`. Backends without a grouped product of their own
        take the one of ``grouped_mm``.

    Returns
    -------
    Tensor
        ``[N, D]`` in the dtype of ``x`` (under autocast: of autocast). Rows behind ``offsets[E]`` belong to no expert:
        they are exactly 0, and so is their gradient.

    Raises
    ------
    TypeError
        If ``x``, ``weight`` and ``bias`` are not of one floating dtype outside autocast, or ``offsets`` not int64.
    ValueError
        If the shapes do not fit together or, on the CPU, ``offsets`` do not ascend from 0 to at most N.
    NotImplementedError
        From a second differentiation, except on ``reference``.

    Examples
    --------
    >>> import torch
    >>> x = torch.tensor([[1.0], [2.0], [3.0]])
    >>> weight = torch.tensor([[[10.0]], [[100.0]]])
    >>> grouped_linear(x, weight, torch.tensor([0, 1, 2])).flatten()  # the third row has no expert
    tensor([ 10., 200.,   0.])
    """
    _check(x, weight, offsets, bias, transposed)
    return run(x, weight, offsets, bias, transposed=transposed, backend=backend)


def run(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    *,
    transposed: bool,
    backend: str = "auto",
) -> Tensor:
    """:func:`grouped_linear` on arguments whose shapes and offsets are known to fit."""
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    for name, other in (("weight", weight), ("bias", bias)):
        if other is not None and other.dtype != x.dtype:
            raise TypeError(f"x is {x.dtype} but {name} is {other.dtype}; cast one of them or use torch.autocast")
    chosen = resolve_backend(backend, x.device, x.dtype)
    if chosen == "reference":
        return _reference(x, weight, offsets, bias, transposed)
    if torch.compiler.is_compiling() or not _is_plain(x, weight):
        result: Tensor = _forward_op(x, weight, offsets, bias, transposed, chosen)
        return result
    tensors = (x, weight) if bias is None else (x, weight, bias)
    if (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)) or (
        torch._C._are_functorch_transforms_active()
    ):
        out: Tensor = _GroupedLinear.apply(x, weight, offsets, bias, transposed, chosen)
        return out
    return _forward(x, weight, offsets, bias, transposed, chosen)


def _check(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, transposed: bool) -> None:
    for name, value in (("x", x), ("weight", weight), ("offsets", offsets)):
        check_tensor(name, value)
    if not x.is_floating_point():
        raise TypeError(f"x must be floating point, got {x.dtype}")
    if offsets.dtype != torch.int64:
        raise TypeError(f"offsets must be int64, got {offsets.dtype}")
    layout = "[E, H, D]" if transposed else "[E, D, H]"
    if weight.ndim != 3:
        raise ValueError(f"weight must be stacked matrices {layout}, got {list(weight.shape)}")
    width_in, width_out = (weight.shape[1], weight.shape[2]) if transposed else (weight.shape[2], weight.shape[1])
    if x.ndim != 2 or x.shape[1] != width_in:
        raise ValueError(f"x must be [N, {width_in}] for weight {layout} = {list(weight.shape)}, got {list(x.shape)}")
    if offsets.shape != (weight.shape[0] + 1,):
        raise ValueError(f"offsets must be [E + 1] = [{weight.shape[0] + 1}], got {list(offsets.shape)}")
    if bias is not None and bias.shape != (weight.shape[0], width_out):
        raise ValueError(f"bias must be [E, D] = {[weight.shape[0], width_out]}, got {list(bias.shape)}")
    if may_check_values(offsets):
        limits = offsets.tolist()
        if limits[0] != 0 or limits != sorted(limits) or limits[-1] > x.shape[0]:
            raise ValueError(f"offsets must ascend from 0 to at most N={x.shape[0]}, got {limits}")


def _is_plain(x: Tensor, weight: Tensor) -> bool:
    return type(x) in {Tensor, Parameter} and type(weight) in {Tensor, Parameter} and x.device.type != "meta"


def _reference(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """Every expert on every row, and a choice among the results, with PyTorch's own autograd."""
    matrices = weight if transposed else weight.mT
    position = torch.arange(x.shape[0], device=x.device)
    # Rows behind the last expert may hold anything (padding): 0 times NaN would reach the gradient of the weights.
    x = x.masked_fill((position >= offsets[-1]).unsqueeze(1), 0.0)
    out = x.new_zeros(x.shape[0], matrices.shape[2])
    for expert in range(matrices.shape[0]):
        mine = ((position >= offsets[expert]) & (position < offsets[expert + 1])).unsqueeze(1)
        y = x @ matrices[expert]
        out = out + torch.where(mine, y if bias is None else y + bias[expert], 0.0)
    return out


# ---------------------------------------------------------------------------------------------------------------------
# The one place where a product is chosen.


def _rows_by_experts(x: Tensor, matrices: Tensor, offsets: Tensor, backend: str) -> Tensor:
    """``[N, H] × [E, H, D] -> [N, D]``, undefined where there is no expert."""
    if not _by_expert(x, matrices.shape[0], matrices.shape[2], backend):
        return rows_times_experts(x, matrices, offsets)
    layout = Layout.of(x.dtype, max(matrices.shape[1:]))
    limits = offsets.tolist()
    y = x.new_empty(x.shape[0], matrices.shape[2])
    for expert, (start, stop) in enumerate(pairwise(limits)):
        if start == stop:
            continue
        mine, target = x[start:stop], y[start:stop]
        if layout.widened(stop - start):  # the narrow matrix is the left operand, which `product` widens by blocks
            wide = torch.empty(target.shape, dtype=torch.float32)
            product(matrices[expert].t(), mine.float().t(), out=wide.t())
            target.copy_(wide)
        else:
            product(mine, matrices[expert], out=target)
    return y


def _rows_by_rows(left: Tensor, right: Tensor, offsets: Tensor, backend: str) -> Tensor:
    """Per expert ``leftᵀ right``: ``[N, M] × [N, P] -> [E, M, P]``, exactly 0 for idle experts."""
    num_experts = offsets.shape[0] - 1
    if not _by_expert(left, num_experts, right.shape[1], backend):
        return rows_times_rows(left, right, offsets)
    layout = Layout.of(left.dtype, max(left.shape[1], right.shape[1]))
    limits = offsets.tolist()
    stacked = left.new_empty(num_experts, left.shape[1], right.shape[1])
    for expert, (start, stop) in enumerate(pairwise(limits)):
        if start == stop:
            stacked[expert].zero_()
            continue
        a, b = left[start:stop], right[start:stop]
        if layout.widened(stop - start):
            a, b = a.float(), b.float()
        product(a.t(), b, out=stacked[expert])
    return stacked


def _by_expert(x: Tensor, num_experts: int, width: int, backend: str) -> bool:
    """Whether the CPU's own products, one expert after another, pay for so many rows an expert; by sizes alone."""
    if backend != "cpu":
        return False
    load = x.shape[0] / num_experts
    if x.dtype in {torch.bfloat16, torch.float16}:
        return Layout.of(x.dtype, width).widened(int(load))
    return load * x.shape[1] * width >= _SMALL


# ---------------------------------------------------------------------------------------------------------------------


def _without_tail(y: Tensor, offsets: Tensor) -> Tensor:
    """Clear what belongs to no expert, in place: products leave it undefined."""
    if y.device.type == "cpu":
        used = int(offsets[-1])
        if used < y.shape[0]:
            y[used:].zero_()
        return y
    # Reading the offset would be a synchronisation.
    behind = torch.arange(y.shape[0], device=y.device) >= offsets[-1]
    return y.masked_fill_(behind.unsqueeze(1), 0.0)


def _forward(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, transposed: bool, backend: str) -> Tensor:
    y = _rows_by_experts(x, weight if transposed else weight.mT, offsets, backend)
    if bias is not None and y.device.type == "cpu":
        of_each_row = bias.repeat_interleave(offsets.diff(), dim=0)
        y[: of_each_row.shape[0]].add_(of_each_row)
    elif bias is not None:  # without reading how many rows there are, which would be a synchronisation
        position = torch.arange(y.shape[0], device=y.device)
        expert = torch.searchsorted(offsets[1:], position, right=True).clamp_(max=bias.shape[0] - 1)
        y.add_(bias.index_select(0, expert))
    return _without_tail(y, offsets)


def _backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    transposed: bool,
    backend: str,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, weight and bias."""
    need_x, need_weight, need_bias = needs
    grad = grad.contiguous()  # also of a gradient that is one expanded number
    dx = None
    if need_x:
        dx = _without_tail(_rows_by_experts(grad, weight.mT if transposed else weight, offsets, backend), offsets)
    dweight = None
    if need_weight:
        left, right = (x, grad) if transposed else (grad, x)
        dweight = _rows_by_rows(left, right, offsets, backend)
    dbias = None
    if need_bias:
        # As a product with ones: no atomics, hence reproducible; as wide as grouped_mm's strides demand.
        ones = grad.new_ones(grad.shape[0], 16)
        dbias = _rows_by_rows(ones, grad, offsets, backend)[:, 0].contiguous()
    return dx, dweight, dbias


class _GroupedLinear(torch.autograd.Function):
    """Eager path; the dispatch of an opaque operator would cost as much as a small product."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, transposed: bool, backend: str
    ) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return _forward(x, weight, offsets, bias, transposed, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, offsets, _, *ctx.settings = inputs
        ctx.save_for_backward(x, weight, offsets)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[3])
        dx, dweight, dbias = _GroupedLinearGradient.apply(grads[0], *ctx.saved_tensors, *ctx.settings, needs)
        return dx, dweight, None, dbias, None, None


class _GroupedLinearGradient(torch.autograd.Function):
    """First derivative, with a clear refusal of the second."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor | None, ...]:
        with torch.autocast(arguments[0].device.type, enabled=False):
            return _backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        raise NotImplementedError(_TWICE)


# ---------------------------------------------------------------------------------------------------------------------
# The same, as opaque operators for torch.compile and for fake tensors.


@torch.library.custom_op("shared_core::grouped_linear", mutates_args=())
def _forward_op(
    x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, transposed: bool, backend: str
) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return _forward(x, weight, offsets, bias, transposed, backend)


@_forward_op.register_fake
def _forward_fake(
    x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, transposed: bool, backend: str
) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2 if transposed else 1])


@torch.library.custom_op("shared_core::grouped_linear_backward", mutates_args=())
def _backward_op(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    transposed: bool,
    backend: str,
    need_x: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.autocast(x.device.type, enabled=False):
        gradients = _backward(grad, x, weight, offsets, transposed, backend, (need_x, need_weight, need_bias))
    return tuple(x.new_empty(0) if g is None else g for g in gradients)  # type: ignore[return-value]


@_backward_op.register_fake
def _backward_fake(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    transposed: bool,
    backend: str,
    need_x: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (x.shape, weight.shape, (weight.shape[0], weight.shape[2 if transposed else 1]))
    needs = (need_x, need_weight, need_bias)
    return tuple(  # type: ignore[return-value]
        x.new_empty(shape if need else 0) for shape, need in zip(shapes, needs, strict=True)
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, offsets, _, *ctx.settings = inputs
    ctx.save_for_backward(x, weight, offsets)


def _op_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[3])
    gradients = _backward_op(grad, *ctx.saved_tensors, *ctx.settings, *needs)
    dx, dweight, dbias = (g if need else None for g, need in zip(gradients, needs, strict=True))
    return dx, dweight, None, dbias, None, None


_forward_op.register_autograd(_op_backward, setup_context=_setup_context)
