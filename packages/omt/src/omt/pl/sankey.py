"""Mass flowing between the components of consecutive groups, as ribbons."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from omt.grouped import group_label
from omt.io import read_uns
from omt.pl._labels import spread, text_sizes
from omt.pl._style import categories_of, finish, label_colors, new_axes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from anndata import AnnData
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    from omt.grouped import GroupedMixtures

    Array = NDArray[np.float64]

__all__ = ["Column", "Flow", "draw_sankey", "sankey"]

_BAR = 0.06  # width of a node, where columns are 1 apart
_AIR = 0.18  # share of a column's height left between its nodes


class Column(NamedTuple):
    """One group: its title, the names of its `K` components and their masses `[K]`."""

    title: str
    names: Sequence[str]
    masses: Array


class Flow(NamedTuple):
    """Ribbons between two columns `[K, L]`: their widths where they leave and where they arrive (they differ when
    mass grows).
    """

    leaving: Array
    arriving: Array


def draw_sankey(
    ax: Axes, columns: Sequence[Column], flows: Sequence[Flow], colors: Mapping[str, str], *, min_mass: float = 0.003
) -> Axes:
    """Draw columns of nodes and the ribbons between them.

    Parameters
    ----------
    ax
        Empty axes.
    columns
        `T` of them, left to right; masses of a column sum to 1.
    flows
        `T - 1` of them.
    colors
        Colour of every component name; a ribbon has the colour of its source.
    min_mass
        Ribbons thinner than this on both ends are left out.
    """
    from matplotlib.patches import Rectangle

    tops: list[Array] = []
    for t, column in enumerate(columns):
        masses = np.asarray(column.masses, dtype=np.float64)
        heights = (1.0 - _AIR) * masses / masses.sum()
        gap = _AIR / max(1, len(masses) - 1)
        top = 1.0 - np.concatenate([[0.0], np.cumsum(heights[:-1] + gap)])
        tops.append(top)
        for name, y, height in zip(column.names, top, heights, strict=True):
            ax.add_patch(Rectangle((t - _BAR / 2, y - height), _BAR, height, color=colors[name], linewidth=0, zorder=3))
    for t, flow in enumerate(flows):
        left = (1.0 - _AIR) * flow.leaving / np.sum(columns[t].masses)
        right = (1.0 - _AIR) * flow.arriving / np.sum(columns[t + 1].masses)
        start = tops[t][:, None] - np.cumsum(left, axis=1) + left
        end = tops[t + 1][None, :] - np.cumsum(right, axis=0) + right
        for k, l in np.argwhere(np.maximum(left, right) >= min_mass):
            ribbon = (t + _BAR / 2, start[k, l], left[k, l]), (t + 1 - _BAR / 2, end[k, l], right[k, l])
            ax.add_patch(_ribbon(*ribbon, color=colors[columns[t].names[k]]))
    ax.set_xlim(-0.5, len(columns) - 0.5)
    ax.set_ylim(-0.02, 1.02)
    ax.set_yticks([])
    ax.set_xticks(range(len(columns)), [column.title for column in columns])
    ax.tick_params(axis="x", length=0)
    for side in ax.spines.values():
        side.set_visible(False)
    _label_columns(ax, columns, tops)
    return ax


def _ribbon(start: tuple[float, float, float], end: tuple[float, float, float], *, color: str) -> Any:
    """A band between two vertical edges given as (x, top, height), with horizontal tangents at both ends."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    (x0, top0, height0), (x1, top1, height1) = start, end
    middle = (x0 + x1) / 2
    points = [
        (x0, top0), (middle, top0), (middle, top1), (x1, top1),
        (x1, top1 - height1), (middle, top1 - height1), (middle, top0 - height0), (x0, top0 - height0), (x0, top0),
    ]  # fmt: skip
    curve = [Outline.CURVE4] * 3
    codes = [Outline.MOVETO, *curve, Outline.LINETO, *curve, Outline.CLOSEPOLY]
    return PathPatch(Outline(points, codes), facecolor=color, alpha=0.45, linewidth=0, zorder=1)


