"""Growth rates of cells from the genes of proliferation and apoptosis that they express.

Letters: `N` cells.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from omt.tl._cells import start_copy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData
    from numpy.typing import NDArray

__all__ = ["score_growth"]


def score_growth(
    adata: AnnData,
    proliferation: Sequence[str],
    apoptosis: Sequence[str],
    *,
    layer: str | None = None,
    beta_min: float = 0.3,
    beta_max: float = 1.7,
    beta_center: float = 0.25,
    beta_width: float = 0.5,
    delta_min: float = 0.3,
    delta_max: float = 1.7,
    delta_center: float = 0.1,
    delta_width: float = 0.2,
    key_added: str = "omt_growth_rate",
    copy: bool = False,
) -> AnnData | None:
    """Estimate how fast cells multiply from two sets of genes, as Waddington-OT does.

    A score is the mean of the z-scores of the set's genes over all cells, each cut off at ±5. The rate is
    `exp(birth - death)`, births rising with the proliferation score along a logistic curve, deaths with the apoptosis
    score.

    Parameters
    ----------
    adata
        Expression as logarithms, in `X` or a layer; may be sparse or on disk, and is never densified.
    proliferation, apoptosis
        Names of genes, for example those of the cell cycle and MSigDB's HALLMARK_APOPTOSIS.
    layer
        Layer with the expression; `X` by default.
    beta_min, beta_max, beta_center, beta_width
        Least and greatest rate of birth per unit of time, the proliferation score half way between, and the width of
        the rise. The defaults are Waddington-OT's, whose unit of time is a day; in minutes, divide both rates by 1440.
    delta_min, delta_max, delta_center, delta_width
        The same for death and the apoptosis score.
    key_added
        Column of `obs` for the rate.
    copy
        Return a copy instead of writing into `adata`.

    Returns
    -------
    AnnData or None
        Writes `obs[key_added]`, the factor by which a cell multiplies in one unit of time (for
        `omt.tl.transport(growth_key=...)`), and the scores, `obs[f"{key_added}_proliferation"]` and
        `obs[f"{key_added}_apoptosis"]`.

    Raises
    ------
    KeyError
        The layer does not exist.
    ValueError
        None of a set's genes is in `var_names`, or expression is not finite.

    Warns
    -----
    UserWarning
        Some genes of a set are missing; the message says how many were found.

    References
    ----------
    G. Schiebinger et al., Optimal-transport analysis of single-cell gene expression, Cell 176, 2019.

    Examples
    --------
    >>> import anndata, numpy as np, omt
    >>> X = np.array([[3.0, 0.0], [0.0, 0.0], [0.0, 3.0]])
    >>> adata = anndata.AnnData(X)
    >>> adata.var_names = ["MKI67", "CASP3"]
    >>> omt.tl.score_growth(adata, ["MKI67"], ["CASP3"])
    >>> adata.obs["omt_growth_rate"].round(2).tolist()
    [4.05, 1.0, 0.25]
    """
    from omt.growth import birth_death_rate, mean_z_score

    if layer is not None and layer not in adata.layers:
        raise KeyError(f"layer={layer!r}: adata.layers has no such key; it has: {', '.join(adata.layers) or '(none)'}")
    expression: Any = adata.X if layer is None else adata.layers[layer]
    if expression is None:
        raise ValueError("adata.X is empty; give layer=, or put expression there")
    scores = {
        name: mean_z_score(expression, _columns(adata, genes, name))
        for name, genes in (("proliferation", proliferation), ("apoptosis", apoptosis))
    }
    rate = birth_death_rate(
        scores["proliferation"],
        scores["apoptosis"],
        beta_min=beta_min,
        beta_max=beta_max,
        beta_center=beta_center,
        beta_width=beta_width,
        delta_min=delta_min,
        delta_max=delta_max,
        delta_center=delta_center,
        delta_width=delta_width,
    )
    result = start_copy(adata, copy)
    result.obs[key_added] = rate
    for name, score in scores.items():
        result.obs[f"{key_added}_{name}"] = score
    return result if copy else None


def _columns(adata: AnnData, genes: Sequence[str], name: str) -> NDArray[np.int64]:
    """Places of the genes of a set that are there."""
    wanted = list(dict.fromkeys([genes] if isinstance(genes, str) else genes))
    if not wanted:
        raise ValueError(f"{name} names no genes; give at least one")
    if not adata.var_names.is_unique:
        raise ValueError("adata.var_names are not unique; call adata.var_names_make_unique() first")
    where = adata.var_names.get_indexer(wanted)
    found = where[where >= 0]
    missing = [gene for gene, place in zip(wanted, where, strict=True) if place < 0]
    if not found.size:
        raise ValueError(
            f"none of the {len(wanted)} genes of {name} is in adata.var_names ({', '.join(missing[:5])}, …): are names "
            f"of another species or kind? There it has {', '.join(adata.var_names[:5])}, …"
        )
    if missing:
        warnings.warn(
            f"{len(found)} of the {len(wanted)} genes of {name} are in adata.var_names; missing: "
            f"{', '.join(missing[:10])}{', …' if len(missing) > 10 else ''}",
            UserWarning,
            stacklevel=4,
        )
    places: NDArray[np.int64] = found.astype(np.int64)
    return places
