"""Optimal transport between the mixtures of the groups."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from omt.grouped import group_label
from omt.io import read_uns, write_uns
from omt.tl._cells import cells_of, obs_column, responsibilities_of, start_copy
from omt.tl._growth import cell_rates, step_length

if TYPE_CHECKING:
    from collections.abc import Mapping

    from anndata import AnnData
    from numpy.typing import NDArray

    from omt.grouped import GroupedMixtures
    from omt.mixture import Mixture
    from omt.transport import Transport

__all__ = ["solve_plans", "transport"]

_LEAST_GROWTH = 1e-12  # descendants per cell that count as none


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
    growth_key: str | None = None,
    growth_iters: int = 1,
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
    growth_key
        Column of `obs` with growth rates: the factor by which a cell multiplies in one unit of time (that of the
        groups, if they are numbers; a step otherwise), as `omt.tl.score_growth` writes them. Over a step of length
        `Δt` a cell counts `rate**Δt` times.
    growth_iters
        Times each plan is solved. From the second on, the growth that the last plan found is what the next assumes, so
        with `tau` below 1 the plan leans more on the composition of the later group. Without `growth_key` it starts
        from equal growth.
    copy
        Return a copy instead of writing into `adata`.

    Returns
    -------
    AnnData or None
        Writes the plans into `uns["omt"]`.

    Raises
    ------
    KeyError
        `growth_key` is not a column of `obs`.
    ValueError
        Neither or both ways of saying which groups to connect; a group that does not exist; `tau`, `reg` out of range;
        a growth rate that is not positive.

    Examples
    --------
    >>> import omt
    >>> adata, _ = omt.datasets.branching_process(100)
    >>> omt.tl.fit_mixtures(adata, groupby="time", labels="cell_type", use_rep="X_state")
    >>> omt.tl.transport(adata, time_key="time", tau=0.9)

    With growth rates (here those of the types, which the generator knows):

    >>> rate = {"stem": 1.6, "A progenitor": 1.3, "B progenitor": 1.1, "A1": 1.0, "A2": 0.8, "B1": 0.9}
    >>> adata.obs["rate"] = adata.obs["cell_type"].map(rate).astype(float)
    >>> omt.tl.transport(adata, time_key="time", growth_key="rate")
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
    solved = solve_plans(
        model,
        source=source,
        target=target,
        growth_from=None if growth_key is None else adata,
        growth_key=growth_key,
        growth_iters=growth_iters,
        reg=reg,
        tau=tau,
        cost=cost,
        inner_reg=inner_reg,
    )
    result = start_copy(adata, copy)
    write_uns(result, solved)
    return result if copy else None


def solve_plans(
    model: GroupedMixtures,
    *,
    source: object = None,
    target: object = None,
    growth_from: AnnData | None = None,
    growth_key: str | None = None,
    growth_iters: int = 1,
    **options: Any,
) -> GroupedMixtures:
    """Solve the plan from `source` to `target`, or without them those of all neighbouring groups; `options` go to
    `omt.transport`, and growth rates are read from the cells `growth_from`.
    """
    count: Any = growth_iters
    if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < 1:
        raise ValueError(f"growth_iters is {growth_iters!r}; it must be an integer ≥ 1")
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
    priors = [
        None if growth_from is None or growth_key is None else _component_growth(growth_from, model, growth_key, i, j)
        for i, j in itertools.pairwise(order)
    ]  # bad rates are found before anything is solved
    transports = tuple(
        _solve(model.mixtures[i], model.mixtures[j], prior, growth_iters, options)
        for (i, j), prior in zip(itertools.pairwise(order), priors, strict=True)
    )
    settings = {
        **model.settings,
        "cost": str(options.get("cost", "w2")),
        "growth_key": growth_key or "",
        "growth_iters": int(growth_iters),
    }
    return replace(model, order=order, transports=transports, settings=settings)


def _solve(
    P: Mixture, Q: Mixture, prior: NDArray[np.float64] | None, growth_iters: int, options: Mapping[str, Any]
) -> Transport:
    """Solve one plan, then again with the growth that was found."""
    from omt.problem import transport as solve

    plan = solve(P, Q, growth=prior, **options)
    for _ in range(1, growth_iters):
        # A component that died out would have weight 0, and no later iteration could bring it back.
        plan = solve(P, Q, growth=np.maximum(plan.posterior_growth, _LEAST_GROWTH), **options)
    return plan


def _component_growth(
    adata: AnnData, model: GroupedMixtures, key: str, source: int, target: int
) -> NDArray[np.float64]:
    """Descendants per cell of each component of a group until another, from the rates of its cells."""
    from omt.growth import component_growth

    rows = cells_of(adata, model, source)
    weight = str(model.settings.get("sample_weight", ""))
    return component_growth(
        cell_rates(adata, key, rows),
        responsibilities_of(adata, model, source, rows),
        step_length(model, source, target),
        sample_weight=obs_column(adata, weight, "sample_weight").to_numpy(dtype=np.float64)[rows] if weight else None,
    )
