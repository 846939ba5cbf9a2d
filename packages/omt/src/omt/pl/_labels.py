"""Where texts go so that none covers another, measured on the rendered picture.

Positions are in points or pixels of the canvas; nothing here knows what is being labelled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.text import Annotation
    from numpy.typing import ArrayLike, NDArray

__all__ = ["place_labels", "spread", "text_sizes"]

_GOLDEN_ANGLE = np.pi * (3.0 - np.sqrt(5.0))


def spread(positions: ArrayLike, sizes: ArrayLike, low: float, high: float) -> NDArray[np.float64]:
    """Move intervals apart, as little as possible in the least-squares sense, so that none overlaps another.

    Minimises `sum((y - positions)**2)` subject to `y[i+1] - y[i] >= (sizes[i] + sizes[i+1]) / 2` in the order of
    `positions`, and to all intervals being
    inside `[low, high]` where they fit: an isotonic regression after a shift of the variable, and its bounded form is
    the clipped one.

    Parameters
    ----------
    positions
        `[n]`, wanted centres.
    sizes
        `[n]`, lengths of the intervals.
    low, high
        Ends of the allowed range. If the intervals together are longer, they start at `low` and pass `high`.

    Examples
    --------
    >>> spread([0.0, 0.1, 5.0], [1.0, 1.0, 1.0], -10.0, 10.0)
    array([-0.45,  0.55,  5.  ])
    """
    wanted, length = np.asarray(positions, dtype=np.float64), np.asarray(sizes, dtype=np.float64)
    if len(wanted) == 0:
        return wanted
    order = np.argsort(wanted, kind="stable")
    step = (length[order][1:] + length[order][:-1]) / 2.0
    offset = np.concatenate([[0.0], np.cumsum(step)])
    blocks: list[tuple[float, int]] = []  # pool adjacent violators: (mean, size)
    for value in wanted[order] - offset:
        mean, size = float(value), 1
        while blocks and blocks[-1][0] > mean:
            previous, count = blocks.pop()
            mean, size = (mean * size + previous * count) / (size + count), size + count
        blocks.append((mean, size))
    shifted = np.repeat([mean for mean, _ in blocks], [size for _, size in blocks])
    first = low + length[order][0] / 2.0
    last = high - length[order][-1] / 2.0 - offset[-1]
    result = np.empty_like(wanted)
    result[order] = np.clip(shifted, first, max(first, last)) + offset
    return result


def text_sizes(ax: Axes, texts: Sequence[str], fontsize: float) -> NDArray[np.float64]:
    """Width and height in pixels `[n, 2]` of texts as the figure's renderer draws them."""
    figure: Any = ax.figure
    renderer = figure.canvas.get_renderer()
    sizes = np.empty((len(texts), 2))
    for i, text in enumerate(texts):
        artist = ax.text(0.5, 0.5, text, fontsize=fontsize, transform=ax.transAxes)
        box = artist.get_window_extent(renderer)
        sizes[i] = box.width, box.height
        artist.remove()
    return sizes


def place_labels(
    ax: Axes,
    anchors: ArrayLike,
    texts: Sequence[str],
    *,
    colors: Sequence[str] | None = None,
    fontsize: float = 8.0,
    priority: ArrayLike | None = None,
) -> list[Annotation]:
    """Write one text near each point, none over another, with a thin line to its point where it had to move.

    Call it last: axis limits and the figure's size must be final. Each text takes the first free place on a spiral
    around its point, the most important first.

    Parameters
    ----------
    ax
        Axes with final limits.
    anchors
        `[n, 2]`, points in data coordinates.
    texts
        `n` labels.
    colors
        Colour of each text; black by default.
    fontsize
        Points.
    priority
        `[n]`: larger ones are placed first, in the order given by default.
    """
    from matplotlib.patheffects import withStroke

    points = np.asarray(anchors, dtype=np.float64).reshape(-1, 2)
    figure: Any = ax.figure
    scale = 72.0 / figure.dpi
    pixels = ax.transData.transform(points)
    sizes = text_sizes(ax, texts, fontsize) + 4.0
    area = ax.get_window_extent(figure.canvas.get_renderer())
    importance = np.zeros(len(texts)) if priority is None else np.asarray(priority, dtype=np.float64)

    taken = np.empty((0, 4))  # x0, y0, x1, y1 in pixels
    notes: list[Annotation] = []
    turns = np.arange(4000)
    radius = 3.0 * np.sqrt(turns)
    ring = np.stack([radius * np.cos(turns * _GOLDEN_ANGLE), radius * np.sin(turns * _GOLDEN_ANGLE)], axis=1)
    for i in np.argsort(-importance, kind="stable"):
        centers = pixels[i] + ring
        boxes = np.concatenate([centers - sizes[i] / 2.0, centers + sizes[i] / 2.0], axis=1)
        hits = np.zeros(len(boxes), dtype=bool)
        for x0, y0, x1, y1 in taken:
            hits |= (boxes[:, 0] < x1) & (boxes[:, 2] > x0) & (boxes[:, 1] < y1) & (boxes[:, 3] > y0)
        inside = (
            (boxes[:, 0] >= area.x0) & (boxes[:, 2] <= area.x1) & (boxes[:, 1] >= area.y0) & (boxes[:, 3] <= area.y1)
        )
        free = np.flatnonzero(~hits & inside)
        if len(free) == 0:  # a crowded axes: the text may leave it, but still covers no other
            free = np.flatnonzero(~hits)
        best = int(free[0]) if len(free) else len(boxes) - 1
        taken = np.vstack([taken, boxes[best]])
        moved = float(np.hypot(*ring[best])) > 0.75 * sizes[i, 1]
        note = ax.annotate(
            texts[i],
            xy=(float(points[i, 0]), float(points[i, 1])),
            xytext=(float(ring[best, 0] * scale), float(ring[best, 1] * scale)),
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=fontsize,
            color="black" if colors is None else colors[i],
            arrowprops={"arrowstyle": "-", "color": "0.35", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 0}
            if moved
            else None,
            path_effects=[withStroke(linewidth=2.0, foreground="white")],
            zorder=10,
        )
        notes.append(note)
    return notes
