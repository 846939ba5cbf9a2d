"""What a fit on genes needs to know before it starts: are entries counts, which genes occur, how deep are cells.

Letters: `N` cells, `G` genes, `d` genes that occur.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from omt.tl._assign import CHUNK
from omt.tl._cells import numbers, obs_column, select_columns

if TYPE_CHECKING:
    from anndata import AnnData
    from numpy.typing import ArrayLike, NDArray

    Array = NDArray[np.float64]

__all__ = ["COUNT_FAMILIES", "SIZED_FAMILIES", "Expressed", "cell_sizes", "expressed"]

COUNT_FAMILIES = ("poisson", "negative_binomial", "multinomial", "bernoulli")
SIZED_FAMILIES = ("poisson", "negative_binomial")


class Expressed(NamedTuple):
    """Genes that occur in any group: their matrix `[N, d]`, their names, and the total of each cell `[N]`."""

    X: Any
    names: tuple[str, ...]
    totals: Array


def expressed(adata: AnnData, X: Any, rows: NDArray[np.int64], family: str, layer: str | None) -> Expressed:
    """Read the cells of all groups once: refuse what is no count, and leave out genes without any.

    Parameters
    ----------
    adata
        Names of cells and genes.
    X
        `[N, G]`, in memory or on disk.
    rows
        Cells that are in a group, rising.
    family
        Who asks for counts.
    layer
        Where `X` is from.

    Raises
    ------
    ValueError
        An entry is no count (the message has its cell and gene and the layers that there are), no cell has any count,
        or two genes have one name.

    Warns
    -----
    UserWarning
        Genes without a count are left out; the message counts them.
    """
    if not adata.var_names.is_unique:
        raise ValueError("adata.var_names are not unique; call adata.var_names_make_unique() first")
    sums, totals = np.zeros(X.shape[1]), np.zeros(X.shape[0])
    for start in range(0, len(rows), CHUNK):
        part = rows[start : start + CHUNK]
        block = X[part]
        sparse = hasattr(block, "tocsr")
        values = block.data if sparse else np.asarray(block)
        bad = ~(np.isfinite(values) & (values >= 0) & (values == np.floor(values)))
        if bad.any():
            if sparse:
                block = block.tocoo()
                place = int(np.argmax(bad))
                row, column, value = int(block.row[place]), int(block.col[place]), block.data[place]
            else:
                row, column = (int(i) for i in np.argwhere(bad)[0])
                value = values[row, column]
            where = "adata.X" if layer is None else f"adata.layers[{layer!r}]"
            others = [name for name in adata.layers if name != layer]
            raise ValueError(
                f"{where} has {float(value):g} in cell {adata.obs_names[part[row]]!r}, "
                f"gene {adata.var_names[column]!r}; family={family!r} needs counts 0, 1, 2, …: "
                f"name the raw counts by layer= (layers are: {', '.join(others) or '(none)'})"
            )
        sums += np.asarray(block.sum(axis=0), dtype=np.float64).ravel()
        totals[part] = np.asarray(block.sum(axis=1), dtype=np.float64).ravel()
    found = np.flatnonzero(sums > 0)
    if not found.size:
        raise ValueError("no cell of any group has a count; nothing to fit")
    if found.size < sums.size:
        warnings.warn(
            f"{sums.size - found.size} of {sums.size} genes have no count in any group; they are left out",
            UserWarning,
            stacklevel=3,
        )
    return Expressed(select_columns(X, found), tuple(str(name) for name in adata.var_names[found]), totals)


def cell_sizes(
    adata: AnnData, size_factors: str | ArrayLike, totals: Array, rows: NDArray[np.int64]
) -> tuple[Any, float]:
    """Size factor of each cell, and the total count of a cell of size one, the same for all groups.

    Parameters
    ----------
    adata
        Annotated data.
    size_factors
        `"total"`, a column of `obs`, or an array `[N]`.
    totals
        Total count of each cell, `[N]`.
    rows
        Cells that are in a group.

    Returns
    -------
    sizes
        `"total"` or an array `[N]`.
    reference
        Positive.

    Raises
    ------
    KeyError
        There is no such column.
    ValueError
        A factor is not positive (the message names the cell), or their number is wrong.
    """
    if isinstance(size_factors, str) and size_factors == "total":
        return "total", float(totals[rows].mean())
    if isinstance(size_factors, str):
        name = f"adata.obs[{size_factors!r}]"
        given = numbers(obs_column(adata, size_factors, "size_factors"), name)
    else:
        name, given = "size_factors", numbers(size_factors, "size_factors")
    if given.shape != (adata.n_obs,):
        raise ValueError(
            f"size_factors has shape {given.shape}; it must be 'total', a column of obs, or [{adata.n_obs}]"
        )
    bad = ~(np.isfinite(given[rows]) & (given[rows] > 0))
    if bad.any():
        cell = rows[int(np.argmax(bad))]
        raise ValueError(f"{name} is {given[cell]:g} in cell {adata.obs_names[cell]!r}; size factors must be positive")
    return given, float(totals[rows].sum() / given[rows].sum())
