"""The gate: scores, choice of k experts and their weights in one launch; and the gradient of the logits in another.

A program owns a few whole rows. Experts lie in *columns*: for policies with contiguous groups column
``g · SIZE_PAD + s`` is member s of group g, so that groups are a dimension of a reshaped tile; otherwise there is one
group. The k best are found in k rounds of argmax on integer keys that order as the selection scores do; equal keys go
to the lower column, which is the lower expert.

Letters: R rows, k slots, E experts, G groups, S = E / G members of a group, C = padded G · padded S columns.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from shared_core.kernels.gating_ops import GateSettings
from shared_core.kernels.triton.launch import on_device

__all__ = ["backward", "forward", "gate_backward_kernel", "gate_forward_kernel"]

# Keys of float32 values: NaN above +inf, -inf lowest, and below it what is out of the race.
_NAN_KEY = tl.constexpr(0x7FFFFFFF)
_UNAVAILABLE = tl.constexpr(-0x7F800001)  # of -inf
_GONE = tl.constexpr(-0x80000000)
_TINY = tl.constexpr(1e-20)

_ELEMENTS = 512  # of a tile: one warp then reduces rows by shuffles alone, with 16 values a thread
_MAX_ROWS = 64


@triton.jit
def _keys(values):
    """Int32 that order as float32 ``values`` do, NaN on top."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    keys = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # negative floats order against their bits
    return tl.where(values == values, keys, _NAN_KEY)  # noqa: PLR0124 - NaN is what differs from itself


@triton.jit
def _values(keys):
    """Float32 of keys: the inverse of :func:`_keys`."""
    return tl.where(keys < 0, keys ^ 0x7FFFFFFF, keys).to(tl.float32, bitcast=True)


@triton.jit
def _best_groups(
    keys,  # [R, C] int32
    ROWS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TWO_BEST: tl.constexpr,
):
    """Keys with the experts outside of the ``TOP_GROUPS`` best groups made unavailable."""
    members = tl.reshape(keys, (ROWS, GROUPS_PAD, SIZE_PAD))
    score = tl.max(members, axis=2)  # [R, G]
    if TWO_BEST:
        member = tl.arange(0, SIZE_PAD)[None, None, :]
        first = tl.argmax(members, axis=2, tie_break_left=True)
        second = tl.max(tl.where(member == tl.expand_dims(first, 2), _GONE, members), axis=2)
        # A missing second expert adds nothing, so a group with one expert left does not count as empty.
        added = tl.where(second <= _UNAVAILABLE, 0.0, _values(second))
        score = _keys(_values(tl.where(score == _GONE, _UNAVAILABLE, score)) + added)
    group = tl.arange(0, GROUPS_PAD)[None, :]
    score = tl.where(group < NUM_GROUPS, score, _GONE)
    kept = tl.zeros((ROWS, GROUPS_PAD), tl.int32)
    for _ in range(TOP_GROUPS):
        best = group == tl.argmax(score, axis=1, tie_break_left=True)[:, None]
        kept = tl.where(best, 1, kept)
        score = tl.where(best, _GONE, score)
    kept_members = tl.broadcast_to(tl.expand_dims(kept, 2), (ROWS, GROUPS_PAD, SIZE_PAD))
    kept_columns = tl.reshape(kept_members, (ROWS, GROUPS_PAD * SIZE_PAD))
    return tl.where(kept_columns == 1, keys, tl.minimum(keys, _UNAVAILABLE))


