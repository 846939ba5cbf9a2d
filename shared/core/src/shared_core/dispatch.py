"""From "each row names its experts" to "each expert has its rows", and back.

A :class:`DispatchPlan` sorts the assignments of a routing by expert; :func:`permute` gathers the rows in that order, so
that each expert sees one contiguous block, and :func:`combine` brings the experts' outputs back to the rows. Both are
differentiable, each is the other's transpose, and no sum depends on the order in which threads finish.

Dimension letters: R rows, k slots (choices a row), E experts, N assignments (without sentinels), H width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from shared_core.checks import eager_cpu
from shared_core.kernels.assignments import check_range


@dataclass(frozen=True, eq=False, repr=False)
class DispatchPlan:
    """The assignments of a routing, sorted by expert; within an expert by row, then by slot.

    Expert ``e`` owns the assignments ``offsets[e]:offsets[e + 1]``. Sentinels ("no expert") are not part of it. Only
    while ``torch.compile`` traces, whose graphs need static sizes, do they stay, behind ``offsets[E]`` and ignored by
    :func:`combine`.

    Parameters
    ----------
    rows
        ``[N]`` int64, the row of each assignment.
    slots
        ``[N]`` int64, its slot: the assignment is ``routing.indices[rows, slots]``.
    offsets
        ``[E + 1]`` int64, where each expert's block starts; ``offsets[E] == N``.
    weights
        ``[N]``, the routing weight of each assignment, differentiable.
    num_rows, num_slots
        R and k.

    Examples
    --------
    >>> import torch
    >>> from shared_core import Routing
    >>> weights = torch.tensor([[0.7, 0.3], [1.0, 0.0]])
    >>> routing = Routing.from_topk(torch.tensor([[2, 0], [0, 3]]), weights, num_experts=3)
    >>> plan = routing.plan()
    >>> plan.rows, plan.offsets
    (tensor([0, 1, 0]), tensor([0, 2, 2, 3]))
    """

    rows: Tensor
    slots: Tensor
    offsets: Tensor
    weights: Tensor
    num_rows: int
    num_slots: int

    @property
    def num_experts(self) -> int:
        """E."""
        return self.offsets.shape[0] - 1

    def counts(self) -> Tensor:
        """Assignments of each expert, ``[E]`` int64."""
        return self.offsets.diff()

    def __repr__(self) -> str:
        """Sizes rather than the values of every assignment."""
        return (
            f"DispatchPlan(assignments={self.rows.shape[0]}, rows={self.num_rows}, slots={self.num_slots}, "
            f"experts={self.num_experts}, device={self.rows.device})"
        )


_pytree.register_pytree_node(
    DispatchPlan,
    lambda plan: ([plan.rows, plan.slots, plan.offsets, plan.weights], (plan.num_rows, plan.num_slots)),
    lambda leaves, sizes: DispatchPlan(*leaves, *sizes),
    serialized_type_name="shared_core.DispatchPlan",
)
torch.serialization.add_safe_globals([DispatchPlan])


def sort_assignments(indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Order of the assignments by expert (stable), without the sentinels.

    Parameters
    ----------
    indices
        ``[R, k]`` integer, values 0 .. E with E the sentinel.
    num_experts
        E.

    Returns
    -------
    order
        ``[N]`` int64 into the flattened ``indices``; ``[R * k]``, sentinels last, while ``torch.compile`` traces.
    offsets
        ``[E + 1]`` int64. Reading ``offsets[E]`` to cut the sentinels off is the one synchronisation on an accelerator.
    """
    if indices.numel() and eager_cpu(indices):
        low, high = indices.aminmax()
        check_range(int(low), int(high), num_experts)  # a narrow key would wrap what lies outside
    # Radix passes grow with the width of the key: one byte sorts four to eight times faster than int64.
    narrow = torch.uint8 if num_experts < 256 else torch.int16 if num_experts < 2**15 else torch.int64
    experts, order = indices.reshape(-1).to(narrow).sort(stable=True)
    bounds = torch.arange(num_experts + 1, dtype=narrow, device=indices.device)
    offsets = torch.searchsorted(experts, bounds)
    return (order if torch.compiler.is_compiling() else order[: int(offsets[-1])]), offsets


