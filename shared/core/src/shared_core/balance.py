r"""Balance as a loss: functions of a :class:`Routing`.

With :math:`c_e` the assignments of expert e (sentinels excluded), :math:`f_e = c_e / \sum c` their share and
:math:`P_e` the mean over unmasked rows of the normalised scores (a row of sigmoid scores is divided by its sum).

Dimension letters: R rows, k slots (choices a row), E experts.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from shared_core.routing import Routing

_TINY = torch.finfo(torch.float32).tiny
# Less noise is none: a logit over it, squared, must stay a float32.
_LEAST_STD = 1e-9


def load_balance_loss(
    routing: Routing, *, group: dist.ProcessGroup | None = None, sequence: Tensor | None = None
) -> Tensor:
    r"""Auxiliary loss :math:`E \sum_e f_e P_e`, which is 1 at perfect balance.

    Parameters
    ----------
    routing
        With scores.
    group
        Process group over which the shares f are taken: the loss of the *global* batch. Balance within every
        micro-batch keeps experts from specialising; averaging the losses (and gradients) over the ranks, as data
        parallelism does, gives exactly the loss of the joint batch when ranks hold equally many rows.
    sequence
        ``[R]`` integer ids (any values, any order): the mean of the losses of the single sequences instead.

    Returns
    -------
    Tensor
        Scalar; 0 if no row has an expert. ``load_balancing_loss_func`` of transformers returns k times this.

    Raises
    ------
    TypeError
        If ``routing`` is no :class:`Routing`, or ``sequence`` are not integers.
    ValueError
        If the routing has no scores, ``sequence`` has another shape than ``[R]``, or both forms are asked for.

    References
    ----------
    Fedus et al. (2022), Switch Transformers, eq. 4-6; Qiu et al. (2025), Demons in the Detail (global batch);
    DeepSeek-AI (2024), DeepSeek-V3 Technical Report, eq. 17-20 (per sequence).

    Examples
    --------
    >>> from shared_core import route
    >>> load_balance_loss(route(torch.eye(4) * 9, top_k=1))  # every expert has one row
    tensor(1.)
    >>> round(load_balance_loss(route(torch.tensor([[9.0, 0, 0, 0]] * 4), top_k=1)).item(), 2)  # all on expert 0
    4.0
    """
    shares = _normalised_scores(routing)
    if sequence is not None:
        if group is not None:
            raise ValueError("pass group (global-batch loss) or sequence (per-sequence loss), not both")
        return _sequence_balance_loss(routing, shares, sequence)
    counts = routing.counts()
    if group is not None:
        dist.all_reduce(counts, group=group)
    f = counts.to(shares.dtype) / counts.sum().clamp(min=1)
    return routing.num_experts * (f * shares.sum(0)).sum() / _num_rows(routing).clamp(min=1)


def _sequence_balance_loss(routing: Routing, shares: Tensor, sequence: Tensor) -> Tensor:
    if sequence.is_floating_point() or sequence.dtype == torch.bool:
        raise TypeError(f"sequence must hold integer ids, got {sequence.dtype}")
    if sequence.numel() != routing.num_rows:
        raise ValueError(f"sequence must hold one id for each of {routing.num_rows} rows, got {list(sequence.shape)}")
    ids, place = torch.unique(sequence.reshape(-1), return_inverse=True)
    experts, slots = routing.num_experts, routing.num_slots
    # Counts of every (sequence, expert), the sentinel as column E.
    cells = place.repeat_interleave(slots) * (experts + 1) + routing.indices.reshape(-1)
    counts = torch.zeros(ids.numel() * (experts + 1), dtype=torch.int64, device=cells.device)
    counts = counts.scatter_add_(0, cells, torch.ones_like(cells)).view(-1, experts + 1)[:, :-1]
    taking_part = torch.ones_like(place) if routing.mask is None else routing.mask.long()
    rows = torch.zeros_like(ids, dtype=torch.int64).scatter_add_(0, place, taking_part)
    f = counts.to(shares.dtype) / counts.sum(1, keepdim=True).clamp(min=1)
    P = shares.new_zeros(ids.numel(), experts).index_add(0, place, shares) / rows.clamp(min=1).unsqueeze(1)
    return experts * (f * P).sum() / (rows > 0).sum().clamp(min=1)


def z_loss(routing: Routing) -> Tensor:
    r"""Mean over rows of :math:`(\log\sum_e \exp z_e)^2`: keeps logits small, where float32 is fine-grained.

    Parameters
    ----------
    routing
        With logits. Masked rows and rows without any available expert are left out.

    Returns
    -------
    Tensor
        Scalar.

    Raises
    ------
    TypeError
        If ``routing`` is no :class:`Routing`.
    ValueError
        If the routing has no logits.

    References
    ----------
    Zoph et al. (2022), ST-MoE, eq. 5.

    Examples
    --------
    >>> from shared_core import route
    >>> z_loss(route(torch.zeros(3, 8), top_k=1))  # (log 8)²
    tensor(4.3241)
    """
    _check_routing(routing)
    if routing.logits is None:
        raise ValueError("z_loss needs routing.logits, which a Routing made by from_topk or load does not have")
    counted = ~routing.logits.detach().isneginf().all(-1)
    if routing.mask is not None:
        counted = counted & routing.mask
    logits = routing.logits.masked_fill(~counted.unsqueeze(-1), 0.0)
    squares = logits.logsumexp(-1).square().masked_fill(~counted, 0.0)
    return squares.sum() / counted.sum().clamp(min=1)


def importance_loss(routing: Routing) -> Tensor:
    r"""Squared coefficient of variation of the experts' summed scores :math:`\sum_r P_{r,\cdot}`.

    Parameters
    ----------
    routing
        With scores. Masked rows are left out.

    Returns
    -------
    Tensor
        Scalar, population variance over squared mean; 0 at equal importance.

    Raises
    ------
    TypeError
        If ``routing`` is no :class:`Routing`.
    ValueError
        If the routing has no scores.

    References
    ----------
    Shazeer et al. (2017), Outrageously Large Neural Networks, eq. 6-7.

    Examples
    --------
    >>> from shared_core import route
    >>> importance_loss(route(torch.zeros(3, 8), top_k=1))
    tensor(0.)
    """
    return _squared_cv(_normalised_scores(routing).sum(0))


def noisy_load_loss(routing: Routing, mean: Tensor, std: Tensor) -> Tensor:
    r"""Load loss of noisy top-k gating: squared coefficient of variation of the expected number of rows per expert.

    The probability that expert e is among the k best of a row if only *its* noise were drawn again is
    :math:`\Phi((\mu_e - t_e) / \sigma_e)`, with :math:`t_e` the k-th largest of the other experts' noisy logits.

    Parameters
    ----------
    routing
        Of the noisy logits.
    mean, std
        ``[..., E]`` from :meth:`NoisyGate.distribution` of the same rows.

    Returns
    -------
    Tensor
        Scalar; 0 if k = E. Unavailable experts (logit ``-inf``) have chance 0.

    Raises
    ------
    TypeError
        If ``routing`` is no :class:`Routing`.
    ValueError
        If the routing has no logits or the shapes do not fit.

    References
    ----------
    Shazeer et al. (2017), Outrageously Large Neural Networks, eq. 8-11.

    Examples
    --------
    >>> from shared_core import NoisyGate, Router
    >>> router = Router(NoisyGate(8, 4), num_experts=4, top_k=2)
    >>> x = torch.randn(32, 8)
    >>> loss = noisy_load_loss(router(x), *router.gate.distribution(x))
    """
    _check_routing(routing)
    if routing.logits is None:
        raise ValueError(
            "noisy_load_loss needs routing.logits, which a Routing made by from_topk or load does not have"
        )
    mean, std = mean.reshape(-1, mean.shape[-1]), std.reshape(-1, std.shape[-1])
    if mean.shape != routing.logits.shape or std.shape != routing.logits.shape:
        raise ValueError(
            f"mean and std must be [R, E] = {list(routing.logits.shape)}, got {list(mean.shape)} and {list(std.shape)}"
        )
    k = routing.num_slots
    if k >= routing.num_experts:
        return (mean * 0.0).sum()
    best = routing.logits.topk(k + 1, dim=-1).values
    inside, outside = best[:, k:], best[:, k - 1 : k]  # k-th largest of the others, for those in and not in the top k
    threshold = torch.where(routing.logits > inside, inside, outside)
    # Without a competitor an expert is in for certain. Both are kept out of the quotient, whose gradient would be NaN.
    certain, unavailable = threshold.isneginf(), routing.logits.isneginf()
    distance = (mean - threshold.masked_fill(certain, 0.0)) / std.clamp(min=_LEAST_STD)
    chance = torch.special.ndtr(distance).masked_fill(certain, 1.0).masked_fill(unavailable, 0.0)
    if routing.mask is not None:
        chance = chance.masked_fill(~routing.mask.unsqueeze(-1), 0.0)
    return _squared_cv(chance.sum(0))


def _num_rows(routing: Routing) -> Tensor:
    if routing.mask is not None:
        return routing.mask.sum()
    return torch.tensor(routing.num_rows, device=routing.indices.device)


def _check_routing(routing: Routing) -> None:
    """Refuse logits, which the losses of other libraries take."""
    if not isinstance(routing, Routing):
        raise TypeError(
            f"routing must be a Routing, got {type(routing).__name__}; router(x) makes one, and so does "
            "route(logits, top_k=...)"
        )


def _normalised_scores(routing: Routing) -> Tensor:
    """``[R, E]`` scores divided by their row sums; rows that are masked or have no available expert are 0."""
    _check_routing(routing)
    if routing.scores is None:
        raise ValueError("this loss needs routing.scores, which a Routing made by from_topk or load does not have")
    shares = routing.scores / routing.scores.sum(-1, keepdim=True).clamp(min=_TINY)
    return shares if routing.mask is None else shares.masked_fill(~routing.mask.unsqueeze(-1), 0.0)


def _squared_cv(totals: Tensor) -> Tensor:
    return totals.var(unbiased=False) / totals.mean().square().clamp(min=_TINY)
