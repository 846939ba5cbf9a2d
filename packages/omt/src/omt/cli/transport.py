"""`omt transport`: plans between the groups of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from omt.cli.app import Json, Output, Quiet, Reg, Tau, app, check_exists, check_output, note, one_sentence, report

_LITTLE = 0.5  # share of the mass below which a plan says more of death and growth than of descent


@app.command()
@one_sentence
def transport(
    model: Annotated[Path, typer.Argument(help="Folder that omt fit wrote.", show_default=False)],
    output: Output,
    source: Annotated[
        str | None, typer.Option(help="With --target: one plan instead of a chain over all groups.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="With --source: the end of that plan.")] = None,
    tau: Tau = 1.0,
    reg: Reg = 0.01,
    inner_reg: Annotated[float, typer.Option(help="Inner temperature relative to the mean cost.")] = 0.0,
    cells: Annotated[Path | None, typer.Option(help="With --growth-key: h5ad file with the cells.")] = None,
    growth_key: Annotated[
        str | None, typer.Option(help="Column of obs in --cells: factor by which a cell multiplies per unit of time.")
    ] = None,
    growth_iters: Annotated[
        int, typer.Option(help="Solve that often; each time the growth just found is assumed.")
    ] = 1,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Solve optimal transport: a chain over consecutive groups, or one plan.

    Column mass: what of the mass is moved; with --tau below 1 the rest dies and grows again.

    A chain needs groups in order: numbers, an ordered categorical column, or --bins of omt fit.

    Example: omt transport model/ --tau 0.9 --reg 0.01 -o chain/

    With growth: omt transport model/ --cells embryo.h5ad --growth-key growth_rate -o chain/
    """
    check_exists(model)
    if (cells is None) != (growth_key is None):
        raise ValueError("give --growth-key together with --cells, the h5ad file whose column it is")
    if cells is not None:
        check_exists(cells)
    check_output(output, folder=True)
    from omt import io
    from omt.grouped import group_label
    from omt.prepare import ready
    from omt.tl._assign import assign
    from omt.tl.transport import solve_plans

    if (source is None) != (target is None):
        raise ValueError("give both --source and --target, or neither for a chain over all groups")
    mixtures = io.load_model(model)
    if source is None and not mixtures.settings.get("ordered"):
        groups = ", ".join(group_label(group) for group in mixtures.groups)
        raise ValueError(
            f"the groups of {mixtures.groupby!r} are text without an order ({groups}): give --source and --target for "
            "one plan; for a chain fit on a numeric column (--bins cuts one into stages) or an ordered categorical one"
        )
    adata = None
    if cells is not None:
        adata = io.read_h5ad(cells)
        if growth_key not in adata.obs:
            raise ValueError(
                f"--growth-key {growth_key}: {cells} has no such obs column; columns are: {', '.join(adata.obs)}"
            )
        assign(adata, mixtures, ready(adata, mixtures))
    solved = solve_plans(
        mixtures,
        source=source,
        target=target,
        growth_from=adata,
        growth_key=growth_key,
        growth_iters=growth_iters,
        tau=tau,
        reg=reg,
        inner_reg=inner_reg,
    )
    io.save_model(solved, output)
    rows: list[dict[str, Any]] = [
        {
            "source": group_label(solved.groups[i]),
            "target": group_label(solved.groups[j]),
            "cost": float(plan.transport_cost),
            "mass": float(plan.coupling.sum()),
            "converged": bool(plan.converged),
            "marginal_error": float(plan.marginal_error),
        }
        for (i, j), plan in zip(solved.steps(), solved.transports, strict=True)
    ]
    least = min(rows, key=lambda row: row["mass"])
    if least["mass"] < _LITTLE:
        note(
            f"only {least['mass']:.1%} of the mass is moved from {least['source']} to {least['target']}, the rest dies "
            "and grows again: compare with --tau 1, or give the growth by --growth-key",
            quiet=quiet,
        )
    report({"chain": str(output), "plans": rows}, rows, as_json=as_json, quiet=quiet)
