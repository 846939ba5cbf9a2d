"""Cell types or digits as components: does each go where its name says?

Letters: `D` features.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from omt import datasets

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from anndata import AnnData
    from numpy.typing import NDArray

    from omt.metrics import LineageConsistency
    from omt.transport import Transport

    Array = NDArray[np.float64]

__all__ = [
    "DigitImages",
    "between_labels",
    "consistency",
    "digit_images",
    "halves",
    "shifted_digits",
    "significant_off_diagonal",
    "two_halves",
]


def consistency(plan: Transport, descendants: Mapping[str, Collection[str]] | None = None) -> LineageConsistency:
    """How much of a plan's mass goes to a component of an allowed name; by default only to its own name."""
    import pandas as pd

    from omt.metrics import lineage_consistency

    table = pd.DataFrame(np.asarray(plan.coupling), index=list(plan.source.names), columns=list(plan.target.names))
    return lineage_consistency(table, {} if descendants is None else descendants)


def halves(*, seed: int, tau: float = 1.0) -> tuple[LineageConsistency, Transport]:
    """Two random halves of 700 blood cells (pbmc68k), cell types as components: each type should stay where it is."""
    adata = datasets.pbmc68k_reduced()
    X = np.asarray(adata.obsm["X_pca"][:, :20], dtype=np.float64)
    labels = adata.obs["bulk_labels"].astype(str).to_numpy()
    first = np.random.default_rng(seed).permutation(len(X)) < len(X) // 2
    plan = between_labels(X[first], labels[first], X[~first], labels[~first], tau)
    return consistency(plan), plan


def two_halves(*, seed: int) -> AnnData:
    """The blood cells with a random half in `obs["half"]`, fitted on 20 principal components and transported."""
    import pandas as pd

    from omt import tl

    cells = datasets.pbmc68k_reduced()
    first = np.random.default_rng(seed).permutation(cells.n_obs) < cells.n_obs // 2
    cells.obs["half"] = pd.Categorical(np.where(first, "first", "second"))
    cells.obsm["X_pca20"] = np.asarray(cells.obsm["X_pca"][:, :20])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*one sample.*")
        tl.fit_mixtures(cells, groupby="half", labels="bulk_labels", use_rep="X_pca20", progress=False)
    tl.transport(cells, source="first", target="second")
    return cells


def significant_off_diagonal(*, seed: int, n_boot: int = 200) -> int:
    """Transitions between different types of two halves that the bootstrap calls more than chance; there are none."""
    from omt import tl

    cells = two_halves(seed=seed)
    tl.bootstrap(cells, n_boot=n_boot, random_state=seed, progress=False)
    pair = cells.uns["omt"]["bootstrap"]["pairs"]["first->second"]
    different = np.not_equal.outer(pair["source_names"], pair["target_names"])
    return int((pair["verdict"][different] > 0).sum())


def shifted_digits(*, seed: int, tau: float = 1.0) -> LineageConsistency:
    """Half of the handwritten digits against the other half, moved by 0.6 pixel and dimmed; 20 principal components."""
    images, digit = datasets.digits()
    first = np.random.default_rng(seed).permutation(len(images)) < len(images) // 2
    center, axes = _principal_axes(images[first], 20)
    moved = datasets.shift_and_dim(images[~first])
    names = digit.astype(str)
    plan = between_labels((images[first] - center) @ axes, names[first], (moved - center) @ axes, names[~first], tau)
    return consistency(plan)


class DigitImages(NamedTuple):
    """Source images `[n, 64]`, where the map takes them, draws of where they may go, and real target images."""

    source: Array
    mapped: Array
    drawn: Array
    target: Array
    plan: Transport


def digit_images(*, seed: int = 0, n: int = 2) -> DigitImages:
    """Map digits 0 to 4 onto digits 5 to 9: `n` images of each, in 20 principal components and back in pixels."""
    images, digit = datasets.digits()
    center, axes = _principal_axes(images, 20)
    Z = (images - center) @ axes
    low = digit < 5
    names = digit.astype(str)
    plan = between_labels(Z[low], names[low], Z[~low], names[~low], 1.0)
    rng = np.random.default_rng(seed)
    chosen = np.concatenate([rng.choice(np.flatnonzero(digit == d), n, replace=False) for d in range(5)])
    # The target nearest to each mapped image: a real image to compare with.
    mapped = plan.map(Z[chosen], kind="barycentric")
    targets = np.flatnonzero(~low)
    nearest = targets[((mapped[:, None, :] - Z[targets][None]) ** 2).sum(axis=2).argmin(axis=1)]
    drawn = plan.map(Z[chosen], kind="sample", rng=rng)
    return DigitImages(images[chosen], mapped @ axes.T + center, drawn @ axes.T + center, images[nearest], plan)


def between_labels(
    X: Array, x_labels: Sequence[str] | Array, Y: Array, y_labels: Sequence[str] | Array, tau: float
) -> Transport:
    """Transport between two samples whose labels are the components."""
    from omt.fitting.em import fit_mixture
    from omt.problem import transport

    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".*one sample.*"
        )  # rare types may have one cell in a half; that is part of the experiment
        P = fit_mixture(X, labels=x_labels, progress=False)
        Q = fit_mixture(Y, labels=y_labels, progress=False)
    return transport(P, Q, tau=tau)


def _principal_axes(images: Array, n: int) -> tuple[Array, Array]:
    """Mean `[D]` and first `n` principal axes `[D, n]`."""
    center = images.mean(axis=0)
    axes: Array = np.linalg.svd(images - center, full_matrices=False)[2][:n].T
    return center, axes
