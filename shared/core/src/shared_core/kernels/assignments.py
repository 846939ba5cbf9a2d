"""The k choices of every row, sorted by expert: the form in which both kernels read a routing.

Letters: R rows, k slots, E experts, N = R·k assignments (with sentinels, so that N does not depend on the data).
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["sort_by_expert"]


def sort_by_expert(indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Sort assignments by expert, within an expert by row and slot; sentinels come last.

    Parameters
    ----------
    indices : Tensor
        ``[R, k]`` integer, 0 .. E; E means "no expert".
    num_experts : int
        E.

    Returns
    -------
    order : Tensor
        ``[N]`` int64 positions in the flattened ``indices``; ``order // k`` is the row.
    bounds : Tensor
        ``[E + 1]`` int64: expert ``e`` owns ``order[bounds[e]:bounds[e + 1]]``.

    Raises
    ------
    ValueError
        On the CPU, if an index is outside 0 .. E (elsewhere looking would cost a synchronisation).

    Examples
    --------
    >>> import torch
    >>> sort_by_expert(torch.tensor([[2, 0], [0, 3]]), num_experts=3)
    (tensor([1, 2, 0, 3]), tensor([0, 2, 2, 3]))
    """
    flat = indices.reshape(-1)
    if flat.device.type == "cpu" and flat.numel() > 0:
        low, high = flat.aminmax()
        check_range(int(low), int(high), num_experts)
    # The radix sort takes one pass a byte of the key.
    narrow = torch.uint8 if num_experts < 256 else torch.int16 if num_experts < 2**15 else torch.int64
    experts, order = flat.to(narrow).sort(stable=True)
    bounds = torch.searchsorted(experts, torch.arange(num_experts + 1, dtype=narrow, device=flat.device))
    return order, bounds


def check_range(low: int, high: int, num_experts: int) -> None:
    """Raise unless the smallest and the largest index lie in 0 .. E."""
    if low < 0 or high > num_experts:
        raise ValueError(
            f"routing.indices must lie in 0..{num_experts} ({num_experts} means no expert), got {low}..{high}"
        )
