"""Descendants: mass carried forward along the chain."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omt.io import read_uns
from omt.tl._cells import start_copy
from omt.tl._mass import carry, start_mass, write_mass

if TYPE_CHECKING:
    from anndata import AnnData
    from numpy.typing import ArrayLike

__all__ = ["push"]


def push(
    adata: AnnData,
    source: object,
    target: object,
    *,
    data: str | ArrayLike | None = None,
    subset: object = None,
    key_added: str = "omt_push",
    copy: bool = False,
) -> AnnData | None:
    """Push a distribution over the cells of `source` forward to the cells of `target`: where do these cells go?

    Parameters
    ----------
    adata
        After `omt.tl.transport`.
    source, target
        Groups, in the order of the chain.
    data
        What to start from. A column of `obs` together with `subset`: equal mass on the cells with these values. A
        numeric column, or an array with a number per cell: masses. Default: all
        cells of `source`.
    subset
        A value of the column `data`, or several.
    key_added
        Column of `obs` to write.
    copy
        Return a copy instead of writing into `adata`.

    Returns
    -------
    AnnData or None
        Writes `obs[key_added]`: the starting distribution on `source`, the carried one on every group up to `target`
        (each sums to 1), NaN on all other cells.

    Raises
    ------
    ValueError
        A group that is not in the chain or not in its order, a subset without cells, masses that are negative.

    Examples
    --------
    >>> import omt
    >>> adata, _ = omt.datasets.branching_process(100)
    >>> omt.tl.fit_mixtures(adata, groupby="time", labels="cell_type", use_rep="X_state")
    >>> omt.tl.transport(adata, time_key="time")
    >>> omt.tl.push(adata, source=0, target=4, data="cell_type", subset="stem")
    >>> round(float(adata.obs.loc[adata.obs["time"] == 4, "omt_push"].sum()), 6)
    1.0
    """
    model = read_uns(adata, need="transport")
    path = model.path(model.position(source, "source"), model.position(target, "target"))
    results = carry(adata, model, path, start_mass(adata, model, path[0], data, subset))
    result = start_copy(adata, copy)
    write_mass(result, results, key_added)
    return result if copy else None
