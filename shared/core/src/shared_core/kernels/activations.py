"""Activations of an expert and their derivatives, written out because the backward pass is ours.

Letters: ``z`` pre-activation of any shape.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["ACTIVATIONS", "activate", "activation_gradient"]

_aten = torch.ops.aten


def _gelu(z: Tensor) -> Tensor:
    return F.gelu(z)


def _gelu_tanh(z: Tensor) -> Tensor:
    return F.gelu(z, approximate="tanh")


def _relu2(z: Tensor) -> Tensor:
    return F.relu(z).square()


def _silu_gradient(z: Tensor, grad: Tensor, out: Tensor) -> None:
    _aten.silu_backward.grad_input(grad, z, grad_input=out)


def _gelu_gradient(z: Tensor, grad: Tensor, out: Tensor) -> None:
    _aten.gelu_backward.grad_input(grad, z, approximate="none", grad_input=out)


def _gelu_tanh_gradient(z: Tensor, grad: Tensor, out: Tensor) -> None:
    _aten.gelu_backward.grad_input(grad, z, approximate="tanh", grad_input=out)


def _relu_gradient(z: Tensor, grad: Tensor, out: Tensor) -> None:
    _aten.threshold_backward.grad_input(grad, z, 0, grad_input=out)


def _relu2_gradient(z: Tensor, grad: Tensor, out: Tensor) -> None:
    torch.mul(F.relu(z).mul_(2), grad, out=out)


_TABLE: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor, Tensor], None]]] = {
    "silu": (F.silu, _silu_gradient),
    "gelu": (_gelu, _gelu_gradient),
    "gelu_tanh": (_gelu_tanh, _gelu_tanh_gradient),
    "relu": (F.relu, _relu_gradient),
    "relu2": (_relu2, _relu2_gradient),
}

ACTIVATIONS: tuple[str, ...] = tuple(_TABLE)
"""Names that ``activation=`` accepts."""


def activate(name: str, z: Tensor) -> Tensor:
    """``act(z)`` as a new tensor.

    Parameters
    ----------
    name : str
        One of :data:`ACTIVATIONS`: ``silu``, ``gelu`` (exact), ``gelu_tanh``, ``relu``, ``relu2`` (squared relu).
    z : Tensor
        Any shape.

    Returns
    -------
    Tensor
        Shape and dtype of ``z``.

    Examples
    --------
    >>> import torch
    >>> activate("relu2", torch.tensor([-1.0, 3.0]))
    tensor([0., 9.])
    """
    return _TABLE[name][0](z)


def activation_gradient(name: str, z: Tensor, grad: Tensor, out: Tensor | None = None) -> Tensor:
    """``grad · act'(z)``.

    Parameters
    ----------
    name : str
        One of :data:`ACTIVATIONS`.
    z, grad : Tensor
        Pre-activation and gradient of ``act(z)``; same shape.
    out : Tensor, optional
        Where to write it, any strides; a new tensor by default.

    Returns
    -------
    Tensor
        Gradient of ``z``; ``out`` if given.

    Examples
    --------
    >>> import torch
    >>> activation_gradient("relu2", torch.tensor([-1.0, 3.0]), torch.ones(2))
    tensor([0., 6.])
    """
    target = torch.empty_like(grad) if out is None else out
    _TABLE[name][1](z, grad, target)
    return target
