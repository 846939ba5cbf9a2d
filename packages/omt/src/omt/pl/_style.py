"""What all pictures share: matplotlib on demand, colours, and scanpy's `show=` / `save=`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared_core.files import atomic_write

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from anndata import AnnData
    from matplotlib.axes import Axes

__all__ = [
    "categories_of",
    "category_colors",
    "finish",
    "import_pyplot",
    "label_colors",
    "legend_beside",
    "new_axes",
]

_LEGEND_LINE = 0.19  # inches that a line of a legend takes


def import_pyplot() -> Any:
    """Return `matplotlib.pyplot`, or say which extra brings it."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'omt[plot]'") from error
    return plt


def new_axes(ax: Axes | None, figsize: tuple[float, float]) -> Axes:
    """Return `ax`, or the axes of a new figure of `figsize` inches."""
    if ax is not None:
        return ax
    plt = import_pyplot()
    axes: Axes = plt.subplots(figsize=figsize)[1]
    return axes


def legend_beside(ax: Axes, handles: Sequence[Any], *, height: float | None = None, widen: bool = False) -> None:
    """Put a legend at the right of `ax`, in as many columns as its height needs.

    Parameters
    ----------
    ax
        Axes of final size.
    handles
        Artists with labels.
    height
        Inches that the legend may take; those of `ax` by default.
    widen
        Make the figure wider by what the legend needs; axes keep their size.
    """
    figure: Any = ax.figure
    room = ax.get_window_extent().height / figure.dpi if height is None else height
    rows = max(1, int(room / _LEGEND_LINE))
    legend = ax.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), ncols=-(-len(handles) // rows), frameon=False,
        fontsize=8, handlelength=1.4, columnspacing=1.2, borderaxespad=0.8,
    )  # fmt: skip
    if not widen:
        return
    beyond = (legend.get_window_extent(figure.canvas.get_renderer()).x1 - figure.bbox.x1) / figure.dpi + 0.1
    if beyond > 0.0:
        width, tall = figure.get_size_inches()
        share = width / (width + beyond)
        left, right = figure.subplotpars.left * share, figure.subplotpars.right * share
        figure.set_size_inches(width + beyond, tall)
        figure.subplots_adjust(left=left, right=right)


def category_colors(names: Sequence[str]) -> dict[str, str]:
    """Give each name a colour of its own: matplotlib's tab10, tab20, and from 21 names on all its twenties in turn."""
    import_pyplot()
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    if len(names) <= 10:
        table = list(colormaps["tab10"].colors)  # type: ignore[attr-defined]
    else:
        table = [color for name in ("tab20", "tab20b", "tab20c") for color in colormaps[name].colors]  # type: ignore[attr-defined]
    return {name: to_hex(table[i % len(table)]) for i, name in enumerate(names)}


def categories_of(column: Any) -> list[str]:
    """Values of a column of `obs` in their order: that of the categories, else sorted."""
    return [str(c) for c in (column.cat.categories if column.dtype == "category" else sorted(column.dropna().unique()))]


def label_colors(adata: AnnData, key: str | None, names: Sequence[str]) -> dict[str, str]:
    """Colours of component names: `adata.uns[f"{key}_colors"]` where it covers the categories of `adata.obs[key]`,
    else a palette.
    """
    if key is not None and key in adata.obs:
        categories = categories_of(adata.obs[key])
        stored = adata.uns.get(f"{key}_colors")
        if stored is not None and len(stored) >= len(categories):
            colors: Mapping[str, str] = {name: str(color) for name, color in zip(categories, stored, strict=False)}
        else:
            colors = category_colors(categories)
        if all(name in colors for name in names):
            return {name: colors[name] for name in names}
    return category_colors(list(names))


def finish(ax: Axes, *, show: bool | None, save: str | Path | bool | None, name: str, fresh: bool) -> Axes:
    """Save and show as scanpy does, and return the axes.

    `save=True` writes `figures/<name>.png`, a suffix such as `".pdf"` writes `figures/<name>.pdf`, anything else is
    the path of the file. `show=True` opens a window. A `fresh` figure, one that the verb made, is closed where it was
    saved and `show=False`, so that a loop over pictures does not pile them up; its axes can still be used.
    """
    figure: Any = ax.figure
    if save is not None and save is not False:
        text = ".png" if save is True else str(save)
        path = Path(text)
        if text.startswith(".") and "/" not in text:
            path = Path("figures") / f"{name}{text}"
            path.parent.mkdir(exist_ok=True)
        with atomic_write(path) as temporary:
            figure.savefig(temporary, dpi=150, bbox_inches="tight")
    if show:
        import_pyplot().show()
    elif fresh and show is False and save is not None and save is not False:
        import_pyplot().close(figure)
    return ax
