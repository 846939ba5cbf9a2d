"""Cells at a time at which none were measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from omt.grouped import group_label
from omt.io import read_uns
from omt.scalars import checked_seed, is_number, whole
from omt.tl._cells import cells_of, features

if TYPE_CHECKING:
    from anndata import AnnData

    from omt.grouped import GroupedMixtures
    from omt.transport import Transport

__all__ = ["generated_cells", "interpolate"]


def interpolate(
    adata: AnnData,
    time: float | None = None,
    *,
    source: object = None,
    target: object = None,
    t: float | None = None,
    n: int | None = None,
    kind: str = "move",
    bridge: bool = False,
    random_state: int = 0,
) -> AnnData:
    """Cells at a time between those that were measured.

    Parameters
    ----------
    adata
        After `omt.tl.transport`; it is not changed.
    time
        A time between the first and the last of the chain, where groups are numbers.
    source, target, t
        Instead of `time`: two neighbouring groups of the chain, and how far from one to the other, 0 to 1.
    n
        Cells; by default as many as `source` has for `kind="move"`, and 2000 for `kind="generate"`.
    kind
        `"move"`: cells of the group before, moved part of their way. `"generate"`: draws from the interpolated mixture
        (Gaussian and log-normal components), for which no cells are needed.
    bridge
        The Schrödinger bridge instead of straight lines to mean partners, where plans have an inner temperature; see
        `omt.Transport.interpolate`.
    random_state
        Seed.

    Returns
    -------
    AnnData
        `n` new cells: `obsm[use_rep]` `[n, D]` (`X` if the mixtures were fitted on it); `obs` with the time in the
        column the mixtures were fitted by (with `t`: `"source→target"`), `omt_source` and `omt_target`, the components
        each cell is between, and with `kind="move"` `omt_origin`, the name of the cell that moved.

    Raises
    ------
    ValueError
        A time outside of the chain (the message lists its times), `t` outside of 0 to 1, groups that are no neighbours,
        `n` below 1, a family that cannot be interpolated by mixtures.

    Examples
    --------
    >>> import omt
    >>> adata, _ = omt.datasets.branching_process(100)
    >>> omt.tl.fit_mixtures(adata, groupby="time", labels="cell_type", use_rep="X_state")
    >>> omt.tl.transport(adata, time_key="time")
    >>> between = omt.tl.interpolate(adata, 2.5, n=300)
    >>> between.obsm["X_state"].shape, sorted(between.obs)
    ((300, 10), ['omt_origin', 'omt_source', 'omt_target', 'time'])
    """
    model = read_uns(adata, need="transport")
    if kind not in {"move", "generate"}:
        raise ValueError(f"kind is {kind!r}, must be 'move' or 'generate'")
    return generated_cells(
        model, time, source=source, target=target, t=t, n=n, bridge=bridge, random_state=random_state,
        cells=adata if kind == "move" else None,
    )  # fmt: skip


def generated_cells(
    model: GroupedMixtures,
    time: float | None,
    *,
    source: object = None,
    target: object = None,
    t: float | None = None,
    n: int | None = None,
    bridge: bool = False,
    random_state: int = 0,
    cells: AnnData | None = None,
) -> AnnData:
    """Do the work of `interpolate`; without `cells` to move, cells are drawn from the interpolated mixture."""
    import pandas as pd
    from anndata import AnnData

    from omt.interpolation import moved_samples

    step, share, label = _place(model, time, source, target, t)
    plan = model.transports[step]
    rng = np.random.default_rng(checked_seed(random_state))
    obs: dict[str, Any]
    if cells is not None:
        rows = cells_of(cells, model, model.order[step])
        X = features(cells, model.use_rep)[rows]
        moved = moved_samples(plan, X, share, n, rng, bridge=bridge)
        points, sources, targets = moved.points, moved.source, moved.target
        obs = {"omt_origin": np.asarray(cells.obs_names)[rows][moved.origin]}
    else:
        count = 2000 if n is None else whole(n, "n")
        points, sources, targets = _drawn(plan, share, count, bridge, rng)
        obs = {}
    table = pd.DataFrame(
        {
            model.groupby: np.full(len(points), label) if isinstance(label, float) else [label] * len(points),
            "omt_source": pd.Categorical.from_codes(sources, categories=pd.Index(plan.source.names)),
            "omt_target": pd.Categorical.from_codes(targets, categories=pd.Index(plan.target.names)),
            **obs,
        },
        index=[f"interpolated{i}" for i in range(len(points))],
    )
    if model.use_rep == "X":
        return AnnData(X=points, obs=table)
    return AnnData(obs=table, obsm={model.use_rep: points})


def _place(
    model: GroupedMixtures, time: float | None, source: object, target: object, t: float | None
) -> tuple[int, float, float | str]:
    """Step of the chain, share of the way through it, and what to write as the time of the new cells."""
    from omt.interpolation import place_in_time

    groups = [model.groups[i] for i in model.order]
    chain = " → ".join(group_label(group) for group in groups)
    if time is not None:
        if source is not None or target is not None or t is not None:
            raise ValueError("give either time=, or source=, target= and t=, not both")
        times = [group for group in groups if isinstance(group, float)]
        if len(times) < len(groups) or any(np.diff(times) <= 0.0):
            raise ValueError(f"the groups of {model.groupby!r} are no times ({chain}); give source=, target= and t=")
        step, share = place_in_time(times, time, "time")
        return step, share, float(time)
    if source is None or target is None or t is None:
        raise ValueError("say when: time=, or source=, target= and t= (how far from one to the other, 0 to 1)")
    if not is_number(t) or not 0.0 <= t <= 1.0:
        raise ValueError(f"t is {t!r}; it must be between 0 (the source) and 1 (the target)")
    i = model.order.index(model.position(source, "source"))
    j = model.order.index(model.position(target, "target"))
    if j != i + 1:
        raise ValueError(f"source={source!r} and target={target!r} must be neighbours in the chain: {chain}")
    if isinstance(groups[i], float) and isinstance(groups[j], float):
        return i, t, (1.0 - t) * float(groups[i]) + t * float(groups[j])
    return i, t, f"{group_label(groups[i])}→{group_label(groups[j])}"


def _drawn(plan: Transport, t: float, n: int, bridge: bool, rng: np.random.Generator) -> tuple[Any, Any, Any]:
    """Draws from the interpolated mixture, with the pair of components of each."""
    from omt.interpolation import drawn, kept_pairs

    mixture = plan.interpolate(t, bridge=bridge)
    points, labels = mixture.sample(n, rng, return_labels=True)
    if t in {0.0, 1.0}:  # an end: the other side of each pair follows from the plan
        onward = plan.conditional("backward" if t else "forward")
        other = drawn(onward[labels], rng)
        return (points, other, labels) if t else (points, labels, other)
    k, l = kept_pairs(plan, t)
    return points, k[labels], l[labels]
