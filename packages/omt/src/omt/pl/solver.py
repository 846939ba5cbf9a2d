"""How the plans were solved: marginal error after each step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from omt.grouped import group_label
from omt.io import read_uns
from omt.pl._style import finish, import_pyplot, new_axes

if TYPE_CHECKING:
    from pathlib import Path

    from anndata import AnnData
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    from omt.chain import TransportChain
    from omt.transport import Transport

__all__ = ["solver"]

_ROUNDING = 1e-17  # an error of exactly 0 has no place on a logarithmic axis
_LEGEND_ROWS = 16


def solver(
    plans: AnnData | Transport | TransportChain,
    *,
    title: str | None = None,
    ax: Axes | None = None,
    show: bool | None = None,
    save: str | Path | bool | None = None,
) -> Axes:
    """Draw the marginal error of each plan after each step of the solver, and the tolerance it had to reach.

    Circles are the start and Sinkhorn sweeps, filled points Newton steps. Errors at the hotter temperatures that large
    and relaxed problems start from are not shown.

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
    from matplotlib.ticker import MaxNLocator

    columns = -(-len(named) // _LEGEND_ROWS)
    ax = new_axes(ax, (6.0 + 1.3 * columns, 4.2))
    colors = plt.get_cmap("viridis")(np.linspace(0.0, 0.9, len(named)))
    for (name, _, errors, newton), color in zip(named, colors, strict=True):
        step = np.arange(len(errors))
        ax.plot(step, errors, color=color, linewidth=1.2, label=name, zorder=2)
        ax.scatter(step[~newton], errors[~newton], s=18, facecolor="white", edgecolor=[color], zorder=3)
        ax.scatter(step[newton], errors[newton], s=18, color=[color], zorder=3)
    for tolerance in sorted({row[1].tol for row in named}):
        ax.axhline(tolerance, color="0.4", linewidth=0.9, linestyle="--", zorder=1)
        ax.annotate(
            f"tol = {tolerance:g}", (1.0, tolerance), xycoords=("axes fraction", "data"), xytext=(-4, 3),
            textcoords="offset points", ha="right", fontsize=8, color="0.4",
        )  # fmt: skip
    ax.set_yscale("log")
    ax.set_xlabel("step (circles: start and Sinkhorn sweeps, points: Newton steps)")
    ax.set_ylabel("marginal error")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    ax.legend(loc="upper left", bbox_to_anchor=(1.02, 1.02), ncols=columns, frameon=False, fontsize=8, handlelength=1.2)
    if title is not None:
        ax.set_title(title)
    return finish(ax, show=show, save=save, name="omt_solver")


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
