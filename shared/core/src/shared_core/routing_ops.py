"""What is done to whole routings afterwards: dropping beyond a capacity, comparing two of them.

Dimension letters: R rows, k slots (choices a row), E experts, N assignments (without sentinels).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from shared_core.routing import Routing
from shared_core.selection import CAPACITY_ROUNDING


def capacity(
    routing: Routing, capacity_factor: float, *, drop: Literal["weight", "position"] = "weight"
) -> tuple[Routing, Tensor]:
    """Let no expert serve more than its capacity; assignments beyond it go to nobody.

    Parameters
    ----------
    routing
        Any routing.
    capacity_factor
        The capacity is ``C = ceil(N / E * capacity_factor)`` with N the assignments (R * k without sentinels).
    drop
        Which assignments of an overfull expert stay: those with the largest ``"weight"`` (equal ones: of the earlier
        rows), or those of the earliest rows (``"position"``, causal within the batch).

    Returns
    -------
    routing
        Dropped assignments are sentinels with weight 0. The other weights are as they were, not renormalised.
    dropped
        Scalar float32, the share of assignments dropped.

    Raises
    ------
    ValueError
        If ``capacity_factor`` is not positive or ``drop`` unknown.

    References
    ----------
    Lepikhin et al. (2021), GShard, algorithm 1 (position); Riquelme et al. (2021), Scaling Vision with Sparse Mixture
    of Experts, §4 (batch prioritised routing).

    Examples
    --------
    >>> import torch
    >>> weights = torch.tensor([[0.2], [0.9], [0.5], [0.1]])
    >>> routing = Routing.from_topk(torch.tensor([[0], [0], [0], [1]]), weights, num_experts=2)
    >>> kept, dropped = capacity(routing, 1.0)  # C = 2
    >>> kept.indices.flatten(), dropped
    (tensor([2, 0, 0, 1]), tensor(0.2500))
    """
    if not 0.0 < capacity_factor < math.inf:
        raise ValueError(f"capacity_factor must be positive, got {capacity_factor}")
    if drop not in {"weight", "position"}:
        raise ValueError(f"drop must be 'weight' or 'position', got {drop!r}")
    experts = routing.indices.reshape(-1)
    order = torch.arange(experts.numel(), device=experts.device)
    if drop == "weight":
        order = routing.weights.detach().reshape(-1).sort(descending=True, stable=True).indices
    order = order[experts[order].sort(stable=True).indices]  # by expert, then by priority
    counts = routing.counts()
    total = counts.sum()
    limit = (total.double() * capacity_factor / routing.num_experts * (1.0 - CAPACITY_ROUNDING)).ceil()
    first = torch.cat([counts.new_zeros(1), counts.cumsum(0)])  # where each expert's block starts, the sentinel's too
    rank = torch.arange(experts.numel(), device=experts.device) - first[experts[order]]
    over = torch.zeros_like(experts, dtype=torch.bool).scatter(0, order, rank >= limit)
    over = (over & (experts < routing.num_experts)).view_as(routing.indices)
    kept = replace(
        routing,
        indices=routing.indices.masked_fill(over, routing.num_experts),
        weights=routing.weights.masked_fill(over, 0.0),
    )
    return kept, over.sum() / total.clamp(min=1)


def routing_overlap(a: Routing, b: Routing) -> Tensor:
    r"""How alike two routings choose: mean over rows of the Jaccard index :math:`|A_r \cap B_r| / |A_r \cup B_r|`.

    Parameters
    ----------
    a, b
        Routings of the same rows over the same experts; k may differ.

    Returns
    -------
    Tensor
        Scalar float32 in 0..1. Rows to which neither gives an expert are left out; NaN if there are no others.

    Raises
    ------
    ValueError
        If the numbers of rows or experts differ.

    Examples
    --------
    >>> import torch
    >>> before = Routing.from_topk(torch.tensor([[0, 1], [2, 3]]), torch.ones(2, 2), num_experts=4)
    >>> after = Routing.from_topk(torch.tensor([[1, 0], [2, 1]]), torch.ones(2, 2), num_experts=4)
    >>> routing_overlap(before, after)  # (1 + 1/3) / 2
    tensor(0.6667)
    """
    if (a.num_rows, a.num_experts) != (b.num_rows, b.num_experts):
        raise ValueError(
            f"a and b must route the same rows over the same experts, got {a.num_rows} rows and {a.num_experts} "
            f"experts against {b.num_rows} and {b.num_experts}"
        )
    chosen_a, chosen_b = _chosen(a), _chosen(b)
    union = (chosen_a | chosen_b).sum(-1)
    jaccard = (chosen_a & chosen_b).sum(-1) / union.clamp(min=1)
    return jaccard.sum() / (union > 0).sum()


def _chosen(routing: Routing) -> Tensor:
    """``[R, E]`` bool."""
    padded = torch.zeros(routing.num_rows, routing.num_experts + 1, dtype=torch.bool, device=routing.indices.device)
    return padded.scatter(1, routing.indices, True)[:, :-1]
