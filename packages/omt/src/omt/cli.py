"""The `omt` command. Commands are verbs; what they need is imported inside them, so that `--help` is quick."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import typer

__all__ = ["app", "main"]

_P = ParamSpec("_P")

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"terminal_width": 110},  # examples stay on one line, to be copied
    help="Optimal mixture transport: which subpopulation becomes which. Start with: omt demo",
)

Output = Annotated[Path, typer.Option("--output", "-o", help="Where the result is written.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress and no table.")]
Seed = Annotated[int, typer.Option(help="Seed; the same seed gives the same result.")]
Source = Annotated[str, typer.Option(help="Group at the start, a value of the --groupby column.", show_default=False)]
Target = Annotated[str, typer.Option(help="Group at the end.", show_default=False)]
Reg = Annotated[float, typer.Option(help="Outer temperature relative to the mean cost; 0 is the exact linear program.")]
Tau = Annotated[float, typer.Option(help="Mass conservation in (0, 1]; below 1 mass may grow and vanish.")]


def _one_sentence(command: Callable[_P, None]) -> Callable[_P, None]:
    """Turn errors into one sentence on stderr: exit 2 for bad input, 1 for what failed later; OMT_TRACEBACK=1 shows
    where.
    """

    @functools.wraps(command)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> None:
        import warnings

        for backend in ("PYTORCH", "JAX", "CUPY", "TENSORFLOW"):
            # POT would import each of them if it is installed, seconds that no command needs
            os.environ.setdefault(f"POT_BACKEND_DISABLE_{backend}", "1")

        def show(message: Warning | str, *_: object, **__: object) -> None:
            print(f"omt: warning: {message}", file=sys.stderr)

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # of the libraries underneath: nothing a user can act on
                warnings.simplefilter("ignore", DeprecationWarning)
                warnings.showwarning = show
                command(*args, **kwargs)
        except typer.Exit:  # itself a RuntimeError
            raise
        except (
            ValueError,
            TypeError,
            KeyError,
            FileNotFoundError,
            NotADirectoryError,
            IsADirectoryError,
            ImportError,
        ) as error:
            _fail(error, 2)
        except (OSError, RuntimeError, MemoryError, ArithmeticError) as error:
            _fail(error, 1)

    return guarded


def _fail(error: BaseException, status: int) -> None:
    if os.environ.get("OMT_TRACEBACK"):
        raise error
    sentence = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    print(f"omt: {' '.join(sentence.split()) or type(error).__name__}", file=sys.stderr)
    raise typer.Exit(status) from error


def _check_exists(path: Path) -> None:
    """Refuse an input that is not there before libraries are imported that take seconds."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")


