"""Transition probabilities between the components, or the labels, of two groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from omt.grouped import group_label
from omt.io import read_uns
from omt.tl._cells import cells_of, obs_column, responsibilities_of

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData
    from numpy.typing import NDArray

    from omt.grouped import GroupedMixtures

__all__ = ["compute_table", "transition_matrix"]


def transition_matrix(
    adata: AnnData, source: object, target: object, *, direction: str = "forward", by: str | None = None
) -> pd.DataFrame:
    """Compute where each component's mass goes (forward) or comes from (backward).

    Between groups that are not neighbours in the chain, the tables of the steps are multiplied.

    Parameters
    ----------
    adata
        After `omt.tl.transport`.
    source, target
        Groups, in their order.
    direction
        `"forward"`: row `k` is the distribution of the descendants of source component `k`. `"backward"`: row `l` is
        the distribution of the origins of target component `l`.
    by
        A column of `obs`: rows and columns are its values instead of components (moscot's `cell_transition`). Cells of
        a label are averaged through their responsibilities.

    Returns
    -------
    pandas.DataFrame
        Rows sum to 1. Also kept in `uns["omt"]["transitions"]["<source>-><target>"]` as arrays (`table`, `rows`,
        `columns`) with the `direction`, because a
        component's name may contain a slash, which no column of a table in an h5ad file may.

    Raises
    ------
    KeyError
        `by` is not a column of `obs`.
    ValueError
        A group that is not in the chain (the message lists those that are), or not in its order.
    """
    model = read_uns(adata, need="transport")
    frame = compute_table(adata, model, source, target, direction=direction, by=by)
    tables = adata.uns["omt"].setdefault("transitions", {})
    key = f"{group_label(model.group(source))}->{group_label(model.group(target))}".replace("/", "|")
    tables[key] = {
        "direction": direction,
        "by": "component" if by is None else by,
        "table": frame.to_numpy(),
        "rows": np.array(frame.index.astype(str), dtype=str),
        "columns": np.array(frame.columns.astype(str), dtype=str),
    }
    return frame


def compute_table(
    adata: AnnData, model: GroupedMixtures, source: object, target: object, *, direction: str, by: str | None
) -> pd.DataFrame:
    """Compute the table of `transition_matrix` without writing it anywhere."""
    frame = model.frame(source, target, direction=direction)
    if by is None:
        return frame
    i, j = model.position(source, "source"), model.position(target, "target")
    start, end = (i, j) if direction == "forward" else (j, i)
    labels = obs_column(adata, by, "by").astype(object)
    rows, mass = _label_masses(adata, model, start, labels)
    columns, arriving = _label_masses(adata, model, end, labels)
    share = arriving / np.maximum(arriving.sum(axis=0, keepdims=True), 1e-300)
    values = (mass / mass.sum(axis=1, keepdims=True)) @ frame.to_numpy() @ share.T
    values /= values.sum(axis=1, keepdims=True)  # a component of unlabelled cells only passes its mass to no label
    return type(frame)(values, index=rows, columns=columns)


def _label_masses(
    adata: AnnData, model: GroupedMixtures, position: int, labels: pd.Series
) -> tuple[list[str], NDArray[np.float64]]:
    """Labels that occur in a group, and the responsibilities summed over the cells of each `[labels, K]`."""
    import pandas as pd

    rows = cells_of(adata, model, position)
    present = labels.iloc[rows]
    known = present.notna().to_numpy()
    if not known.any():
        raise ValueError(
            f"no cell of {model.groupby} {group_label(model.groups[position])} has a value in "
            f"adata.obs[{labels.name!r}]"
        )
    codes, names = pd.factorize(present[known].astype(str), sort=True)
    R = responsibilities_of(adata, model, position, rows[known])
    sums = np.zeros((len(names), R.shape[1]))
    np.add.at(sums, codes, R)
    return [str(name) for name in names], sums
