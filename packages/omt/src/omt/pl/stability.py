"""Transitions between two groups with their intervals, largest first: which of them to trust."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from omt.grouped import group_label
from omt.io import read_uns
from omt.pl._style import finish, new_axes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from anndata import AnnData
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

__all__ = ["draw_intervals", "stability"]


def draw_intervals(
    ax: Axes,
    names: Sequence[str],
    found: Array,
    lower: Array,
    upper: Array,
    by_chance: Array,
    verdict: NDArray[np.int64],
) -> Axes:
    """Draw one row for each of `n` transitions, from top to bottom.

    Parameters
    ----------
    ax
        Empty axes.
    names
        `n` labels.
    found, lower, upper
        `[n]`: probabilities and the ends of their intervals.
    by_chance
        `[n]`: probabilities under independence.
    verdict
        `[n]`: 1 above independence, -1 below, 0 undecided.
    """
    rows = np.arange(len(names))
    shades = {1: "tab:blue", 0: "0.6", -1: "tab:orange"}
    colors = [shades[int(v)] for v in verdict]
    ax.hlines(rows, lower, upper, colors=colors, linewidth=2.5, zorder=2)
    for value, label in ((1, "more than chance"), (-1, "less than chance"), (0, "undecided")):
        chosen = np.asarray(verdict) == value
        if chosen.any():
            face = "white" if value == 0 else shades[value]
            ax.scatter(
                found[chosen], rows[chosen], s=28, facecolor=face, edgecolor=shades[value], label=label, zorder=3
            )
    ax.scatter(by_chance, rows, s=70, marker="|", color="black", linewidth=1.2, label="independence", zorder=4)
    ax.set_yticks(rows, names, fontsize=9)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set_xlim(-0.02, 1.02)
    ax.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.grid(axis="x", color="0.9", linewidth=0.6, zorder=0)
    ax.set_axisbelow(True)
    return ax


def stability(
    adata: AnnData,
    source: object,
    target: object,
    *,
    direction: str = "forward",
    n_top: int = 30,
    title: str | None = None,
    ax: Axes | None = None,
    show: bool | None = None,
    save: str | Path | bool | None = None,
) -> Axes:
    """Draw the largest transitions between two groups with the intervals that `omt.tl.bootstrap` found.

    Coloured transitions differ from independence, the black tick: over the replicates their ratio to it stays on one
    side of 1. The tick is that of the plan itself and moves with the replicates, so a coloured bar may just reach it.

    Parameters
    ----------
    adata
        After `omt.tl.bootstrap`.
    source, target
        Groups, in their order.
    direction
        `"forward"`: where source components go. `"backward"`: where target components come from.
    n_top
        Most transitions shown: those that carry most mass.
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
        There is no bootstrap.
    ValueError
        A group that is not in the chain, another direction, or `n_top` below 1.
    """
    from omt.tl.bootstrap import stored_pair

    if direction not in {"forward", "backward"}:
        raise ValueError(f"direction is {direction!r}; it must be 'forward' or 'backward'")
    if n_top < 1:
        raise ValueError(f"n_top is {n_top}; it must be at least 1")
    model = read_uns(adata, need="transport")
    i, j = model.position(source, "source"), model.position(target, "target")
    stored = stored_pair(adata, model, i, j)
    table = model.table(i, j, direction=direction)
    joint = model.joint(i, j)
    forward = direction == "forward"
    mass, verdict = (joint, stored["verdict"]) if forward else (joint.T, stored["verdict"].T)
    chosen = np.argsort(-mass, axis=None, kind="stable")[:n_top]
    k, l = np.unravel_index(chosen, mass.shape)
    starts, ends = (model.names(i), model.names(j)) if forward else (model.names(j), model.names(i))
    arrow = "→" if forward else "←"
    names = [f"{starts[a]} {arrow} {ends[b]}" for a, b in zip(k, l, strict=True)]
    longest = 0.075 * max(len(name) for name in names)
    width, height = 4.6 + longest, 0.24 * len(names) + 1.5
    fresh = ax is None
    ax = new_axes(ax, (width, height))
    figure: Any = ax.figure
    if fresh:
        figure.subplots_adjust(
            left=(longest + 0.3) / width, right=1 - 0.3 / width, bottom=1.0 / height, top=1 - 0.4 / height
        )
    interval = stored[direction]
    by_chance = mass.sum(axis=0) / mass.sum()
    draw_intervals(
        ax, names, table[k, l], interval["lower"][k, l], interval["upper"][k, l], by_chance[l], verdict[k, l]
    )
    level = float(adata.uns["omt"]["bootstrap"]["level"])
    ax.set_xlabel(f"probability, {level:.0%} interval over {adata.uns['omt']['bootstrap']['unit']}s")
    below = -0.62 / (figure.get_figheight() * ax.get_position().height)
    ax.legend(loc="upper right", bbox_to_anchor=(1.0, below), ncols=4, frameon=False, fontsize=8, columnspacing=1.0)
    first, last = group_label(model.group(source)), group_label(model.group(target))
    ax.set_title(title if title is not None else f"{first} {arrow} {last}" if forward else f"{last} {arrow} {first}")
    return finish(ax, show=show, save=save, name="omt_stability", fresh=fresh)
