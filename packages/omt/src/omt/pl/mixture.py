"""Components of the fitted mixtures on an embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from omt.grouped import group_label
from omt.io import read_uns
from omt.pl._embedding import basis_of, blobs_of, draw_blobs, draw_cells, frame, label_blobs
from omt.pl._style import finish, label_colors, new_axes
from omt.tl._cells import cells_of, responsibilities_of

if TYPE_CHECKING:
    from pathlib import Path

    from anndata import AnnData
    from matplotlib.axes import Axes

__all__ = ["mixture"]


def mixture(
    adata: AnnData,
    group: object = None,
    *,
    basis: str = "umap",
    title: str | None = None,
    ax: Axes | None = None,
    show: bool | None = None,
    save: str | Path | bool | None = None,
) -> Axes:
    """Draw the cells of one group and its components as ellipses of one standard deviation.

    Parameters
    ----------
    adata
        After `omt.tl.fit_mixtures`.
    group
        The group; the first by default.
    basis
        `"umap"` for `obsm["X_umap"]`, and so on.
    title
        Title; the group by default.
    ax, show, save
        As in scanpy; see `omt.pl.sankey`.

    Returns
    -------
    matplotlib.axes.Axes

    Notes
    -----
    Ellipses are means and covariances of the cells on the picture, weighted by their responsibilities: an embedding
    such as UMAP has no map that could carry the
    fitted covariances there.
    """
    model = read_uns(adata)
    position = 0 if group is None else model.position(group, "group", chain=False)
    xy, short = basis_of(adata, basis)
    rows = cells_of(adata, model, position)
    R = responsibilities_of(adata, model, position, rows)
    names = model.names(position)
    colors = label_colors(adata, model.labels, names)
    palette = [colors[name] for name in names]
    blobs = blobs_of(xy[rows], R, names, palette)
    fresh = ax is None
    ax = new_axes(ax, (6.0, 5.5))
    others = np.setdiff1d(np.arange(adata.n_obs), rows)
    if len(others):
        draw_cells(ax, xy[others], "0.85", size=40000.0 / adata.n_obs)
    draw_cells(ax, xy[rows], [palette[k] for k in R.argmax(axis=1)], size=40000.0 / adata.n_obs)
    draw_blobs(ax, blobs)
    frame(ax, short)
    ax.set_title(f"{model.groupby} {group_label(model.groups[position])}" if title is None else title)
    ax.autoscale_view()
    label_blobs(ax, blobs, widen=fresh)
    return finish(ax, show=show, save=save, name="omt_mixture", fresh=fresh)
