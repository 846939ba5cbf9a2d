"""`omt fit`: a mixture for each group of cells."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from omt.cli.app import Json, Output, Quiet, Seed, app, check_exists, check_output, one_sentence, report


@app.command()
@one_sentence
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
    check_exists(data)
    check_output(output, folder=True)
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
    report({"model": str(output), "groupby": groupby, "groups": rows}, shown, as_json=as_json, quiet=quiet)