@triton.jit(do_not_specialize=["num_rows", "bias_row", "scale"])
def gate_forward_kernel(
    logits_ptr,  # [R, E] float32
    bias_ptr,  # [R, E] float32 with stride bias_row, or None: added to the scores for the choice
    keep_ptr,  # [R] bool, or None: rows that take part
    group_ids_ptr,  # [E] int32, or None: groups of which at most CAP experts are chosen
    indices_ptr,  # [R, k] int64
    weights_ptr,  # [R, k] float32
    scores_ptr,  # [R, E] float32
    num_rows,
    bias_row,
    scale,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    OFFSET: tl.constexpr,  # ranks skipped
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,  # 0: all
    TWO_BEST: tl.constexpr,  # whether a group scores by the sum of its two best
    CAP: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    SLOTS_PAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Scores, indices and weights of ``ROWS`` rows."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, GROUPS_PAD * SIZE_PAD)
    expert = (column // SIZE_PAD) * (NUM_EXPERTS // NUM_GROUPS) + column % SIZE_PAD
    is_expert = (column % SIZE_PAD < NUM_EXPERTS // NUM_GROUPS) & (column < NUM_GROUPS * SIZE_PAD)
    is_row = rows < num_rows
    inside = is_row[:, None] & is_expert[None, :]

    z = tl.load(logits_ptr + rows[:, None] * NUM_EXPERTS + expert[None, :], mask=inside, other=-float("inf"))
    unavailable = z == -float("inf")
    if SIGMOID:
        small = tl.exp(-tl.abs(z))
        p = tl.where(z >= 0.0, 1.0, small) / (1.0 + small)
    else:
        # A row without any expert has scores 0: neither inf - inf nor 0 / 0 is evaluated.
        nobody = tl.min(unavailable.to(tl.int32), axis=1) == 1
        top = tl.max(z, axis=1)
        exps = tl.exp(z - tl.where(top == -float("inf"), 0.0, top)[:, None])
        p = exps / tl.where(nobody, 1.0, tl.sum(exps, axis=1))[:, None]
    tl.store(scores_ptr + rows[:, None] * NUM_EXPERTS + expert[None, :], p, mask=inside)

    q = p
    if bias_ptr is not None:
        q += tl.load(bias_ptr + rows[:, None] * bias_row + expert[None, :], mask=inside, other=0.0)
    if keep_ptr is not None:
        keep = tl.load(keep_ptr + rows, mask=is_row, other=0).to(tl.int1)
        unavailable |= (keep == 0)[:, None]
    keys = tl.where(unavailable, _UNAVAILABLE, _keys(q))
    keys = tl.where(is_expert[None, :], keys, _GONE)
    if TOP_GROUPS > 0:
        keys = _best_groups(keys, ROWS, NUM_GROUPS, GROUPS_PAD, SIZE_PAD, TOP_GROUPS, TWO_BEST)
    if CAP > 0:
        group_id = tl.load(group_ids_ptr + expert, mask=is_expert, other=-1)[None, :]
        taken = tl.zeros((ROWS, GROUPS_PAD * SIZE_PAD), tl.int32)  # of each column's group

    slot = tl.arange(0, SLOTS_PAD)[None, :]
    chosen = tl.zeros((ROWS, SLOTS_PAD), tl.int32)
    weights = tl.zeros((ROWS, SLOTS_PAD), tl.float32)
    for rank in range(OFFSET + TOP_K):
        # Two plain reductions: on these devices one instruction each, where an argmax is a tree of shuffles.
        key = tl.max(keys, axis=1)
        winner = tl.min(tl.where(keys == key[:, None], column[None, :], GROUPS_PAD * SIZE_PAD), axis=1)
        won = column[None, :] == winner[:, None]
        found = key > _UNAVAILABLE
        index = tl.where(found, (winner // SIZE_PAD) * (NUM_EXPERTS // NUM_GROUPS) + winner % SIZE_PAD, NUM_EXPERTS)
        # Without a bias the key is the score itself.
        score = _values(key) if bias_ptr is None else tl.sum(tl.where(won, p, 0.0), axis=1)
        weight = tl.where(found, score, 0.0)
        here = slot == rank - OFFSET
        chosen = tl.where(here, index[:, None], chosen)
        weights = tl.where(here, weight[:, None], weights)
        if CAP > 0:
            group = tl.sum(tl.where(won, group_id, 0), axis=1)
            same = group_id == group[:, None]
            taken += same.to(tl.int32)
            won |= same & (taken >= CAP)
        keys = tl.where(won, _GONE, keys)

    if RENORMALIZE:
        weights /= (tl.sum(weights, axis=1) + _TINY)[:, None]
    weights *= scale
    is_slot = is_row[:, None] & (slot < TOP_K)
    tl.store(indices_ptr + rows[:, None] * TOP_K + slot, chosen.to(tl.int64), mask=is_slot)
    tl.store(weights_ptr + rows[:, None] * TOP_K + slot, weights, mask=is_slot)


@triton.jit(do_not_specialize=["num_rows", "scale"])
def gate_backward_kernel(
    scores_ptr,  # [R, E] float32
    indices_ptr,  # [R, k] int64
    weights_grad_ptr,  # [R, k] float32, or None
    scores_grad_ptr,  # [R, E] float32, or None
    logits_grad_ptr,  # [R, E] float32
    num_rows,
    scale,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLOTS_PAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Gradient of the logits of ``ROWS`` rows."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    is_row = (rows < num_rows)[:, None]
    inside = is_row & (column < NUM_EXPERTS)
    offsets = rows[:, None] * NUM_EXPERTS + column
    p = tl.load(scores_ptr + offsets, mask=inside, other=0.0)
    dp = tl.zeros((ROWS, COLUMNS), tl.float32)
    if scores_grad_ptr is not None:
        dp += tl.load(scores_grad_ptr + offsets, mask=inside, other=0.0)

    if weights_grad_ptr is not None:
        slot = tl.arange(0, SLOTS_PAD)[None, :]
        is_slot = is_row & (slot < TOP_K)
        index = tl.load(indices_ptr + rows[:, None] * TOP_K + slot, mask=is_slot, other=NUM_EXPERTS).to(tl.int32)
        chosen = index < NUM_EXPERTS
        g = tl.load(weights_grad_ptr + rows[:, None] * TOP_K + slot, mask=is_slot, other=0.0) * scale
        if RENORMALIZE:  # w = p / s with s = Σ p: dp = (g - Σ g w) / s
            raw = tl.load(scores_ptr + rows[:, None] * NUM_EXPERTS + index, mask=chosen, other=0.0)
            total = (tl.sum(raw, axis=1) + _TINY)[:, None]
            g = (g - tl.sum(g * (raw / total), axis=1)[:, None]) / total
        g = tl.where(chosen, g, 0.0)
        for each in range(TOP_K):
            here = slot == each
            mine = column == tl.sum(tl.where(here, index, 0), axis=1)[:, None]
            dp += tl.where(mine, tl.sum(tl.where(here, g, 0.0), axis=1)[:, None], 0.0)

    dz = dp * p * (1.0 - p) if SIGMOID else p * (dp - tl.sum(p * dp, axis=1)[:, None])
    tl.store(logits_grad_ptr + offsets, dz, mask=inside)


def forward(
    logits: Tensor, bias: Tensor | None, keep: Tensor | None, group_ids: Tensor | None, settings: GateSettings
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the gate.

    Parameters
    ----------
    logits : Tensor
        ``[R, E]`` float32.
    bias : Tensor or None
        ``[R, E]`` float32, added to the scores for the choice; its rows may be one row, expanded.
    keep : Tensor or None
        ``[R]`` bool.
    group_ids : Tensor or None
        ``[E]`` int32; with ``settings.cap``.
    settings : GateSettings
        The rest.

    Returns
    -------
    indices, weights, scores : Tensor
        ``[R, k]`` int64, ``[R, k]`` float32, ``[R, E]`` float32.
    """
    num_rows, num_experts = logits.shape
    logits = logits.contiguous()
    if bias is not None and bias.stride(1) != 1:
        bias = bias.contiguous()
    indices = torch.empty(num_rows, settings.top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(num_rows, settings.top_k, dtype=torch.float32, device=logits.device)
    scores = torch.empty_like(logits)
    constants = _forward_constants(num_experts, settings)
    if num_rows:
        with on_device(logits.device):
            gate_forward_kernel[(triton.cdiv(num_rows, constants["ROWS"]),)](
                logits,
                bias,
                None if keep is None else keep.contiguous(),
                group_ids,
                indices,
                weights,
                scores,
                num_rows,
                0 if bias is None else bias.stride(0),
                settings.scale,
                **constants,
                num_warps=1,
                enable_fp_fusion=True,
            )
    return indices, weights, scores


def backward(
    scores: Tensor,
    indices: Tensor,
    weights_grad: Tensor | None,
    scores_grad: Tensor | None,
    settings: GateSettings,
) -> Tensor:
    """Launch the gradient of the gate.

    Parameters
    ----------
    scores, indices : Tensor
        As :func:`forward` returned them.
    weights_grad, scores_grad : Tensor or None
        ``[R, k]`` and ``[R, E]`` float32.
    settings : GateSettings
        Those of the forward pass.

    Returns
    -------
    Tensor
        Gradient of the logits, ``[R, E]`` float32.
    """
    num_rows, num_experts = scores.shape
    logits_grad = torch.empty_like(scores)
    constants = _backward_constants(num_experts, settings)
    if num_rows:
        with on_device(scores.device):
            gate_backward_kernel[(triton.cdiv(num_rows, constants["ROWS"]),)](
                scores,
                indices,
                None if weights_grad is None else weights_grad.contiguous(),
                None if scores_grad is None else scores_grad.contiguous(),
                logits_grad,
                num_rows,
                settings.scale,
                **constants,
                num_warps=1,
                enable_fp_fusion=True,
            )
    return logits_grad


def _rows(columns: int) -> int:
    return max(1, min(_MAX_ROWS, _ELEMENTS // columns))


def _forward_constants(num_experts: int, settings: GateSettings) -> dict[str, Any]:
    groups_pad, size_pad = settings.padded(num_experts)
    return {
        "NUM_EXPERTS": num_experts,
        "TOP_K": settings.top_k,
        "OFFSET": settings.offset,
        "SIGMOID": settings.sigmoid,
        "RENORMALIZE": settings.renormalize,
        "NUM_GROUPS": settings.num_groups,
        "TOP_GROUPS": settings.top_groups,
        "TWO_BEST": settings.two_best,
        "CAP": settings.cap,
        "GROUPS_PAD": groups_pad,
        "SIZE_PAD": size_pad,
        "SLOTS_PAD": triton.next_power_of_2(settings.top_k),
        "ROWS": _rows(groups_pad * size_pad),
    }


def _backward_constants(num_experts: int, settings: GateSettings) -> dict[str, Any]:
    columns = triton.next_power_of_2(num_experts)
    return {
        "NUM_EXPERTS": num_experts,
        "TOP_K": settings.top_k,
        "SIGMOID": settings.sigmoid,
        "RENORMALIZE": settings.renormalize,
        "COLUMNS": columns,
        "SLOTS_PAD": triton.next_power_of_2(settings.top_k),
        "ROWS": _rows(columns),
    }
