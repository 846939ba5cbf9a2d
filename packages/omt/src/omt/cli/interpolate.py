"""`omt interpolate`: cells at a time at which none were measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from omt.cli.app import Json, Output, Quiet, Seed, app, check_exists, check_output, one_sentence, report


@app.command()
@one_sentence
def interpolate(
    chain: Annotated[Path, typer.Argument(help="Folder that omt transport wrote.", show_default=False)],
    output: Output,
    time: Annotated[float | None, typer.Option(help="Time between the first and the last.")] = None,
    source: Annotated[
        str | None, typer.Option(help="With --target and --at, instead of --time: the group before.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="With --source and --at: the group after.")] = None,
    at: Annotated[float | None, typer.Option(help="How far from --source to --target, 0 to 1.")] = None,
    n: Annotated[int, typer.Option("-n", help="How many cells.")] = 2000,
    bridge: Annotated[
        bool, typer.Option("--bridge", help="Schrödinger bridge, for plans with an inner temperature.")
    ] = False,
    seed: Seed = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write cells at a time between those that were measured, drawn from the interpolated mixture.

    Their features are in the obsm key the model was fitted on; obs tells between which components each cell is.

    Example: omt interpolate chain/ --time 330 -n 2000 -o at330.h5ad
    """
    check_exists(chain)
    check_output(output)
    from omt import io
    from omt.tl.interpolate import generated_cells

    model = io.load_model(chain, need="transport")
    cells = generated_cells(model, time, source=source, target=target, t=at, n=n, bridge=bridge, random_state=seed)
    io.write_h5ad(cells, output)
    pairs = cells.obs.groupby(["omt_source", "omt_target"], observed=True).size().sort_values(ascending=False)
    rows = [{"source": str(s), "target": str(t), "cells": int(count)} for (s, t), count in pairs.items()]
    content = {"output": str(output), "cells": cells.n_obs, "use_rep": model.use_rep, "pairs": rows}
    report(content, rows, as_json=as_json, quiet=quiet)