def _label_columns(ax: Axes, columns: Sequence[Column], tops: Sequence[Array]) -> None:
    """Name the nodes: outside of the first and last column, and in between only names that no outer column shows."""
    from matplotlib.patheffects import withStroke

    outer = {*columns[0].names, *columns[-1].names}
    height_px = ax.get_window_extent().height / (ax.get_ylim()[1] - ax.get_ylim()[0])
    for t, column in enumerate(columns):
        last = t == len(columns) - 1
        masses = np.asarray(column.masses) / np.sum(column.masses)
        middles = tops[t] - (1.0 - _AIR) * masses / 2
        chosen = [k for k, name in enumerate(column.names) if t == 0 or last or name not in outer]
        if not chosen:
            continue
        texts = [column.names[k] for k in chosen]
        fontsize = 9.0
        heights = text_sizes(ax, texts, fontsize)[:, 1] * 1.08
        if heights.sum() > height_px:  # the caller's axes are low: smaller letters
            fontsize *= height_px / float(heights.sum())
            heights = text_sizes(ax, texts, fontsize)[:, 1] * 1.08
        ys = spread(middles[chosen], heights / height_px, 0.0, 1.0)
        side = -1.0 if t == 0 else 1.0
        for y, k, text in zip(ys, chosen, texts, strict=True):
            ax.annotate(
                text,
                xy=(t + side * _BAR / 2, float(middles[k])),
                xytext=(t + side * (_BAR / 2 + 0.07), float(y)),
                ha="right" if t == 0 else "left",
                va="center",
                fontsize=fontsize,
                arrowprops={"arrowstyle": "-", "color": "0.6", "linewidth": 0.6, "shrinkA": 1, "shrinkB": 0},
                path_effects=[withStroke(linewidth=2.0, foreground="white")],
                annotation_clip=False,
                zorder=5,
            )


def sankey(
    adata: AnnData,
    *,
    min_mass: float = 0.003,
    title: str | None = None,
    ax: Axes | None = None,
    show: bool | None = None,
    save: str | Path | bool | None = None,
) -> Axes:
    """Draw the whole chain: a column a group, a node a component, a ribbon the mass between two components.

    Parameters
    ----------
    adata
        After `omt.tl.transport`.
    min_mass
        Ribbons below this share of a group's mass are left out.
    title
        Title of the picture.
    ax
        Axes to draw on; a new figure, wide and high enough for its labels, by default.
    show, save
        As in scanpy: `save=True` or a suffix writes `figures/omt_sankey…`, a path writes that file. With
        `show=False` a new figure is closed once it is saved.

    Returns
    -------
    matplotlib.axes.Axes

    Notes
    -----
    A ribbon leaves with the share of its source component (rows of the forward table times the source weight) and
    arrives with the share of its target
    component (the backward table times the target weight). For a balanced plan both are the same; where it widens,
    mass has grown.
    """
    model = read_uns(adata, need="transport")
    flows = []
    for i, j in model.steps():
        forward, backward = model.table(i, j), model.table(i, j, direction="backward")
        flows.append(
            Flow(model.mixtures[i].weights[:, None] * forward, (model.mixtures[j].weights[:, None] * backward).T)
        )
    ranks = _ranks(adata, model, flows)
    columns = []
    for i, rank in zip(model.order, ranks, strict=True):
        names_i = model.names(i)
        columns.append(
            Column(
                group_label(model.groups[i]), [names_i[k] for k in rank], np.asarray(model.mixtures[i].weights)[rank]
            )
        )
    flows = [
        Flow(leaving[np.ix_(ranks[t], ranks[t + 1])], arriving[np.ix_(ranks[t], ranks[t + 1])])
        for t, (leaving, arriving) in enumerate(flows)
    ]
    names = sorted({name for column in columns for name in column.names})
    widest = max(len(column.names) for column in columns)
    inner = [len(name) for column in columns[1:-1] for name in column.names]
    spacing = max(1.6, 0.085 * max(inner, default=0) + 0.5)  # inches between columns: names stand there
    fresh = ax is None
    ax = new_axes(ax, (3.8 + spacing * (len(columns) - 1), max(4.0, 0.21 * widest + 1.0)))
    draw_sankey(ax, columns, flows, label_colors(adata, model.labels, names), min_mass=min_mass)
    ax.set_xlabel(model.groupby)
    if title is not None:
        ax.set_title(title)
    return finish(ax, show=show, save=save, name="omt_sankey", fresh=fresh)


def _ranks(adata: AnnData, model: GroupedMixtures, flows: Sequence[Flow]) -> list[NDArray[np.int64]]:
    """Order of the nodes of each column: that of the label's categories, else the one in which ribbons cross least.

    The second is the barycentre rule for layered graphs: a node stands where its ribbons come from on average.
    """
    if model.labels is not None and model.labels in adata.obs:
        place = {name: i for i, name in enumerate(categories_of(adata.obs[model.labels]))}
        return [
            np.argsort([place.get(name, len(place)) for name in model.names(i)], kind="stable") for i in model.order
        ]
    ranks = [np.arange(model.mixtures[model.order[0]].K)]
    for flow in flows:
        height = np.argsort(ranks[-1])  # place of each node of the column before
        origin = (flow.arriving * height[:, None]).sum(axis=0) / np.maximum(flow.arriving.sum(axis=0), 1e-300)
        ranks.append(np.argsort(origin, kind="stable"))
    return ranks
