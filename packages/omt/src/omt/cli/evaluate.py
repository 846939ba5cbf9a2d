"""`omt evaluate`: how near an interpolation comes to a time that was left out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from omt.cli.app import Json, Quiet, Reg, Seed, Tau, app, check_exists, check_representation, one_sentence, report


@app.command()
@one_sentence
def evaluate(
    data: Annotated[Path, typer.Argument(help="h5ad file; it is only read.", show_default=False)],
    groupby: Annotated[str, typer.Option(help="Numeric column of obs: the times.", show_default=False)],
    hold_out: Annotated[
        float | None, typer.Option(help="Time to leave out; each between the first and the last if not given.")
    ] = None,
    use_rep: Annotated[str, typer.Option(help="Key of obsm with the features.")] = "X_pca",
    labels: Annotated[str | None, typer.Option(help="Column of obs whose values are the components.")] = None,
    n_components: Annotated[int, typer.Option(help="Components per time, where --labels is not given.")] = 10,
    covariance: Annotated[str, typer.Option(help="full, diag, spherical, tied or lowrank.")] = "full",
    bins: Annotated[
        str | None,
        typer.Option(help="Edges, e.g. 0,10,20: cut a numeric --groupby into stages named by their middles."),
    ] = None,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="X is raw counts: normalise, log, variable genes, PCA by scanpy.")
    ] = False,
    n_pcs: Annotated[int, typer.Option(help="Principal components of --prepare.")] = 20,
    tau: Tau = 1.0,
    reg: Reg = 0.01,
    repeats: Annotated[int, typer.Option(help="Random draws to average over.", min=1)] = 5,
    seed: Seed = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Leave a time out, interpolate it from its neighbours, and print its distance to the cells measured there.

    Beside it: entropic transport between all cells, random pairs, the times before and after as they are, and one half
    of the cells against the other (noise floor). Column explained: 0 is random pairing, 1 the noise floor.

    Example: omt evaluate embryo.h5ad --groupby stage --hold-out 330
    """
    check_exists(data)
    from omt import io, tl
    from omt import prepare as preparation

    adata = io.read_h5ad(data)
    if bins is not None:
        groupby = preparation.bin_times(adata, groupby, bins)
    if prepare:
        use_rep = "X_pca"
        adata.obsm[use_rep], _ = preparation.prepare(adata, n_pcs=n_pcs, random_state=seed)
    elif groupby in adata.obs:
        check_representation(data, adata.obsm, use_rep)
    table = tl.evaluate_interpolation(
        adata, groupby, hold_out=hold_out, use_rep=use_rep, labels=labels, n_components=n_components,
        covariance=covariance, reg=reg, tau=tau, n_repeats=repeats, random_state=seed,
        progress=False if quiet or as_json else None,
    )  # fmt: skip
    rows: list[dict[str, Any]] = [
        {"time": float(time), "method": str(method), **{str(name): float(value) for name, value in row.items()}}
        for (time, method), row in zip(table.index, table.to_dict("records"), strict=True)
    ]
    content = {"groupby": groupby, "use_rep": use_rep, "rows": rows}
    report(content, rows, as_json=as_json, quiet=quiet)
