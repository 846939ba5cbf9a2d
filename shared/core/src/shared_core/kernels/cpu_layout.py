"""How the numbers of one expert lie in memory on their way through a CPU, and in which dtype they are multiplied.

Letters: n rows of one expert, I intermediate width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shared_core.kernels.cpu import product
from shared_core.kernels.cpu_features import cpu_features

__all__ = ["WIDEN_ROWS", "Layout"]

WIDEN_ROWS = 56
"""Rows of an expert from which 16-bit matrices are widened to float32, where the CPU multiplies float32 faster."""


class Layout(NamedTuple):
    """Choice for each expert from its number of rows; everything has the logical shape ``[features, n]``.

    Measured on a Sapphire Rapids core (MKL and oneDNN) with matrices that come from main memory: row-major
    (``[n, ·]``) products read few rows' matrix fastest. From 8 to 64 rows in float32, feature-major (``[·, n]``) ones
    are up to 1.7 times as fast, because the matrix is then the left operand, which is packed with less effort. Beyond,
    both are equal, unless the expert is ``long`` (many intermediate features): then even transposing x and y pays.
    16-bit products lose more to columns that do not fill a register than they gain.

    Attributes
    ----------
    narrow : bool
        A 16-bit dtype.
    long : bool
        I ≥ 1024.
    """

    narrow: bool
    long: bool

    @classmethod
    def of(cls, dtype: torch.dtype, intermediate_size: int) -> Layout:
        """Layout for experts of one dtype and width."""
        return cls(narrow=dtype in {torch.bfloat16, torch.float16}, long=intermediate_size >= 1024)

    def widened(self, num_rows: int) -> bool:
        """Whether so many rows run in float32, on matrices widened on the fly."""
        return self.narrow and num_rows >= WIDEN_ROWS and cpu_features().widen_bf16

    def feature_major(self, num_rows: int) -> bool:
        """Whether ``[features, n]`` is also the order in memory."""
        if self.narrow and not self.widened(num_rows):
            return False
        return num_rows >= 8 and (num_rows <= 64 or self.long)

    def matrix(self, flat: Tensor, width: int) -> Tensor:
        """View flat memory of ``width · n`` numbers as ``[width, n]``."""
        num_rows = flat.shape[0] // width
        return flat.view(width, num_rows) if self.feature_major(num_rows) else flat.view(num_rows, width).t()

    def columns(self, rows: Tensor) -> Tensor:
        """``[n, ·]`` as the right operand ``[·, n]`` of a product with many features."""
        turned = rows.t()
        return turned.contiguous() if self.long and self.feature_major(rows.shape[0]) else turned

    def rows_of_product(self, matrix: Tensor, columns: Tensor) -> Tensor:
        """``(matrix · columns)ᵀ``, ``[n, M]``, row-major because rows are what is added up afterwards."""
        num_rows = columns.shape[1]
        if self.long and self.feature_major(num_rows):
            return product(matrix, columns).t().contiguous()
        y = columns.new_empty(num_rows, matrix.shape[0])
        product(matrix, columns, out=y.t())
        return y
