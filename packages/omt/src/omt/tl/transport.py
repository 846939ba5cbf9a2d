"""Optimal transport between the mixtures of the groups."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from omt.grouped import group_label
from omt.io import read_uns, write_uns
from omt.tl._cells import start_copy

if TYPE_CHECKING:
    from anndata import AnnData

    from omt.grouped import GroupedMixtures

__all__ = ["solve_plans", "transport"]


def transport(
    adata: AnnData,
    *,
    time_key: str | None = None,
    source: object = None,
    target: object = None,
    reg: float = 0.01,
    tau: float | tuple[float, float] = 1.0,
    tau_a: float | None = None,
    tau_b: float | None = None,
    cost: str = "w2",
    inner_reg: float = 0.0,
    copy: bool = False,
) -> AnnData | None:
    """Solve optimal mixture transport: a chain over consecutive times, or one plan between two groups.

    Parameters
    ----------
    adata
        After `omt.tl.fit_mixtures`.
    time_key
        The column given there as `groupby`, if its values have an order: solves a plan for each pair of consecutive
        values.
    source, target
        Two groups instead of `time_key`: solves the one plan from `source` to `target`.
    reg
        Outer temperature relative to the mean cost; 0 is the exact linear program.
    tau
        Mass conservation of the source and the target side, in (0, 1]: 1 keeps both marginals exactly; below 1 mass
        may grow and vanish, which time courses need.
    tau_a, tau_b
        The two sides of `tau` under moscot's names.
    cost, inner_reg
        As in `omt.transport`.
    copy
        Return a copy instead of writing into `adata`.

    Returns
    -------
    AnnData or None
        Writes the plans into `uns["omt"]`.

    Raises
    ------
    ValueError
        Neither or both ways of saying which groups to connect; a group that does not exist; `tau`, `reg` out of range.

    Examples
    --------
    >>> import omt
    >>> adata, _ = omt.datasets.branching_process(100)
    >>> omt.tl.fit_mixtures(adata, groupby="time", labels="cell_type", use_rep="X_state")
    >>> omt.tl.transport(adata, time_key="time", tau=0.9)
    """
    model = read_uns(adata)
    if time_key is not None:
        if time_key != model.groupby:
            raise ValueError(
                f"time_key={time_key!r}, but the mixtures are those of {model.groupby!r}; run "
                f"omt.tl.fit_mixtures(adata, groupby={time_key!r}) first"
            )
        if source is not None or target is not None:
            raise ValueError(
                "give either time_key= (a chain over all times) or source= and target= (one plan), not both"
            )
    elif source is None or target is None:
        raise ValueError(
            "say what to connect: time_key= for a chain over all times, or source= and target= for two groups"
        )
    if tau_a is not None or tau_b is not None:
        tau = (1.0 if tau_a is None else tau_a, 1.0 if tau_b is None else tau_b)
    solved = solve_plans(model, source=source, target=target, reg=reg, tau=tau, cost=cost, inner_reg=inner_reg)
    result = start_copy(adata, copy)
    write_uns(result, solved)
    return result if copy else None


def solve_plans(
    model: GroupedMixtures, *, source: object = None, target: object = None, **options: Any
) -> GroupedMixtures:
    """Solve the plan from `source` to `target`, or without them those of all neighbouring groups; `options` go to
    `omt.transport`.
    """
    from omt.problem import transport as solve

    if source is not None and target is not None:
        order: tuple[int, ...] = (
            model.position(source, "source", chain=False),
            model.position(target, "target", chain=False),
        )
        if order[0] == order[1]:
            raise ValueError(f"source and target are both {group_label(model.groups[order[0]])}; they must differ")
    else:
        if not model.settings.get("ordered"):
            raise ValueError(
                f"{model.groupby!r} is neither numeric nor an ordered categorical, so its times have no order; "
                "make it one with pandas.Categorical(..., ordered=True), or give source and target"
            )
        if len(model.groups) < 2:
            raise ValueError(
                f"{model.groupby!r} has only the time {group_label(model.groups[0])}; transport needs at least two"
            )
        order = tuple(range(len(model.groups)))
    steps = itertools.pairwise(order)
    transports = tuple(solve(model.mixtures[i], model.mixtures[j], **options) for i, j in steps)
    return replace(model, order=order, transports=transports)
