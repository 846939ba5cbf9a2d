"""Pictures of expert load. Needs matplotlib: ``pip install 'shared-core[plot]'``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from shared_core.load import load_stats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["expert_load"]

_TICKS = 16


def expert_load(counts_by_layer: ArrayLike, ax: Axes | None = None) -> Axes:
    """Draw the load of every expert relative to the mean: bars for one layer, a heat map for several.

    Parameters
    ----------
    counts_by_layer
        Assignments, ``[E]`` or ``[L, E]``; a numpy array, nested sequence or torch tensor.
    ax
        Where to draw; a new figure of fitting size by default.

    Returns
    -------
    matplotlib.axes.Axes
        With the mean marked (as a line, or as white on the colour scale) and MaxVio in the title.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    ValueError
        If `counts_by_layer` is not a load, see :func:`shared_core.load_stats`.

    Examples
    --------
    >>> import matplotlib; matplotlib.use("agg")
    >>> expert_load([6, 2, 4, 4]).get_title()
    'Load of 4 experts, MaxVio 0.50'
    """
    try:
        from matplotlib import pyplot
    except ModuleNotFoundError as error:
        raise ImportError("shared_core.plot needs matplotlib: pip install 'shared-core[plot]'") from error

    stats = load_stats(counts_by_layer)
    counts = np.atleast_2d(stats.counts)
    if not counts.size:
        raise ValueError("counts_by_layer has no layers to draw")
    layers, experts = counts.shape
    mean = counts.mean(1, keepdims=True)
    # A layer without any assignment is shown as empty, not as NaN.
    relative = np.divide(counts, mean, out=np.zeros(counts.shape), where=mean > 0)
    if ax is None:
        size = (min(14.0, max(5.0, 1.6 + 0.22 * experts)), 3.0 if layers == 1 else min(9.0, 1.6 + 0.2 * layers))
        _, ax = pyplot.subplots(figsize=size, layout="constrained")

    if layers == 1:
        _bars(ax, relative[0])
        worst = f"MaxVio {float(np.ravel(stats.max_violation)[0]):.2f}"
        ax.set_title(f"Load of {experts} experts, {worst}")
    else:
        _heat_map(ax, relative)
        worst = f"MaxVio mean {_mean(stats.max_violation):.2f}, worst {np.max(np.nan_to_num(stats.max_violation)):.2f}"
        ax.set_title(f"Load of {experts} experts in {layers} layers\n{worst}")
    ax.set_xlabel("expert")
    ax.set_xticks(_ticks(experts))
    return ax


def _bars(ax: Axes, relative: Any) -> None:
    """Draw one bar an expert, those above the mean set off, and the mean."""
    above, below = "#c2410c", "#3b6ea5"
    ax.bar(range(len(relative)), relative, color=[above if load > 1 else below for load in relative], width=0.85)
    ax.axhline(1.0, color="black", linewidth=1, linestyle="--")
    ax.annotate("mean", (1, 1), (3, 0), xycoords=("axes fraction", "data"), textcoords="offset points", va="center")
    ax.set_xlim(-0.6, len(relative) - 0.4)
    ax.set_ylabel("load / mean")
    ax.spines[["top", "right"]].set_visible(False)


def _heat_map(ax: Axes, relative: Any) -> None:
    """Draw layers × experts, white at the mean, blue below (down to no load) and red above."""
    from matplotlib.colors import TwoSlopeNorm

    top = max(2.0, float(relative.max()))
    image = ax.imshow(relative, aspect="auto", cmap="RdBu_r", norm=TwoSlopeNorm(1.0, 0.0, top), interpolation="nearest")
    ax.set_ylabel("layer")
    ax.set_yticks(_ticks(len(relative)))
    bar = ax.figure.colorbar(image, ax=ax, pad=0.02)
    bar.set_label("load / mean")
    bar.ax.axhline(1.0, color="black", linewidth=1, linestyle="--")
    bar.set_ticks(sorted({0.0, 0.5, 1.0, (1 + top) / 2, top}), labels=None)
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")


def _ticks(n: int) -> list[int]:
    """Choose at most 16 whole positions, evenly spaced, from 0."""
    step = next(step for step in (1, 2, 4, 5, 8, 10, 16, 20, 25, 32, 50, 64, 100, n) if n <= _TICKS * step)
    return list(range(0, n, step))


def _mean(values: Any) -> float:
    """Mean of what is not NaN, NaN if nothing is."""
    known = np.asarray(values)[~np.isnan(values)]
    return float(known.mean()) if known.size else float("nan")
