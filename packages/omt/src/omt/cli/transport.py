"""`omt transport`: plans between the groups of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from omt.cli.app import Json, Output, Quiet, Reg, Tau, app, check_exists, check_output, one_sentence, report


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
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Solve optimal transport: a chain over consecutive groups, or one plan.

    A chain needs groups in order: numbers, an ordered categorical column, or --bins of omt fit.

    Example: omt transport model/ --tau 0.9 --reg 0.01 -o chain/
    """
    check_exists(model)
    check_output(output, folder=True)
    from omt import io
    from omt.grouped import group_label
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
    solved = solve_plans(mixtures, source=source, target=target, tau=tau, reg=reg, inner_reg=inner_reg)
    io.save_model(solved, output)
    rows = [
        {
            "source": group_label(solved.groups[i]),
            "target": group_label(solved.groups[j]),
            "cost": float(plan.transport_cost),
            "converged": bool(plan.converged),
            "marginal_error": float(plan.marginal_error),
        }
        for (i, j), plan in zip(solved.steps(), solved.transports, strict=True)
    ]
    report({"chain": str(output), "plans": rows}, rows, as_json=as_json, quiet=quiet)
