"""Starting an expert kernel with one of its tile shapes, tuned at the first launch of its sizes.

The first launch of a kernel with new sizes (E, widths, dtype, bucket of rows) times the candidates of
:mod:`shared_core.kernels.triton.configs` with ``triton.autotune`` and keeps the best for the life of the process. Every
candidate is deterministic by itself, and none is allowed to change what is computed; but another tile shape may round
differently in the last bit, so two processes that tuned differently may differ there. Nothing is tuned, and the first
candidate runs, with ``SHARED_CORE_AUTOTUNE=0``, under ``torch.use_deterministic_algorithms(True)``, while a CUDA graph
is captured, and in the interpreter. Tuning is the one thing that waits for the device.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton

from shared_core.kernels import interpreted
from shared_core.kernels.triton.configs import Kind, Tile, row_bucket, tiles

__all__ = ["Setting", "launch", "narrowest", "on_device"]

_chosen: dict[tuple[object, ...], Tile] = {}


class Setting(NamedTuple):
    """What all launches of one call have in common.

    Attributes
    ----------
    device : torch.device
    dtype : torch.dtype
        Of rows and weights.
    num_assignments, num_experts : int
        N and E.
    """

    device: torch.device
    dtype: torch.dtype
    num_assignments: int
    num_experts: int

    @property
    def bucket(self) -> int:
        """Height of the tiles."""
        return row_bucket(self.num_assignments, self.num_experts)

    @property
    def precision(self) -> str:
        """How products of float32 are computed: exactly, or in TF32 where PyTorch's own products may be."""
        if interpreted():
            return "widen"
        allowed = self.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
        return "tf32" if allowed else "ieee"

    @property
    def may_tune(self) -> bool:
        """Whether candidates may be timed now."""
        if os.environ.get("SHARED_CORE_AUTOTUNE") == "0" or torch.are_deterministic_algorithms_enabled():
            return False
        return not (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a CUDA device the current one, which is where Triton launches."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def launch(
    kind: Kind,
    kernel: Any,
    grid: Callable[[int, int], int],
    arguments: dict[str, Any],
    setting: Setting,
    *,
    sizes: tuple[int, ...],
    depth: int | None = None,
    repeatable: bool = True,
) -> Tile:
    """Start a kernel, after tuning it if its sizes are new.

    Parameters
    ----------
    kind : str
        Which table of tiles.
    kernel : triton.JITFunction
    grid : callable
        Programs for tiles of so many rows and columns; nothing is started for none.
    arguments : dict
        Everything but the tile.
    setting : Setting
        Of the call.
    sizes : tuple of int
        Widths, on which with E, dtype and bucket the best tile depends.
    depth : int, optional
        Length of the loop, for kernels that drop its masks where a step divides it.
    repeatable : bool
        False for a launch that adds to its result, so cannot be tried out.

    Returns
    -------
    Tile
        What was launched.
    """
    architecture, candidates = _architecture(setting.device), _candidates(kind, setting)
    # Kinds share kernels, kernels share sizes: together they say which launch this is.
    key = (kind, setting.device, architecture, setting.dtype, setting.precision, candidates, setting.num_experts, sizes)
    tile = _chosen.get(key, candidates[0])
    if grid(tile.m, tile.n) == 0:
        return tile
    if key not in _chosen and repeatable and len(candidates) > 1 and setting.may_tune:
        configs = [triton.Config(_constants(each, depth), each.warps, each.stages) for each in candidates]
        tuner = triton.autotune(configs, key=[])(kernel)
        tuner[lambda meta: (grid(meta["BLOCK_M"], meta["BLOCK_N"]),)](**arguments, enable_fp_fusion=True)
        tile = _chosen[key] = candidates[configs.index(tuner.best_config)]
        return tile
    kernel[(grid(tile.m, tile.n),)](
        **arguments, **_constants(tile, depth), num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True
    )
    return tile


def narrowest(kind: Kind, setting: Setting) -> int:
    """Fewest columns of a tile that :func:`launch` may choose, for buffers with an entry for each block of columns."""
    return min(tile.n for tile in _candidates(kind, setting))


def _candidates(kind: Kind, setting: Setting) -> tuple[Tile, ...]:
    return tiles(kind, setting.dtype, setting.bucket, _architecture(setting.device))


def _architecture(device: torch.device) -> int | None:
    """Compute capability times ten; None in the interpreter."""
    if interpreted():
        return None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)  # kept by PyTorch; Triton's own answer asks the driver
        return 10 * properties.major + properties.minor
    return int(triton.runtime.driver.active.get_current_target().arch)  # no device: the check ahead of time


def _constants(tile: Tile, depth: int | None) -> dict[str, Any]:
    blocks = {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k}
    return blocks if depth is None else {**blocks, "EVEN_K": depth % tile.k == 0}