def _check_output(path: Path, *, folder: bool = False) -> None:
    """Refuse a place that cannot be written before the work is done, not after."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: the folder {path.parent} does not exist")
    if folder and path.is_file():
        raise NotADirectoryError(f"cannot write {path}: it is a file; give the name of a folder")
    if not folder and path.is_dir():
        raise IsADirectoryError(f"cannot write {path}: it is a folder; give the name of a file")


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"omt {version('omt')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
@_one_sentence
def fit(
    data: Annotated[Path, typer.Argument(help="h5ad file; it is only read.", show_default=False)],
    groupby: Annotated[
        str, typer.Option(help="Column of obs: the time points, or control and treated.", show_default=False)
    ],
    output: Output,
    use_rep: Annotated[str, typer.Option(help="Key of obsm with the features; X for the matrix itself.")] = "X_pca",
    labels: Annotated[str | None, typer.Option(help="Column of obs whose values are the components.")] = None,
    n_components: Annotated[int, typer.Option(help="Components per group, where --labels is not given.")] = 10,
    covariance: Annotated[str, typer.Option(help="full, diag, spherical, tied or lowrank.")] = "full",
    bins: Annotated[
        str | None,
        typer.Option(help="Edges, e.g. 0,10,20: cut a numeric --groupby into stages named by their middles."),
    ] = None,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="X is raw counts: normalise, log, variable genes, PCA by scanpy.")
    ] = False,
    n_pcs: Annotated[int, typer.Option(help="Principal components of --prepare.")] = 20,
    seed: Seed = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Fit a mixture to each group of cells and write the model folder.

    Example: omt fit embryo.h5ad --groupby stage --use-rep X_pca --labels cell_type -o model/
    """
    _check_exists(data)
    _check_output(output, folder=True)
    from dataclasses import replace

    from omt import io, tl
    from omt import prepare as preparation
    from omt.grouped import group_label

    adata = io.read_h5ad(data, backed=not prepare)
    settings: dict[str, str] = {}
    if bins is not None:
        settings = {"bins": bins, "bins_of": groupby}
        groupby = preparation.bin_times(adata, groupby, bins)
    record: dict[str, Any] = {}
    if prepare:
        use_rep = "X_pca"
        adata.obsm[use_rep], record = preparation.prepare(adata, n_pcs=n_pcs, random_state=seed)
    elif groupby in adata.obs and use_rep != "X" and use_rep not in adata.obsm:
        raise ValueError(
            f"{data} has no {use_rep!r} in obsm; it has: {', '.join(adata.obsm) or '(none)'}. "
            "Name one by --use-rep, or give --prepare if X holds raw counts"
        )
    tl.fit_mixtures(
        adata, groupby, use_rep=use_rep, labels=labels, n_components=n_components, covariance=covariance,
        random_state=seed, progress=False if quiet else None,
    )  # fmt: skip
    model = io.read_uns(adata)
    model = replace(model, prepare=record, settings={**model.settings, **settings})
    io.save_model(model, output)
    rows = [
        {
            "group": group_label(group),
            "cells": 0 if mixture.report is None else mixture.report.n_samples,
            "components": mixture.K,
            "log_likelihood": None if mixture.report is None else mixture.report.log_likelihood,
        }
        for group, mixture in zip(model.groups, model.mixtures, strict=True)
    ]
    shown = [{("log-likelihood per cell" if k == "log_likelihood" else k): v for k, v in row.items()} for row in rows]
    _report({"model": str(output), "groupby": groupby, "groups": rows}, shown, as_json=as_json, quiet=quiet)


