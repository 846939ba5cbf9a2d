"""Transition table between two groups as a heat map."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from omt.grouped import group_label
from omt.io import read_uns
from omt.pl._labels import text_sizes
from omt.pl._style import finish, new_axes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from anndata import AnnData
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    from omt.grouped import GroupedMixtures

__all__ = ["Intervals", "axes_for_table", "draw_transitions", "transitions"]


class Intervals(NamedTuple):
    """Uncertainty of a table `[K, L]`: ends of the intervals of its entries, and which hold independence."""

    lower: NDArray[np.float64]
    upper: NDArray[np.float64]
    undecided: NDArray[np.bool_]
    level: float


def draw_transitions(
    ax: Axes,
    table: NDArray[np.float64],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    intervals: Intervals | None = None,
) -> Axes:
    """Draw a table `[K, L]` of probabilities, rows from top to bottom, with its entries written where they are large
    enough to read.

    Parameters
    ----------
    ax
        Axes of final size.
    table
        `[K, L]`, between 0 and 1.
    rows, columns
        `K` and `L` names.
    intervals
        Uncertainty: intervals are written where there is room, and entries that may be independence are hatched.
    """
    from matplotlib.patheffects import withStroke

    values = np.asarray(table, dtype=np.float64)
    image = ax.imshow(values, vmin=0.0, vmax=1.0, cmap="Blues", aspect="auto", interpolation="nearest")
    figure: Any = ax.figure
    bar = figure.colorbar(
        image, ax=ax, fraction=0.04, pad=0.02
    )  # takes its room from ax, so before anything is measured
    bar.outline.set_visible(False)
    bar.set_label("probability")
    box = ax.get_window_extent()
    cell_width, cell_height = box.width / values.shape[1], box.height / values.shape[0]
    fontsize = 9.0
    line = float(text_sizes(ax, ["Ag"], fontsize)[0, 1]) * 1.1
    if min(cell_width, cell_height) < line:  # the caller's axes are small: smaller letters
        fontsize *= min(cell_width, cell_height) / line
    ax.set_xticks(range(values.shape[1]), columns, rotation=90, fontsize=fontsize)
    ax.set_yticks(range(values.shape[0]), rows, fontsize=fontsize)
    ax.tick_params(length=0)
    for side in ax.spines.values():
        side.set_visible(False)
    if intervals is not None:
        _hatch(ax, intervals.undecided)
    (width, height), (span, small) = text_sizes(ax, ["0.00"], 7.0)[0], text_sizes(ax, ["0.00–0.00"], 6.5)[0]
    if width * 1.15 < cell_width and height * 1.15 < cell_height:
        spans = intervals is not None and span * 1.1 < cell_width and (height + small) * 1.2 < cell_height
        shown = np.maximum(values, intervals.upper) >= 0.01 if intervals is not None and spans else values >= 0.01
        for k, l in np.argwhere(shown):
            dark = values[k, l] > 0.6
            style: dict[str, Any] = {"ha": "center", "color": "white" if dark else "black"}
            if intervals is not None and intervals.undecided[k, l]:  # a rim keeps letters legible on the hatching
                style["path_effects"] = [withStroke(linewidth=3.0, foreground=image.to_rgba(values[k, l]))]
            if intervals is None or not spans:
                ax.text(l, k, f"{values[k, l]:.2f}", va="center", fontsize=7.0, **style)
                continue
            half = 0.5 * (height + small) / cell_height  # the two lines together stand in the middle of the cell
            ax.text(l, k - half + 0.5 * height / cell_height, f"{values[k, l]:.2f}", va="center", fontsize=7.0, **style)
            ends = f"{intervals.lower[k, l]:.2f}–{intervals.upper[k, l]:.2f}"
            ax.text(l, k + half - 0.5 * small / cell_height, ends, va="center", fontsize=6.5, **style)
    return ax


def _hatch(ax: Axes, mask: NDArray[np.bool_]) -> None:
    """Hatch the entries of a table."""
    from matplotlib.patches import Rectangle

    for k, l in np.argwhere(mask):
        ax.add_patch(
            Rectangle(
                (l - 0.5, k - 0.5), 1.0, 1.0, fill=False, hatch="////", edgecolor="0.72", linewidth=0.0, zorder=1.5
            )
        )


def axes_for_table(rows: Sequence[str], columns: Sequence[str], ax: Axes | None = None, *, roomy: bool = False) -> Axes:
    """Return `ax`, or axes in a new figure that has room for the names of all rows and columns; `roomy` for entries of
    two lines, up to fifteen of them a side.
    """
    if ax is not None:
        return ax
    longest = 0.075 * max(len(name) for name in [*rows, *columns])
    cell = (0.66, 0.4) if roomy and max(len(rows), len(columns)) <= 15 else (0.3, 0.26)
    width = max(3.5, cell[0] * len(columns)) + longest + 1.4
    height = max(2.6, cell[1] * len(rows)) + longest + 1.0 + 0.2 * roomy
    ax = new_axes(None, (width, height))
    figure: Any = ax.figure
    figure.subplots_adjust(
        left=(longest + 0.5) / width,
        right=1 - 0.3 / width,
        bottom=(longest + 0.5) / height,
        top=1 - (0.4 + 0.2 * roomy) / height,
    )
    return ax


def transitions(
    adata: AnnData,
    source: object,
    target: object,
    *,
    direction: str = "forward",
    by: str | None = None,
    show_ci: bool = False,
    title: str | None = None,
    ax: Axes | None = None,
    show: bool | None = None,
    save: str | Path | bool | None = None,
) -> Axes:
    """Draw the table that `omt.tl.transition_matrix` computes.

    Parameters
    ----------
    adata
        After `omt.tl.transport`.
    source, target
        Groups, in their order.
    direction
        `"forward"`: rows are source components and sum to 1. `"backward"`: rows are target components.
    by
        A column of `adata.obs`: rows and columns are its values instead of components.
    show_ci
        After `omt.tl.bootstrap`: write the interval of each entry where there is room, and hatch the entries whose
        interval holds the value that they would have if descendants were drawn without regard to their origin (for a
        forward table, the share of the target component). An entry without hatching is more, or less, than chance.
    title
        Title; the two groups by default.
    ax, show, save
        As in scanpy; see `omt.pl.sankey`.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    KeyError
        `show_ci` without a bootstrap.
    ValueError
        A group that is not in the chain, or `show_ci` together with `by`.
    """
    from omt.tl.transition_matrix import compute_table

    model = read_uns(adata, need="transport")
    frame = compute_table(adata, model, source, target, direction=direction, by=by)
    rows, columns = [str(v) for v in frame.index], [str(v) for v in frame.columns]
    intervals = _intervals(adata, model, source, target, direction, by) if show_ci else None
    fresh = ax is None
    ax = axes_for_table(rows, columns, ax, roomy=show_ci)
    draw_transitions(ax, frame.to_numpy(), rows, columns, intervals=intervals)
    start, end = group_label(model.group(source)), group_label(model.group(target))
    ax.set_ylabel(f"{model.groupby} {start if direction == 'forward' else end}")
    ax.set_xlabel(f"{model.groupby} {end if direction == 'forward' else start}")
    heading = title if title is not None else f"{start} → {end}" if direction == "forward" else f"{end} ← {start}"
    ax.set_title(heading)
    if intervals is not None:
        ax.set_title(f"{heading}\nhatched: could be chance ({intervals.level:.0%} interval)", fontsize=9)
    return finish(ax, show=show, save=save, name="omt_transitions", fresh=fresh)


def _intervals(
    adata: AnnData, model: GroupedMixtures, source: object, target: object, direction: str, by: str | None
) -> Intervals:
    """What `omt.tl.bootstrap` wrote about the table between two groups."""
    from omt.tl.bootstrap import stored_pair

    if by is not None:
        raise ValueError(f"show_ci=True needs the table between components, for which there are intervals; by={by!r}")
    pair = stored_pair(adata, model, model.position(source, "source"), model.position(target, "target"))
    table, undecided = pair[direction], pair["verdict"] == 0
    return Intervals(
        table["lower"],
        table["upper"],
        undecided if direction == "forward" else undecided.T,
        float(adata.uns["omt"]["bootstrap"]["level"]),
    )
