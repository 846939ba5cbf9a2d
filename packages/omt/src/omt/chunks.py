"""Reading samples in blocks of rows, the same way from memory, from a file and from a stream.

Everything after this file sees only blocks: a dense array or a CSR matrix of a few thousand rows. So the memory of
a fit does not depend on the number of samples.

Letters: ``N`` samples, ``d`` features, ``n`` rows of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray
from scipy import sparse

# Rows that stay together when the order is shuffled. Runs from a file are read at one go, so they are longer; both
# are short against a batch, so that a file sorted by group still gives mixed batches.
_RUN_IN_MEMORY = 16
_RUN_ON_DISK = 128
# Batches held back by the shuffle of a stream, which cannot be read in another order.
_STREAM_BATCHES = 16
# Numbers whose squares, and the inverses of these, each precision can still sum.
_LARGEST = {np.dtype(np.float64): np.float64(1e150), np.dtype(np.float32): np.float64(1e17)}


@dataclass(frozen=True)
class Source:
    """Samples that can be read in blocks of rows; made by :func:`as_source`.

    Attributes
    ----------
    n_samples, n_features
        ``N`` and ``d``.
    is_sparse
        Whether blocks are CSR matrices.
    in_memory
        Whether rows can be gathered in any order at no cost.
    """

    n_samples: int
    n_features: int
    is_sparse: bool
    in_memory: bool
    _rows: Any = None
    _canonical: bool = False
    _stream: Callable[[], Iterable[Any]] | None = None

    def chunks(self, size: int, dtype: DTypeLike = np.float64) -> Iterator[tuple[int, Any]]:
        """Blocks of at most ``size`` rows in order, each with the index of its first row.

        Parameters
        ----------
        size
            Largest number of rows of a block.
        dtype
            Type of the blocks.

        Yields
        ------
        start, block
            ``block`` is ``[n, d]``, a dense array or a CSR matrix.

        Raises
        ------
        ValueError
            If a stream yields blocks of another width, or another number of rows than at first.
        """
        if self._stream is None:
            for start in range(0, self.n_samples, size):
                yield start, _block(self._rows[start : start + size], dtype, self._canonical)
            return
        start = 0
        for piece in self._stream():
            block = _stream_block(piece, self.n_features, start)
            for first in range(0, block.shape[0], size):
                part = block[first : first + size]
                yield start + first, _block(part, dtype)
            start += block.shape[0]
        if start != self.n_samples:
            raise ValueError(
                f"the callable X gave {start} rows in this pass and {self.n_samples} in the first one; every call must "
                "yield the same blocks in the same order"
            )

    def shuffled(
        self, size: int, rng: np.random.Generator, dtype: DTypeLike = np.float64
    ) -> Iterator[tuple[NDArray[np.int64], Any]]:
        """Every row once, in batches of ``size`` rows drawn from all over the data.

        Short runs of consecutive rows are shuffled, so a file is read in pieces and not row by row. A stream is
        shuffled within a buffer of sixteen batches.

        Yields
        ------
        rows, block
            Indices ``[n]`` of the rows and the block ``[n, d]``.
        """
        if self._stream is not None:
            yield from self._shuffled_stream(size, rng, dtype)
            return
        length = max(1, min(_RUN_IN_MEMORY if self.in_memory else _RUN_ON_DISK, size))
        starts = rng.permutation(np.arange(0, self.n_samples, length))
        per_batch = max(1, size // length)
        for first in range(0, starts.size, per_batch):
            runs = [np.arange(s, min(s + length, self.n_samples)) for s in starts[first : first + per_batch]]
            rows = np.concatenate(runs)
            if self.in_memory:
                yield rows, _block(self._rows[rows], dtype, self._canonical)
            else:
                pieces = [self._rows[int(run[0]) : int(run[-1]) + 1] for run in runs]
                yield rows, _block(_stack(pieces), dtype)

    def _shuffled_stream(
        self, size: int, rng: np.random.Generator, dtype: DTypeLike
    ) -> Iterator[tuple[NDArray[np.int64], Any]]:
        held: list[tuple[NDArray[np.int64], Any]] = []

        def drain() -> Iterator[tuple[NDArray[np.int64], Any]]:
            rows = np.concatenate([index for index, _ in held])
            block = _stack([piece for _, piece in held])
            order = rng.permutation(rows.size)
            for first in range(0, rows.size, size):
                pick = order[first : first + size]
                yield rows[pick], block[pick]

        count = 0
        for start, block in self.chunks(size, dtype):
            held.append((np.arange(start, start + block.shape[0]), block))
            count += block.shape[0]
            if count >= _STREAM_BATCHES * size:
                yield from drain()
                held, count = [], 0
        if held:
            yield from drain()

    def take(self, rows: NDArray[np.int64], dtype: DTypeLike = np.float64) -> Any:
        """Rows at the given increasing indices, ``[n, d]``; one pass over what is not in memory."""
        if self.in_memory:
            return _block(self._rows[rows], dtype, self._canonical)
        pieces = []
        for start, block in self.chunks(8192, dtype):
            first, last = np.searchsorted(rows, [start, start + block.shape[0]])
            if last > first:
                pieces.append(block[rows[first:last] - start])
        return _stack(pieces)


def as_source(X: Any, *, name: str = "X") -> Source:
    """Wrap samples of any accepted kind so that they can be read in blocks.

    Parameters
    ----------
    X
        ``[N, d]``: an array or anything :func:`numpy.asarray` takes; a scipy sparse matrix; an on-disk matrix that
        is indexed by rows (``h5py``, zarr, the ``X`` of an AnnData opened backed, dense or CSR); or a callable
        without arguments that yields blocks of rows, the same ones at each call.
    name
        What to call the data in error messages.

    Returns
    -------
    Source

    Raises
    ------
    ValueError
        If the data are not two-dimensional, not real numbers, empty, or stored by columns on disk.
    TypeError
        If they are of a kind that cannot be read by rows.

    Examples
    --------
    >>> import numpy as np
    >>> source = as_source(np.arange(10.0).reshape(5, 2))
    >>> [(start, block.shape) for start, block in source.chunks(2)]
    [(0, (2, 2)), (2, (2, 2)), (4, (1, 2))]
    """
    if isinstance(X, Source):
        return X
    if callable(X) and not hasattr(X, "shape"):
        return _stream_source(X, name)
    if hasattr(X, "obsm") and hasattr(X, "n_obs"):
        raise TypeError(
            f"{name} is an AnnData object; give one of its matrices (adata.obsm['X_pca'] or adata.X), or use omt.tl"
        )
    if is_sparse(X):
        rows, csr, in_memory = X.tocsr(), True, True
    elif getattr(X, "format", None) in ("csr", "csc") and hasattr(X, "shape"):
        if X.format == "csc":
            raise ValueError(
                f"{name} is stored by columns (CSC) on disk and cannot be read by rows; load it into memory first"
            )
        rows, csr, in_memory = X, True, False
    elif _is_on_disk(X):
        rows, csr, in_memory = X, False, False
    else:
        if isinstance(X, np.ma.MaskedArray) and np.ma.is_masked(X):
            raise ValueError(f"{name} is a masked array with masked entries; fill them or drop their samples first")
        rows, csr, in_memory = np.asarray(X), False, True
    if len(rows.shape) != 2:
        raise ValueError(f"{name} has shape {tuple(rows.shape)}; it must be two-dimensional, [samples, features]")
    if rows.shape[0] == 0 or rows.shape[1] == 0:
        raise ValueError(f"{name} has shape {tuple(rows.shape)}; it must have at least one sample and one feature")
    if np.dtype(rows.dtype).kind not in "fiub":
        raise ValueError(f"{name} has dtype {rows.dtype}; it must hold real numbers")
    canonical = in_memory and csr and bool(rows.has_canonical_format)
    return Source(int(rows.shape[0]), int(rows.shape[1]), csr, in_memory, rows, canonical)


def _is_on_disk(X: Any) -> bool:
    """Whether ``X`` is indexed like an array without being one in memory (h5py, zarr, dask)."""
    return (
        not isinstance(X, np.ndarray)
        and all(hasattr(X, a) for a in ("shape", "dtype", "__getitem__", "ndim"))
        and (not hasattr(X, "to_numpy"))
    )


def _stream_source(stream: Callable[[], Iterable[Any]], name: str) -> Source:
    n_samples, n_features, csr = 0, 0, False
    for piece in stream():
        if n_features == 0:
            if len(getattr(piece, "shape", ())) != 2:
                raise ValueError(f"the callable {name} must yield two-dimensional blocks [rows, features]")
            n_features, csr = int(piece.shape[1]), is_sparse(piece)
        n_samples += int(_stream_block(piece, n_features, n_samples).shape[0])
    if n_samples == 0 or n_features == 0:
        raise ValueError(f"the callable {name} yielded no rows")
    # A generator function can be called again; an iterator that is spent would silently end every later pass.
    return Source(n_samples, n_features, csr, False, None, False, stream)


def _stream_block(piece: Any, n_features: int, start: int) -> Any:
    shape = tuple(getattr(piece, "shape", ()))
    if len(shape) != 2 or shape[1] != n_features:
        raise ValueError(
            f"the callable X yielded a block of shape {shape} at row {start}; it must be [rows, {n_features}]"
        )
    return piece


def _block(rows: Any, dtype: DTypeLike, canonical: bool = False) -> Any:
    """Rows as a dense array or CSR matrix of the type, without a copy if they are one already.

    An entry that a sparse matrix stores in several parts becomes one: squares and factorials do not add up. Matrices
    known to be ``canonical`` have none.
    """
    if is_sparse(rows):
        block = rows.tocsr().astype(dtype, copy=False)
        if not canonical and not block.has_canonical_format:
            block = block.copy()
            block.sum_duplicates()
        return block
    return np.asarray(rows, dtype=dtype)


def _stack(pieces: list[Any]) -> Any:
    return (
        sparse.vstack(pieces, format="csr") if is_sparse(pieces[0]) else np.concatenate([np.asarray(p) for p in pieces])
    )


def is_sparse(X: Any) -> bool:
    """Whether ``X`` is a scipy sparse matrix or array."""
    return bool(sparse.issparse(X))


def largest(dtype: DTypeLike) -> np.float64:
    """The largest number that ``float64`` or ``float32`` can square and sum; its inverse is the smallest spread.

    Examples
    --------
    >>> float(largest("float64"))
    1e+150
    """
    return _LARGEST[np.dtype(dtype)]


def require_finite(X: Any, first_row: int, *, name: str = "X", dtype: DTypeLike = np.float64) -> None:
    """Raise ``ValueError`` naming row and column of the first NaN, infinity or number too large to be squared.

    Parameters
    ----------
    X
        Block of rows, dense or CSR.
    first_row
        Index of the block's first row in the data.
    name
        What to call the data.
    dtype
        Precision of what is computed from the block.

    Examples
    --------
    >>> import numpy as np
    >>> require_finite(np.array([[0.0, 1.0], [np.nan, 2.0]]), 10)
    Traceback (most recent call last):
        ...
    ValueError: X has nan in row 11, column 0; remove or fill such samples first
    """
    values = X.data if is_sparse(X) else X
    limit = largest(dtype)
    finite = np.abs(values) <= limit  # neither NaN nor infinity is
    if finite.all():
        return
    if is_sparse(X):
        position = int(np.argmin(finite))
        row = int(np.searchsorted(X.indptr, position, side="right")) - 1
        column, value = int(X.indices[position]), values[position]
    else:
        row, column = (int(i) for i in np.argwhere(~finite)[0])
        value = values[row, column]
    where = f"{name} has {value} in row {first_row + row}, column {column}"
    if np.isfinite(value):
        raise ValueError(f"{where}; squares of numbers beyond {limit:g} overflow, so give {name} in another unit")
    raise ValueError(f"{where}; remove or fill such samples first")
