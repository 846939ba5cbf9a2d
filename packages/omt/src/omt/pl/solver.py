"""How the plans were solved: marginal error after each step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from omt.grouped import group_label
from omt.io import read_uns
from omt.pl._style import finish, import_pyplot, legend_beside, new_axes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from anndata import AnnData
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    from omt.chain import TransportChain
    from omt.transport import Transport

__all__ = ["solver"]

_ROUNDING = 1e-17  # an error of exactly 0 has no place on a logarithmic axis
_MARKS = (  # label, marker, face and edge
    ("start, Sinkhorn sweep", "o", "white", "black"),
    ("Newton step", "o", "black", "black"),
    ("Newton step, rejected", "x", "none", "tab:red"),
)


def solver(
    plans: AnnData | Transport | TransportChain,
    *,
    title: str | None = None,
    ax: Axes | None = None,
    show: bool | None = None,
    save: str | Path | bool | None = None,
) -> Axes:
    """Draw the marginal error of each plan after each step of the solver, and the tolerance it had to reach.

    Circles are the start and Sinkhorn sweeps, filled points Newton steps, crosses Newton steps that were rejected
    because no damping made them better. Where forbidden transitions split a plan into blocks, each has its line, in
    the colour of the plan. Errors at the hotter temperatures that large and relaxed problems start from are not shown.

    Parameters
    ----------
    plans
        AnnData after `omt.tl.transport`, one transport, or a chain of them.
    title
        Title of the picture.
    ax, show, save
        As in scanpy; see `omt.pl.sankey`.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    ValueError
        No plan has steps to show: linear programs (`reg=0`) have none, and files of earlier versions did not keep them.
    """
    named = [(name, plan, *_steps(plan)) for name, plan in _named(plans)]
    named = [row for row in named if len(row[2])]
    if not named:
        raise ValueError(
            "no plan has solver steps to show: linear programs (reg=0) have none, and files of earlier versions did "
            "not keep them; run omt.tl.transport again"
        )
    plt = import_pyplot()
    from matplotlib.lines import Line2D
    from matplotlib.patheffects import withStroke
    from matplotlib.ticker import MaxNLocator

    fresh = ax is None
    ax = new_axes(ax, (6.5, 4.2))
    handles = []
    marked = np.zeros(3, dtype=bool)
    colors = plt.get_cmap("viridis")(np.linspace(0.0, 0.9, len(named)))
    for (name, _, errors, newton), color in zip(named, colors, strict=True):
        blocks = list(_blocks(errors, newton))
        label = name if len(blocks) == 1 else f"{name} ({len(blocks)} blocks)"
        handles.append(Line2D([], [], color=color, linewidth=1.6, label=label))
        for error, is_newton in blocks:
            step = np.arange(len(error))
            rejected = is_newton & (np.diff(error, prepend=np.nan) == 0.0)
            accepted = is_newton & ~rejected
            ax.plot(step, error, color=color, linewidth=1.2, label=name, zorder=2)
            ax.scatter(step[~is_newton], error[~is_newton], s=18, facecolor="white", edgecolor=[color], zorder=3)
            ax.scatter(step[accepted], error[accepted], s=18, color=[color], zorder=3)
            ax.scatter(step[rejected], error[rejected], s=26, marker="x", color="tab:red", linewidth=1.2, zorder=4)
            marked |= [(~is_newton).any(), accepted.any(), rejected.any()]
    for tolerance in sorted({row[1].tol for row in named}):
        ax.axhline(tolerance, color="0.4", linewidth=0.9, linestyle="--", zorder=1)
        ax.annotate(
            f"tol = {tolerance:g}", (0.0, tolerance), xycoords=("axes fraction", "data"), xytext=(4, 3),
            textcoords="offset points", ha="left", fontsize=8, color="0.4", zorder=5,
            path_effects=[withStroke(linewidth=2.0, foreground="white")],
        )  # fmt: skip
    ax.set_yscale("log")
    ax.set_xlabel("step")
    ax.set_ylabel("marginal error")
    left, right = ax.get_xlim()
    ax.set_xlim(min(left, -0.2), max(right, 1.0))  # one step alone would be given fractions as ticks
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for (kind, marker, face, edge), present in zip(_MARKS, marked, strict=True):
        if present:
            handles.append(
                Line2D(
                    [], [], linestyle="none", marker=marker, markersize=4.5, markerfacecolor=face, markeredgecolor=edge,
                    label=kind,
                )
            )  # fmt: skip
    legend_beside(ax, handles, widen=fresh)
    if title is not None:
        ax.set_title(title)
    return finish(ax, show=show, save=save, name="omt_solver", fresh=fresh)


def _blocks(
    errors: NDArray[np.float64], newton: NDArray[np.bool_]
) -> Iterator[tuple[NDArray[np.float64], NDArray[np.bool_]]]:
    """Errors and kinds of step of each block of a plan: they are recorded one after the other, nan between them."""
    ends = np.flatnonzero(np.isnan(errors))
    for first, last in zip([0, *(ends + 1)], [*ends, len(errors)], strict=True):
        yield errors[first:last], newton[first:last]


def _steps(plan: Transport) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Errors `[n]` after each step, and whether it was Newton's; empty where nothing was recorded."""
    if plan.solution.errors is None or plan.solution.newton is None:
        return np.empty(0), np.empty(0, dtype=bool)
    return np.maximum(plan.solution.errors, _ROUNDING), plan.solution.newton


def _named(plans: Any) -> list[tuple[str, Transport]]:
    """Plans with what to call them in the legend."""
    if hasattr(plans, "obs"):
        model = read_uns(plans, need="transport")
        names = [f"{group_label(model.groups[i])} → {group_label(model.groups[j])}" for i, j in model.steps()]
        return list(zip(names, model.transports, strict=True))
    if hasattr(plans, "transports"):
        times = list(plans.times)
        return [(f"{times[i]:g} → {times[i + 1]:g}", plan) for i, plan in enumerate(plans.transports)]
    if not hasattr(plans, "solution"):
        raise TypeError(
            f"plans is of type {type(plans).__name__}; it must be an AnnData, a Transport or a TransportChain"
        )
    return [("plan", plans)]
