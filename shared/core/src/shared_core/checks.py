"""What is looked at where the user hands tensors over, and when values may be looked at."""

from __future__ import annotations

import os

import torch
from torch import Tensor


def eager_cpu(tensor: Tensor) -> bool:
    """Whether the values are plainly there: memory of this process, no tracing, no ``torch.func`` transform."""
    return (
        type(tensor) in {Tensor, torch.nn.Parameter}
        and tensor.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
    )


def may_check_values(tensor: Tensor) -> bool:
    """Whether to validate values: on the CPU always, on accelerators (a sync) only with ``SHARED_CORE_CHECKS=1``."""
    if eager_cpu(tensor):
        return True
    return (
        os.environ.get("SHARED_CORE_CHECKS") == "1"
        and type(tensor) in {Tensor, torch.nn.Parameter}
        and tensor.device.type != "meta"
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
    )


def forward_ad_active() -> bool:
    """Whether inside ``torch.autograd.forward_ad.dual_level``: tensors may carry tangents that kernels would lose."""
    return torch.autograd.forward_ad._current_level >= 0


def check_tensor(name: str, value: object) -> None:
    """Raise unless ``value`` is a tensor; arrays and lists are not converted, since they carry no gradient."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")


def check_num_experts(num_experts: int) -> None:
    """Raise unless ``num_experts`` is a positive int."""
    if isinstance(num_experts, bool) or not isinstance(num_experts, int | torch.SymInt):
        raise TypeError(f"num_experts must be an int, got {type(num_experts).__name__}")
    if num_experts < 1:
        raise ValueError(f"num_experts must be at least 1, got {num_experts}")


def check_top_k(top_k: int, num_experts: int) -> None:
    """Raise unless 1 <= top_k <= num_experts."""
    if isinstance(top_k, bool) or not isinstance(top_k, int):
        raise TypeError(f"top_k must be an int, got {type(top_k).__name__}")
    if top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
    if top_k > num_experts:
        raise ValueError(f"top_k={top_k} exceeds num_experts={num_experts}")


def check_logits(logits: Tensor, num_experts: int | None = None) -> None:
    """Raise unless ``logits`` are floating point ``[..., E]`` with at least one expert."""
    check_tensor("logits", logits)
    if not logits.is_floating_point():
        raise TypeError(f"logits must be floating point, got {logits.dtype}")
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits must have shape [..., E] with E >= 1, got {list(logits.shape)}")
    if num_experts is not None and logits.shape[-1] != num_experts:
        raise ValueError(f"the last size of logits must be num_experts={num_experts}, got shape {list(logits.shape)}")


def check_indices(indices: Tensor, num_experts: int) -> None:
    """Raise unless ``indices`` are ``[R, k]`` integers in 0 .. E."""
    check_tensor("indices", indices)
    if indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool:
        raise TypeError(f"indices must be integers, got {indices.dtype}")
    if indices.ndim != 2:
        raise ValueError(f"indices must have shape [R, k], got {list(indices.shape)}")
    if indices.numel() == 0 or not may_check_values(indices):
        return
    low, high = (int(bound) for bound in indices.long().aminmax())  # unsigned integers have no aminmax of their own
    if low < 0 or high > num_experts:
        raise ValueError(
            f"indices must lie in 0..{num_experts} ({num_experts} means no expert), got values from {low} to {high}"
        )


def flat_mask(mask: Tensor, leading: torch.Size) -> Tensor:
    """``mask`` as ``[R]`` bool; its shape is the leading shape of the logits, or ``[R]`` already."""
    check_tensor("mask", mask)
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be bool (True for rows that take part), got {mask.dtype}")
    if mask.shape != leading and mask.shape != (leading.numel(),):
        raise ValueError(
            f"mask must have the leading shape of the logits, {list(leading)}, or one entry a row, "
            f"[{leading.numel()}]; got {list(mask.shape)}"
        )
    return mask.reshape(-1)


def rows_of_experts(name: str, values: Tensor, shape: torch.Size) -> Tensor:
    """Broadcastable form of ``values`` (``[E]``, ``[R, E]``, ``[B, 1, E]`` ...) for logits of ``shape`` ``[..., E]``.

    Returns
    -------
    Tensor
        ``values``, reshaped from ``[R, E]`` to the shape of the logits where these have more leading dimensions.
    """
    check_tensor(name, values)
    if values.ndim == 0 or values.shape[-1] != shape[-1]:
        raise ValueError(
            f"the last size of {name} must be the number of experts, {shape[-1]}; got shape {list(values.shape)}"
        )
    # Sizes are compared by hand: torch.broadcast_shapes would also accept a `values` larger than the logits.
    padded = (1,) * (len(shape) - values.ndim) + tuple(values.shape)
    if len(padded) == len(shape) and all(size in (1, full) for size, full in zip(padded, shape, strict=True)):
        return values
    rows = shape[:-1].numel()
    if values.shape == (rows, shape[-1]):
        return values.reshape(shape)
    raise ValueError(f"{name} of shape {list(values.shape)} does not broadcast to logits of shape {list(shape)}")
