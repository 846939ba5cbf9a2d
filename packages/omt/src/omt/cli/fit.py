"""`omt fit`: a mixture for each group of cells."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from omt.cli.app import (
    Json,
    Output,
    Quiet,
    Seed,
    app,
    check_exists,
    check_output,
    check_representation,
    note,
    one_sentence,
    report,
)

if TYPE_CHECKING:
    from omt.families.gaussian import CovarianceType
    from omt.fitting.arguments import FamilyName


@app.command()
@one_sentence
def fit(
    data: Annotated[Path, typer.Argument(help="h5ad file; it is only read.", show_default=False)],
    groupby: Annotated[
        str, typer.Option(help="Column of obs: the time points, or control and treated.", show_default=False)
    ],
    output: Output,
    use_rep: Annotated[
        str | None,
        typer.Option(help="Key of obsm with the features; X for the matrix itself. Default: X_pca, for counts X."),
    ] = None,
    layer: Annotated[str | None, typer.Option(help="Layer to take instead of X, e.g. counts.")] = None,
    labels: Annotated[str | None, typer.Option(help="Column of obs whose values are the components.")] = None,
    n_components: Annotated[int, typer.Option(help="Components per group, where --labels is not given.")] = 10,
    bic: Annotated[
        str | None,
        typer.Option(help="Range, e.g. 5:40: as many components as the Bayesian information criterion says."),
    ] = None,
    icl: Annotated[
        str | None, typer.Option(help="The same by the integrated completed likelihood: fewer, separated ones.")
    ] = None,
    budget: Annotated[
        int | None, typer.Option(help="Most components of all groups together, with --bic or --icl.")
    ] = None,
    family: Annotated[
        str,
        typer.Option(
            help="gaussian; poisson, negative_binomial, multinomial (counts); bernoulli; gamma, exponential, lognormal."
        ),
    ] = "gaussian",
    covariance: Annotated[str, typer.Option(help="full, diag, spherical, tied or lowrank.")] = "full",
    size_factors: Annotated[
        str | None, typer.Option(help="For counts: total, or a column of obs: how deep each cell was sequenced.")
    ] = None,
    bins: Annotated[
        str | None,
        typer.Option(help="Edges, e.g. 0,10,20: cut a numeric --groupby into stages named by their middles."),
    ] = None,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="X is raw counts: normalise, log, variable genes, PCA by scanpy.")
    ] = False,
    n_pcs: Annotated[int, typer.Option(help="Principal components of --prepare.")] = 20,
    device: Annotated[str, typer.Option(help="cpu, or a device of PyTorch such as cuda, for Gaussians.")] = "cpu",
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Folder for unfinished work: the same command goes on from there. Removed at the end."),
    ] = None,
    seed: Seed = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Fit a mixture to each group of cells and write the model folder.

    Example: omt fit embryo.h5ad --groupby stage --use-rep X_pca --labels cell_type -o model/

    Raw counts: omt fit cells.h5ad --groupby stage --family negative_binomial --size-factors total -o model/
    """
    check_exists(data)
    check_output(output, folder=True)
    number, bounds = _wanted(n_components, bic, icl)
    from dataclasses import replace

    from omt import io, tl
    from omt import prepare as preparation
    from omt.grouped import group_label
    from omt.tl.fit_mixtures import reads_obsm

    adata = io.read_h5ad(data, backed=not prepare)
    settings: dict[str, str] = {}
    if bins is not None:
        settings = {"bins": bins, "bins_of": groupby}
        groupby = preparation.bin_times(adata, groupby, bins)
    record: dict[str, Any] = {}
    if prepare:
        use_rep = "X_pca"
        adata.obsm[use_rep], record = preparation.prepare(adata, n_pcs=n_pcs, random_state=seed)
    elif groupby in adata.obs and reads_obsm(use_rep, layer, family):
        check_representation(data, adata.obsm, use_rep or "X_pca")
    tl.fit_mixtures(
        adata, groupby, use_rep=use_rep, labels=labels, n_components=number, component_range=bounds, budget=budget,
        family=cast("FamilyName", family), layer=layer, size_factors=size_factors,
        covariance=cast("CovarianceType", covariance), random_state=seed, device=device, checkpoint=checkpoint,
        progress=False if quiet else None,
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
    left_out = adata.n_obs - sum(int(row["cells"] or 0) for row in rows)
    if left_out:
        note(f"{left_out} of {adata.n_obs} cells have no {groupby} and are left out", quiet=quiet)
    if isinstance(number, str):
        for sentence in _at_the_edge(rows, bounds):
            note(sentence, quiet=quiet)
    shown = [{("log-likelihood per cell" if k == "log_likelihood" else k): v for k, v in row.items()} for row in rows]
    content = {"model": str(output), "groupby": groupby, "left_out": left_out, "groups": rows}
    report(content, shown, as_json=as_json, quiet=quiet)


def _at_the_edge(rows: list[dict[str, Any]], bounds: tuple[int, int]) -> list[str]:
    """Sentences on groups whose number of components is an end of the range, so that a wider one may give another."""
    sentences = []
    for end, word in zip(bounds, ("fewest", "most"), strict=True):
        groups = [str(row["group"]) for row in rows if row["components"] == end > 1]
        if groups:
            sentences.append(
                f"{', '.join(groups)}: {end} components are the {word} of the range; a wider one may suit better"
            )
    return sentences


def _wanted(n_components: int, bic: str | None, icl: str | None) -> tuple[Any, tuple[int, int]]:
    """The number of components, or the criterion that chooses it and the range that it chooses from."""
    if bic is not None and icl is not None:
        raise ValueError("--bic and --icl both choose the number of components; give one of them")
    for criterion, text in (("bic", bic), ("icl", icl)):
        if text is not None:
            least, _, most = text.partition(":")
            if not (least.isdigit() and most.isdigit()):
                raise ValueError(f"--{criterion} is {text!r}; it must be a range such as 5:40")
            return criterion, (int(least), int(most))
    return n_components, (1, 20)
