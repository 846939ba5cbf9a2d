"""`omt demo`: the method on data of its dependencies."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from omt.cli.app import Json, Quiet, app, one_sentence, report


@app.command()
@one_sentence
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("omt-demo"),
    data: Annotated[
        Path | None,
        typer.Option(help="Folder with worm_embryo.h5ad, mix3to10_d2.npz, …: the experiments on them run, too."),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Repeat every experiment with this many seeds.", min=1)] = 5,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run the method on data of its dependencies; print what it reached.

    Needs no network, writes pictures, takes about two minutes.

    Example: omt demo --out pictures/
    """
    from omt.demo import run

    result = run(out, data=data, seeds=seeds, progress=not quiet and not as_json)
    report(result.to_dict(), result.table(), as_json=as_json, quiet=quiet)
    for note in result.notes:
        print(f"omt: {note}", file=sys.stderr)
    if not result.ok:
        raise typer.Exit(1)
