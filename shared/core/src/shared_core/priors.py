r"""Priors over experts: mixed into the logits, or as a loss that pulls the router towards them.

A prior :math:`\pi` is a distribution over the experts that is known before the router has seen the row: from metadata,
from an organ's statistics, from the structure of a series.

Dimension letters: R rows, E experts, G groups, B batch, S sequence.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from shared_core.checks import check_logits, flat_mask, may_check_values, rows_of_experts


def mix_prior(
    logits: Tensor,
    prior: Tensor,
    strength: float,
    *,
    mode: Literal["product", "mixture"] = "product",
    floor: float = 1e-6,
) -> Tensor:
    r"""Logits whose softmax is the router's distribution mixed with a prior.

    Parameters
    ----------
    logits
        ``[..., E]``, z.
    prior
        :math:`\pi`: ``[E]``, ``[R, E]`` or any shape that broadcasts to the logits (``[B, 1, E]`` for ``[B, S, E]``);
        every row sums to 1.
    strength
        :math:`\lambda`: at least 0, for the mixture at most 1.
    mode
        ``"product"``: :math:`z + \lambda \log\max(\pi, \text{floor})`, a product of experts. ``"mixture"``:
        :math:`\log((1 - \lambda)\,\mathrm{softmax}(z) + \lambda\pi)`.
    floor
        Least prior of the product, so that no expert is excluded by it.

    Returns
    -------
    Tensor
        ``[..., E]``, float32 (float64 for float64). With ``strength=0`` the product is ``logits`` itself and the
        mixture their log-softmax. A row without any available expert counts as softmax 0: the mixture gives it the
        prior alone.

    Raises
    ------
    TypeError
        If ``logits`` or ``prior`` are not floating point.
    ValueError
        If the prior has negative entries or rows that do not sum to 1 within 1e-4 (looked at on the CPU, on
        accelerators only with ``SHARED_CORE_CHECKS=1``), does not fit the logits, or a parameter is out of range.

    References
    ----------
    Hinton (2002), Training Products of Experts by Minimizing Contrastive Divergence, eq. 1 (product).

    Examples
    --------
    >>> logits = torch.zeros(1, 2)
    >>> mix_prior(logits, torch.tensor([0.9, 0.1]), 0.5, mode="mixture").exp()
    tensor([[0.7000, 0.3000]])
    >>> mix_prior(logits, torch.tensor([0.9, 0.1]), 1.0).softmax(-1)
    tensor([[0.9000, 0.1000]])
    """
    check_logits(logits)
    prior = rows_of_experts("prior", prior, logits.shape)
    check_prior(prior)
    if mode not in {"product", "mixture"}:
        raise ValueError(f"mode must be 'product' or 'mixture', got {mode!r}")
    if not 0.0 <= strength < math.inf or (mode == "mixture" and strength > 1.0):
        allowed = "in 0..1 for the mixture" if mode == "mixture" else "finite and not negative"
        raise ValueError(f"strength must be {allowed}, got {strength}")
    if not floor > 0.0:
        raise ValueError(f"floor must be positive, got {floor}")
    z = _wide(logits)
    if mode == "product":
        return logits if strength == 0.0 else z + strength * prior.to(z.dtype).clamp(min=floor).log()
    nobody = z.detach().isneginf().all(-1, keepdim=True)  # scores 0, as in route, where the softmax is NaN
    log_p = z.masked_fill(nobody, 0.0).log_softmax(-1).masked_fill(nobody, -math.inf)
    if strength == 0.0:
        return log_p
    log_prior = prior.to(z.dtype).log() + math.log(strength)
    if strength == 1.0:
        return log_prior.expand_as(z)
    log_p = log_p + math.log1p(-strength)
    # Both impossible: the value -inf is right, but logaddexp's gradient would be NaN.
    neither = log_p.isneginf() & log_prior.isneginf()
    return torch.logaddexp(log_p.masked_fill(neither, 0.0), log_prior).masked_fill(neither, -math.inf)


def prior_kl(
    logits: Tensor,
    prior: Tensor,
    *,
    mask: Tensor | None = None,
    group: Tensor | None = None,
    level: Literal["group", "row"] = "group",
) -> Tensor:
    r"""Divergence of the router from a prior, as a loss: at inference the learned router decides alone.

    Parameters
    ----------
    logits
        ``[..., E]``, for instance ``routing.logits``.
    prior
        :math:`\pi`; rows sum to 1. It never gets a gradient. For ``level="row"`` ``[E]``, ``[R, E]``, any shape that
        broadcasts to the logits, or, with ``group``, ``[G, E]``. For ``level="group"`` ``[E]`` for all groups, or
        ``[G, E]`` where row g belongs to id g; without ``group``, ``[B, 1, E]`` and logits ``[B, S, E]`` make every
        ``b`` a group.
    mask
        Bool, the leading shape of the logits or ``[R]``: False for rows that do not count.
    group
        ``[R]`` integer ids (of the series or sequence that a row belongs to). None: all rows are one group.
    level
        ``"group"``: mean over groups of :math:`KL(\pi_g \,\|\, \bar p_g)` with :math:`\bar p_g` the mean of the softmax
        over the group's rows, so single rows stay free to differ. ``"row"``: mean over rows of
        :math:`KL(\pi_r \,\|\, p_r)`.

    Returns
    -------
    Tensor
        Scalar, at least 0; infinite if an expert with a positive prior is unavailable. Rows without any available
        expert and groups without a counted row are left out.

    Raises
    ------
    TypeError
        If ``logits`` or ``prior`` are not floating point, ``group`` is not integer, or ``mask`` not bool.
    ValueError
        If the prior is no distribution (see :func:`mix_prior`), shapes do not fit, ids lie outside the prior's rows,
        or ``level`` is unknown.

    Examples
    --------
    >>> logits = torch.tensor([[9.0, 0.0], [0.0, 9.0]])  # two rows of one series, one on each expert
    >>> even = torch.tensor([[0.5, 0.5]])
    >>> series = torch.tensor([0, 0])
    >>> bool(prior_kl(logits, even, group=series) < 1e-6), bool(prior_kl(logits, even[0], level="row") > 1)
    (True, True)
    """
    check_logits(logits)
    if level not in {"group", "row"}:
        raise ValueError(f"level must be 'group' or 'row', got {level!r}")
    prior = prior.detach()
    check_prior(prior)
    shape, experts = logits.shape, logits.shape[-1]
    ids = None if group is None else _flat_ids(group, shape[:-1].numel())
    flat = _wide(logits).reshape(-1, experts)
    counted = ~flat.detach().isneginf().all(-1)
    if mask is not None:
        counted = counted & flat_mask(mask, shape[:-1])
    log_p = flat.masked_fill(~counted.unsqueeze(-1), 0.0).log_softmax(-1)

    if level == "row":
        if ids is not None and prior.ndim == 2:
            targets = _prior_of_groups(prior, ids, experts).to(flat.dtype)[ids]
        else:
            targets = rows_of_experts("prior", prior, shape).to(flat.dtype).expand(shape).reshape(-1, experts)
        return _mean_kl(targets, log_p, counted)

    if ids is None:
        if prior.ndim == 3 and prior.shape[:2] == (shape[0], 1) and len(shape) == 3:
            prior = prior[:, 0]
            ids = torch.arange(shape[0], device=flat.device).repeat_interleave(shape[1])
        else:
            ids = torch.zeros(flat.shape[0], dtype=torch.int64, device=flat.device)
            prior = prior[None] if prior.ndim == 1 else prior
            if prior.ndim != 2 or prior.shape[0] != 1:
                raise ValueError(
                    f"one group needs a prior [E] or [1, E], got {list(prior.shape)}: pass the rows' group ids, "
                    "or level='row' for a prior of every row"
                )
    elif prior.ndim == 1:
        names, ids = torch.unique(ids, return_inverse=True)
        prior = prior.expand(names.numel(), -1)
    targets = _prior_of_groups(prior, ids, experts).to(flat.dtype)
    log_mean, rows = _log_mean_of_groups(log_p, ids, counted, targets.shape[0])
    return _mean_kl(targets, log_mean, rows > 0)


def _log_mean_of_groups(log_p: Tensor, ids: Tensor, counted: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Log of each group's mean distribution ``[G, E]``, by log-sum-exp, and its number of counted rows ``[G]``."""
    rows = torch.zeros(groups, dtype=torch.int64, device=ids.device).index_add(0, ids, counted.long())
    log_p = log_p.masked_fill(~counted.unsqueeze(-1), -math.inf)
    place = ids.unsqueeze(-1).expand_as(log_p)
    top = log_p.new_full((groups, log_p.shape[-1]), -math.inf)
    top = top.scatter_reduce(0, place, log_p.detach(), reduce="amax")
    top = top.masked_fill(top.isneginf(), 0.0)  # nobody there: the sum is 0 and its log -inf, without inf - inf
    total = torch.zeros_like(top).index_add(0, ids, (log_p - top[ids]).exp())
    log_total = total.masked_fill(total == 0, 1.0).log().masked_fill(total == 0, -math.inf)
    return top + log_total - rows.clamp(min=1).to(log_p.dtype).log().unsqueeze(-1), rows


