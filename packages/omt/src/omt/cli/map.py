"""`omt map`: new cells of one group, moved into another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from omt.cli.app import (
    Json,
    Output,
    Quiet,
    Seed,
    Source,
    Target,
    app,
    check_exists,
    check_output,
    one_sentence,
    report,
)


@app.command("map")
@one_sentence
def map_cells(
    model: Annotated[Path, typer.Argument(help="Folder that omt fit or omt transport wrote.", show_default=False)],
    source: Source,
    target: Target,
    data: Annotated[
        Path, typer.Option("--input", help="h5ad file with cells like those of --source.", show_default=False)
    ],
    output: Output,
    kind: Annotated[str, typer.Option(help="barycentric, sample or mode.")] = "barycentric",
    refine: Annotated[
        bool, typer.Option("--refine", help="Finer than components: entropic transport between points of both groups.")
    ] = False,
    n_points: Annotated[int, typer.Option(help="Points of --refine on each side.")] = 2000,
    tau: Annotated[
        float | None, typer.Option(help="Of the plan that is solved here: mass conservation in (0, 1]; 1 if not given.")
    ] = None,
    reg: Annotated[float | None, typer.Option(help="Of the plan that is solved here: outer temperature, 0.01.")] = None,
    seed: Seed = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Move new cells of one group into another; writes obsm["X_omt_map"].

    A folder of omt fit has no plans yet: then the one from --source to --target is solved here with --tau and --reg.
    If the file has the --groupby column only cells of --source are mapped and the others get NaN; without it all are.

    Example: omt map model/ --source ctrl --target stim --input new.h5ad -o mapped.h5ad
    """
    check_exists(model)
    check_exists(data)
    check_output(output)
    import numpy as np

    from omt import io
    from omt.grouped import group_label
    from omt.prepare import ready
    from omt.tl._cells import group_cells
    from omt.tl.map_to import mapped_table
    from omt.tl.transport import solve_plans

    if refine and kind != "barycentric":
        raise ValueError(f"--refine gives the mean image of each cell; it cannot go with --kind {kind}")
    plans = io.load_model(model)
    if not plans.transports:
        plans = solve_plans(
            plans, source=source, target=target, tau=1.0 if tau is None else tau, reg=0.01 if reg is None else reg
        )
    elif tau is not None or reg is not None:
        raise ValueError(
            f"{model} has its plans, solved by omt transport; --tau and --reg go there, or take the folder of omt fit"
        )
    i, j = plans.position(source, "source"), plans.position(target, "target")
    adata = io.read_h5ad(data)
    X = ready(adata, plans)
    rows = np.arange(adata.n_obs)
    if plans.groupby in adata.obs:
        groups = group_cells(adata, plans.groupby)
        if plans.groups[i] not in groups.values:
            raise ValueError(f"{data} has no cell with {plans.groupby} {group_label(plans.groups[i])}")
        rows = np.flatnonzero(groups.codes == groups.values.index(plans.groups[i]))
    if refine:
        if plans.order.index(j) != plans.order.index(i) + 1:
            raise ValueError(
                f"--refine needs neighbours in the chain; {source} and {target} are none: give the folder of omt fit "
                "for a plan between them"
            )
        moved = plans.transports[plans.order.index(i)].refine(n_points, seed=seed).map(X[rows])
    else:
        moved = plans.map_cells(X[rows], i, j, kind=kind, random_state=seed, n_written=adata.n_obs)
    adata.obsm["X_omt_map"] = mapped_table(moved, rows, adata.obs_names, plans.mixtures[j].feature_names)
    io.write_h5ad(adata, output)
    content = {"output": str(output), "key_added": "X_omt_map", "cells": len(rows), "features": moved.shape[1]}
    report(content, [content], as_json=as_json, quiet=quiet)
