"""Matrix products on the CPU: the one place that knows which library is fast for which dtype on which machine.

It owns the private oneDNN operator: guarded by ``hasattr``, checked once on numbers whose products are exact, and never
needed (``torch.mm`` is the fallback).
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from shared_core.kernels.cpu_features import cpu_features

__all__ = ["accumulate_product", "linear", "onednn_usable", "product"]

_THIN = 16  # rows or columns below which a product is bound by memory
_BLOCK = 1 << 19  # numbers of a widened block: 2 MiB stay in the second-level cache


@functools.cache
def onednn_usable() -> bool:
    """Whether the private oneDNN product exists and computes what it should on this machine.

    Returns
    -------
    bool
        Found out once per process, on a product that is exact in float32, for plain and transposed weights.
    """
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not (available and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    x = torch.arange(1.0, 13.0).reshape(3, 4) / 8
    weight = torch.arange(-9.0, 11.0).reshape(5, 4) / 4
    expected = (x[:, None, :] * weight[None, :, :]).sum(-1)
    try:
        plain = _onednn_linear(x, weight, None)
        strided = _onednn_linear(x, weight.t().contiguous().t(), None)
    except RuntimeError:
        return False
    return torch.equal(plain, expected) and torch.equal(strided, expected)


def _onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


@functools.cache
def _onednn_first() -> bool:
    return cpu_features().onednn_fp32 and onednn_usable()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x Wᵀ + b`` by the fastest float32 product of this CPU; :func:`torch.nn.functional.linear` for everything else.

    Where a gradient is recorded, or ``torch.compile`` traces, it is PyTorch's own function.

    Parameters
    ----------
    x : Tensor
        ``[..., H]``.
    weight : Tensor
        ``[O, H]``.
    bias : Tensor, optional
        ``[O]``.

    Returns
    -------
    Tensor
        ``[..., O]``.

    Examples
    --------
    >>> import torch
    >>> linear(torch.ones(2, 3), torch.ones(1, 3))
    tensor([[3.],
            [3.]])
    """
    if (
        x.dtype == weight.dtype == torch.float32
        and x.device.type == "cpu"
        and x.numel() > 0
        and not torch.compiler.is_compiling()
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        and _onednn_first()
    ):
        return _onednn_linear(x, weight, bias)
    return F.linear(x, weight, bias)


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """``a b`` for matrices, outside of autograd.

    Parameters
    ----------
    a : Tensor
        ``[M, K]``, any strides. A bfloat16 or float16 matrix with a float32 ``b`` is widened on the fly, block by
        block.
    b : Tensor
        ``[K, N]``, any strides.
    out : Tensor, optional
        ``[M, N]``, written in place, any strides, possibly of another dtype.

    Returns
    -------
    Tensor
        ``out`` if given.
    """
    if a.dtype != b.dtype:
        return _widened_product(a, b, b.new_empty(a.shape[0], b.shape[1]) if out is None else out)
    if out is not None and not out.is_contiguous() and out.stride(0) == 1:
        # Libraries write rows: bᵀ aᵀ, the same product, spares them (oneDNN above all) a copy of the result.
        product(b.t(), a.t(), out=out.t())
        return out
    if a.dtype == torch.float32 and _onednn_pays(a, b):
        result = _onednn_linear(a, b.t(), None)
        return result if out is None else out.copy_(result)
    if out is not None and out.dtype != a.dtype:
        return out.copy_(torch.mm(a, b))
    return torch.mm(a, b, out=out)


def _onednn_pays(a: Tensor, b: Tensor) -> bool:
    """Thin products are bound by memory, where a copy into ``out`` would be the larger cost."""
    return _onednn_first() and a.shape[0] >= _THIN and b.shape[1] >= _THIN


def _widened_product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    num_rows, inner = a.shape
    if a.stride(0) == 1:  # widen in the order of the memory: a transposing copy would cost more than the product
        return product(a.t().to(b.dtype).t(), b, out=out)
    step = max(_THIN, _BLOCK // max(1, inner))
    block = b.new_empty(min(step, num_rows), inner)
    for start in range(0, num_rows, step):
        part = a[start : start + step]
        product(block[: part.shape[0]].copy_(part), b, out=out[start : start + step])
    return out


def accumulate_product(a: Tensor, b: Tensor, into: Tensor) -> None:
    """``into += a b`` in place."""
    if a.dtype == into.dtype and not (a.dtype == torch.float32 and _onednn_pays(a, b)):
        into.addmm_(a, b)
    else:
        into.add_(product(a, b))
