"""`omt transitions`: the table between two groups."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from omt.cli.app import Json, Quiet, Source, Target, app, check_exists, check_output, one_sentence, report


@app.command()
@one_sentence
def transitions(
    chain: Annotated[Path, typer.Argument(help="Folder that omt transport wrote.", show_default=False)],
    source: Source,
    target: Target,
    backward: Annotated[
        bool, typer.Option("--backward", help="Rows are target components: where they come from.")
    ] = False,
    cells: Annotated[Path | None, typer.Option(help="With --by: h5ad file with the cells.")] = None,
    by: Annotated[
        str | None, typer.Option(help="Column of obs in --cells: rows and columns are its values, not components.")
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the table there.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw it there (needs omt[plot]).")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Print the transition table between two groups; rows sum to 1.

    Example: omt transitions chain/ --source 240 --target 420 --csv t.csv --plot t.png

    Found components in your labels: omt transitions chain/ --source 240 --target 420 --cells embryo.h5ad --by cell_type
    """
    check_exists(chain)
    if (cells is None) != (by is None):
        raise ValueError("give --by together with --cells, the h5ad file whose column it is")
    if cells is not None:
        check_exists(cells)
    for path, others in ((csv, (cells, plot)), (plot, (cells,))):
        if path is not None:
            check_output(path, apart_from=others)
    from omt import io
    from omt.prepare import ready
    from omt.tl._assign import assign
    from omt.tl.transition_matrix import compute_table
    from shared_core.files import atomic_write

    model = io.load_model(chain, need="transport")
    direction = "backward" if backward else "forward"
    if cells is not None and by is not None:
        adata = io.read_h5ad(cells)
        if by not in adata.obs:
            raise ValueError(f"--by {by}: {cells} has no such obs column; columns are: {', '.join(adata.obs)}")
        assign(adata, model, ready(adata, model))
        frame = compute_table(adata, model, source, target, direction=direction, by=by)
    else:
        frame = model.frame(source, target, direction=direction)
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
            finish(ax, show=False, save=plot, name="omt_transitions", fresh=True)
    content = {
        "source": source,
        "target": target,
        "direction": direction,
        "by": "component" if by is None else by,
        "rows": list(frame.index),
        "columns": list(frame.columns),
        "table": frame.to_numpy().tolist(),
    }
    rows: list[dict[str, Any]] = [
        {"": name, **{column: f"{p:.3f}" for column, p in zip(frame.columns, values, strict=True)}}
        for name, values in zip(frame.index, frame.to_numpy().tolist(), strict=True)
    ]
    report(content, rows, as_json=as_json, quiet=quiet)
