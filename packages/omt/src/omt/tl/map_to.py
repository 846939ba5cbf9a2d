"""Cells of one group moved to where the plan takes them in the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from omt.io import read_uns
from omt.tl._cells import cells_of, features, start_copy

if TYPE_CHECKING:
    from anndata import AnnData

__all__ = ["map_to"]


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
        Key of `obsm` to write.
    random_state
        Seed of `kind="sample"`.
    copy
        Return a copy instead of writing into `adata`.

    Returns
    -------
    AnnData or None
        Writes `obsm[key_added]` `[N, D]`; NaN for cells outside of `source`.

    Raises
    ------
    KeyError
        The representation is missing.
    ValueError
        A group that is not in the chain or not in its order, `kind` is none of the three, features that are not finite.
    """
    model = read_uns(adata, need="transport")
    i, j = model.position(source, "source"), model.position(target, "target")
    X: Any = features(adata, model.use_rep)
    rows = cells_of(adata, model, i)
    moved = model.map_cells(_dense(X[rows]), i, j, kind=kind, random_state=random_state)
    result = np.full((adata.n_obs, moved.shape[1]), np.nan)
    result[rows] = moved
    out = start_copy(adata, copy)
    out.obsm[key_added] = result
    return out if copy else None


def _dense(X: Any) -> Any:
    return X.toarray() if hasattr(X, "toarray") else np.asarray(X, dtype=np.float64)
