"""Cells as a file has them to cells as a model knows them: stages from times, principal components from raw counts,
recorded so that new cells go the same way.

Letters: `N` cells, `G` genes kept, `D` components.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from anndata import AnnData
    from numpy.typing import NDArray

    from omt.grouped import GroupedMixtures

    Array = NDArray[np.float64]

__all__ = ["bin_times", "prepare", "project", "ready"]

_TARGET_SUM = 1e4


def prepare(
    adata: AnnData, *, n_top_genes: int = 2000, keep: Sequence[str] = (), n_pcs: int = 20, random_state: int = 0
) -> tuple[Array, dict[str, Any]]:
    """Normalise raw counts per cell, take `log1p`, keep the most variable genes and compute principal components, all
    by scanpy.

    Parameters
    ----------
    adata
        Raw counts in `X`; not changed.
    n_top_genes
        Most variable genes to keep.
    keep
        Genes to keep however variable they are.
    n_pcs
        Components.
    random_state
        Seed of the principal component analysis.

    Returns
    -------
    X : ndarray
        `[N, D]`.
    record : dict
        `genes` `[G]`, `mean` `[G]`, `components` `[G, D]`, `target_sum`: what `project` needs; h5ad can hold it.

    Raises
    ------
    ImportError
        scanpy is not installed.
    ValueError
        `X` is not raw counts (the message has the first offending entry), or a gene of `keep` is missing.
    """
    for name, value in (("n_top_genes", n_top_genes), ("n_pcs", n_pcs)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    _check_counts(adata)
    try:
        import scanpy as sc
    except ImportError as error:
        raise ImportError("preparing raw counts needs scanpy: pip install 'omt[scanpy]'") from error
    import anndata

    work = anndata.AnnData(
        adata.X[:].copy() if adata.isbacked else adata.X.copy(), obs=adata.obs[[]], var=adata.var[[]]
    )
    sc.pp.normalize_total(work, target_sum=_TARGET_SUM)
    sc.pp.log1p(work)
    sc.pp.highly_variable_genes(work, n_top_genes=min(n_top_genes, work.n_vars))
    missing = [gene for gene in keep if gene not in work.var_names]
    if missing:
        raise ValueError(f"keep names {missing[0]!r}, which is not in adata.var_names")
    work = work[:, work.var["highly_variable"].to_numpy() | work.var_names.isin(list(keep))].copy()
    del work.var["highly_variable"]  # scanpy would leave the genes of keep out of the components
    D = min(n_pcs, min(work.shape) - 1)
    sc.pp.pca(work, n_comps=D, random_state=random_state)
    record = {
        "target_sum": _TARGET_SUM,
        "genes": np.array(work.var_names, dtype=str),
        "mean": np.asarray(work.X.mean(axis=0), dtype=np.float64).ravel(),
        "components": np.asarray(work.varm["PCs"], dtype=np.float64),
    }
    return np.asarray(work.obsm["X_pca"], dtype=np.float64), record


def project(adata: AnnData, record: Mapping[str, Any]) -> Array:
    """Bring raw counts of other cells into the space that `prepare` made.

    Parameters
    ----------
    adata
        Raw counts in `X`; genes in any order.
    record
        From `prepare`.

    Returns
    -------
    ndarray
        `[N, D]`.

    Raises
    ------
    ValueError
        A gene of the record is missing (the message names the first), or `X` is not raw counts.
    """
    _check_counts(adata)
    genes = [str(g) for g in np.asarray(record["genes"]).tolist()]
    where = adata.var_names.get_indexer(genes)
    if (where < 0).any():
        missing = [gene for gene, i in zip(genes, where, strict=True) if i < 0]
        raise ValueError(
            f"adata lacks {len(missing)} of the {len(genes)} genes that the model was prepared "
            f"with; the first is {missing[0]!r}"
        )
    counts = adata.X[:] if adata.isbacked else adata.X
    totals = np.asarray(counts.sum(axis=1), dtype=np.float64).ravel()
    kept = counts[:, where]
    kept = kept.toarray() if hasattr(kept, "toarray") else np.asarray(kept)
    scale = np.divide(float(record["target_sum"]), totals, out=np.zeros_like(totals), where=totals > 0)
    result: Array = (np.log1p(kept.astype(np.float64) * scale[:, None]) - record["mean"]) @ np.asarray(
        record["components"]
    )
    return result


def bin_times(adata: AnnData, key: str, edges: str) -> str:
    """Cut a numeric column into stages `[edge, next edge)` and write `obs["<key>_stage"]`, the middle of each cell's
    bin.

    Parameters
    ----------
    adata
        Cells; those outside of all bins get NaN, so they belong to no stage.
    key
        Numeric column of `obs`.
    edges
        Rising numbers separated by commas, at least two.

    Returns
    -------
    str
        The new column's name.

    Raises
    ------
    KeyError
        `key` is not a column of `obs`.
    ValueError
        `edges` are not rising numbers, or the column is not numeric.
    """
    import pandas as pd

    from omt.tl._cells import obs_column

    try:
        limits = np.array([float(part) for part in edges.split(",")])
    except ValueError:
        raise ValueError(f"bins={edges!r} must be numbers separated by commas, for example 0,10,20") from None
    if len(limits) < 2 or not np.isfinite(limits).all() or not (np.diff(limits) > 0).all():
        raise ValueError(f"bins={edges!r} must be at least two rising, finite numbers")
    column = obs_column(adata, key, "groupby")
    if not pd.api.types.is_numeric_dtype(column.dtype):
        raise ValueError(f"bins= cuts numbers, but adata.obs[{key!r}] has dtype {column.dtype}")
    times = column.to_numpy(dtype=np.float64, na_value=np.nan)
    place = np.searchsorted(limits, times, side="right") - 1
    inside = (place >= 0) & (place < len(limits) - 1) & np.isfinite(times)
    if not inside.any():
        found = times[np.isfinite(times)]
        span = f"its values go from {found.min():g} to {found.max():g}" if found.size else "it has no values"
        raise ValueError(f"no cell has {key} in bins={edges!r}; {span}")
    middles = (limits[1:] + limits[:-1]) / 2.0
    name = f"{key}_stage"
    adata.obs[name] = np.where(inside, middles[np.clip(place, 0, len(middles) - 1)], np.nan)
    return name


def ready(adata: AnnData, model: GroupedMixtures) -> Any:
    """Give cells from a file the stages and the features `[N, D]` that the model was fitted on; return the features.

    Raises
    ------
    KeyError, ValueError
        The file has neither the representation nor raw counts that could be brought there.
    """
    from omt.tl._cells import model_features

    bins = model.settings.get("bins")
    if bins and str(model.settings["bins_of"]) in adata.obs:
        bin_times(adata, str(model.settings["bins_of"]), str(bins))
    if model.prepare:
        adata.obsm[model.use_rep] = project(adata, model.prepare)
    X = model_features(adata, model)
    if X.shape[1] != model.mixtures[0].d:
        raise ValueError(
            f"{model.use_rep!r} has {X.shape[1]} features here and had {model.mixtures[0].d} "
            "when the mixtures were fitted"
        )
    return X


def _check_counts(adata: AnnData) -> None:
    if adata.X is None:
        raise ValueError("adata.X is empty; preparing needs raw counts there")
    counts = adata.X[:] if adata.isbacked else adata.X
    values = np.asarray(counts.data if hasattr(counts, "tocsr") else counts)
    bad = ~(np.isfinite(values) & (values >= 0) & (values == np.round(values)))
    if bad.any():
        raise ValueError(
            f"adata.X holds {values[bad][0]:g}, so it is not raw counts (non-negative whole "
            "numbers); if it is normalised already, compute principal components with scanpy "
            "and give use_rep='X_pca'"
        )
