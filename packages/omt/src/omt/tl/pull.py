"""Ancestors: mass carried backward along the chain."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omt.io import read_uns
from omt.tl._cells import start_copy
from omt.tl._mass import carry, start_mass, write_mass

if TYPE_CHECKING:
    from anndata import AnnData
    from numpy.typing import ArrayLike

__all__ = ["pull"]


def pull(
    adata: AnnData,
    source: object,
    target: object,
    *,
    data: str | ArrayLike | None = None,
    subset: object = None,
    key_added: str = "omt_pull",
    copy: bool = False,
) -> AnnData | None:
    """Pull a distribution over the cells of `target` back to the cells of `source`: where do these cells come from?

    Parameters
    ----------
    adata
        After `omt.tl.transport`.
    source, target
        Groups, in the order of the chain; the distribution starts on `target`.
    data, subset
        What to start from, on the cells of `target`; as in `omt.tl.push`.
    key_added
        Column of `obs` to write.
    copy
        Return a copy instead of writing into `adata`.

    Returns
    -------
    AnnData or None
        Writes `obs[key_added]`: the starting distribution on `target`, the origins on every group back to `source`
        (each sums to 1), NaN on all other cells.

    Raises
    ------
    ValueError
        As in `omt.tl.push`.

    Examples
    --------
    >>> import omt
    >>> adata, _ = omt.datasets.branching_process(100)
    >>> omt.tl.fit_mixtures(adata, groupby="time", labels="cell_type", use_rep="X_state")
    >>> omt.tl.transport(adata, time_key="time")
    >>> omt.tl.pull(adata, source=0, target=4, data="cell_type", subset="B1")
    >>> start = adata.obs[adata.obs["time"] == 0]
    >>> bool(start.loc[start["cell_type"] == "A progenitor", "omt_pull"].sum() < 0.01)  # of the other branch
    True
    """
    model = read_uns(adata, need="transport")
    path = model.path(model.position(source, "source"), model.position(target, "target"))[::-1]
    results = carry(adata, model, path, start_mass(adata, model, path[0], data, subset))
    result = start_copy(adata, copy)
    write_mass(result, results, key_added)
    return result if copy else None
