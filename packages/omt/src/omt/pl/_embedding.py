"""Cells, components as ellipses and arrows between them on a plane; drawn from plain arrays.

Letters: `N` cells, `C` components drawn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from omt.pl._labels import place_labels, text_sizes
from omt.pl._style import legend_beside

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from anndata import AnnData
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D
    from numpy.typing import ArrayLike, NDArray

    Array = NDArray[np.float64]

__all__ = [
    "Blob",
    "basis_of",
    "blobs_of",
    "draw_arrows",
    "draw_blobs",
    "draw_cells",
    "frame",
    "label_blobs",
    "legend_handles",
]

_CROWDED = 0.1  # share of the axes' area that names may cover; numbers and a legend take their place above it


class Blob(NamedTuple):
    """A component on the plane: its name, mass, centre `[2]`, covariance `[2, 2]` and colour."""

    name: str
    mass: float
    center: Array
    cov: Array
    color: str


def basis_of(adata: AnnData, basis: str) -> tuple[Array, str]:
    """Coordinates `[N, 2]` of `basis` (`"umap"` means `obsm["X_umap"]`, as in scanpy) and its short name."""
    for key in (f"X_{basis}", basis):
        if key in adata.obsm:
            xy = np.asarray(adata.obsm[key], dtype=np.float64)
            if xy.ndim != 2 or xy.shape[1] < 2:
                raise ValueError(
                    f"basis={basis!r}: adata.obsm[{key!r}] has shape {xy.shape}; a picture needs two columns"
                )
            return xy[:, :2], key.removeprefix("X_")
    raise KeyError(
        f"basis={basis!r}: adata.obsm has neither 'X_{basis}' nor {basis!r}; it has: "
        f"{', '.join(adata.obsm.keys()) or '(none)'}"
    )


def blobs_of(xy: ArrayLike, R: ArrayLike, names: Sequence[str], colors: Sequence[str]) -> list[Blob]:
    """Where components lie on the plane: means and covariances of the cells `[n, 2]`, weighted by responsibilities
    `[n, K]`.
    """
    points, weights = np.asarray(xy, dtype=np.float64), np.asarray(R, dtype=np.float64)
    blobs = []
    for k, name in enumerate(names):
        w = weights[:, k] / max(float(weights[:, k].sum()), 1e-300)
        center = w @ points
        offset = points - center
        blobs.append(Blob(name, float(weights[:, k].mean()), center, (offset.T * w) @ offset, colors[k]))
    return blobs


def draw_cells(ax: Axes, xy: Array, colors: Sequence[str] | str, *, size: float | None = None) -> None:
    """Draw cells as points, as large as scanpy draws them."""
    area = 40000.0 / max(len(xy), 1) if size is None else size
    ax.scatter(
        xy[:, 0], xy[:, 1], s=min(area, 25.0), c=colors, linewidths=0, alpha=0.35, zorder=1, rasterized=len(xy) > 5000
    )


def draw_blobs(ax: Axes, blobs: Sequence[Blob]) -> None:
    """Draw components as ellipses of one standard deviation."""
    from matplotlib.patches import Ellipse

    for blob in blobs:
        variances, axes = np.linalg.eigh(blob.cov)
        width, height = 2.0 * np.sqrt(np.maximum(variances[::-1], 0.0))
        angle = float(np.degrees(np.arctan2(axes[1, 1], axes[0, 1])))
        ax.add_patch(
            Ellipse(
                (float(blob.center[0]), float(blob.center[1])), float(width), float(height), angle=angle,
                facecolor=blob.color, alpha=0.25, edgecolor="none", zorder=2,
            )
        )  # fmt: skip
        ax.add_patch(
            Ellipse(
                (float(blob.center[0]), float(blob.center[1])), float(width), float(height), angle=angle,
                fill=False, edgecolor=blob.color, linewidth=1.1, zorder=3,
            )
        )  # fmt: skip


def draw_arrows(ax: Axes, starts: ArrayLike, ends: ArrayLike, masses: ArrayLike, colors: Sequence[str]) -> None:
    """Draw one arrow per pair of components, its width proportional to its mass; the largest mass is 6 points wide.

    Call it when axis limits are final: arrows shorter than 12 pixels are left out, since mass that stays needs none.
    """
    from matplotlib.patches import FancyArrowPatch

    mass = np.asarray(masses, dtype=np.float64)
    if not len(mass):
        return
    widths = 6.0 * mass / mass.max()
    tails, heads = np.asarray(starts, dtype=np.float64), np.asarray(ends, dtype=np.float64)
    lengths = np.hypot(*(ax.transData.transform(heads) - ax.transData.transform(tails)).T)
    for start, end, length, width, color in zip(tails, heads, lengths, widths, colors, strict=True):
        if length < 12.0:
            continue
        head = f"-|>,head_length={2.0 + width / 3:.2f},head_width={1.2 + width / 4:.2f}"
        ax.add_patch(
            FancyArrowPatch(
                tuple(start), tuple(end), arrowstyle=head,
                connectionstyle="arc3,rad=0.15", linewidth=max(float(width), 0.6), color=color, alpha=0.75,
                shrinkA=2, shrinkB=2, mutation_scale=1.6, zorder=4, joinstyle="miter", capstyle="butt",
            )
        )  # fmt: skip


def legend_handles(colors: Mapping[str, str], *, numbered: bool = False) -> list[Line2D]:
    """One filled circle for each name; `numbered` puts 1, 2, … before the names, as they stand in the picture."""
    from matplotlib.lines import Line2D

    return [
        Line2D(
            [], [], marker="o", linestyle="none", markersize=6, markerfacecolor=color, markeredgewidth=0,
            label=f"{i}  {name}" if numbered else name,
        )
        for i, (name, color) in enumerate(colors.items(), start=1)
    ]  # fmt: skip


def label_blobs(ax: Axes, blobs: Sequence[Blob], *, widen: bool = False) -> None:
    """Name each component once, at its centre or as near as the other names allow.

    Names that would cover too much of the picture are replaced by numbers, which a legend at the right explains;
    `widen` makes room for it in the figure.
    """
    centers, masses = [blob.center for blob in blobs], [blob.mass for blob in blobs]
    names = [blob.name for blob in blobs]
    area = ax.get_window_extent()
    if text_sizes(ax, names, 8.0).prod(axis=1).sum() <= _CROWDED * area.width * area.height:
        place_labels(ax, centers, names, priority=masses)
        return
    place_labels(ax, centers, [str(i) for i in range(1, len(blobs) + 1)], priority=masses)
    legend_beside(ax, legend_handles({blob.name: blob.color for blob in blobs}, numbered=True), widen=widen)


def frame(ax: Axes, basis: str) -> None:
    """Axes as scanpy draws embeddings: names, no ticks."""
    ax.set_xticks([])
    ax.set_yticks([])
    ax.set_xlabel(f"{basis} 1")
    ax.set_ylabel(f"{basis} 2")
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
