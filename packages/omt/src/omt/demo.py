"""What `omt demo` does: run the experiments on data that come with the dependencies, judge them, draw pictures."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from omt import datasets, experiments
from omt.experiments.claims import WITH_FILES, WITHOUT_FILES, Row

if TYPE_CHECKING:
    from pathlib import Path


__all__ = ["DemoResult", "Row", "run"]


@dataclass(frozen=True)
class DemoResult:
    """Rows of the table, pictures written, and what could not run."""

    rows: tuple[Row, ...]
    pictures: tuple[str, ...]
    notes: tuple[str, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether every row reached its target."""
        return all(row.ok for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON can hold it."""
        rows = [
            {
                "job": row.job,
                "measure": row.measure,
                "value": row.value,
                "seeds": list(row.values),
                "target": row.target,
                "ok": row.ok,
            }
            for row in self.rows
        ]
        return {"rows": rows, "pictures": list(self.pictures), "notes": list(self.notes), "seconds": self.seconds}

    def table(self) -> list[dict[str, Any]]:
        """Rows as the command prints them."""
        return [
            {
                "data": row.job,
                "measure": row.measure,
                "value": f"{row.value:.3f}" + (" (worst)" if row.every else " (mean)"),
                "range": f"{min(row.values):.3f} to {max(row.values):.3f}",
                "target": row.target,
                "": "" if not row.target else "ok" if row.ok else "MISSED",
            }
            for row in self.rows
        ]


def run(out: Path, *, data: Path | None = None, seeds: int = 5, progress: bool = False) -> DemoResult:
    """Run all experiments `seeds` times, and draw.

    Parameters
    ----------
    out
        Folder for the pictures; it is made if its parent exists.
    data
        Folder with published data that are not part of omt (`omt.experiments.claims.WITH_FILES`); the experiments on
        those found there run, too.
    seeds
        Repetitions.
    progress
        Say on stderr what is running.

    Returns
    -------
    DemoResult
        Rows of `omt[scanpy]`'s data and pictures are left out, with a note, where that or matplotlib is not installed.

    Raises
    ------
    FileNotFoundError
        The parent of `out` does not exist, or `data` holds none of the files.
    NotADirectoryError
        `out` is a file.
    """
    if out.exists() and not out.is_dir():
        raise NotADirectoryError(f"out={out} is a file, must be a folder")
    if not out.parent.is_dir():
        raise FileNotFoundError(f"cannot make the folder {out}: {out.parent} does not exist")
    jobs = list(WITHOUT_FILES)
    if data is not None:
        there = [(name, partial(job, data / file)) for file, name, job in WITH_FILES if (data / file).is_file()]
        if not there:
            raise FileNotFoundError(f"{data} has none of the files {', '.join(file for file, *_ in WITH_FILES)}")
        jobs += there
    start = time.perf_counter()
    rows: list[Row] = []
    pictures: list[str] = []
    notes: list[str] = []
    for name, job in jobs:
        if progress:
            print(f"{name} …", file=sys.stderr)
        try:
            rows += job(range(seeds))
        except ImportError as error:
            notes.append(f"{name} did not run: {error}")
    if progress:
        print("pictures …", file=sys.stderr)
    try:
        pictures = _draw(out, with_cells=not any("omt[scanpy]" in note for note in notes))
    except ImportError as error:
        notes.append(f"no pictures: {error}")
    return DemoResult(tuple(rows), tuple(pictures), tuple(notes), time.perf_counter() - start)


def _draw(out: Path, *, with_cells: bool) -> list[str]:
    """Write the pictures and return their names."""
    from omt import pl, tl
    from omt.pl._style import import_pyplot

    plt = import_pyplot()
    backend = plt.get_backend()
    plt.switch_backend("agg")
    try:
        out.mkdir(exist_ok=True)
        adata, _ = datasets.branching_process()
        tl.fit_mixtures(adata, groupby="time", labels="cell_type", use_rep="X_state", progress=False)
        tl.transport(adata, time_key="time")
        pl.sankey(adata, title="A generated branching process", show=False, save=out / "sankey.png")
        pl.flow(adata, basis="tree", title="Mass between cell types, all steps", show=False, save=out / "flow.png")
        pl.solver(adata, title="Solving the steps of the branching process", show=False, save=out / "solver.png")
        tl.transport(adata, source=0, target=2)
        pl.interpolation(adata, 0, 2, show=False, save=out / "interpolation.png")  # rings: what was measured at time 1
        names = ["sankey.png", "flow.png", "solver.png", "interpolation.png"]
        if with_cells:
            cells = experiments.two_halves(seed=0)
            pl.transitions(
                cells,
                "first",
                "second",
                title="Two halves of 700 blood cells",
                show=False,
                save=out / "transitions.png",
            )
        else:
            pl.transitions(adata, 0, 2, show=False, save=out / "transitions.png")
        _draw_digits(out / "digits.png")
    finally:
        plt.switch_backend(backend)
    return [*names, "transitions.png", "digits.png"]


def _draw_digits(path: Path) -> None:
    """Digits 0 to 4, where the map takes them, one draw of where they may go, and the real image nearest to the map."""
    from omt.pl._style import finish, import_pyplot

    result = experiments.digit_images()
    lines = [
        ("a digit", result.source),
        ("its image", result.mapped),
        ("a draw", result.drawn),
        ("nearest real", result.target),
    ]
    n = len(result.source)
    figure, axes = import_pyplot().subplots(len(lines), n, figsize=(0.75 * n + 1.0, 0.8 * len(lines) + 0.4))
    for row, (name, images) in enumerate(lines):
        for column in range(n):
            ax = axes[row, column]
            ax.imshow(images[column].reshape(8, 8), cmap="gray_r", vmin=0, vmax=1, interpolation="nearest")
            ax.set_xticks([])
            ax.set_yticks([])
        axes[row, 0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9)
    figure.suptitle("Digits 0-4 mapped onto 5-9", fontsize=10)
    finish(axes[0, 0], show=False, save=path, name="digits", fresh=True)
