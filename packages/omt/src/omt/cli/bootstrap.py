"""`omt bootstrap`: which transitions to trust."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from omt.cli.app import Json, Quiet, Seed, Source, Target, app, check_exists, check_output, one_sentence, report


@app.command()
@one_sentence
def bootstrap(
    data: Annotated[Path, typer.Argument(help="h5ad file with the cells.", show_default=False)],
    chain: Annotated[Path, typer.Argument(help="Folder that omt transport wrote.", show_default=False)],
    source: Source,
    target: Target,
    unit: Annotated[
        str, typer.Option(help="cell, or the obs column of what would be drawn anew in another study: donor, embryo.")
    ] = "cell",
    n_boot: Annotated[int, typer.Option(help="Replicates.")] = 200,
    level: Annotated[float, typer.Option(help="Of the intervals, between 0 and 1.")] = 0.9,
    refit: Annotated[bool, typer.Option("--refit", help="Let EM run again in every replicate.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the cells and the result there.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the table there.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the transitions there (needs omt[plot]).")] = None,
    seed: Seed = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Give every transition between two groups an interval, by the Bayesian bootstrap.

    Prints the transitions, those of most mass first; "more" and "less" are against drawing descendants without regard
    to their origin, "?" may be either.

    Example: omt bootstrap embryo.h5ad chain/ --source 240 --target 420 --unit embryo -o sure.h5ad
    """
    check_exists(data)
    check_exists(chain)
    for path, others in ((output, (csv, plot)), (csv, (data, plot)), (plot, (data,))):
        if path is not None:
            check_output(path, apart_from=others)
    from omt import io, tl
    from omt.prepare import ready
    from omt.tl._assign import assign
    from omt.tl.bootstrap import stored_pair
    from shared_core.files import atomic_write

    model = io.load_model(chain, need="transport")
    i, j = model.position(source, "source"), model.position(target, "target")
    model.path(i, j)
    adata = io.read_h5ad(data)
    assign(adata, model, ready(adata, model))
    io.write_uns(adata, model)
    tl.bootstrap(adata, n_boot, unit, level=level, refit=refit, random_state=seed, progress=False if quiet else None)
    found = stored_pair(adata, model, i, j)
    rows = _rows(model.names(i), model.names(j), model.table(i, j), model.joint(i, j), found)
    if csv is not None:
        import pandas as pd

        with atomic_write(csv) as temporary:
            pd.DataFrame(rows).to_csv(temporary, index=False)
    if plot is not None:
        from omt import pl

        pl.transitions(adata, source, target, show_ci=True, show=False, save=plot)
    if output is not None:
        io.write_h5ad(adata, output)
    content = {"source": source, "target": target, "unit": unit, "level": level, "n_boot": n_boot, "transitions": rows}
    report(content, rows, as_json=as_json, quiet=quiet)


def _rows(sources: Any, targets: Any, table: Any, joint: Any, found: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each transition that has 0.1 % of the mass or could have it, by falling mass."""
    words = {1: "more", 0: "?", -1: "less"}
    rows = []
    for place in (-joint).argsort(axis=None, kind="stable"):
        k, l = divmod(int(place), joint.shape[1])
        if max(joint[k, l], found["coupling"]["upper"][k, l]) < 1e-3 * joint.sum():
            continue
        rows.append(
            {
                "from": sources[k],
                "to": targets[l],
                "probability": float(table[k, l]),
                "lower": float(found["forward"]["lower"][k, l]),
                "upper": float(found["forward"]["upper"][k, l]),
                "sign_stability": float(found["sign_stability"][k, l]),
                "than_chance": words[int(found["verdict"][k, l])],
            }
        )
    return rows
