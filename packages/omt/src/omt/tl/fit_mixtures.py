"""One mixture for each group of cells."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from omt.grouped import GroupedMixtures, group_label
from omt.io import write_uns
from omt.tl._assign import assign, cells, is_missing
from omt.tl._cells import Groups, features, group_cells, matrix, numbers, obs_column, soft_labels, start_copy
from omt.tl._counts import COUNT_FAMILIES, SIZED_FAMILIES, cell_sizes, expressed

if TYPE_CHECKING:
    import os

    from anndata import AnnData
    from numpy.typing import ArrayLike, NDArray

    from omt.families.base import Family
    from omt.families.gaussian import CovarianceType
    from omt.fitting.arguments import FamilyName
    from omt.fitting.selection import Criterion

    Array = NDArray[np.float64]

__all__ = ["fit_mixtures", "reads_obsm"]


def fit_mixtures(
    adata: AnnData,
    groupby: str,
    *,
    use_rep: str | None = None,
    layer: str | None = None,
    labels: str | None = None,
    responsibilities: str | None = None,
    n_components: int | Criterion = 10,
    component_range: tuple[int, int] = (1, 20),
    budget: int | None = None,
    family: FamilyName | Family = "gaussian",
    covariance: CovarianceType = "full",
    size_factors: str | ArrayLike | None = None,
    sample_weight: str | None = None,
    n_init: int = 3,
    max_iter: int = 200,
    tol: float = 1e-4,
    random_state: int = 0,
    device: str = "cpu",
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
    copy: bool = False,
) -> AnnData | None:
    """Fit a mixture to each group of cells: each time point, or control and treated.

    Components are Gaussians on a representation such as principal components, or, by `family`, laws of raw counts on
    the genes themselves; sparse counts are never densified.

    Parameters
    ----------
    adata
        Cells; may be opened with `backed="r"`, nothing is written to its file.
    groupby
        Column of `obs` that says which group a cell is in. Numbers and ordered categoricals have an order; cells
        without a value are left out.
    use_rep
        Key of `obsm` with the features `[N, D]`, for example the principal components; `"X"` takes the expression
        matrix itself, in chunks where it is on disk. Default: `"X"` for families of counts and where `layer` is given,
        otherwise `"X_pca"`.
    layer
        Layer to take instead of `X`, for example the one with raw counts.
    labels
        Column of `obs` whose values become the components, one each; cells without a value get their responsibilities
        by Bayes' rule.
    responsibilities
        Key of `obsm` with soft labels `[N, K]`, instead of `labels`; the columns of a table give the names of the
        components.
    n_components
        Components per group where neither is given; or `"bic"` or `"icl"` for the number in `component_range` with the
        lowest criterion.
    component_range
        Least and largest number that `"bic"` and `"icl"` try.
    budget
        Most components of all groups together, with `"bic"` or `"icl"`: they go where the criterion gains most.
    family
        `"gaussian"`; for counts `"poisson"`, `"negative_binomial"` or `"multinomial"`; `"bernoulli"` for zeros and
        ones; `"gamma"`, `"exponential"` or `"lognormal"` for positive numbers; or a family object of `omt.families`.
        Genes of `X` or a layer that have no count in any group are left out, with a warning; the names of the others
        stay with the mixtures, and later verbs look them up by name.
    covariance
        `"full"`, `"diag"`, `"spherical"`, `"tied"` or `"lowrank"`, of Gaussian and log-normal components.
    size_factors
        How much deeper than a cell of size one each cell was sequenced, for `"poisson"` and `"negative_binomial"`:
        `"total"` (its total count over the mean total of all groups), a column of `obs`, or an array `[N]`. Given
        factors are used for the fit; new cells get theirs from their totals, on the same scale.
    sample_weight
        Column of `obs` with a positive weight per cell.
    n_init, max_iter, tol
        As in `omt.fit_mixture`.
    random_state
        Seed: the same seed gives the same mixtures.
    device
        `"cpu"`, or a device of PyTorch for Gaussian components, as in `omt.fit_mixture`.
    checkpoint
        Folder that keeps the state of each group's fit. After an interruption the same call skips the groups that are
        done and goes on in the middle of the one that was not; at the end the folder is removed.
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
        Features are not finite or outside of the family's support, a group is too small for its components, a weight
        or size factor is not positive.
    TypeError
        `X` is sparse and the components need dense features.

    Examples
    --------
    >>> import omt
    >>> adata, _ = omt.datasets.branching_process(100)
    >>> omt.tl.fit_mixtures(adata, groupby="time", labels="cell_type", use_rep="X_state")
    >>> adata.obsm["X_omt_responsibilities"].shape
    (500, 6)

    On raw counts, genes by name:

    >>> cells, _ = omt.datasets.perturbed_counts(100)
    >>> omt.tl.fit_mixtures(
    ...     cells, "condition", family="poisson", size_factors="total", n_components=2, progress=False
    ... )
    >>> omt.tl.transport(cells, source="control", target="treated")
    >>> omt.tl.map_to(cells, "control", "treated", kind="sample")
    >>> cells.obsm["X_omt_map"].columns[0]
    'gene0'
    """
    from omt.fitting.arguments import family_named
    from omt.fitting.checkpoint import kept_files, remove_files
    from omt.fitting.em import fit_mixture

    groups = group_cells(adata, groupby)
    if labels is not None and responsibilities is not None:
        raise ValueError(
            f"labels={labels!r} and responsibilities={responsibilities!r} both define the components; give one of them"
        )
    name = family_named(family, covariance, None).name
    column = None if labels is None else obs_column(adata, labels, "labels").astype(object)
    soft = None if responsibilities is None else soft_labels(adata, responsibilities)
    weights = None if sample_weight is None else _weights(adata, sample_weight)
    given = isinstance(n_components, str) or column is not None or soft is not None
    _check_groups(groups, groupby, 1 if given else cast("int", n_components))
    use_rep = _representation(use_rep, layer, name)
    grouped = np.flatnonzero(groups.codes >= 0)
    genes, sizes, reference = None, None, None
    if use_rep != "X":
        X = features(adata, use_rep)
    else:
        X = matrix(adata, layer)
        _refuse_sparse(X, name, covariance, layer)
        genes = tuple(str(gene) for gene in adata.var_names) if adata.var_names.is_unique else None
    if size_factors is not None and not (name in SIZED_FAMILIES and use_rep == "X"):
        raise ValueError(
            f"size_factors are for families {' and '.join(SIZED_FAMILIES)} on the genes of X or a layer; here "
            f"family={name!r} and use_rep={use_rep!r}"
        )
    if name in COUNT_FAMILIES and use_rep == "X":
        X, genes, totals = expressed(adata, X, grouped, name, layer)
        if size_factors is not None:
            sizes, reference = cell_sizes(adata, size_factors, totals, grouped)
    members = [np.flatnonzero(groups.codes == position) for position in range(len(groups.values))]
    numbers: list[int | Criterion] = [n_components] * len(members)
    if budget is not None:
        numbers = _within_budget(
            [cells(X, rows) for rows in members], groups, budget, n_components, given=labels or responsibilities or "",
            component_range=component_range, family=_recipe(family, sizes, reference, None), covariance=covariance,
            sample_weights=None if weights is None else [weights[rows] for rows in members], n_init=n_init, tol=tol,
            random_state=random_state, progress=progress,
        )  # fmt: skip

    files = [None] * len(members) if checkpoint is None else kept_files(checkpoint, len(members))
    mixtures = []
    for value, rows, number, file in zip(groups.values, members, numbers, files, strict=True):
        known = None if column is None else column.to_numpy()[rows]
        if known is not None and all(is_missing(v) for v in known):
            raise ValueError(
                f"no cell of {groupby} {group_label(value)} has a value in adata.obs[{labels!r}]; "
                "label some, or drop the group"
            )
        with warnings.catch_warnings(record=True) as caught:  # they cannot know which group they are about
            mixture = fit_mixture(
                cells(X, rows),
                number,
                component_range=component_range,
                family=_recipe(family, sizes, reference, rows),
                covariance=covariance,
                labels=known,
                responsibilities=None if soft is None else soft.iloc[rows],
                sample_weight=None if weights is None else weights[rows],
                feature_names=genes,
                n_init=n_init,
                max_iter=max_iter,
                tol=tol,
                random_state=random_state,
                device=device,
                checkpoint=file,
                progress=progress,
            )
        for warning in caught:
            warnings.warn(f"{warning.message} ({groupby} {group_label(value)})", warning.category, stacklevel=2)
        if known is None and soft is None:
            mixture = replace(mixture, names=tuple(f"{group_label(value)}:{k}" for k in range(mixture.K)))
        mixtures.append(mixture)

    if checkpoint is not None:
        remove_files(checkpoint, files)
    target = start_copy(adata, copy)
    model = GroupedMixtures(
        groupby=groupby,
        groups=groups.values,
        mixtures=tuple(mixtures),
        use_rep=use_rep,
        labels=labels,
        settings={
            "family": name,
            "covariance": covariance if name in {"gaussian", "lognormal"} else "",
            "layer": layer or "",
            "size_factors": size_factors if isinstance(size_factors, str) else "given" if sizes is not None else "",
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
    weights = numbers(obs_column(adata, key, "sample_weight"), f"adata.obs[{key!r}]")
    bad = np.flatnonzero(~(np.isfinite(weights) & (weights > 0)))
    if len(bad):
        raise ValueError(
            f"adata.obs[{key!r}] is {weights[bad[0]]:g} in cell {adata.obs_names[bad[0]]!r}; weights must be positive"
        )
    result: Array = weights
    return result


def _representation(use_rep: str | None, layer: str | None, family: str) -> str:
    """Which features the caller means."""
    if use_rep is None:
        return "X" if layer is not None or family in COUNT_FAMILIES else "X_pca"
    if layer is not None and use_rep != "X":
        raise ValueError(f"use_rep={use_rep!r} and layer={layer!r} both say what to fit on; give one of them")
    return use_rep


def reads_obsm(use_rep: str | None, layer: str | None, family: str) -> bool:
    """Whether a fit with these arguments takes its features from `obsm`."""
    return _representation(use_rep, layer, family) != "X"


def _recipe(family: Any, sizes: Any, reference: float | None, rows: NDArray[np.int64] | None) -> Any:
    """The family with the size factors of the cells at `rows`, on one scale for all groups."""
    if sizes is None:
        return family
    if rows is None and not isinstance(sizes, str):
        raise ValueError("budget= cannot be combined with given size factors; use size_factors='total'")
    from omt.fitting.arguments import family_named

    recipe = family_named(family, "full", sizes if isinstance(sizes, str) else sizes[rows])
    return replace(cast("Any", recipe), reference=reference)


def _within_budget(
    samples: list[Any], groups: Groups, budget: int, criterion: Any, *, given: str, **options: Any
) -> list[int | Criterion]:
    """Number of components of each group, by one budget for all."""
    from omt.fitting.selection import choose_components

    if given:
        raise ValueError(f"budget={budget} chooses numbers of components, but {given!r} defines them; give one of them")
    if not isinstance(criterion, str):
        raise ValueError(f"budget={budget} needs n_components='bic' or 'icl' to share it out by; it is {criterion!r}")
    named = dict(zip(map(group_label, groups.values), samples, strict=True))
    return list(choose_components(named, budget, criterion=cast("Criterion", criterion), **options).n_components)


def _refuse_sparse(X: Any, family: str, covariance: str, layer: str | None) -> None:
    """Refuse sparse data where components mix all features."""
    if family in {"gaussian", "lognormal"} and covariance in {"full", "tied", "lowrank"} and _is_sparse(X):
        where = "adata.X" if layer is None else f"adata.layers[{layer!r}]"
        raise TypeError(
            f"{where} is sparse and covariance={covariance!r} needs dense features; give use_rep='X_pca' "
            "(see scanpy.pp.pca), covariance='diag', or a family of counts"
        )


def _is_sparse(X: Any) -> bool:
    return hasattr(X, "tocsr") or (
        type(X).__name__.endswith("Dataset") and "Sparse" in type(X).__name__ + type(X).__mro__[1].__name__
    )
