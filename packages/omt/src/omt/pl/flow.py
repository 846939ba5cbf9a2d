"""Mass flowing between components, as arrows on an embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from omt.io import read_uns
from omt.pl._embedding import Blob, basis_of, blobs_of, draw_arrows, draw_blobs, draw_cells, frame, label_blobs
from omt.pl._style import finish, label_colors, new_axes
from omt.tl._cells import cells_of, responsibilities_of

if TYPE_CHECKING:
    from pathlib import Path

    from anndata import AnnData
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

__all__ = ["flow"]


def flow(
    adata: AnnData,
    source: object = None,
    target: object = None,
    *,
    basis: str = "umap",
    min_mass: float = 0.01,
    title: str | None = None,
    ax: Axes | None = None,
    show: bool | None = None,
    save: str | Path | bool | None = None,
) -> Axes:
    """Draw one arrow for each pair of components that exchange mass; its width is that mass.

    Parameters
    ----------
    adata
        After `omt.tl.transport`.
    source, target
        Two groups of the chain: arrows of the plan between them. By default all steps of the chain are drawn.
    basis
        `"umap"` for `obsm["X_umap"]`, and so on.
    min_mass
        Arrows with less than this share of a step's mass are left out.
    title
        Title of the picture.
    ax, show, save
        As in scanpy; see `omt.pl.sankey`.

    Returns
    -------
    matplotlib.axes.Axes

    Notes
    -----
    Ellipses are the components' cells on the picture (one standard deviation), arrows join their centres and have the
    colour of the source. Widths are on one scale for all steps; where a centre hardly moves there is no arrow. Names
    that would hide the picture are numbers, which a legend explains.
    """
    model = read_uns(adata, need="transport")
    if (source is None) != (target is None):
        raise ValueError("give both source= and target=, or neither for all steps of the chain")
    steps = model.steps() if source is None else [(model.position(source, "source"), model.position(target, "target"))]
    xy, short = basis_of(adata, basis)
    blobs: dict[int, list[Blob]] = {}
    shades = np.full(adata.n_obs, "#d9d9d9", dtype=object)
    positions = sorted({p for step in steps for p in step})
    colors = label_colors(adata, model.labels, list(dict.fromkeys(n for p in positions for n in model.names(p))))
    for position in positions:
        rows = cells_of(adata, model, position)
        R = responsibilities_of(adata, model, position, rows)
        palette = [colors[name] for name in model.names(position)]
        blobs[position] = blobs_of(xy[rows], R, model.names(position), palette)
        shades[rows] = np.array(palette, dtype=object)[R.argmax(axis=1)]
    fresh = ax is None
    ax = new_axes(ax, (7.0, 6.0))
    draw_cells(ax, xy, list(shades))
    for position in positions:
        draw_blobs(ax, blobs[position])
    ax.autoscale_view()
    arrows: list[tuple[Blob, Blob, float]] = []  # of all steps together, so that widths compare across them
    for i, j in steps:
        W = model.joint(i, j) / model.joint(i, j).sum()
        arrows += [(blobs[i][k], blobs[j][l], float(W[k, l])) for k, l in np.argwhere(min_mass <= W)]
    masses = [mass for _, _, mass in arrows]
    draw_arrows(
        ax, [a.center for a, _, _ in arrows], [b.center for _, b, _ in arrows], masses, [a.color for a, _, _ in arrows]
    )
    if arrows:
        ax.annotate(
            f"arrow width: mass, the widest {max(masses):.1%} of a step", (1.0, 0.0), xycoords="axes fraction",
            xytext=(0, -20), textcoords="offset points", ha="right", va="top", fontsize=8, color="0.3",
        )  # fmt: skip
    frame(ax, short)
    if title is not None:
        ax.set_title(title)
    label_blobs(ax, _one_per_name([blob for position in positions for blob in blobs[position]]), widen=fresh)
    return finish(ax, show=show, save=save, name="omt_flow", fresh=fresh)


def _one_per_name(blobs: list[Blob]) -> list[Blob]:
    """Merge components of the same name: a cell type that occurs at many times is named once, at the centre of its
    mass.
    """
    merged = []
    for name in dict.fromkeys(blob.name for blob in blobs):
        same = [blob for blob in blobs if blob.name == name]
        mass = sum(blob.mass for blob in same)
        center: NDArray[np.float64] = np.sum([blob.mass * blob.center for blob in same], axis=0) / mass
        merged.append(Blob(name, mass, center, same[0].cov, same[0].color))
    return merged
