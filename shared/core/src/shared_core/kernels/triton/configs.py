"""Tile shapes that the expert kernels may be launched with.

A table gives every kernel a few candidates for each height of a tile; the first of a list is taken where nothing is
tuned. The height follows the rows that an expert gets on average, so a decoding step does not compute with 128 rows of
which one is real, and its many narrow tiles keep enough loads in flight to read the weights at the memory's speed.

Shared memory limits the lists: what every device since 8.0 has (99 KiB a block) first, what 9.0 and 10.0 add
(227 KiB) in :data:`_LARGE`. `tests/test_triton_aot.py` and ``shared-core doctor`` compile all of it.

Letters: E experts, N assignments.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

__all__ = ["Kind", "Tile", "row_bucket", "tiles"]

Kind = Literal["up", "project", "hidden_gradient", "weight_gradient"]


class Tile(NamedTuple):
    """Rows and columns of a tile, depth of one step of its loop, and how the compiler spreads that over a block.

    Attributes
    ----------
    m, n, k : int
        Powers of two, at least 16.
    warps, stages : int
        Warps of a block; loads of the loop in flight.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int


_INTERPRETED = Tile(16, 32, 32, 4, 1)

_HALF: dict[tuple[Kind, int], tuple[Tile, ...]] = {
    ("up", 16): (Tile(16, 32, 128, 4, 4), Tile(16, 64, 64, 4, 5), Tile(16, 16, 256, 4, 4)),
    ("up", 32): (Tile(32, 64, 64, 4, 4), Tile(32, 32, 128, 4, 4)),
    ("up", 64): (Tile(64, 64, 64, 4, 4), Tile(64, 64, 32, 4, 5)),
    ("up", 128): (Tile(128, 64, 64, 8, 4), Tile(128, 64, 32, 8, 5)),
    ("project", 16): (Tile(16, 64, 128, 4, 4), Tile(16, 32, 256, 4, 4), Tile(16, 128, 64, 4, 5)),
    ("project", 32): (Tile(32, 64, 128, 4, 4), Tile(32, 128, 64, 4, 4)),
    ("project", 64): (Tile(64, 128, 64, 4, 4), Tile(64, 64, 64, 4, 4)),
    ("project", 128): (Tile(128, 128, 64, 8, 4), Tile(128, 128, 32, 8, 5), Tile(128, 64, 64, 4, 4)),
    ("hidden_gradient", 16): (Tile(16, 64, 128, 4, 4), Tile(16, 32, 128, 4, 4)),
    ("hidden_gradient", 32): (Tile(32, 64, 64, 4, 4), Tile(32, 32, 128, 4, 4)),
    ("hidden_gradient", 64): (Tile(64, 64, 64, 8, 4), Tile(64, 32, 64, 4, 4)),
    ("hidden_gradient", 128): (Tile(128, 64, 64, 8, 4), Tile(128, 32, 64, 4, 4)),
    # k counts the rows of an expert here. The load of a gathered row waits for the load of its number, which halves
    # what the stages keep in flight: five are two steps ahead.
    ("weight_gradient", 16): (Tile(64, 128, 16, 4, 5), Tile(128, 128, 16, 8, 5)),
    ("weight_gradient", 32): (Tile(128, 128, 32, 8, 5), Tile(64, 128, 32, 4, 5)),
    ("weight_gradient", 64): (Tile(128, 128, 32, 8, 5), Tile(64, 128, 64, 4, 5)),
    ("weight_gradient", 128): (Tile(128, 128, 64, 8, 5), Tile(128, 128, 32, 8, 7)),
}
_LARGE: dict[tuple[Kind, int], tuple[Tile, ...]] = {
    ("up", 64): (Tile(64, 128, 64, 8, 4),),
    ("up", 128): (Tile(128, 128, 64, 8, 4),),
    ("project", 64): (Tile(64, 256, 64, 8, 4),),
    ("project", 128): (Tile(128, 256, 64, 8, 4),),
    ("hidden_gradient", 128): (Tile(128, 64, 128, 8, 4),),
    ("weight_gradient", 128): (Tile(128, 256, 64, 8, 5),),
}
# Exact float32 products run on the ordinary cores, from registers: small tiles, few stages.
_SINGLE: dict[tuple[Kind, int], tuple[Tile, ...]] = {
    ("up", 16): (Tile(16, 32, 64, 4, 3), Tile(16, 64, 32, 4, 3)),
    ("up", 32): (Tile(32, 32, 32, 4, 3), Tile(32, 64, 32, 4, 2)),
    ("up", 64): (Tile(64, 32, 32, 4, 3), Tile(64, 64, 16, 8, 3)),
    ("project", 16): (Tile(16, 64, 64, 4, 3), Tile(16, 32, 64, 4, 3)),
    ("project", 32): (Tile(32, 64, 32, 4, 3), Tile(32, 64, 64, 4, 2)),
    ("project", 64): (Tile(64, 64, 32, 4, 3), Tile(64, 128, 16, 8, 3)),
    ("hidden_gradient", 16): (Tile(16, 64, 64, 4, 3), Tile(16, 32, 64, 4, 3)),
    ("hidden_gradient", 32): (Tile(32, 32, 32, 4, 3), Tile(32, 64, 32, 4, 2)),
    ("hidden_gradient", 64): (Tile(64, 32, 32, 4, 3), Tile(64, 64, 16, 8, 3)),
    ("weight_gradient", 16): (Tile(64, 64, 16, 4, 3), Tile(32, 64, 16, 4, 3)),
    ("weight_gradient", 32): (Tile(64, 64, 32, 4, 2), Tile(64, 64, 16, 4, 3)),
    ("weight_gradient", 64): (Tile(64, 64, 32, 4, 3), Tile(64, 128, 16, 8, 3)),
}


def row_bucket(num_assignments: int, num_experts: int) -> int:
    """Height of a tile for these sizes: the first of 16, 32, 64, 128 that holds an expert's average rows.

    Parameters
    ----------
    num_assignments, num_experts : int
        N and E. Which expert gets how many rows is not looked at: it is known to the device alone.

    Returns
    -------
    int

    Examples
    --------
    >>> row_bucket(8, 128), row_bucket(4096, 128), row_bucket(65536, 128)
    (16, 32, 128)
    """
    average = -(-num_assignments // num_experts)
    return next((height for height in (16, 32, 64) if average <= height), 128)


def tiles(kind: Kind, dtype: torch.dtype, bucket: int, architecture: int | None) -> tuple[Tile, ...]:
    """Candidates of a kernel, the default first.

    Parameters
    ----------
    kind : str
        Which kernel.
    dtype : torch.dtype
        Of rows and weights.
    bucket : int
        From :func:`row_bucket`.
    architecture : int or None
        Compute capability times ten; None for the interpreter, which has one small tile.

    Returns
    -------
    tuple of Tile
    """
    if architecture is None:
        return (_INTERPRETED,)
    if dtype == torch.float32:
        return _SINGLE[kind, min(bucket, 64)]
    large = _LARGE.get((kind, bucket), ()) if architecture // 10 in {9, 10} else ()
    return _HALF[kind, bucket] + large