def _mean_kl(targets: Tensor, log_p: Tensor, counted: Tensor) -> Tensor:
    """Mean of ``sum_e pi log(pi / p)`` over counted rows, with ``0 log 0 = 0`` also where p is 0."""
    cross = (targets * log_p.masked_fill(targets == 0, 0.0)).sum(-1)
    divergence: Tensor = (torch.special.xlogy(targets, targets).sum(-1) - cross).masked_fill(~counted, 0.0)
    return divergence.sum() / counted.sum().clamp(min=1)


def _prior_of_groups(prior: Tensor, ids: Tensor, experts: int) -> Tensor:
    if prior.ndim != 2 or prior.shape[-1] != experts:
        raise ValueError(f"a prior of groups must have shape [G, E] with E={experts}, got {list(prior.shape)}")
    if ids.numel() and may_check_values(ids):
        low, high = (int(bound) for bound in ids.aminmax())
        if low < 0 or high >= prior.shape[0]:
            raise ValueError(f"group ids must lie in 0..{prior.shape[0] - 1} (rows of prior), got {low} to {high}")
    return prior


def _flat_ids(group: Tensor, rows: int) -> Tensor:
    if group.is_floating_point() or group.dtype == torch.bool:
        raise TypeError(f"group must hold integer ids, got {group.dtype}")
    if group.numel() != rows:
        raise ValueError(f"group must hold one id for each of {rows} rows, got {list(group.shape)}")
    return group.reshape(-1).long()


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def check_prior(prior: Tensor) -> None:
    """Raise unless ``prior`` holds distributions over its last dimension."""
    if not prior.is_floating_point():
        raise TypeError(f"prior must be floating point, got {prior.dtype}")
    if prior.numel() == 0 or not may_check_values(prior):
        return
    least = float(prior.detach().amin())
    if not least >= 0.0:
        raise ValueError(f"prior must not have negative (or NaN) entries, got {least}")
    sums = prior.detach().sum(-1, dtype=torch.float64)
    worst = float(sums.reshape(-1)[(sums - 1.0).abs().reshape(-1).argmax()])
    if not abs(worst - 1.0) <= 1e-4:
        raise ValueError(f"every row of prior must sum to 1 within 1e-4, got a sum of {worst:.6g}")