class _GatherRows(torch.autograd.Function):
    """``x[plan.rows]`` whose gradient is a sum over slots instead of atomic additions."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, rows: Tensor, places: Tensor, num_rows: int, num_slots: int) -> Tensor:
        return x.index_select(0, rows)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, rows, places, num_rows, num_slots = inputs
        ctx.save_for_backward(rows, places)
        ctx.sizes = (num_rows, num_slots)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, places = ctx.saved_tensors
        return _sum_slots(grad, rows, places, *ctx.sizes), None, None, None, None


class _SumSlots(torch.autograd.Function):
    """Transpose of :class:`_GatherRows`: every row's sum over its slots."""

    generate_vmap_rule = True

    @staticmethod
    def forward(y: Tensor, rows: Tensor, places: Tensor, num_rows: int, num_slots: int) -> Tensor:
        if y.device.type == "cpu":  # sequential, hence in a fixed order, and without the k-fold buffer
            return y.new_zeros(num_rows, *y.shape[1:]).index_add_(0, rows, y)
        return _sum_by_place(y, places, num_rows, num_slots)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, rows, places, num_rows, num_slots = inputs
        ctx.save_for_backward(rows, places)
        ctx.sizes = (num_rows, num_slots)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, places = ctx.saved_tensors
        gathered: Tensor = _GatherRows.apply(grad, rows, places, *ctx.sizes)
        return gathered, None, None, None, None


def _sum_by_place(y: Tensor, places: Tensor, num_rows: int, num_slots: int) -> Tensor:
    """Every (row, slot) is written once and then summed over slots, so no atomics decide the order."""
    spread = y.new_zeros(num_rows * num_slots, *y.shape[1:]).index_copy_(0, places, y)
    return spread.view(num_rows, num_slots, *y.shape[1:]).sum(1)


def _sum_slots(y: Tensor, rows: Tensor, places: Tensor, num_rows: int, num_slots: int) -> Tensor:
    summed: Tensor = _SumSlots.apply(y, rows, places, num_rows, num_slots)
    return summed


def _places(plan: DispatchPlan) -> Tensor:
    return plan.rows * plan.num_slots + plan.slots


def permute(x: Tensor, plan: DispatchPlan) -> Tensor:
    """Gather the rows of ``x`` in the order of the plan: one contiguous block for each expert.

    Parameters
    ----------
    x
        ``[R, H]`` (or ``[R, ...]``).
    plan
        From :meth:`Routing.plan`.

    Returns
    -------
    Tensor
        ``[N, H]``. Its gradient sums each row's slots in a fixed order.

    Raises
    ------
    ValueError
        If ``x`` does not have one row for each row of the plan.
    """
    if x.shape[0] != plan.num_rows:
        raise ValueError(f"x has {x.shape[0]} rows, but the plan was made for {plan.num_rows}")
    gathered: Tensor = _GatherRows.apply(x, plan.rows, _places(plan), plan.num_rows, plan.num_slots)
    return gathered


def combine(y: Tensor, plan: DispatchPlan, *, weighted: bool = True) -> Tensor:
    r"""Sum every row's expert outputs: :math:`out_r = \sum_j w_{r,j}\, y_{r,j}`.

    Parameters
    ----------
    y
        ``[N, H]`` (or ``[N, ...]``) in the order of the plan.
    plan
        From :meth:`Routing.plan`.
    weighted
        Multiply with the routing weights; pass ``False`` if they are already folded into ``y``.

    Returns
    -------
    Tensor
        ``[R, H]`` in the dtype of ``y``, accumulated in float32 (float64 for float64) and rounded once. Bitwise
        reproducible; a row's result does not depend on the other rows. Rows without an expert are exactly 0.

    Raises
    ------
    ValueError
        If ``y`` does not have one row for each assignment of the plan.

    Examples
    --------
    >>> import torch
    >>> from shared_core import Routing
    >>> weights = torch.tensor([[0.75, 0.25], [0.0, 0.0]])
    >>> routing = Routing.from_topk(torch.tensor([[0, 1], [2, 2]]), weights, num_experts=2)
    >>> plan = routing.plan()
    >>> combine(permute(torch.tensor([[4.0], [8.0]]), plan), plan)
    tensor([[4.],
            [0.]])
    """
    if y.shape[0] != plan.rows.shape[0]:
        raise ValueError(f"y has {y.shape[0]} rows, but the plan has {plan.rows.shape[0]} assignments")
    wide = torch.float64 if y.dtype == torch.float64 else torch.float32
    values = y.to(wide)
    if torch.compiler.is_compiling():  # the sentinels are still there (see DispatchPlan), their outputs arbitrary
        sentinel = torch.arange(y.shape[0], device=y.device) >= plan.offsets[-1]
        values = values.masked_fill(sentinel.reshape(-1, *[1] * (y.ndim - 1)), 0.0)
    if weighted:
        values = values * plan.weights.to(wide).reshape(-1, *[1] * (y.ndim - 1))
    return _sum_slots(values, plan.rows, _places(plan), plan.num_rows, plan.num_slots).to(y.dtype)
