"""Rows to the processes that hold their experts, and back.

A row goes *once* to every process that holds at least one of its experts, together with its choices among the experts
there; that process runs all of them, weighted, and sends one sum back. Against one copy for each choice this saves
traffic whenever several choices of a row live together, needs no stored expert outputs for the gradient of the weights,
and leaves to the receiver an ordinary :class:`~shared_core.Routing` over its own experts.

Letters: R rows, k slots, E experts, W processes ("ranks"), L = E / W experts of one process, M rows sent (a row that
goes to two processes counts twice), V rows received ("visitors"), K slots that travel, H width in, D width out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd, wait_tensor

from shared_core.dispatch import DispatchPlan, permute
from shared_core.routing import Routing

__all__ = ["Agreement", "Terms", "agree", "choices_at_ranks", "exchange", "give_back", "refuse", "route_to_ranks"]

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def route_to_ranks(routing: Routing, num_ranks: int) -> Routing:
    """Say to which processes each row goes, if each of them holds equally many neighbouring experts.

    Parameters
    ----------
    routing : Routing
        Of R rows to E experts.
    num_ranks : int
        W, a divisor of E. Rank w holds the experts ``w·E/W`` to ``(w + 1)·E/W - 1``.

    Returns
    -------
    Routing
        Of the R rows to W ranks, each rank at most once a row, with weight 1; index W means "none". Its ``counts()``
        are the rows that travel to each rank.

    Raises
    ------
    ValueError
        If W does not divide E.

    Examples
    --------
    >>> import torch
    >>> routing = Routing.from_topk(torch.tensor([[0, 1], [3, 0], [4, 4]]), torch.ones(3, 2), num_experts=4)
    >>> route_to_ranks(routing, num_ranks=2).indices
    tensor([[0, 2],
            [0, 1],
            [2, 2]])
    """
    held = experts_of_a_rank(routing.num_experts, num_ranks)
    # The sentinel E becomes W by itself. Sorted, a rank that a row chose before stands right before its repetition.
    ranks = torch.div(routing.indices, held, rounding_mode="floor").sort(dim=1).values
    ranks[:, 1:].masked_fill_(ranks[:, 1:] == ranks[:, :-1], num_ranks)
    return Routing(ranks, (ranks < num_ranks).float(), None, None, num_ranks)


def experts_of_a_rank(num_experts: int, num_ranks: int) -> int:
    """L, or a ValueError with both numbers."""
    if num_ranks < 1 or num_experts % num_ranks:
        raise ValueError(
            f"num_experts={num_experts} cannot be shared equally among {num_ranks} processes; "
            "choose a number of processes that divides the number of experts"
        )
    return num_experts // num_ranks


def choices_at_ranks(routing: Routing, plan: DispatchPlan) -> tuple[Tensor, Tensor]:
    """What every travelling row wants at its destination.

    Parameters
    ----------
    routing : Routing
        Of R rows to E experts.
    plan : DispatchPlan
        Of :func:`route_to_ranks`: M assignments of rows to ranks.

    Returns
    -------
    experts : Tensor
        ``[M, k]`` int64, numbered from 0 at the destination, ascending; L ("no expert here") comes last.
    weights : Tensor
        ``[M, k]``, 0 where there is no expert; differentiable.
    """
    num_ranks = plan.num_experts
    held = routing.num_experts // num_ranks
    rank = torch.arange(num_ranks, device=plan.rows.device)
    rank = rank.repeat_interleave(plan.counts(), output_size=plan.rows.shape[0])
    local = routing.indices.index_select(0, plan.rows) - held * rank.unsqueeze(1)
    local = torch.where((local >= 0) & (local < held), local, held)
    local, slots = local.sort(dim=1, stable=True)
    weights = permute(routing.weights, plan).gather(1, slots)
    return local, weights.masked_fill(local == held, 0.0)


class Terms(NamedTuple):
    """What all processes must have in common for their exchange to make sense; integers, so that they can travel."""

    num_experts: int
    hidden_size: int
    x_dtype: int
    weights_dtype: int
    weight_input: int
    grad_enabled: int
    trained_experts: int

    @classmethod
    def of(
        cls,
        x: Tensor,
        routing: Routing,
        *,
        weight_input: bool,
        trained_experts: bool,
    ) -> Terms:
        """Terms of one call.

        Parameters
        ----------
        x : Tensor
            ``[..., H]``, as it will travel.
        routing : Routing
        weight_input : bool
        trained_experts : bool
            Whether any parameter of the experts needs a gradient.
        """
        return cls(
            routing.num_experts,
            x.shape[-1],
            _DTYPES.index(x.dtype),
            _DTYPES.index(wide_dtype(routing.weights.dtype)),
            int(weight_input),
            int(torch.is_grad_enabled()),
            int(trained_experts),
        )

    def differences(self, other: Terms) -> list[tuple[str, object, object]]:
        """Name and both values of what is not equal, readable."""

        def readable(name: str, value: int) -> object:
            if name.endswith("dtype"):
                return _DTYPES[value]
            return value if name in {"num_experts", "hidden_size"} else bool(value)

        pairs = zip(self._fields, self, other, strict=True)
        return [(name, readable(name, a), readable(name, b)) for name, a, b in pairs if a != b]


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Float32 or float64, in which weights travel; the experts' numbers that travel with them are exact in either."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Agreement:
    """What a process knows of the others before the rows travel.

    Attributes
    ----------
    send, receive : list of int
        Rows to and from each of the W ranks.
    slots : int
        K: how many choices of one row live together at most, anywhere in the group.
    x_needs_grad, weights_need_grad : bool
        Whether they do on any rank: then the backward exchange takes place, and every rank must take part in it.
    """

    send: list[int]
    receive: list[int]
    slots: int
    x_needs_grad: bool
    weights_need_grad: bool


def agree(
    terms: Terms,
    experts: Tensor,
    plan: DispatchPlan,
    *,
    x_needs_grad: bool,
    weights_need_grad: bool,
    group: dist.ProcessGroup,
) -> Agreement:
    """Exchange the numbers of rows, and compare what must be common; one small collective, one synchronisation.

    Parameters
    ----------
    terms : Terms
        Of this process.
    experts : Tensor
        ``[M, k]`` of :func:`choices_at_ranks`.
    plan : DispatchPlan
        Of :func:`route_to_ranks`.
    x_needs_grad, weights_need_grad : bool
        Of this process.
    group : ProcessGroup

    Returns
    -------
    Agreement

    Raises
    ------
    RuntimeError
        If another process refused its arguments or came with other terms. Every process raises, so that none waits for
        rows that never come.
    """
    num_ranks, device = plan.num_experts, experts.device
    chosen = (experts < terms.num_experts // num_ranks).sum(1)
    slots = torch.cat([chosen, chosen.new_ones(1)]).max()  # at least one column, even if nobody sends anything
    common = torch.tensor([1, *terms, x_needs_grad, weights_need_grad], dtype=torch.int64, device=device)
    sent = torch.cat([torch.cat([common, slots[None]]).expand(num_ranks, -1), plan.counts()[:, None]], 1)
    received = _arrived(all_to_all_single(sent, None, None, group))
    table = torch.stack([sent, received]).tolist()
    *_, offers = table
    me = dist.get_rank(group)
    _raise_if_refused([rank for rank, (accepted, *_) in enumerate(offers) if not accepted])
    for rank, (_, *offer) in enumerate(offers):
        differences = terms.differences(Terms(*offer[: len(terms)]))
        if differences:
            told = "; ".join(
                f"{name} is {ours} on rank {me} and {theirs} on rank {rank}" for name, ours, theirs in differences
            )
            raise RuntimeError(f"the processes of this expert-parallel group disagree: {told}")
    x_flags, weights_flags, all_slots, rows = zip(*(offer[-4:] for offer in offers), strict=True)
    return Agreement(
        send=[row[-1] for row in table[0]],
        receive=list(rows),
        slots=max(all_slots),
        x_needs_grad=any(x_flags),
        weights_need_grad=any(weights_flags),
    )


def refuse(num_ranks: int, device: torch.device, group: dist.ProcessGroup) -> None:
    """Take part in :func:`agree` to tell the others that this process raises.

    Parameters
    ----------
    num_ranks : int
        W.
    device : torch.device
        Of the experts.
    group : ProcessGroup
    """
    width = 1 + len(Terms._fields) + 4
    empty = torch.zeros(num_ranks, width, dtype=torch.int64, device=device)
    _arrived(all_to_all_single(empty, None, None, group))


def _raise_if_refused(ranks: list[int]) -> None:
    if ranks:
        names = ", ".join(map(str, ranks))
        raise RuntimeError(
            f"rank {names} of this expert-parallel group refused its arguments; its own error says why"
            if len(ranks) == 1
            else f"ranks {names} of this expert-parallel group refused their arguments; their own errors say why"
        )


def exchange(
    rows: Tensor, experts: Tensor, weights: Tensor, held: int, agreement: Agreement, group: dist.ProcessGroup
) -> tuple[Tensor, Routing]:
    """Send rows with their choices, receive those of all ranks.

    Parameters
    ----------
    rows : Tensor
        ``[M, H]``, sorted by destination.
    experts, weights : Tensor
        ``[M, k]`` of :func:`choices_at_ranks`.
    held : int
        L.
    agreement : Agreement
    group : ProcessGroup

    Returns
    -------
    visitors : Tensor
        ``[V, H]``, sorted by rank of origin.
    routing : Routing
        Of the visitors to the L experts of this process.
    """
    slots = agreement.slots
    weights = weights.to(wide_dtype(weights.dtype))
    # Numbers of experts travel in the buffer of their weights, exact up to 2**24: one collective less.
    choices = torch.cat([_fit(weights, slots, 0), _fit(experts, slots, held).to(weights.dtype)], 1)
    splits = agreement.receive, agreement.send
    arriving = all_to_all_single_autograd(_join(rows, agreement.x_needs_grad), *splits, group)
    choices = _arrived(all_to_all_single_autograd(_join(choices, agreement.weights_need_grad), *splits, group))
    routing = Routing(choices[:, slots:].long(), choices[:, :slots], None, None, held)
    return _arrived(arriving), routing


def give_back(y: Tensor, agreement: Agreement, group: dist.ProcessGroup) -> Tensor:
    """Return one row of results for each row received.

    Parameters
    ----------
    y : Tensor
        ``[V, D]``.
    agreement : Agreement
    group : ProcessGroup

    Returns
    -------
    Tensor
        ``[M, D]``, in the order in which the rows were sent.
    """
    return _arrived(all_to_all_single_autograd(y.contiguous(), agreement.send, agreement.receive, group))


def _arrived(tensor: Tensor) -> Tensor:
    """Wait for a collective; the result is a plain tensor again, which the kernels of the experts take directly."""
    plain: Tensor = wait_tensor(tensor)  # type: ignore[no-untyped-call]
    return plain


def _fit(values: Tensor, slots: int, fill: int) -> Tensor:
    """``[M, k]`` as ``[M, K]``: what is cut off or added is "no expert"."""
    return F.pad(values, (0, slots - values.shape[1]), value=fill)


def _join(tensor: Tensor, needed_anywhere: bool) -> Tensor:
    """A tensor whose gradient is asked for wherever any rank asks for it: collectives of backward passes must match."""
    if needed_anywhere and torch.is_grad_enabled() and not tensor.requires_grad:
        return tensor.detach().requires_grad_()
    return tensor
