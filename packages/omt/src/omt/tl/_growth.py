"""Growth rates of cells, as columns of `obs` hold them, and the time that a step of the chain takes.

Letters: `n` cells of a group, `K` its components.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from omt.grouped import group_label
from omt.tl._cells import obs_column

if TYPE_CHECKING:
    from anndata import AnnData
    from numpy.typing import NDArray

    from omt.grouped import GroupedMixtures

    Array = NDArray[np.float64]

__all__ = ["cell_rates", "step_length"]


def cell_rates(adata: AnnData, key: str, rows: NDArray[np.int64]) -> Array:
    """Growth rates `[n]` of some cells, checked to be positive numbers."""
    column = obs_column(adata, key, "growth_key").iloc[rows]
    try:
        rates = column.to_numpy(dtype=np.float64, na_value=np.nan)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"growth_key={key!r}: adata.obs[{key!r}] has dtype {column.dtype}; it must hold growth rates, numbers > 0"
        ) from error
    bad = ~(np.isfinite(rates) & (rates > 0.0))
    if bad.any():
        i = int(bad.argmax())
        raise ValueError(
            f"growth_key={key!r}: adata.obs[{key!r}] is {rates[i]:g} in cell {adata.obs_names[rows[i]]!r}; a growth "
            "rate is the factor by which a cell multiplies in one unit of time, so it must be > 0 (1: no change)"
        )
    result: Array = rates
    return result


def step_length(model: GroupedMixtures, source: int, target: int) -> float:
    """Time between two groups, given by their positions: the difference of numbers, 1 between names.

    Raises
    ------
    ValueError
        If the source is the later one: growth runs forward in time.
    """
    first, last = model.groups[source], model.groups[target]
    if not (isinstance(first, float) and isinstance(last, float)):
        return 1.0
    if last <= first:
        raise ValueError(
            f"growth leads from earlier to later cells, but source={group_label(first)} is not before "
            f"target={group_label(last)}"
        )
    return last - first
