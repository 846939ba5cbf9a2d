"""Routing traces: which experts served which row, recorded as plain arrays and kept as ``.npz``. numpy only.

Letters: ``R`` rows, ``k`` chosen experts a row, ``E`` experts. Index ``E`` is the sentinel "no expert".
"""

from __future__ import annotations

import json
import operator
import os
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from shared_core.files import atomic_write, read_arrays

_FORMAT = 1
# Counts hold one number an expert, so a file of a few bytes must not be able to ask for gigabytes of them.
_MOST_EXPERTS = 2**24
_MEMBERS = {"format": (0, "iu"), "indices": (2, "iu"), "weights": (2, "f"), "num_experts": (0, "iu"), "meta": (0, "U")}


@dataclass(frozen=True, eq=False)
class RoutingTrace:
    """The decisions of one router: chosen experts and their weights, without gradients and without torch.

    Attributes
    ----------
    indices
        int32 ``[R, k]``, in ``0..E``; ``E`` means "no expert".
    weights
        float32 ``[R, k]``.
    num_experts
        ``E``.
    meta
        Anything JSON can hold, for example ``{"layer": 3, "model": "…"}``.

    Raises
    ------
    ValueError
        If shapes differ, an index lies outside ``0..E``, or `num_experts` is not in 1..2**24.
    TypeError
        If indices or `num_experts` are not integers, weights not real numbers, or `meta` is no dict.

    Examples
    --------
    >>> trace = RoutingTrace(indices=[[0, 2], [2, 3]], weights=[[0.7, 0.3], [1.0, 0.0]], num_experts=3)
    >>> trace.counts()
    array([1, 0, 2])
    """

    indices: NDArray[np.int32]
    weights: NDArray[np.float32]
    num_experts: int
    meta: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        indices, weights = np.asarray(self.indices), np.asarray(self.weights)
        if indices.dtype.kind not in "iu":
            raise TypeError(f"indices must be integers, not {indices.dtype}")
        if weights.dtype.kind not in "iuf":
            raise TypeError(f"weights must be real numbers, not {weights.dtype}")
        if indices.ndim != 2 or indices.shape != weights.shape:
            raise ValueError(
                f"indices and weights must both have shape [R, k], not {list(indices.shape)} and {list(weights.shape)}"
            )
        try:
            experts = operator.index(self.num_experts)
        except TypeError:
            raise TypeError(f"num_experts must be an integer, not {type(self.num_experts).__name__}") from None
        if not 1 <= experts <= _MOST_EXPERTS:
            raise ValueError(f"num_experts must be in 1..2**24, not {experts}")
        if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) <= experts:
            raise ValueError(
                f"indices must lie in 0..{experts} ({experts} means no expert), "
                f"but they span {indices.min()}..{indices.max()}"
            )
        if not isinstance(self.meta, dict):
            raise TypeError(f"meta must be a dict, not {type(self.meta).__name__}")
        object.__setattr__(self, "indices", indices.astype(np.int32, copy=False))
        object.__setattr__(self, "weights", weights.astype(np.float32, copy=False))
        object.__setattr__(self, "num_experts", experts)

    def counts(self) -> NDArray[np.int64]:
        """Count assignments per expert, ``[E]``; sentinels are not counted."""
        # bincount returns intp, which is int64 only on 64-bit machines.
        return np.bincount(self.indices.ravel(), minlength=self.num_experts + 1)[:-1].astype(np.int64)

    def dense(self) -> NDArray[np.float32]:
        """Spread the weights over all experts, ``[R, E]``; experts not chosen get 0."""
        rows = self.indices.shape[0]
        table = np.zeros((rows, self.num_experts + 1), dtype=np.float32)
        # add.at, not assignment: a foreign trace may name an expert twice in a row, and the sentinel repeats anyway.
        np.add.at(table, (np.arange(rows)[:, None], self.indices), self.weights)
        return table[:, :-1]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace as ``.npz`` under exactly this name; an existing file is replaced only by a whole new one.

        Raises
        ------
        TypeError
            If `meta` holds something that JSON cannot.
        FileNotFoundError
            If the folder does not exist.
        """
        try:
            meta = json.dumps(self.meta)
        except (TypeError, ValueError) as error:
            raise TypeError(f"meta must hold only what JSON can: {error}") from error
        with atomic_write(path) as temporary, temporary.open("wb") as file:
            np.savez(
                file,
                format=np.int64(_FORMAT),
                indices=self.indices,
                weights=self.weights,
                num_experts=np.int64(self.num_experts),
                meta=np.str_(meta),
            )

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, max_bytes: int = 2**31) -> Self:
        """Read a trace. Nothing in the file is executed or unpickled, and no size in it is believed unchecked.

        Parameters
        ----------
        path
            A file that :meth:`save` wrote.
        max_bytes
            Refuse files whose arrays need more memory than this (bytes, all together; default 2 GiB).

        Raises
        ------
        FileNotFoundError
            If there is no such file.
        ValueError
            If it is not a whole, well-formed trace, is of a later format, or is larger than `max_bytes`.
        """
        arrays = read_arrays(path, _MEMBERS, kind="routing trace", max_bytes=max_bytes)
        version = int(arrays["format"])
        if version != _FORMAT:
            raise ValueError(f"{path} is a routing trace of format {version}; this version reads format {_FORMAT}")
        try:
            meta = json.loads(arrays["meta"].item())
            return cls(arrays["indices"], arrays["weights"], int(arrays["num_experts"]), meta)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not a valid routing trace: {error}") from error
