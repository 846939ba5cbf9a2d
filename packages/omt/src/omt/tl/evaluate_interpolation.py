"""Leave a time out, interpolate it from its neighbours, and compare with the cells measured there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

from omt.grouped import group_label
from omt.tl._cells import features, group_cells, obs_column

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData

    from omt.families.gaussian import CovarianceType

__all__ = ["evaluate_interpolation"]


def evaluate_interpolation(
    adata: AnnData,
    time_key: str,
    *,
    hold_out: float | None = None,
    use_rep: str = "X_pca",
    labels: str | None = None,
    n_components: int = 10,
    covariance: str = "full",
    reg: float = 0.01,
    tau: float = 1.0,
    n_repeats: int = 5,
    n_cells: int = 1000,
    random_state: int = 0,
    progress: bool | None = None,
) -> pd.DataFrame:
    """Hold a time out and see how near the interpolation from its neighbours comes to its cells.

    A mixture is fitted to the time before and one to the time after, they are joined by transport, and cells are moved
    to the time between. Nothing is learnt from the cells held out.

    Parameters
    ----------
    adata
        Cells; not changed.
    time_key
        Numeric column of `obs`.
    hold_out
        The time to leave out, not the first or the last; each of those in between, in turn, if not given.
    use_rep
        Key of `obsm` with the features, few enough for distances to mean something.
    labels
        Column of `obs` whose values are the components; cells without one get theirs by Bayes' rule.
    n_components, covariance
        Components per time where there are no labels, and their shape.
    reg, tau
        As in `omt.transport`.
    n_repeats, n_cells
        As in `omt.holdout.distances_to_held_out`.
    random_state
        Seed.
    progress
        Progress bar of the fits on stderr.

    Returns
    -------
    pandas.DataFrame
        Rows for each held-out time (first level of the index) and method: `omt`, `cell-level entropic`, `random
        pairing`, `first`, `last`, `noise floor`. Columns `w2`, `sd`, `explained`; see
        `omt.holdout.distances_to_held_out`. Read it so: `omt` should be well below `random pairing`, `first` and
        `last`, and near `cell-level entropic`; `noise floor` is what two halves of the same cells differ by.

    Raises
    ------
    KeyError
        A column or key is missing; the message lists those that exist.
    ValueError
        The times are no numbers, there are fewer than three, or `hold_out` is not one between the others (the message
        lists them).

    Examples
    --------
    >>> import omt
    >>> adata, _ = omt.datasets.branching_process(100)
    >>> table = omt.tl.evaluate_interpolation(
    ...     adata, "time", hold_out=2, use_rep="X_state", labels="cell_type", progress=False
    ... )
    >>> bool(table.loc[(2.0, "omt"), "w2"] < table.loc[(2.0, "random pairing"), "w2"])
    True
    """
    import pandas as pd

    from omt.fitting.em import fit_mixture
    from omt.holdout import distances_to_held_out
    from omt.problem import transport

    groups = group_cells(adata, time_key, "time_key")
    times = [value for value in groups.values if isinstance(value, float)]
    listed = ", ".join(group_label(value) for value in groups.values)
    if len(times) < len(groups.values):
        raise ValueError(f"time_key={time_key!r}: its values must be numbers, but they are {listed}")
    if len(times) < 3:
        raise ValueError(f"time_key={time_key!r} has the times {listed}; holding one out needs at least three")
    if hold_out is not None and hold_out not in times[1:-1]:
        raise ValueError(
            f"hold_out={hold_out!r} is not a time between others; {time_key} has {listed}, "
            "of which the first and the last cannot be interpolated"
        )
    X: Any = features(adata, use_rep)
    column = None if labels is None else obs_column(adata, labels, "labels").astype(object).to_numpy()

    def cells(position: int) -> Any:
        part = X[np.flatnonzero(groups.codes == position)]
        return np.asarray(part.toarray() if hasattr(part, "toarray") else part, dtype=np.float64)

    tables = {}
    for position in range(1, len(times) - 1) if hold_out is None else [times.index(float(hold_out))]:
        mixtures = [
            fit_mixture(
                cells(side),
                n_components,
                covariance=cast("CovarianceType", covariance),
                labels=None if column is None else column[groups.codes == side],
                random_state=random_state,
                progress=progress,
            )
            for side in (position - 1, position + 1)
        ]
        plan = transport(*mixtures, reg=reg, tau=tau)
        before, now, after = times[position - 1 : position + 2]
        share = (now - before) / (after - before)
        first, middle, last = (cells(i) for i in range(position - 1, position + 2))
        tables[now] = distances_to_held_out(
            plan, first, middle, last, share, n_repeats=n_repeats, n_cells=n_cells, seed=random_state
        )
    return pd.concat(tables, names=[time_key])
