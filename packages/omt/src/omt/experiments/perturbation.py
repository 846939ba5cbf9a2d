"""Unpaired perturbation: does a map from control to treated cells land where unseen treated cells are?

Letters: `N` cells, `G` genes, `D` principal components, `K` components.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from anndata import AnnData
    from numpy.typing import NDArray

    from omt.mixture import Mixture

    Array = NDArray[np.float64]

__all__ = ["INTERFERON_GENES", "Perturbation", "interferon", "perturbation"]

INTERFERON_GENES = ("ISG15", "IFI6", "IFIT1", "IFIT3")
"""Genes that interferon switches on in every blood cell."""


class Perturbation(NamedTuple):
    """Energy distances to treated cells that no fit has seen, in principal components of log-normalised counts.

    Attributes
    ----------
    unmapped, mapped
        Of control cells as they are, and moved by `kind="sample"`.
    linear, shift
        Of control cells moved by one linear map (one Gaussian a side), and by the difference of the means.
    floor
        Of the treated cells that were seen: what noise alone leaves.
    rise
        `[K, len(genes)]`: how much the mean of each gene rises from each control component to where it goes (log scale
        for Gaussian components, counts of a cell of size one otherwise).
    """

    unmapped: float
    mapped: float
    linear: float
    shift: float
    floor: float
    rise: Array

    @property
    def ratio(self) -> float:
        """What the map leaves of the distance."""
        return self.mapped / self.unmapped


def interferon(
    path: str | os.PathLike[str],
    *,
    seed: int,
    family: Literal["gaussian", "negative_binomial"] = "gaussian",
    n_components: int = 12,
) -> Perturbation:
    """Blood cells without and with interferon-β (Kang et al. 2018): an h5ad file of raw counts with `obs["condition"]`
    `"ctrl"` and `"stim"`.
    """
    import anndata

    adata = anndata.read_h5ad(Path(path))
    return perturbation(
        adata, "ctrl", "stim", genes=INTERFERON_GENES, seed=seed, family=family, n_components=n_components
    )


def perturbation(
    adata: AnnData,
    control: str,
    treated: str,
    *,
    genes: Sequence[str],
    seed: int,
    family: Literal["gaussian", "negative_binomial"] = "gaussian",
    n_components: int = 12,
    n_pcs: int = 20,
    n_genes: int | None = None,
) -> Perturbation:
    """Map control cells to treated ones, of which half is held out.

    Parameters
    ----------
    adata
        Raw counts, `obs["condition"]`.
    control, treated
        Its values.
    genes
        Genes whose rise is reported; they are used however variable they are.
    seed
        Of the split, the fits and the draws.
    family
        Components: Gaussians on `n_pcs` principal components, or negative binomials on the counts themselves, with size
        factors.
    n_components
        `K` on each side.
    n_pcs
        Principal components in which distances are measured (and Gaussians fitted).
    n_genes
        Most variable genes; default: 2000, and 1000 for counts.
    """
    from omt.families import NegativeBinomial
    from omt.fitting.em import fit_mixture
    from omt.metrics import energy_distance
    from omt.prepare import prepare, project
    from omt.problem import transport

    rng = np.random.default_rng(seed)
    condition = adata.obs["condition"].astype(str).to_numpy()
    source, target = np.flatnonzero(condition == control), rng.permutation(np.flatnonzero(condition == treated))
    seen, unseen = np.sort(target[: len(target) // 2]), np.sort(target[len(target) // 2 :])
    counts = family != "gaussian"
    known = adata[np.concatenate([source, seen])]
    most = n_genes or (1000 if counts else 2000)
    _, record = prepare(known, n_top_genes=most, keep=genes, n_pcs=n_pcs, random_state=seed)
    place = [str(g) for g in record["genes"].tolist()]
    chosen = [place.index(gene) for gene in genes]
    if counts:  # distances are those of what the model sees: of the chosen genes, normalised among themselves
        adata = adata[:, place].copy()
        _, record = prepare(adata[known.obs_names], n_top_genes=len(place), n_pcs=n_pcs, random_state=seed)
    Z = {name: project(adata[rows], record) for name, rows in (("x", source), ("seen", seen), ("unseen", unseen))}
    unseen_cells = Z["unseen"]

    if counts:
        recipe = NegativeBinomial(size_factors="total", reference=float(adata.X.sum(axis=1).mean()))
        X = adata.X.tocsr()
        P, Q = (
            fit_mixture(X[rows], n_components, family=recipe, random_state=seed, progress=False)
            for rows in (source, seen)
        )
        plan = transport(P, Q)
        moved = adata[source].copy()
        moved.X = plan.map(X[source], kind="sample", rng=rng)
        images, rise = project(moved, record), _rise(P, Q, plan.conditional())[:, chosen]
    else:
        P, Q = (fit_mixture(Z[name], n_components, random_state=seed, progress=False) for name in ("x", "seen"))
        plan = transport(P, Q)
        images = plan.map(Z["x"], kind="sample", rng=rng)
        rise = _rise(P, Q, plan.conditional()) @ np.asarray(record["components"])[chosen].T
    one = [fit_mixture(Z[name], 1, random_state=seed, progress=False) for name in ("x", "seen")]
    shifted = Z["x"] + Z["seen"].mean(axis=0) - Z["x"].mean(axis=0)
    return Perturbation(
        unmapped=energy_distance(Z["x"], unseen_cells),
        mapped=energy_distance(images, unseen_cells),
        linear=energy_distance(transport(*one).map(Z["x"]), unseen_cells),
        shift=energy_distance(shifted, unseen_cells),
        floor=energy_distance(Z["seen"], unseen_cells),
        rise=rise,
    )


def _rise(P: Mixture, Q: Mixture, onward: Array) -> Array:
    """Mean of where each source component goes minus its own, `[K, D]`."""
    difference: Array = onward @ Q.components.mean() - P.components.mean()
    return difference
