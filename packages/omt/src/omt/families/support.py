"""Which values a family of distributions can have: checked once, where data come in.

Letters: ``n`` rows of a block, ``d`` features.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def require_counts(X: Any, first_row: int, family: str) -> None:
    """Raise ``ValueError`` naming row, column and value of the first entry that is not 0, 1, 2, …

    Parameters
    ----------
    X
        Block of rows, ``[n, d]``, dense or CSR (of which only the stored entries are looked at).
    first_row
        Index of the block's first row in the data.
    family
        Who asks.

    Examples
    --------
    >>> import numpy as np
    >>> require_counts(np.array([[0.0, 0.5]]), 7, "poisson")
    Traceback (most recent call last):
        ...
    ValueError: X has 0.5 in row 7, column 1; family 'poisson' needs counts 0, 1, 2, …: give raw counts, e.g. \
layer="counts", not normalised or logarithmic values
    """
    values = _values(X)
    bad = (values < 0) | (values != np.floor(values))
    if bad.any():
        raise ValueError(
            f"X has {_first(X, bad, first_row)}; family {family!r} needs counts 0, 1, 2, …: give raw counts, e.g. "
            'layer="counts", not normalised or logarithmic values'
        )


def require_binary(X: Any, first_row: int, family: str) -> None:
    """Raise ``ValueError`` naming row, column and value of the first entry that is neither 0 nor 1."""
    values = _values(X)
    bad = (values != 0) & (values != 1)
    if bad.any():
        raise ValueError(
            f"X has {_first(X, bad, first_row)}; family {family!r} needs 0 and 1: give (X > 0), or family='poisson' "
            "for counts"
        )


def require_positive(X: Any, first_row: int, family: str) -> None:
    """Raise ``ValueError`` naming row, column and value of the first entry that is not above zero."""
    if hasattr(X, "toarray"):
        hole = np.flatnonzero(np.diff(X.indptr) < X.shape[1])
        where = ""
        if hole.size:
            row = int(hole[0])
            present = X.indices[X.indptr[row] : X.indptr[row + 1]]
            column = int(np.setdiff1d(np.arange(X.shape[1]), present)[0])
            where = f" (row {first_row + row}, column {column} is 0)"
        raise ValueError(
            f"X is sparse{where}; family {family!r} needs a dense array of numbers > 0: use a family of counts, or "
            "give features that are never zero"
        )
    bad = ~(X > 0)
    if bad.any():
        raise ValueError(
            f"X has {_first(X, bad, first_row)}; family {family!r} needs numbers > 0: leave out or shift such "
            "features, or use a family of counts or of real numbers"
        )


def _values(X: Any) -> NDArray[Any]:
    return np.asarray(X.data if hasattr(X, "toarray") else X)


def _first(X: Any, bad: NDArray[np.bool_], first_row: int) -> str:
    """Value and place of the first entry that is marked."""
    if hasattr(X, "toarray"):
        position = int(np.argmax(bad))
        row = int(np.searchsorted(X.indptr, position, side="right")) - 1
        column, value = int(X.indices[position]), X.data[position]
    else:
        row, column = (int(i) for i in np.argwhere(bad)[0])
        value = X[row, column]
    return f"{float(value):g} in row {first_row + row}, column {column}"
