"""Selection policies: which experts a row gets, given its selection scores.

A policy is any callable ``(q, k) -> indices``: ``q`` is ``[R, E]`` without a gradient, ``-inf`` where an expert is not
available to a row; the result is ``[R, K]`` int64 in descending order of ``q``, with the sentinel ``E`` (or an
unavailable expert, which :func:`shared_core.route` turns into the sentinel) where fewer experts are left. The policies
here are exact: equal scores go to the lower expert index.

Dimension letters: R rows, E experts, k choices a row, G groups, M members of the largest group.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from shared_core.ranking import top_indices

# 100 assignments to 10 experts at a capacity factor of 1.1 make 11 places, but 11.000000000000002 in floating point.
CAPACITY_ROUNDING = 1e-12

Selection: TypeAlias = Callable[[Tensor, int], Tensor]


def places(wanted: float, most: int) -> int:
    """``ceil(wanted)``, at most ``most``; a whole number stays one although rounding put it a little higher."""
    return most if wanted >= most else math.ceil(wanted * (1.0 - CAPACITY_ROUNDING))


@dataclass(frozen=True)
class TopK:
    """The ``k`` best experts, or those of ranks ``offset .. offset + k - 1``.

    Parameters
    ----------
    offset
        Ranks to skip. Above 0 this is forced misrouting to mid-ranked experts, for studies of robustness.

    Raises
    ------
    ValueError
        If ``offset`` is negative, or, when called, if ``offset + k`` exceeds the number of experts.

    Examples
    --------
    >>> TopK()(torch.tensor([[0.1, 0.4, 0.4, 0.2]]), 2)
    tensor([[1, 2]])
    >>> TopK(offset=1)(torch.tensor([[0.1, 0.4, 0.4, 0.2]]), 2)
    tensor([[2, 3]])
    """

    offset: int = 0

    def __post_init__(self) -> None:
        if self.offset < 0:
            raise ValueError(f"offset must not be negative, got {self.offset}")

    def __call__(self, q: Tensor, k: int) -> Tensor:
        """Indices ``[R, k]``."""
        if self.offset + k > q.shape[-1]:
            raise ValueError(f"offset={self.offset} and top_k={k} need {self.offset + k} experts, got {q.shape[-1]}")
        return top_indices(q, self.offset + k)[..., self.offset :]


@dataclass(frozen=True)
class GroupLimitedTopK:
    """Top-k inside the ``top_groups`` best of equal contiguous groups (DeepSeek-V2 and -V3, node-limited routing).

    Parameters
    ----------
    num_groups
        Groups; the number of experts must be divisible by it.
    top_groups
        Groups that a row may use.
    group_score
        ``"top2_sum"``: the sum of a group's two best scores (V3); ``"max"``: its best score (V2).

    Raises
    ------
    ValueError
        For impossible settings; when called, if the experts do not divide into the groups or the kept groups hold
        fewer than ``k`` experts.

    Notes
    -----
    Experts of the other groups are ``-inf``, never 0: zero would win as soon as biased scores turn negative.

    References
    ----------
    DeepSeek-AI (2024), DeepSeek-V3 Technical Report, §2.1.2 and its reference implementation.

    Examples
    --------
    >>> policy = GroupLimitedTopK(num_groups=2, top_groups=1)
    >>> policy(torch.tensor([[0.9, 0.1, 0.6, 0.5]]), 2)  # 0.6 + 0.5 > 0.9 + 0.1
    tensor([[2, 3]])
    """

    num_groups: int
    top_groups: int
    group_score: Literal["top2_sum", "max"] = "top2_sum"

    def __post_init__(self) -> None:
        if self.num_groups < 1:
            raise ValueError(f"num_groups must be at least 1, got {self.num_groups}")
        if not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(f"top_groups must be in 1..num_groups={self.num_groups}, got {self.top_groups}")
        if self.group_score not in {"top2_sum", "max"}:
            raise ValueError(f"group_score must be 'top2_sum' or 'max', got {self.group_score!r}")

    def __call__(self, q: Tensor, k: int) -> Tensor:
        """Indices ``[R, k]``."""
        rows, experts = q.shape
        if experts % self.num_groups:
            raise ValueError(f"num_experts={experts} is not divisible by num_groups={self.num_groups}")
        size = experts // self.num_groups
        if k > self.top_groups * size:
            raise ValueError(f"top_k={k} exceeds the {self.top_groups * size} experts of top_groups={self.top_groups}")
        members = q.view(rows, self.num_groups, size)
        if self.group_score == "max" or size == 1:
            score = members.amax(-1)
        else:
            first, second = members.topk(2, dim=-1).values.unbind(-1)
            # A missing second expert adds nothing, so a group with one expert left does not count as empty.
            score = first + second.masked_fill(second.isneginf(), 0.0)
        kept = top_indices(score, self.top_groups)
        out = torch.ones_like(score, dtype=torch.bool).scatter(1, kept, False)
        return _available(members.masked_fill(out.unsqueeze(-1), -math.inf).view(rows, experts), k)


def _available(q: Tensor, k: int) -> Tensor:
    """The ``k`` best, and the sentinel where fewer are left: what a policy ruled out must not fill up a row."""
    chosen = top_indices(q, k)
    return chosen.masked_fill(q.gather(1, chosen).isneginf(), q.shape[1])


class GroupCappedTopK(nn.Module):
    r"""The best ``k`` experts with at most ``cap`` of each group.

    Maximises :math:`\sum q` exactly: the constraint is a partition matroid, on which greedy choice is optimal, so the
    ``cap`` best of every group are kept and the ``k`` best of those taken.

    Parameters
    ----------
    groups
        ``[E]`` integer group ids, any values, groups of any sizes.
    cap
        Experts that a row may use of one group.

    Raises
    ------
    TypeError
        If ``groups`` are not integers.
    ValueError
        If ``groups`` is not one-dimensional or ``cap`` below 1; when called, if there are not as many ids as experts
        or ``k`` exceeds what the caps allow.

    Notes
    -----
    A module only so that its index table follows the router to a device; it has no entry in the state dict.

    Examples
    --------
    >>> policy = GroupCappedTopK(torch.tensor([0, 0, 1, 1]))
    >>> policy(torch.tensor([[0.4, 0.3, 0.2, 0.1]]), 2)
    tensor([[0, 2]])
    """

    members: Tensor

    def __init__(self, groups: Tensor, cap: int = 1) -> None:
        super().__init__()
        groups = torch.as_tensor(groups)
        if groups.is_floating_point() or groups.dtype == torch.bool:
            raise TypeError(f"groups must be integer ids, got {groups.dtype}")
        if groups.ndim != 1 or groups.numel() == 0:
            raise ValueError(f"groups must hold one id for each expert, [E]; got shape {list(groups.shape)}")
        if cap < 1:
            raise ValueError(f"cap must be at least 1, got {cap}")
        self.num_experts, self.cap = groups.numel(), cap
        by_group: dict[int, list[int]] = {}
        for expert, group in enumerate(groups.tolist()):
            by_group.setdefault(group, []).append(expert)
        self.limit = sum(min(cap, len(experts)) for experts in by_group.values())
        """Experts that one row can get at most."""
        width = max(len(experts) for experts in by_group.values())
        padded = [experts + [self.num_experts] * (width - len(experts)) for experts in by_group.values()]
        # [G, M] experts of each group in ascending order, padded with E: ties inside a group go to the lower index.
        self.register_buffer("members", torch.tensor(padded, device=groups.device), persistent=False)

    def forward(self, q: Tensor, k: int) -> Tensor:
        """Indices ``[R, k]``."""
        rows, experts = q.shape
        if experts != self.num_experts:
            raise ValueError(f"groups has {self.num_experts} ids, but there are {experts} experts")
        if k > self.limit:
            raise ValueError(f"top_k={k} exceeds the {self.limit} experts that cap={self.cap} allows over all groups")
        members = self.members.to(q.device)
        if self.cap >= members.shape[1]:
            return top_indices(q, k)
        padded = torch.cat([q, q.new_full((rows, 1), -math.inf)], dim=1)
        inside = padded[:, members]  # [R, G, M]
        best = top_indices(inside, self.cap)
        kept = members.expand_as(inside).gather(2, best).flatten(1)
        capped = torch.full_like(padded, -math.inf).scatter(1, kept, padded.gather(1, kept))
        return _available(capped[:, :-1], k)

    def extra_repr(self) -> str:
        """Sizes for ``print(module)``."""
        return f"num_experts={self.num_experts}, num_groups={self.members.shape[0]}, cap={self.cap}"


@dataclass(frozen=True)
class ExpertChoice:
    """Every expert takes its ``C`` best rows, with ``C = min(R, ceil(R * k / E * capacity_factor))``.

    Perfectly balanced, but **acausal**: whether a row is chosen depends on all other rows, also later ones of the same
    sequence. For training and for encoders, not for autoregressive decoding.

    Parameters
    ----------
    capacity_factor
        Scales C; above 0.

    Raises
    ------
    ValueError
        If ``capacity_factor`` is not positive.

    Notes
    -----
    Rows get between 0 and E experts. The result is ``[R, K]`` with K the most experts on one row (at least 1), filled
    up with the sentinel; finding K is one synchronisation on an accelerator. R counts all rows; masked rows are never
    chosen, so with many of them experts may stay below C.

    References
    ----------
    Zhou et al. (2022), Mixture-of-Experts with Expert Choice Routing, §3.2.

    Examples
    --------
    >>> ExpertChoice()(torch.tensor([[0.9, 0.8], [0.2, 0.1]]), 1)  # both experts take row 0
    tensor([[0, 1],
            [2, 2]])
    """

    capacity_factor: float = 1.0

    def __post_init__(self) -> None:
        if not self.capacity_factor > 0:
            raise ValueError(f"capacity_factor must be positive, got {self.capacity_factor}")

    def __call__(self, q: Tensor, k: int) -> Tensor:
        """Indices ``[R, K]``."""
        rows, experts = q.shape
        share = places(rows * k / experts * self.capacity_factor, rows)
        taken = top_indices(q.t(), share)  # [E, C] rows
        chosen = torch.zeros_like(q, dtype=torch.bool).t().scatter(1, taken, True).t()
        chosen = chosen & ~q.isneginf()
        most = max(1, int(chosen.sum(1).amax())) if rows else 1
        ranked = top_indices(q.masked_fill(~chosen, -math.inf), most)
        return ranked.masked_fill(~chosen.gather(1, ranked), experts)
