"""Growth of cells that plans assumed and found."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from omt.io import read_uns
from omt.tl._cells import cells_of, responsibilities_of, start_copy
from omt.tl._growth import step_length

if TYPE_CHECKING:
    from anndata import AnnData

__all__ = ["growth"]


def growth(adata: AnnData, *, key_added: str = "omt_growth", copy: bool = False) -> AnnData | None:
    """Write how many descendants each cell has until the next group, as assumed and as the plan found it.

    A cell has the growth of its components, weighted by its responsibilities. With `tau` of 1 on the source side the
    plan finds what was assumed; with `tau` below, it finds what the composition of the next group asks for.

    Parameters
    ----------
    adata
        After `omt.tl.transport`.
    key_added
        Start of the names of the columns.
    copy
        Return a copy instead of writing into `adata`.

    Returns
    -------
    AnnData or None
        Writes `obs[f"{key_added}_prior"]` and `obs[f"{key_added}_posterior"]`, descendants per cell over the step to
        the next group, and `obs[f"{key_added}_rate"]`, the posterior as a factor per unit of time, `posterior^(1/Δt)`.
        NaN for cells of the last group and outside of the chain.

    Raises
    ------
    KeyError
        There are no plans.

    Examples
    --------
    >>> import numpy as np, omt
    >>> adata, _ = omt.datasets.branching_process(300)
    >>> omt.tl.fit_mixtures(adata, groupby="time", labels="cell_type", use_rep="X_state")
    >>> adata.obs["rate"] = np.where(adata.obs["cell_type"] == "stem", 1.6, 1.0)
    >>> omt.tl.transport(adata, time_key="time", growth_key="rate")
    >>> omt.tl.growth(adata)
    >>> stem = adata.obs[(adata.obs["time"] == 0) & (adata.obs["cell_type"] == "stem")]
    >>> float(round(stem["omt_growth_posterior"].mean(), 6))
    1.6
    """
    model = read_uns(adata, need="transport")
    columns = {name: np.full(adata.n_obs, np.nan) for name in ("prior", "posterior", "rate")}
    for (here, there), plan in zip(model.steps(), model.transports, strict=True):
        rows = cells_of(adata, model, here)
        R = responsibilities_of(adata, model, here, rows)
        columns["prior"][rows] = R @ plan.prior_growth
        columns["posterior"][rows] = R @ plan.posterior_growth
        columns["rate"][rows] = (R @ plan.posterior_growth) ** (1.0 / step_length(model, here, there))
    result = start_copy(adata, copy)
    for name, values in columns.items():
        result.obs[f"{key_added}_{name}"] = values
    return result if copy else None
