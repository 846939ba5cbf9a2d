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
    csv: Annotated[Path | None, typer.Option(help="Write the table there.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw it there (needs omt[plot]).")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Print the transition table between two groups; rows sum to 1.

    Example: omt transitions chain/ --source 240 --target 420 --csv t.csv --plot t.png
    """
    check_exists(chain)
    for path in (csv, plot):
        if path is not None:
            check_output(path)
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
    report(content, rows, as_json=as_json, quiet=quiet)