@app.command()
@_one_sentence
def transport(
    model: Annotated[Path, typer.Argument(help="Folder that omt fit wrote.", show_default=False)],
    output: Output,
    source: Annotated[
        str | None, typer.Option(help="With --target: one plan instead of a chain over all groups.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="With --source: the end of that plan.")] = None,
    tau: Tau = 1.0,
    reg: Reg = 0.01,
    inner_reg: Annotated[float, typer.Option(help="Inner temperature relative to the mean cost.")] = 0.0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Solve optimal transport: a chain over consecutive groups, or one plan.

    A chain needs groups in order: numbers, an ordered categorical column, or --bins of omt fit.

    Example: omt transport model/ --tau 0.9 --reg 0.01 -o chain/
    """
    _check_exists(model)
    _check_output(output, folder=True)
    from omt import io
    from omt.grouped import group_label
    from omt.tl.transport import solve_plans

    if (source is None) != (target is None):
        raise ValueError("give both --source and --target, or neither for a chain over all groups")
    mixtures = io.load_model(model)
    if source is None and not mixtures.settings.get("ordered"):
        groups = ", ".join(group_label(group) for group in mixtures.groups)
        raise ValueError(
            f"the groups of {mixtures.groupby!r} are text without an order ({groups}): give --source and --target for "
            "one plan; for a chain fit on a numeric column (--bins cuts one into stages) or an ordered categorical one"
        )
    solved = solve_plans(mixtures, source=source, target=target, tau=tau, reg=reg, inner_reg=inner_reg)
    io.save_model(solved, output)
    rows = [
        {
            "source": group_label(solved.groups[i]),
            "target": group_label(solved.groups[j]),
            "cost": float(plan.transport_cost),
            "converged": bool(plan.converged),
            "marginal_error": float(plan.marginal_error),
        }
        for (i, j), plan in zip(solved.steps(), solved.transports, strict=True)
    ]
    _report({"chain": str(output), "plans": rows}, rows, as_json=as_json, quiet=quiet)


@app.command()
@_one_sentence
def transitions(
    chain: Annotated[Path, typer.Argument(help="Folder that omt transport wrote.", show_default=False)],
    source: Source,
    target: Target,
    backward: Annotated[
        bool, typer.Option("--backward", help="Rows are target components: where they come from.")
    ] = False,
    csv: Annotated[Path | None, typer.Option(help="Write the table there.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw it there (needs omt[plot]).")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Print the transition table between two groups; rows sum to 1.

    Example: omt transitions chain/ --source 240 --target 420 --csv t.csv --plot t.png
    """
    _check_exists(chain)
    for path in (csv, plot):
        if path is not None:
            _check_output(path)
    from omt import io
    from shared_core.files import atomic_write

    model = io.load_model(chain, need="transport")
    frame = model.frame(source, target, direction="backward" if backward else "forward")
    with ExitStack() as both_or_none:
        if csv is not None:
            frame.to_csv(both_or_none.enter_context(atomic_write(csv)))
        if plot is not None:
            from omt.pl._style import finish
            from omt.pl.transitions import axes_for_table, draw_transitions

            ax = axes_for_table(list(frame.index), list(frame.columns))
            draw_transitions(ax, frame.to_numpy(), list(frame.index), list(frame.columns))
            ax.set_ylabel(f"{model.groupby} {target if backward else source}")
            ax.set_xlabel(f"{model.groupby} {source if backward else target}")
            ax.set_title(f"{source} ← {target}" if backward else f"{source} → {target}")
            finish(ax, show=False, save=plot, name="omt_transitions")
    content = {
        "source": source,
        "target": target,
        "direction": "backward" if backward else "forward",
        "rows": list(frame.index),
        "columns": list(frame.columns),
        "table": frame.to_numpy().tolist(),
    }
    rows: list[dict[str, Any]] = [
        {"": name, **{column: f"{p:.3f}" for column, p in zip(frame.columns, values, strict=True)}}
        for name, values in zip(frame.index, frame.to_numpy().tolist(), strict=True)
    ]
    _report(content, rows, as_json=as_json, quiet=quiet)


@app.command()
@_one_sentence
def push(
    data: Annotated[Path, typer.Argument(help="h5ad file with the cells.", show_default=False)],
    chain: Annotated[Path, typer.Argument(help="Folder that omt transport wrote.", show_default=False)],
    source: Source,
    target: Target,
    output: Output,
    obs: Annotated[str | None, typer.Option(help="key=value: start from these cells; all by default.")] = None,
    backward: Annotated[
        bool, typer.Option("--backward", help="Start at --target and find the origins at --source.")
    ] = False,
    key_added: Annotated[
        str | None, typer.Option(help="Column of obs to write: omt_push, or omt_pull with --backward.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Carry cells forward to their descendants, or backward to their origins.

    Writes the h5ad file with the scores, which sum to 1 over the cells of each group on the way.

    Example: omt push embryo.h5ad chain/ --source 240 --target 420 --obs cell_type=AWA --backward -o scored.h5ad
    """
    _check_exists(chain)
    _check_exists(data)
    _check_output(output)
    from omt import io, tl
    from omt.grouped import group_label
    from omt.prepare import ready
    from omt.tl._assign import assign
    from omt.tl._cells import cells_of

    model = io.load_model(chain, need="transport")
    key: str | None = None
    value: str | None = None
    if obs is not None:
        key, found, value = obs.partition("=")
        if not found or not key or not value:
            raise ValueError(f"--obs is {obs!r}, must be key=value, for example cell_type=AWA")
    adata = io.read_h5ad(data)
    if key is not None and key not in adata.obs:
        raise ValueError(f"--obs {obs}: {data} has no obs column {key!r}; columns are: {', '.join(adata.obs)}")
    assign(adata, model, ready(adata, model))
    io.write_uns(adata, model)
    column = key_added or ("omt_pull" if backward else "omt_push")
    (tl.pull if backward else tl.push)(adata, source, target, data=key, subset=value, key_added=column)
    io.write_h5ad(adata, output)
    path = model.path(model.position(source, "source"), model.position(target, "target"))
    end = path[0] if backward else path[-1]
    cells = cells_of(adata, model, end)
    scores = adata.obs[column].iloc[cells].groupby(adata.obs["omt_component"].iloc[cells], observed=True).sum()
    rows = [{"component": str(name), "mass": float(mass)} for name, mass in scores.sort_values(ascending=False).items()]
    content = {"output": str(output), "key_added": column, "group": group_label(model.groups[end]), "mass": rows}
    _report(content, rows, as_json=as_json, quiet=quiet)


@app.command("map")
@_one_sentence
def map_cells(
    model: Annotated[Path, typer.Argument(help="Folder that omt fit or omt transport wrote.", show_default=False)],
    source: Source,
    target: Target,
    data: Annotated[
        Path, typer.Option("--input", help="h5ad file with cells like those of --source.", show_default=False)
    ],
    output: Output,
    kind: Annotated[str, typer.Option(help="barycentric, sample or mode.")] = "barycentric",
    tau: Tau = 1.0,
    reg: Reg = 0.01,
    seed: Seed = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Move new cells of one group into another; writes obsm["X_omt_map"].

    A folder of omt fit has no plans yet: then the one from --source to --target is solved here with --tau and --reg.
    If the file has the --groupby column only cells of --source are mapped and the others get NaN; without it all are.

    Example: omt map model/ --source ctrl --target stim --input new.h5ad -o mapped.h5ad
    """
    _check_exists(model)
    _check_exists(data)
    _check_output(output)
    import numpy as np

    from omt import io
    from omt.grouped import group_label
    from omt.prepare import ready
    from omt.tl._cells import group_cells
    from omt.tl.transport import solve_plans

    plans = io.load_model(model)
    if not plans.transports:
        plans = solve_plans(plans, source=source, target=target, tau=tau, reg=reg)
    i, j = plans.position(source, "source"), plans.position(target, "target")
    adata = io.read_h5ad(data)
    X = ready(adata, plans)
    rows = np.arange(adata.n_obs)
    if plans.groupby in adata.obs:
        groups = group_cells(adata, plans.groupby)
        if plans.groups[i] not in groups.values:
            raise ValueError(f"{data} has no cell with {plans.groupby} {group_label(plans.groups[i])}")
        rows = np.flatnonzero(groups.codes == groups.values.index(plans.groups[i]))
    part = X[rows]
    moved = plans.map_cells(part.toarray() if hasattr(part, "toarray") else part, i, j, kind=kind, random_state=seed)
    result = np.full((adata.n_obs, moved.shape[1]), np.nan)
    result[rows] = moved
    adata.obsm["X_omt_map"] = result
    io.write_h5ad(adata, output)
    content = {"output": str(output), "key_added": "X_omt_map", "cells": len(rows), "features": moved.shape[1]}
    _report(content, [content], as_json=as_json, quiet=quiet)


@app.command()
@_one_sentence
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("omt-demo"),
    seeds: Annotated[int, typer.Option(help="Repeat every experiment with this many seeds.", min=1)] = 5,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run the method on data of its dependencies; print what it reached.

    Needs no network, writes pictures, takes about half a minute.

    Example: omt demo --out pictures/
    """
    from omt.demo import run

    result = run(out, seeds=seeds, progress=not quiet and not as_json)
    _report(result.to_dict(), result.table(), as_json=as_json, quiet=quiet)
    for note in result.notes:
        print(f"omt: {note}", file=sys.stderr)
    if not result.ok:
        raise typer.Exit(1)


def _report(content: dict[str, Any], rows: list[dict[str, Any]], *, as_json: bool, quiet: bool) -> None:
    """Print a result: JSON for programs, a table for people, nothing with --quiet."""
    if as_json:
        print(json.dumps(content))
        return
    if quiet or not rows:
        return
    cells = [[str(name) for name in rows[0]], *([_text(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    for line in cells:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def main() -> None:
    """Run the command line."""
    app()
