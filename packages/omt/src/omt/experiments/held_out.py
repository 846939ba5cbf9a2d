"""A time that is left out, interpolated from its neighbours and compared with the cells seen there."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from omt import datasets

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    import pandas as pd
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

__all__ = ["HeldOut", "held_out", "held_out_emt", "held_out_turning"]


class HeldOut(NamedTuple):
    """Wasserstein-2 distances to the cells of the time left out; means over fits and draws.

    Attributes
    ----------
    table
        Of :func:`omt.holdout.distances_to_held_out`, averaged.
    to_entropic, to_random
        Distance of the mixtures' interpolation over that of cell-level entropic transport, and of random pairing.
    """

    table: pd.DataFrame
    to_entropic: float
    to_random: float


def held_out(
    first: Array,
    middle: Array,
    last: Array,
    t: float,
    *,
    n_components: int = 5,
    seeds: Sequence[int] = range(5),
    n_cells: int = 1000,
) -> HeldOut:
    """Interpolate from `first` and `last` `[N, D]` with a mixture of each; fit and draw anew with each seed."""
    from omt.fitting.em import fit_mixture
    from omt.holdout import distances_to_held_out
    from omt.problem import transport

    tables = []
    for seed in seeds:
        P, Q = (fit_mixture(X, n_components, random_state=seed, progress=False) for X in (first, last))
        plan = transport(P, Q)
        tables.append(distances_to_held_out(plan, first, middle, last, t, n_repeats=1, n_cells=n_cells, seed=seed))
    table = tables[0].copy()
    values = np.stack([one["w2"].to_numpy() for one in tables])
    table["w2"], table["sd"] = values.mean(axis=0), values.std(axis=0, ddof=1) if len(seeds) > 1 else np.nan
    distance = table["w2"]
    chance, floor = distance["random pairing"], distance["noise floor"]
    table["explained"] = (chance - distance) / (chance - floor)
    return HeldOut(
        table,
        float(distance["omt"] / distance["cell-level entropic"]),
        float(distance["omt"] / distance["random pairing"]),
    )


def held_out_emt(
    path: str | os.PathLike[str], time: int, *, seeds: Sequence[int] = range(5), n_cells: int = 1000
) -> HeldOut:
    """Cells in epithelial-mesenchymal transition at five times, in three dimensions: leave `time` (1, 2 or 3) out.

    Parameters
    ----------
    path
        Table with the columns `time_index` and three coordinates.
    time
        Index of the time.
    seeds, n_cells
        As in `held_out`.
    """
    import pandas as pd

    table = pd.read_csv(path)
    stage = table["time_index"].to_numpy()
    X = table.drop(columns="time_index").to_numpy(dtype=np.float64)
    return held_out(X[stage == time - 1], X[stage == time], X[stage == time + 1], 0.5, seeds=seeds, n_cells=n_cells)


def held_out_turning(*, seed: int = 0, seeds: Sequence[int] = range(5), n_cells: int = 400) -> HeldOut:
    """The same on generated cells: clusters that move apart on straight lines while they turn and change shape."""
    first, middle, last = datasets.moving_clusters(n_cells, random_state=seed)
    return held_out(first, middle, last, 0.5, n_components=5, seeds=seeds)
