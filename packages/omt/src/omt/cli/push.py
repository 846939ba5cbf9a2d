"""`omt push`: descendants and origins of chosen cells."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from omt.cli.app import Json, Output, Quiet, Source, Target, app, check_exists, check_output, one_sentence, report


@app.command()
@one_sentence
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
    check_exists(chain)
    check_exists(data)
    check_output(output)
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
    report(content, rows, as_json=as_json, quiet=quiet)
