"""What a router decides: the :class:`Routing` of rows to experts.

A **row** is whatever the caller routes (a token, an image, a crop, a series, an agent's step). Inputs of shape
``[..., H]`` are flattened to R rows in row-major order: row ``b * S + s`` of a routing belongs to ``x[b, s]``.

Dimension letters: R rows, k slots (choices a row), E experts, H width.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from shared_core.checks import check_indices, check_num_experts, check_tensor, may_check_values
from shared_core.dispatch import DispatchPlan, sort_assignments

_FIELDS = ("indices", "weights", "logits", "scores", "mask")


@dataclass(frozen=True, eq=False, repr=False)
class Routing:
    """Which experts serve which row, and with which weight.

    Plain tensors, registered as a pytree, so that it passes through ``torch.compile``, ``torch.func`` and activation
    checkpointing. Index ``E`` with weight 0 is the *sentinel*, "no expert": everything downstream accepts it.

    Parameters
    ----------
    indices
        ``[R, k]`` int64, by descending selection score; E is the sentinel.
    weights
        ``[R, k]`` float32 (float64 if the logits were), differentiable, 0 at sentinels.
    logits
        ``[R, E]`` after ``logit_bias``, or None. Rows that ``mask`` leaves out hold 0.
    scores
        ``[R, E]``, softmax or sigmoid of ``logits``, or None.
    num_experts
        E.
    mask
        ``[R]`` bool, False for rows that take no part (padding), or None for all.

    Notes
    -----
    As for any tensor with a graph, ``copy.deepcopy`` refuses a routing that is part of one: :meth:`detach` it first.

    Examples
    --------
    >>> import torch
    >>> from shared_core import route
    >>> routing = route(torch.tensor([[0.0, 2.0, 1.0]]), top_k=2, renormalize=True)
    >>> routing.indices
    tensor([[1, 2]])
    >>> routing.dense()
    tensor([[0.0000, 0.7311, 0.2689]])
    """

    indices: Tensor
    weights: Tensor
    logits: Tensor | None
    scores: Tensor | None
    num_experts: int
    mask: Tensor | None = None

    @classmethod
    def from_topk(cls, indices: Tensor, weights: Tensor, *, num_experts: int) -> Routing:
        """Wrap the two tensors that other routers return.

        Parameters
        ----------
        indices
            ``[R, k]`` integer, values 0 .. E where E means "no expert".
        weights
            ``[R, k]`` floating point. Weights at the sentinel are set to 0.
        num_experts
            E.

        Raises
        ------
        TypeError
            If ``indices`` are not integers, ``weights`` not floating point, or ``num_experts`` is no int.
        ValueError
            If the shapes differ or are not ``[R, k]``, ``num_experts`` is not positive, or if an index is
            outside 0 .. E (looked at on the CPU; on an accelerator, where it would cost a synchronisation, only with
            ``SHARED_CORE_CHECKS=1``).

        Examples
        --------
        >>> import torch
        >>> Routing.from_topk(torch.tensor([[1], [0]]), torch.ones(2, 1), num_experts=2).counts()
        tensor([1, 1])
        """
        check_num_experts(num_experts)
        check_indices(indices, num_experts)
        check_tensor("weights", weights)
        if not weights.is_floating_point():
            raise TypeError(f"weights must be floating point, got {weights.dtype}")
        if weights.shape != indices.shape:
            raise ValueError(
                f"indices and weights must have one shape [R, k], got {tuple(indices.shape)} and {tuple(weights.shape)}"
            )
        indices = indices.long()
        wide = weights if weights.dtype == torch.float64 else weights.float()
        return cls(indices, wide.masked_fill(indices == num_experts, 0.0), None, None, num_experts)

    @property
    def num_rows(self) -> int:
        """R."""
        return self.indices.shape[0]

    @property
    def num_slots(self) -> int:
        """k, the width of ``indices``."""
        return self.indices.shape[1]

    def counts(self) -> Tensor:
        """Assignments of each expert without sentinels, ``[E]`` int64."""
        flat = self.indices.reshape(-1)
        return flat.new_zeros(self.num_experts + 1).scatter_add_(0, flat, torch.ones_like(flat))[:-1]

    def dense(self) -> Tensor:
        """Weights of every expert, ``[R, E]``, 0 where an expert was not chosen; differentiable."""
        padded = self.weights.new_zeros(self.num_rows, self.num_experts + 1)
        return padded.scatter_add(1, self.indices, self.weights)[:, :-1]

    def expand(self, repeats: int | Tensor) -> Routing:
        """Hand every row's decision on to its tokens.

        Parameters
        ----------
        repeats
            Tokens of each row: one number, or an integer tensor ``[R]``.

        Returns
        -------
        Routing
            Row ``r`` stands ``repeats[r]`` times in a row, as in :func:`torch.repeat_interleave`.

        Raises
        ------
        TypeError
            If ``repeats`` is neither an int nor a tensor.
        ValueError
            If ``repeats`` is negative (of a tensor: looked at on the CPU) or is a tensor of another shape than ``[R]``.

        Examples
        --------
        >>> import torch
        >>> per_image = Routing.from_topk(torch.tensor([[1], [0]]), torch.ones(2, 1), num_experts=2)
        >>> per_image.expand(2).indices.flatten()
        tensor([1, 1, 0, 0])
        """
        if isinstance(repeats, Tensor):
            if repeats.shape != (self.num_rows,) or repeats.is_floating_point() or repeats.dtype == torch.bool:
                raise ValueError(
                    f"repeats must be an int or an integer tensor [R] = [{self.num_rows}], "
                    f"got {repeats.dtype} of shape {list(repeats.shape)}"
                )
            if repeats.numel() and may_check_values(repeats) and int(repeats.min()) < 0:
                raise ValueError(f"repeats must not be negative, got {int(repeats.min())}")
        elif isinstance(repeats, bool) or not isinstance(repeats, int | torch.SymInt):
            raise TypeError(f"repeats must be an int or an integer tensor, got {type(repeats).__name__}")
        elif repeats < 0:
            raise ValueError(f"repeats must not be negative, got {repeats}")
        return self._map(lambda field: field.repeat_interleave(repeats, dim=0))

    def plan(self) -> DispatchPlan:
        """Assignments sorted by expert; the sort is done once and kept.

        Returns
        -------
        DispatchPlan
            Its weights are gathered anew where a gradient must reach them, so one routing can serve several graphs.
        """
        cached: DispatchPlan | None = self.__dict__.get("_plan")
        if cached is None:
            order, offsets = sort_assignments(self.indices, self.num_experts)
            slots = self.num_slots
            cached = DispatchPlan(
                rows=torch.div(order, slots, rounding_mode="floor"),
                slots=order % slots,
                offsets=offsets,
                weights=self.weights.detach().reshape(-1).index_select(0, order),
                num_rows=self.num_rows,
                num_slots=slots,
            )
            # Not while tracing (a cache is a side effect), and no inference tensor where autograd may come later.
            if not torch.compiler.is_compiling() and cached.rows.is_inference() == self.indices.is_inference():
                self.__dict__["_plan"] = cached
        if self.weights.requires_grad and torch.is_grad_enabled():
            return replace(cached, weights=self.weights[cached.rows, cached.slots])
        return cached

    def detach(self) -> Routing:
        """The same decision outside of the graph."""
        return self._map(lambda field: field.detach())

    def to(
        self,
        device: torch.device | str | int | torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        *,
        non_blocking: bool = False,
    ) -> Routing:
        """Move to a device and/or cast what is floating point, like :meth:`torch.Tensor.to`."""
        if isinstance(device, torch.dtype):
            device, dtype = None, device

        def move(field: Tensor) -> Tensor:
            kind = dtype if field.is_floating_point() else None
            return field.to(device=device, dtype=kind, non_blocking=non_blocking)

        return self._map(move)

    def save(self, path: str | os.PathLike[str], *, meta: dict[str, Any] | None = None) -> None:
        """Write indices (int32), weights (float32) and ``num_experts`` as an ``.npz`` trace.

        Logits, scores and the mask are not part of a trace (masked rows remain visible as rows of sentinels).
        See :class:`shared_core.RoutingTrace`, which reads the same file without torch.
        """
        from shared_core.traces import RoutingTrace

        RoutingTrace(
            indices=self.indices.detach().cpu().numpy(),
            weights=self.weights.detach().float().cpu().numpy(),
            num_experts=self.num_experts,
            meta=meta or {},
        ).save(Path(path))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Routing:
        """Read a trace that :meth:`save` wrote."""
        from shared_core.traces import RoutingTrace

        trace = RoutingTrace.load(Path(path))
        return cls.from_topk(torch.tensor(trace.indices), torch.tensor(trace.weights), num_experts=trace.num_experts)

    def _map(self, function: Callable[[Tensor], Tensor]) -> Routing:
        return Routing(
            function(self.indices),
            function(self.weights),
            None if self.logits is None else function(self.logits),
            None if self.scores is None else function(self.scores),
            self.num_experts,
            None if self.mask is None else function(self.mask),
        )

    def __getstate__(self) -> dict[str, Any]:
        """Fields only: the cached plan is derived and not worth its bytes."""
        return {name: value for name, value in self.__dict__.items() if name != "_plan"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        """Sizes rather than the values of every row."""
        return (
            f"Routing(rows={self.num_rows}, slots={self.num_slots}, num_experts={self.num_experts}, "
            f"dtype={self.weights.dtype}, device={self.weights.device})"
        )


def _flatten(routing: Routing) -> tuple[list[Tensor], tuple[tuple[str, ...], int]]:
    # Absent fields are part of the structure: vmap and torch.export want every leaf to be a tensor.
    present = tuple(name for name in _FIELDS if getattr(routing, name) is not None)
    return [getattr(routing, name) for name in present], (present, routing.num_experts)


def _unflatten(leaves: Iterable[Any], structure: tuple[tuple[str, ...], int]) -> Routing:
    present, num_experts = structure
    fields: dict[str, Any] = dict.fromkeys(_FIELDS)
    fields.update(zip(present, leaves, strict=True))
    return Routing(**fields, num_experts=num_experts)


_pytree.register_pytree_node(Routing, _flatten, _unflatten, serialized_type_name="shared_core.Routing")
# torch.load(..., weights_only=True), its default, may rebuild a Routing: it is a record of tensors and one integer.
torch.serialization.add_safe_globals([Routing])
