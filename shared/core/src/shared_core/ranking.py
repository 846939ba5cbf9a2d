"""Exact top-k: ties go to the lower index, on every device and under every transform.

``torch.topk`` leaves the order of equal values open, so it may differ between devices and versions. Here every value is
first made unique: a float32 widened to float64 leaves the lower 29 bits of the mantissa zero, and the index is written
there (the lower index wins). Read as int64, these keys order as the values do, and any top-k algorithm has only one
answer; no branch need look at the data.

On the CPU keys go through numpy's vectorised sort, and shorter ones first: the index written over the last bits of the
float32 itself. Where the remaining bits tell the best ``k + 1`` apart, which they do but for a few rows in a thousand,
the order is settled; the other rows are ranked by their full keys.

Dimension letters: R rows, E experts, k choices a row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared_core.checks import eager_cpu

_INDEX_BITS = (1 << 29) - 1
_INT32_MAX, _INT64_MAX = (1 << 31) - 1, (1 << 63) - 1
# Bytes of the keys of one block: they stay in a second-level cache.
_BLOCK_BYTES = 2**18
# Up to here one sort of whole rows beats a partition and a second, strided sort of its end.
_SORT_WHOLE = 128
# With more index bits too little of the mantissa would be left to tell values apart.
_MAX_SHORT_WIDTH = 2**10
# Up to here sorting full keys at once costs less than the calls that check short ones.
_SMALL = 2**13
# torch.topk spreads rows over threads, numpy does not: with many threads the parallel path wins on large inputs.
_LARGE, _MANY_THREADS = 2**16, 8


def top_indices(values: Tensor, k: int) -> Tensor:
    """Indices of the ``k`` largest values of the last dimension, in descending order, ties to the lower index.

    Parameters
    ----------
    values
        ``[..., E]`` floating point. NaN counts as larger than everything, as in ``torch.topk``.
    k
        0 <= k <= E.

    Returns
    -------
    Tensor
        ``[..., k]`` int64, without a gradient.

    Examples
    --------
    >>> top_indices(torch.tensor([1.0, 3.0, 3.0, 3.0]), 2)
    tensor([1, 2])
    """
    values = values.detach()
    if values.dtype == torch.float64:  # all mantissa bits are taken
        return values.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    values = values.float()
    if eager_cpu(values) and (values.numel() < _LARGE or torch.get_num_threads() < _MANY_THREADS):
        rows = values.reshape(values.shape[:-1].numel(), values.shape[-1]).numpy()
        return torch.from_numpy(_rank_rows(rows, k)).view(*values.shape[:-1], k)
    best_keys = _unique_keys(values).topk(k, dim=-1).values
    return values.shape[-1] - 1 - (best_keys & _INDEX_BITS)


def _unique_keys(values: Tensor) -> Tensor:
    """``[..., E]`` int64 keys that order by value, then by descending index; all different within a row."""
    bits = (values.double() + 0.0).view(torch.int64)  # + 0.0 turns -0.0 into 0.0, which it equals
    bits = bits ^ ((bits >> 63) & _INT64_MAX)  # negative floats order against their bits
    bits = torch.where(values.isnan(), _INT64_MAX, bits)
    descending = torch.arange(values.shape[-1] - 1, -1, -1, device=values.device)
    return (bits & ~_INDEX_BITS) | descending


def _rank_rows(rows: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """:func:`top_indices` of ``[R, E]`` in numpy."""
    if rows.size <= _SMALL or rows.shape[1] > _MAX_SHORT_WIDTH:
        return _rank_by_full_keys(rows, k)
    top, unsettled = _rank_by_short_keys(rows, k)
    if unsettled.size:
        top[unsettled] = _rank_by_full_keys(rows[unsettled], k)
    return top


def _rank_by_short_keys(rows: NDArray[np.float32], k: int) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
    """Indices by int32 keys, and the numbers of the rows for which these keys do not settle the order."""
    num_rows, width = rows.shape
    index_bits = (width - 1).bit_length()
    index_mask = np.int32((1 << index_bits) - 1)
    ranks = min(k + 1, width)
    descending = np.arange(width - 1, -1, -1, dtype=np.int32)
    best = np.empty((num_rows, ranks), np.int32)
    height = max(1, min(num_rows, _BLOCK_BYTES // (4 * width)))
    block = np.empty((height, width), np.int32)
    for start in range(0, num_rows, height):
        values = rows[start : start + height]
        keys = block[: values.shape[0]]
        np.add(values, np.float32(0.0), out=keys.view(np.float32))  # turns -0.0 into 0.0, which it equals
        if not values.min() >= 0:  # scores are not negative: this is for biased ones, and for NaN
            keys ^= (keys >> 31) & _INT32_MAX  # negative floats order against their bits
            keys[np.isnan(values)] = _INT32_MAX
        keys &= ~index_mask
        keys |= descending
        best[start : start + height] = _largest(keys, ranks)
    values_left = best >> index_bits
    unsettled = (values_left[:, 1:] == values_left[:, :-1]).any(axis=1)
    return np.subtract(width - 1, best[:, :k] & index_mask, dtype=np.int64), np.flatnonzero(unsettled)


def _rank_by_full_keys(rows: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """Indices by int64 keys, which are all different."""
    num_rows, width = rows.shape
    best = np.empty((num_rows, k), np.int64)
    if best.size == 0:
        return best
    descending = np.arange(width - 1, -1, -1, dtype=np.int64)
    height = max(1, min(num_rows, _BLOCK_BYTES // (8 * width)))
    block = np.empty((height, width), np.int64)
    for start in range(0, num_rows, height):
        values = rows[start : start + height]
        keys = block[: values.shape[0]]
        np.add(values, 0.0, out=keys.view(np.float64), dtype=np.float64)
        if not values.min() >= 0:
            keys ^= (keys >> 63) & _INT64_MAX
            keys[np.isnan(values)] = _INT64_MAX
            keys &= ~_INDEX_BITS
        keys |= descending
        best[start : start + height] = _largest(keys, k)
    best &= _INDEX_BITS
    np.subtract(width - 1, best, out=best)
    return best


def _largest(keys: NDArray[Any], count: int) -> NDArray[Any]:
    """The ``count`` largest keys of every row in descending order; ``keys`` is overwritten."""
    width = keys.shape[1]
    if width > _SORT_WHOLE:
        keys.partition(width - count, axis=-1)
        keys = keys[:, width - count :]
    keys.sort(axis=-1)
    return keys[:, : -count - 1 : -1]
