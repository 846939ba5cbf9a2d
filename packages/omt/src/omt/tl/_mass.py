"""Mass on the cells of one group, carried along the chain to the cells of another.

Letters: `n` cells of a group, `K` its components.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from omt.grouped import group_label
from omt.tl._cells import cells_of, obs_column, responsibilities_of

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData
    from numpy.typing import ArrayLike, NDArray

    from omt.grouped import GroupedMixtures

    Array = NDArray[np.float64]

__all__ = ["carry", "start_mass", "write_mass"]


def start_mass(
    adata: AnnData, model: GroupedMixtures, position: int, data: str | ArrayLike | None, subset: object
) -> Array:
    """Return the distribution `[n]` over the cells of a group that `data` and `subset` describe; it sums to 1."""
    import pandas as pd

    rows = cells_of(adata, model, position)
    group = f"{model.groupby} {group_label(model.groups[position])}"
    if data is None:
        if subset is not None:
            raise ValueError(f"subset={subset!r} needs data=, the column of adata.obs whose value it is")
        mass = _cell_weights(adata, model, rows)
    elif isinstance(data, str):
        column = obs_column(adata, data, "data").iloc[rows]
        if subset is not None:
            numeric = _holds_numbers(column)
            wanted = {_spelled(v, numeric) for v in ([subset] if _is_one(subset) else subset)}  # type: ignore[attr-defined]
            spelled = column.astype(object).map(lambda value: _spelled(value, numeric))
            chosen = spelled.isin(wanted).to_numpy() & column.notna().to_numpy()
            if not chosen.any():
                values = ", ".join(sorted(spelled[column.notna()].unique())) or "(none)"
                raise ValueError(
                    f"no cell of {group} has {data} {' or '.join(sorted(wanted))}; there it is one of: {values}"
                )
            mass = _cell_weights(adata, model, rows) * chosen
        elif pd.api.types.is_numeric_dtype(column.dtype):
            mass = column.to_numpy(dtype=np.float64)
        else:
            raise ValueError(
                f"data={data!r} is not a number per cell; give subset=, the value of adata.obs[{data!r}] to start from"
            )
    else:
        mass = np.asarray(data, dtype=np.float64)
        if mass.shape == (adata.n_obs,):
            mass = mass[rows]
        if mass.shape != (len(rows),):
            raise ValueError(
                f"data has shape {mass.shape}, must be one number for each of the {len(rows)} "
                f"cells of {group} or for all {adata.n_obs} cells"
            )
    if not np.isfinite(mass).all() or (mass < 0).any() or not mass.sum() > 0:
        raise ValueError(f"data must be finite and non-negative masses with a positive sum over the cells of {group}")
    result: Array = mass / mass.sum()
    return result


def carry(
    adata: AnnData, model: GroupedMixtures, path: list[int], mass: Array
) -> list[tuple[NDArray[np.int64], Array]]:
    """Carry a distribution along positions of the chain, forward or backward; return rows and masses of each group on
    the path.

    A cell's mass first goes to components through its responsibilities, then from component to component by the
    row-stochastic tables, and each
    component's mass is shared among its cells: for one balanced step this is the coarse plan of a sample plan applied
    to `mass`.
    """
    rows = cells_of(adata, model, path[0])
    results = [(rows, mass)]
    component_mass = mass @ responsibilities_of(adata, model, path[0], rows)
    for here, there in itertools.pairwise(path):
        forward = model.order.index(here) < model.order.index(there)
        table = model.table(here, there) if forward else model.table(there, here, direction="backward")
        component_mass = component_mass @ table
        rows = cells_of(adata, model, there)
        S = responsibilities_of(adata, model, there, rows)
        nu = _cell_weights(adata, model, rows)
        b = nu @ S
        results.append((rows, nu * (S @ np.divide(component_mass, b, out=np.zeros_like(b), where=b > 0))))
    return results


def write_mass(adata: AnnData, results: list[tuple[NDArray[np.int64], Array]], key: str) -> None:
    """Write masses into `obs[key]`; cells of other groups get NaN."""
    column = np.full(adata.n_obs, np.nan)
    for rows, mass in results:
        column[rows] = mass
    adata.obs[key] = column


def _is_one(subset: object) -> bool:
    """Whether this is one value, not several."""
    return isinstance(subset, str) or not np.iterable(subset)


def _holds_numbers(column: pd.Series) -> bool:
    """Whether the values of a column, or its categories, are numbers."""
    import pandas as pd

    dtype = column.cat.categories.dtype if isinstance(column.dtype, pd.CategoricalDtype) else column.dtype
    return pd.api.types.is_numeric_dtype(dtype) and not pd.api.types.is_bool_dtype(dtype)


def _spelled(value: object, numeric: bool) -> str:
    """One spelling of a value: among numbers 1, 1.0 and "1.0" are the same."""
    if numeric:
        try:
            return f"{float(str(value)):.15g}"
        except ValueError:
            pass
    return str(value)


def _cell_weights(adata: AnnData, model: GroupedMixtures, rows: NDArray[np.int64]) -> Array:
    """Sample weights `[n]` the mixtures were fitted with; they sum to 1."""
    key = model.settings.get("sample_weight")
    if not key:
        return np.full(len(rows), 1.0 / len(rows))
    weights = obs_column(adata, str(key), "sample_weight").to_numpy(dtype=np.float64)[rows]
    normalised: Array = weights / weights.sum()
    return normalised
