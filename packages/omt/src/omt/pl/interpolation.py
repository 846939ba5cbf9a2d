"""The way from one group to the next: panels of interpolated cells and components."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from omt.grouped import group_label
from omt.io import read_uns
from omt.pl._embedding import Blob, basis_of, blobs_of, draw_blobs, draw_cells, frame, legend_handles
from omt.pl._labels import place_labels
from omt.pl._style import finish, import_pyplot, label_colors, legend_beside
from omt.tl._cells import cells_of, features, group_cells, responsibilities_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from anndata import AnnData
    from numpy.typing import NDArray

    from omt.grouped import GroupedMixtures

    Array = NDArray[np.float64]

__all__ = ["interpolation"]

_FAINT = 0.01  # pairs of components with a smaller share of the cells get no ellipse
_TOLD_APART = 10  # colours; with more names, numbers help
_PANEL = 3.5  # inches
_NEIGHBOURS = 5  # measured cells whose place on an embedding an interpolated cell takes the mean of


def interpolation(
    adata: AnnData,
    source: object,
    target: object,
    t: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    *,
    basis: str | None = None,
    n: int | None = None,
    measured: bool = True,
    title: str | None = None,
    random_state: int = 0,
    show: bool | None = None,
    save: str | Path | bool | None = None,
) -> NDArray[np.object_]:
    """Draw a panel for each step of the way between two neighbouring groups.

    Ends show the measured cells, panels between them the cells of `omt.tl.interpolate(kind="move")`, in the colour of
    the component they come from; grey are the measured cells of both ends. Ellipses are one standard deviation of the
    cells between each two components. With more than ten components, each has a number in its largest ellipse.

    Parameters
    ----------
    adata
        After `omt.tl.transport`.
    source, target
        Neighbours in the chain.
    t
        How far along each panel is, 0 to 1.
    basis
        `"umap"` for `obsm["X_umap"]`, and so on. Interpolated cells stand at the mean of the five measured cells that
        are nearest to them in the features, because such a picture has no map for new cells. By default the plane of
        the two directions in which the cells of both groups vary most, onto which everything is projected.
    n
        Interpolated cells of a panel; as many as `source` has by default.
    measured
        Where a group that was measured lies at the time of a panel, draw its cells as black rings: what interpolation
        should have found.
    title
        Title of the picture.
    random_state
        Seed of the interpolated cells.
    show, save
        As in scanpy; see `omt.pl.sankey`.

    Returns
    -------
    array of matplotlib.axes.Axes
        One for each `t`.

    Raises
    ------
    ValueError
        Groups that are no neighbours, `t` outside of 0 to 1 or empty.
    """
    from omt.tl.interpolate import interpolate

    steps = [float(step) for step in t]
    if not steps:
        raise ValueError("t is empty; give at least one number from 0 to 1")
    model = read_uns(adata, need="transport")
    i, j = model.position(source, "source"), model.position(target, "target")
    ends = {place: cells_of(adata, model, place) for place in (i, j)}
    both = np.concatenate([ends[i], ends[j]])
    plane, short, known = _plane(adata, model, both, basis)
    colors = label_colors(adata, model.labels, list(dict.fromkeys((*model.names(i), *model.names(j)))))
    figure, panels = _panels(len(steps))
    drawn: list[list[Blob]] = []
    rings = None
    for ax, step in zip(panels, steps, strict=True):
        draw_cells(ax, known[both], "0.85", size=12.0)
        if step in (0.0, 1.0):
            place = i if step == 0.0 else j
            R = responsibilities_of(adata, model, place, ends[place])
            palette = [colors[name] for name in model.names(place)]
            draw_cells(ax, known[ends[place]], [palette[k] for k in R.argmax(axis=1)], size=12.0)
            blobs = blobs_of(known[ends[place]], R, model.names(place), palette)
        else:
            cells = interpolate(adata, source=source, target=target, t=step, n=n, random_state=random_state)
            xy = plane(features(cells, model.use_rep) if model.use_rep != "X" else np.asarray(cells.X))
            draw_cells(ax, xy, [colors[name] for name in cells.obs["omt_source"].astype(str)], size=12.0)
            blobs = _pair_blobs(cells, xy, colors)
        draw_blobs(ax, blobs)
        drawn.append(blobs)
        between = _measured_at(adata, model, i, j, step) if measured and 0.0 < step < 1.0 else np.empty(0, dtype=int)
        if between.size:
            xy = known[between]
            area = float(np.clip(3000.0 / len(xy), 4.0, 12.0))
            rings = ax.scatter(
                xy[:, 0], xy[:, 1], s=area, facecolor="none", edgecolor="black", linewidth=0.4, alpha=0.7, zorder=1.5
            )  # below the ellipses
        frame(ax, short)
        ax.set_title(_panel_title(model, i, j, step), fontsize=10)
    columns = panels[0].get_gridspec().ncols
    for place, ax in enumerate(panels):
        if place % columns:
            ax.set_ylabel("")
        if place + columns < len(panels):
            ax.set_xlabel("")
    panels[0].autoscale_view()
    if title is not None:
        figure.suptitle(title)
    figure.tight_layout()
    shown = {blob.name for blobs in drawn for blob in blobs}
    _explain(panels, drawn, {name: color for name, color in colors.items() if name in shown}, rings is not None)
    finish(panels[0], show=show, save=save, name="omt_interpolation", fresh=True)
    return panels


def _panels(n: int) -> tuple[Any, NDArray[np.object_]]:
    """A figure and its `n` axes, in one row or two."""
    columns = n if n <= 3 else -(-n // 2)
    rows = -(-n // columns)
    figure, axes = import_pyplot().subplots(
        rows, columns, figsize=(_PANEL * columns, (_PANEL + 0.3) * rows), sharex=True, sharey=True, squeeze=False
    )
    for ax in axes.flat[n:]:
        ax.remove()
    return figure, axes.ravel()[:n]


def _explain(panels: NDArray[np.object_], drawn: Sequence[list[Blob]], colors: dict[str, str], rings: bool) -> None:
    """Numbers in the panels where colours are too many to tell apart, and the legend of all of them."""
    from matplotlib.lines import Line2D

    numbered = len(colors) > _TOLD_APART
    if numbered:
        number = {name: str(i) for i, name in enumerate(colors, start=1)}
        for ax, blobs in zip(panels, drawn, strict=True):
            largest = {blob.name: blob for blob in sorted(blobs, key=lambda blob: blob.mass)}.values()
            place_labels(
                ax, [b.center for b in largest], [number[b.name] for b in largest], fontsize=7.5,
                priority=[b.mass for b in largest],
            )  # fmt: skip
    style: dict[str, Any] = {"marker": "o", "linestyle": "none"}
    handles = [
        *legend_handles(colors, numbered=numbered),
        Line2D([], [], markersize=5, markerfacecolor="0.8", markeredgewidth=0, label="measured at both ends", **style),
    ]
    if rings:
        label = "measured at this time"
        handles.append(
            Line2D([], [], markersize=4, markerfacecolor="none", markeredgecolor="black", label=label, **style)
        )
    figure = panels[0].figure
    columns = panels[0].get_gridspec().ncols
    height = 0.9 * figure.get_size_inches()[1]
    legend_beside(panels[min(columns, len(panels)) - 1], handles, height=height, widen=True)


def _plane(
    adata: AnnData, model: GroupedMixtures, rows: NDArray[np.int64], basis: str | None
) -> tuple[Callable[[Array], Array], str, Array]:
    """A function that puts features `[n, D]` on the plane, its name, and where the measured cells are, `[N, 2]`."""
    X = _dense(features(adata, model.use_rep))
    if basis is None:
        center = X[rows].mean(axis=0)
        axes = np.linalg.svd(X[rows] - center, full_matrices=False)[2][:2].T
        if axes.shape[1] < 2:
            axes = np.pad(axes, ((0, 0), (0, 2 - axes.shape[1])))

        def project(Z: Array) -> Array:
            return np.asarray((_dense(Z) - center) @ axes, dtype=np.float64)

        return project, "principal axis", project(X)
    from scipy.spatial import cKDTree

    xy, short = basis_of(adata, basis)
    k = min(_NEIGHBOURS, len(X))
    tree = cKDTree(X)

    def nearest(Z: Array) -> Array:
        index = tree.query(_dense(Z), k=k)[1].reshape(len(Z), k)
        return np.asarray(xy[index].mean(axis=1), dtype=np.float64)

    return nearest, short, xy


def _pair_blobs(cells: AnnData, xy: Array, colors: dict[str, str]) -> list[Blob]:
    """Ellipses of the cells between each two components, in the colour of the source."""
    pairs = cells.obs.groupby(["omt_source", "omt_target"], observed=True).indices
    blobs = []
    for (origin, _), rows in pairs.items():
        if len(rows) < max(3, _FAINT * len(xy)):
            continue
        (blob,) = blobs_of(xy[rows], np.ones((len(rows), 1)), [str(origin)], [colors[str(origin)]])
        blobs.append(blob._replace(mass=len(rows) / len(xy)))
    return blobs


def _time(model: GroupedMixtures, i: int, j: int, step: float) -> float | None:
    """Time of a panel where groups are numbers."""
    first, last = model.groups[i], model.groups[j]
    if isinstance(first, str) or isinstance(last, str):
        return None
    return first + step * (last - first)


def _measured_at(adata: AnnData, model: GroupedMixtures, i: int, j: int, step: float) -> NDArray[np.int64]:
    """Rows of the cells that were measured at the time of a panel."""
    time = _time(model, i, j, step)
    if time is None:
        return np.empty(0, dtype=np.int64)
    groups = group_cells(adata, model.groupby)
    for code, value in enumerate(groups.values):
        if isinstance(value, float) and np.isclose(value, time, rtol=1e-9, atol=0.0):
            return np.flatnonzero(groups.codes == code)
    return np.empty(0, dtype=np.int64)


def _panel_title(model: GroupedMixtures, i: int, j: int, step: float) -> str:
    time = _time(model, i, j, step)
    if time is not None:
        return f"{model.groupby} {time:g}"
    if step in (0.0, 1.0):
        return group_label(model.groups[i if step == 0.0 else j])
    return f"t = {step:g}"


def _dense(X: Any) -> Array:
    return np.asarray(X.toarray() if hasattr(X, "toarray") else X, dtype=np.float64)
