"""Transition table between two groups as a heat map."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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

__all__ = ["axes_for_table", "draw_transitions", "transitions"]


def draw_transitions(ax: Axes, table: NDArray[np.float64], rows: Sequence[str], columns: Sequence[str]) -> Axes:
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
    """
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
    width, height = text_sizes(ax, ["0.00"], 7.0)[0]
    if width * 1.15 < cell_width and height * 1.15 < cell_height:
        for k, l in np.argwhere(values >= 0.01):
            shade = "white" if values[k, l] > 0.6 else "black"
            ax.text(l, k, f"{values[k, l]:.2f}", ha="center", va="center", fontsize=7.0, color=shade)
    return ax


def axes_for_table(rows: Sequence[str], columns: Sequence[str], ax: Axes | None = None) -> Axes:
    """Return `ax`, or axes in a new figure that has room for the names of all rows and columns."""
    if ax is not None:
        return ax
    longest = 0.075 * max(len(name) for name in [*rows, *columns])
    width = max(3.5, 0.3 * len(columns)) + longest + 1.4
    height = max(2.6, 0.26 * len(rows)) + longest + 1.0
    ax = new_axes(None, (width, height))
    figure: Any = ax.figure
    figure.subplots_adjust(
        left=(longest + 0.5) / width, right=1 - 0.3 / width, bottom=(longest + 0.5) / height, top=1 - 0.4 / height
    )
    return ax


def transitions(
    adata: AnnData,
    source: object,
    target: object,
    *,
    direction: str = "forward",
    by: str | None = None,
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
    title
        Title; the two groups by default.
    ax, show, save
        As in scanpy; see `omt.pl.sankey`.

    Returns
    -------
    matplotlib.axes.Axes
    """
    from omt.tl.transition_matrix import compute_table

    model = read_uns(adata, need="transport")
    frame = compute_table(adata, model, source, target, direction=direction, by=by)
    rows, columns = [str(v) for v in frame.index], [str(v) for v in frame.columns]
    ax = axes_for_table(rows, columns, ax)
    draw_transitions(ax, frame.to_numpy(), rows, columns)
    start, end = group_label(model.group(source)), group_label(model.group(target))
    ax.set_ylabel(f"{model.groupby} {start if direction == 'forward' else end}")
    ax.set_xlabel(f"{model.groupby} {end if direction == 'forward' else start}")
    ax.set_title(title if title is not None else f"{start} → {end}" if direction == "forward" else f"{end} ← {start}")
    return finish(ax, show=show, save=save, name="omt_transitions")
