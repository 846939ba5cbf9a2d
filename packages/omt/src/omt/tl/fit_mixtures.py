"""One mixture for each group of cells."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from omt.grouped import GroupedMixtures, group_label
from omt.io import write_uns
from omt.tl._assign import assign, cells, is_missing
from omt.tl._cells import Groups, features, group_cells, obs_column, soft_labels, start_copy

if TYPE_CHECKING:
    from anndata import AnnData
    from numpy.typing import NDArray

    from omt.families.gaussian import CovarianceType

    Array = NDArray[np.float64]

__all__ = ["fit_mixtures"]


def fit_mixtures(
    adata: AnnData,
    groupby: str,
    *,
    use_rep: str = "X_pca",
    labels: str | None = None,
    responsibilities: str | None = None,
    n_components: int = 10,
    covariance: str = "full",
    sample_weight: str | None = None,
    n_init: int = 3,
    max_iter: int = 200,
    tol: float = 1e-4,
    random_state: int = 0,
    progress: bool | None = None,
    copy: bool = False,
) -> AnnData | None:
    """Fit a mixture of Gaussians to each group of cells: each time point, or control and treated.

    Parameters
    ----------
    adata
        Cells; may be opened with `backed="r"`, nothing is written to its file.
    groupby
        Column of `obs` that says which group a cell is in. Numbers and ordered categoricals have an order; cells
        without a value are left out.
    use_rep
        Key of `obsm` with the features `[N, D]`, for example the principal components; `"X"` takes the expression
        matrix itself, in chunks where it is on disk.
    labels
        Column of `obs` whose values become the components, one each; cells without a value get their responsibilities
        by Bayes' rule.
    responsibilities
        Key of `obsm` with soft labels `[N, K]`, instead of `labels`; the columns of a table give the names of the
        components.
    n_components
        Components per group where neither is given.
    covariance
        `"full"`, `"diag"`, `"spherical"`, `"tied"` or `"lowrank"`.
    sample_weight
        Column of `obs` with a positive weight per cell.
    n_init, max_iter, tol
        As in `omt.fit_mixture`.
    random_state
        Seed: the same seed gives the same mixtures.
    progress
        Progress bar on stderr.
    copy
        Return a copy instead of writing into `adata`.

    Returns
    -------
    AnnData or None
        Writes `uns["omt"]` (mixtures and settings), `obs["omt_component"]` (each cell's most probable component) and
        `obsm["X_omt_responsibilities"]` `[N, max K]` (float32; zero rows for cells outside of all groups).

    Raises
    ------
    KeyError
        A column or key is missing; the message lists those that exist.
    ValueError
        Features are not finite, a group is too small for its components, a weight is not positive.

    Examples
    --------
    >>> import omt
    >>> adata, _ = omt.datasets.branching_process(100)
    >>> omt.tl.fit_mixtures(adata, groupby="time", labels="cell_type", use_rep="X_state")
    >>> adata.obsm["X_omt_responsibilities"].shape
    (500, 6)
    """
    from omt.fitting.em import fit_mixture

    groups = group_cells(adata, groupby)
    if labels is not None and responsibilities is not None:
        raise ValueError(
            f"labels={labels!r} and responsibilities={responsibilities!r} both define the components; give one of them"
        )
    X = features(adata, use_rep)
    column = None if labels is None else obs_column(adata, labels, "labels").astype(object)
    soft = None if responsibilities is None else soft_labels(adata, responsibilities)
    weights = None if sample_weight is None else _weights(adata, sample_weight)
    _check_groups(groups, groupby, n_components if column is None and soft is None else 1)
    if use_rep == "X" and covariance in {"full", "tied", "lowrank"} and _is_sparse(X):
        raise TypeError(
            f"adata.X is sparse and covariance={covariance!r} needs dense features; give use_rep='X_pca' "
            "(see scanpy.pp.pca) or covariance='diag'"
        )

    mixtures = []
    for position, value in enumerate(groups.values):
        rows = np.flatnonzero(groups.codes == position)
        known = None if column is None else column.to_numpy()[rows]
        if known is not None and all(is_missing(v) for v in known):
            raise ValueError(
                f"no cell of {groupby} {group_label(value)} has a value in adata.obs[{labels!r}]; "
                "label some, or drop the group"
            )
        mixture = fit_mixture(
            cells(X, rows),
            n_components,
            covariance=cast("CovarianceType", covariance),
            labels=known,
            responsibilities=None if soft is None else soft.iloc[rows],
            sample_weight=None if weights is None else weights[rows],
            n_init=n_init,
            max_iter=max_iter,
            tol=tol,
            random_state=random_state,
            progress=progress,
        )
        if known is None and soft is None:
            mixture = replace(mixture, names=tuple(f"{group_label(value)}:{k}" for k in range(mixture.K)))
        mixtures.append(mixture)

    target = start_copy(adata, copy)
    model = GroupedMixtures(
        groupby=groupby,
        groups=groups.values,
        mixtures=tuple(mixtures),
        use_rep=use_rep,
        labels=labels,
        settings={
            "covariance": covariance,
            "random_state": random_state,
            "ordered": int(groups.ordered),
            "sample_weight": sample_weight or "",
            "responsibilities": responsibilities or "",
        },
    )
    write_uns(target, model)
    assign(target, model, X)
    return target if copy else None


def _check_groups(groups: Groups, groupby: str, needed: int) -> None:
    if not groups.values:
        raise ValueError(f"adata.obs[{groupby!r}] has no values; nothing to fit")
    for position, value in enumerate(groups.values):
        n = int((groups.codes == position).sum())
        if n < 2:
            raise ValueError(
                f"{groupby} {group_label(value)} has {n} cell; a mixture needs at least 2: drop "
                "the group or merge it with a neighbour"
            )
        if n < needed:
            raise ValueError(
                f"{groupby} {group_label(value)} has {n} cells, fewer than n_components={needed}; "
                "use fewer components or merge groups"
            )


def _weights(adata: AnnData, key: str) -> Array:
    weights = obs_column(adata, key, "sample_weight").to_numpy(dtype=np.float64)
    bad = np.flatnonzero(~(np.isfinite(weights) & (weights > 0)))
    if len(bad):
        raise ValueError(
            f"adata.obs[{key!r}] is {weights[bad[0]]:g} in cell {adata.obs_names[bad[0]]!r}; weights must be positive"
        )
    result: Array = weights
    return result


def _is_sparse(X: Any) -> bool:
    return hasattr(X, "tocsr") or (
        type(X).__name__.endswith("Dataset") and "Sparse" in type(X).__name__ + type(X).__mro__[1].__name__
    )
