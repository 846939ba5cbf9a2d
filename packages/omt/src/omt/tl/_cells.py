"""What the verbs read from an AnnData: groups, features and responsibilities, checked where the user hands them over.

Letters: `N` cells, `D` features, `K` components of a group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData
    from numpy.typing import NDArray

    from omt.grouped import Group, GroupedMixtures

    Array = NDArray[np.float64]

__all__ = [
    "COMPONENT_KEY",
    "RESPONSIBILITIES_KEY",
    "Columns",
    "Groups",
    "cells_of",
    "features",
    "group_cells",
    "matrix",
    "model_features",
    "numbers",
    "obs_column",
    "responsibilities_of",
    "select_columns",
    "soft_labels",
    "start_copy",
]

COMPONENT_KEY = "omt_component"
RESPONSIBILITIES_KEY = "X_omt_responsibilities"


class Groups(NamedTuple):
    """Groups of cells in order: their values, each cell's position `[N]` (-1: none), and whether the order means
    something.
    """

    values: tuple[Group, ...]
    codes: NDArray[np.int64]
    ordered: bool


def start_copy(adata: AnnData, copy: bool) -> AnnData:
    """Return `adata` itself, or a copy of it in memory."""
    if not copy:
        return adata
    return adata.to_memory() if adata.isbacked else adata.copy()


def obs_column(adata: AnnData, key: str, argument: str) -> Any:
    """Return `adata.obs[key]`; `argument` is the name by which the caller gave it."""
    if key not in adata.obs:
        raise KeyError(f"{argument}={key!r}: adata.obs has no such column; columns are: {_listed(adata.obs.columns)}")
    return adata.obs[key]


def numbers(values: Any, name: str) -> Array:
    """Return `values` as numbers; `name` is what the caller calls them."""
    try:
        result: Array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} does not hold numbers: {error}") from error
    return result


def group_cells(adata: AnnData, groupby: str, argument: str = "groupby") -> Groups:
    """Split the cells by a column: numbers by size, categories in their order; cells without a value belong to no
    group.
    """
    import pandas as pd

    column = obs_column(adata, groupby, argument)
    ordered = isinstance(column.dtype, pd.CategoricalDtype) and bool(column.cat.ordered)
    if (
        isinstance(column.dtype, pd.CategoricalDtype)
        or column.dtype == object
        or pd.api.types.is_string_dtype(column.dtype)
    ):
        categorical = column.astype("category").cat.remove_unused_categories()
        numbers = pd.to_numeric(pd.Series(categorical.cat.categories.astype(str)), errors="coerce")
        if numbers.isna().any():
            names = tuple(str(value) for value in categorical.cat.categories)
            return Groups(names, categorical.cat.codes.to_numpy().astype(np.int64), ordered)
        values = np.append(numbers.to_numpy(dtype=np.float64), np.nan)[categorical.cat.codes.to_numpy()]
    elif pd.api.types.is_bool_dtype(column.dtype):
        return Groups(("False", "True"), column.to_numpy().astype(np.int64), False)
    elif pd.api.types.is_numeric_dtype(column.dtype):
        values = column.to_numpy(dtype=np.float64, na_value=np.nan)
    else:
        raise TypeError(
            f"{argument}={groupby!r}: adata.obs[{groupby!r}] has dtype {column.dtype}; it must "
            "be numeric or categorical"
        )
    known = np.isfinite(values)
    unique, inverse = np.unique(values[known], return_inverse=True)
    codes = np.full(adata.n_obs, -1, dtype=np.int64)
    codes[known] = inverse
    return Groups(tuple(float(v) for v in unique), codes, True)


def features(adata: AnnData, use_rep: str) -> Any:
    """Return the features of all cells `[N, D]`: a finite float64 array from `obsm`, or `adata.X` as it is stored for
    `use_rep="X"`.
    """
    if use_rep == "X":
        return matrix(adata, None)
    if use_rep not in adata.obsm:
        raise KeyError(
            f"use_rep={use_rep!r}: adata.obsm has no such key; it has: {_listed(adata.obsm.keys())}. "
            "Compute it first (for example scanpy.pp.pca), or give another one"
        )
    stored = adata.obsm[use_rep]
    stored = stored.toarray() if hasattr(stored, "toarray") else stored
    X = np.asarray(stored, dtype=np.float64)
    if not np.isfinite(X).all():
        row, column = (int(v) for v in np.argwhere(~np.isfinite(X))[0])
        raise ValueError(
            f"adata.obsm[{use_rep!r}] has {X[row, column]} in cell {adata.obs_names[row]!r} "
            f"(row {row}, column {column}); drop such cells or repair them first"
        )
    return X


def _expression(adata: AnnData) -> Any:
    """`adata.X`; `None` if there is none, also where it is on disk."""
    try:
        return adata.X
    except KeyError:
        return None


def matrix(adata: AnnData, layer: str | None) -> Any:
    """Return `adata.X` or a layer `[N, G]` as it is stored; a sparse one in memory by rows."""
    if layer is not None and layer not in adata.layers:
        raise KeyError(f"layer={layer!r}: adata.layers has no such key; it has: {_listed(adata.layers.keys())}")
    X = _expression(adata) if layer is None else adata.layers[layer]
    if X is None:
        known = _listed(adata.layers.keys())
        raise ValueError(f"adata.X is empty; give layer= (adata.layers has: {known}) or use_rep=")
    return X.tocsr() if hasattr(X, "tocsr") else X


class Columns:
    """Some columns `[N, d]` of a matrix on disk, read row by row as that one is.

    Parameters
    ----------
    stored
        Matrix `[N, G]` that is indexed by rows.
    columns
        Positions `[d]`.
    """

    ndim = 2

    def __init__(self, stored: Any, columns: NDArray[np.intp]) -> None:
        self._stored, self._columns = stored, columns
        self.shape = (int(stored.shape[0]), int(columns.size))
        self.dtype = stored.dtype

    def __getitem__(self, rows: Any) -> Any:
        return self._stored[rows][:, self._columns]


def select_columns(X: Any, columns: NDArray[np.intp]) -> Any:
    """Some columns of a matrix: a smaller matrix in memory, a view that reads rows where it is on disk."""
    if columns.size == X.shape[1] and np.array_equal(columns, np.arange(columns.size)):
        return X
    return X[:, columns] if isinstance(X, np.ndarray) or hasattr(X, "tocsr") else Columns(X, columns)


def model_features(adata: AnnData, model: GroupedMixtures) -> Any:
    """Return the features `[N, D]` that the model was fitted on: a representation, or genes of `X` or a layer by their
    names.
    """
    if model.use_rep != "X":
        return features(adata, model.use_rep)
    X = matrix(adata, str(model.settings.get("layer", "")) or None)
    names = model.mixtures[0].feature_names
    if names is None:
        return X
    if tuple(adata.var_names) == names:
        return X
    if not adata.var_names.is_unique:
        raise ValueError("adata.var_names are not unique; call adata.var_names_make_unique()")
    where = adata.var_names.get_indexer(list(names))
    if (where < 0).any():
        missing = [name for name, i in zip(names, where, strict=True) if i < 0]
        raise ValueError(
            f"adata lacks {len(missing)} of the {len(names)} genes that the mixtures were fitted on; the first is "
            f"{missing[0]!r}"
        )
    return select_columns(X, where)


def soft_labels(adata: AnnData, key: str) -> pd.DataFrame:
    """Return soft labels `[N, K]` from `obsm` as a table whose columns are the names of the components."""
    import pandas as pd

    if key not in adata.obsm:
        raise KeyError(f"responsibilities={key!r}: adata.obsm has no such key; it has: {_listed(adata.obsm.keys())}")
    frame = pd.DataFrame(adata.obsm[key])
    return frame.set_axis([str(name) for name in frame.columns], axis=1)


def cells_of(adata: AnnData, model: GroupedMixtures, position: int) -> NDArray[np.int64]:
    """Rows of the cells of one group, in the order of `adata`."""
    groups = group_cells(adata, model.groupby)
    value = model.groups[position]
    if value not in groups.values:
        listed = _listed([value])
        raise ValueError(
            f"adata.obs[{model.groupby!r}] has no cell of {listed}, for which a mixture was "
            f"fitted; it has: {_listed(groups.values)}"
        )
    return np.flatnonzero(groups.codes == groups.values.index(value))


def responsibilities_of(adata: AnnData, model: GroupedMixtures, position: int, rows: NDArray[np.int64]) -> Array:
    """Responsibilities `[n, K]` of the given cells of a group; rows sum to 1 in float64."""
    if RESPONSIBILITIES_KEY not in adata.obsm:
        raise KeyError(f"adata.obsm has no {RESPONSIBILITIES_KEY!r}; run omt.tl.fit_mixtures first")
    R = np.asarray(adata.obsm[RESPONSIBILITIES_KEY][rows, : model.mixtures[position].K], dtype=np.float64)
    sums = R.sum(axis=1, keepdims=True)
    if not (sums > 0).all():
        bad = adata.obs_names[rows[int(np.flatnonzero(~(sums[:, 0] > 0))[0])]]
        raise ValueError(
            f"cell {bad!r} has no responsibilities; {model.groupby!r} has changed since omt.tl.fit_mixtures, "
            "run it again"
        )
    result: Array = R / sums
    return result


def _listed(values: Any, limit: int = 20) -> str:
    """Join the first names of a collection; `(none)` if it is empty."""
    names = [f"{v:g}" if isinstance(v, float) else str(v) for v in values]
    return ", ".join(names[:limit]) + (", …" if len(names) > limit else "") if names else "(none)"
