"""Cells of one group moved to where the plan takes them in the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from omt.io import read_uns
from omt.tl._assign import cells
from omt.tl._cells import cells_of, model_features, start_copy

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

__all__ = ["map_to", "mapped_table"]


def map_to(
    adata: AnnData,
    source: object,
    target: object,
    *,
    kind: str = "barycentric",
    key_added: str = "X_omt_map",
    random_state: int = 0,
    copy: bool = False,
) -> AnnData | None:
    """Move every cell of `source` into `target`, in the space the mixtures were fitted in.

    Parameters
    ----------
    adata
        After `omt.tl.transport`.
    source, target
        Groups, in the order of the chain. Groups that are not neighbours are joined by the chain's component plan and
        mapped in one piece.
    kind
        `"barycentric"`: the mean of where a cell goes. `"sample"`: one draw from it, so that the moved cells are
        distributed like the target. `"mode"`: the map of the most probable pair of components.
    key_added
        Key of `obsm` to write. Mixtures of genes give a table whose columns are their names, for example
        `adata.obsm["X_omt_map"]["ISG15"]`.
    random_state
        Seed of `kind="sample"`.
    copy
        Return a copy instead of writing into `adata`.

    Returns
    -------
    AnnData or None
        Writes `obsm[key_added]` `[N, D]`, dense; NaN for cells outside of `source`. Mapped counts are those of a cell
        of the same size: with size factors its depth stays what it was.

    Raises
    ------
    KeyError
        The representation is missing.
    ValueError
        A group that is not in the chain or not in its order, `kind` is none of the three, features that are not finite,
        genes that are missing, or more than 10⁸ numbers to write.
    """
    model = read_uns(adata, need="transport")
    i, j = model.position(source, "source"), model.position(target, "target")
    X: Any = model_features(adata, model)
    rows = cells_of(adata, model, i)
    moved = model.map_cells(cells(X, rows), i, j, kind=kind, random_state=random_state, n_written=adata.n_obs)
    out = start_copy(adata, copy)
    out.obsm[key_added] = mapped_table(moved, rows, adata.obs_names, model.mixtures[j].feature_names)
    return out if copy else None


def mapped_table(moved: Array, rows: NDArray[np.int64], cells: pd.Index, names: tuple[str, ...] | None) -> Any:
    """Images `[n, D]` of some cells as an array `[N, D]` with NaN for all others; a table where features have names."""
    import pandas as pd

    result = np.full((len(cells), moved.shape[1]), np.nan)
    result[rows] = moved
    return result if names is None else pd.DataFrame(result, index=cells, columns=pd.Index(names))
