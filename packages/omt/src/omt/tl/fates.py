"""What each cell becomes by the end of the chain."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from omt.grouped import group_label
from omt.io import read_uns
from omt.tl._cells import cells_of, responsibilities_of, start_copy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData

__all__ = ["fates"]


def fates(
    adata: AnnData,
    *,
    target: object = None,
    terminal: Sequence[str] | None = None,
    key_added: str = "omt_fates",
    copy: bool = False,
) -> AnnData | None:
    """Compute for every cell the probability to end in each component of the last group.

    Parameters
    ----------
    adata
        After `omt.tl.transport`.
    target
        The group in which cells end; the last one of the chain by default.
    terminal
        Names of the components of `target` to keep; all by default. What is left out is not shared among the others,
        so rows may sum to less than 1.
    key_added
        Key of `obsm` and of the names in `uns["omt"]`.
    copy
        Return a copy instead of writing into `adata`.

    Returns
    -------
    AnnData or None
        Writes `obsm[key_added]` `[N, F]` (NaN for cells after `target` and outside of the chain) and
        `uns["omt"][key_added]` with `names` (`F` of them) and `target`.

    Raises
    ------
    ValueError
        `target` is not in the chain; `terminal` names no component there (the message lists those that exist).

    Examples
    --------
    >>> import omt
    >>> adata, _ = omt.datasets.branching_process(100)
    >>> omt.tl.fit_mixtures(adata, groupby="time", labels="cell_type", use_rep="X_state")
    >>> omt.tl.transport(adata, time_key="time")
    >>> omt.tl.fates(adata, terminal=["A1", "A2", "B1"])
    >>> adata.obsm["omt_fates"].shape
    (500, 3)
    """
    model = read_uns(adata, need="transport")
    end = model.order[-1] if target is None else model.position(target, "target")
    names = list(model.names(end))
    unknown = [name for name in terminal or () if name not in names]
    if unknown:
        raise ValueError(
            f"terminal={unknown[0]!r} is no component of {model.groupby} {group_label(model.groups[end])}; "
            f"components are: {', '.join(names)}"
        )
    kept = [names.index(name) for name in (names if terminal is None else terminal)]
    result = np.full((adata.n_obs, len(kept)), np.nan)
    for position in model.order[: model.order.index(end) + 1]:
        rows = cells_of(adata, model, position)
        R = responsibilities_of(adata, model, position, rows)
        reached = R if position == end else R @ model.table(position, end)
        result[rows] = reached[:, kept]
    out = start_copy(adata, copy)
    out.obsm[key_added] = result
    out.uns["omt"][key_added] = {
        "names": np.array([names[k] for k in kept], dtype=str),
        "target": group_label(model.groups[end]),
    }
    return out if copy else None
