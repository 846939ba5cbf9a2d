"""Data that need no download: sets inside scanpy and scikit-learn, and generators whose truth is known.

Letters: `N` samples, `D` features, `K` components, `T` times.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from omt.generators import ConvexPotential, convex_potential, moving_clusters
from omt.scalars import checked_seed

if TYPE_CHECKING:
    from anndata import AnnData
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

__all__ = [
    "BranchingTruth",
    "ConvexPotential",
    "KnownMap",
    "PerturbationTruth",
    "branching_process",
    "convex_potential",
    "digits",
    "known_map",
    "moving_clusters",
    "pbmc68k_reduced",
    "perturbed_counts",
    "shift_and_dim",
]


def pbmc68k_reduced() -> AnnData:
    """700 peripheral blood cells with ten cell types (`obs["bulk_labels"]`), as they ship inside scanpy.

    Returns
    -------
    AnnData
        Log-normalised expression of 765 genes, `obsm["X_pca"]` [700, 50] and `obsm["X_umap"]` [700, 2].

    Raises
    ------
    ImportError
        scanpy is not installed.
    """
    try:
        import scanpy
    except ImportError as error:
        raise ImportError(
            "pbmc68k_reduced is a file inside scanpy, which is missing: pip install 'omt[scanpy]'"
        ) from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the stored file uses an old on-disk encoding; anndata says so at each read
        return scanpy.datasets.pbmc68k_reduced()


def shift_and_dim(images: Array, *, shift: float = 0.6, scale: float = 0.7, offset: float = 0.1) -> Array:
    """Shift 8 x 8 images to the right by a fraction of a pixel and change their brightness.

    Parameters
    ----------
    images
        `[N, 64]`, values in [0, 1].
    shift
        Pixels to the right; between pixels the image is interpolated linearly, outside it is 0.
    scale, offset
        Every pixel becomes `scale * pixel + offset`.

    Returns
    -------
    ndarray
        `[N, 64]`.

    Examples
    --------
    >>> import numpy as np
    >>> image = np.zeros((1, 64)); image[0, 0] = 1.0
    >>> shift_and_dim(image, shift=0.25, scale=1.0, offset=0.0)[0, :3]
    array([0.75, 0.25, 0.  ])
    """
    from scipy.ndimage import shift as translate

    pixels = np.asarray(images, dtype=np.float64)
    if pixels.ndim != 2 or pixels.shape[1] != 64:
        raise ValueError(f"images must have shape [N, 64] (8 x 8 pixels), got {pixels.shape}")
    moved = translate(pixels.reshape(-1, 8, 8), (0.0, 0.0, shift), order=1, mode="grid-constant", cval=0.0)
    result: Array = scale * moved.reshape(-1, 64) + offset
    return result


def digits() -> tuple[Array, NDArray[np.int64]]:
    """1797 handwritten digits of 8 x 8 pixels, as they ship inside scikit-learn.

    Returns
    -------
    images : ndarray
        `[1797, 64]`, values in [0, 1].
    digit : ndarray
        `[1797]`, 0 to 9.
    """
    from sklearn.datasets import load_digits

    data: Any = load_digits()
    return np.asarray(data.data, dtype=np.float64) / 16.0, np.asarray(data.target, dtype=np.int64)


@dataclass(frozen=True)
class KnownMap:
    """A source and a target mixture of Gaussians whose optimal map is known: each component has its own affine map.

    Attributes
    ----------
    weights
        `[K]`, the same on both sides.
    means, covariances
        `[K, D]`, `[K, D, D]` of the source components.
    target_means, linear
        `[K, D]`, `[K, D, D]`: component `k` moves by `x -> target_means[k] + linear[k] @ (x - means[k])`; `linear[k]`
        is symmetric
        positive definite, so this is the optimal map of the pair (Brenier).
    """

    weights: Array
    means: Array
    covariances: Array
    target_means: Array
    linear: Array

    def sample_source(self, n: int, rng: np.random.Generator) -> tuple[Array, NDArray[np.int64]]:
        """Draw `n` source samples `[N, D]` and their components `[N]`."""
        components = rng.choice(len(self.weights), size=n, p=self.weights)
        noise = rng.standard_normal((n, self.means.shape[1]))
        roots = np.linalg.cholesky(self.covariances)
        return self.means[components] + np.einsum("nij,nj->ni", roots[components], noise), components

    def sample_target(self, n: int, rng: np.random.Generator) -> tuple[Array, NDArray[np.int64]]:
        """Draw `n` target samples `[N, D]` (images of fresh source samples) and their components `[N]`."""
        X, components = self.sample_source(n, rng)
        return self.map(X, components), components

    def map(self, X: Array, components: NDArray[np.int64]) -> Array:
        """Apply the true map of each sample's own component: `[N, D] -> [N, D]`."""
        moved: Array = self.target_means[components] + np.einsum(
            "nij,nj->ni", self.linear[components], X - self.means[components]
        )
        return moved


def known_map(
    n_components: int = 10,
    n_features: int = 20,
    *,
    separation: float = 2.0,
    displacement: float | None = None,
    random_state: int = 0,
) -> KnownMap:
    """Generate well separated Gaussian components that each move by their own affine map.

    Parameters
    ----------
    n_components, n_features
        `K` and `D`.
    separation
        Standard deviation of the component means per axis; within a component it is between 0.55 and 1.1.
    displacement
        Standard deviation per axis by which components move; by default two thirds of `separation`: far enough that no
        linear map does, near enough that staying with one's own component is the optimal coupling. In few dimensions
        that needs less.
    random_state
        Seed.

    Examples
    --------
    >>> import numpy as np
    >>> problem = known_map(3, 4, random_state=1)
    >>> X, k = problem.sample_source(5, np.random.default_rng(0))
    >>> problem.map(X, k).shape
    (5, 4)
    """
    rng = np.random.default_rng(checked_seed(random_state))
    K, D = n_components, n_features
    weights = rng.uniform(0.5, 1.5, size=K)

    def positive(low: float, high: float) -> Array:
        rotation = np.linalg.qr(rng.standard_normal((K, D, D)))[0]
        matrices: Array = (rotation * rng.uniform(low, high, size=(K, 1, D))) @ rotation.swapaxes(1, 2)
        return matrices

    means = separation * rng.standard_normal((K, D))
    return KnownMap(
        weights=weights / weights.sum(),
        means=means,
        covariances=positive(0.3, 1.2),
        target_means=means + (separation / 1.5 if displacement is None else displacement) * rng.standard_normal((K, D)),
        linear=positive(0.6, 1.4),
    )


@dataclass(frozen=True)
class BranchingTruth:
    """What `branching_process` knows about its cells.

    Attributes
    ----------
    types
        Names of the cell types, `K` of them.
    transition
        `[K, K]`: share of a type's descendants, one time step later, that have each type; rows sum to 1.
    growth
        `[K]`: descendants per cell and time step.
    composition
        `[T, K]`: expected shares of the types at each time.
    """

    types: tuple[str, ...]
    transition: Array
    growth: Array
    composition: Array

    @property
    def allowed(self) -> NDArray[np.bool_]:
        """`[K, K]`: whether a cell of the row's type can have a descendant of the column's type one step later."""
        possible: NDArray[np.bool_] = self.transition > 0
        return possible


# A tree of six types. A step away from the root goes further out at an angle of 60 degrees, so a jump over a type
# costs more than two steps.
_TYPES = ("stem", "A progenitor", "B progenitor", "A1", "A2", "B1")
_TRANSITION = np.array(
    [
        [0.40, 0.35, 0.25, 0.00, 0.00, 0.00],
        [0.00, 0.40, 0.00, 0.36, 0.24, 0.00],
        [0.00, 0.00, 0.50, 0.00, 0.00, 0.50],
        [0.00, 0.00, 0.00, 1.00, 0.00, 0.00],
        [0.00, 0.00, 0.00, 0.00, 1.00, 0.00],
        [0.00, 0.00, 0.00, 0.00, 0.00, 1.00],
    ]
)
_GROWTH = np.array([1.6, 1.3, 1.1, 1.0, 0.8, 0.9])
_START = np.array([0.7, 0.15, 0.15, 0.0, 0.0, 0.0])


def branching_process(
    n_cells: int = 600, *, n_times: int = 5, n_features: int = 10, random_state: int = 0
) -> tuple[AnnData, BranchingTruth]:
    """Generate a time course of a branching differentiation with known transitions, fates and growth.

    A stem type gives two progenitors and they give three mature types. Between two times every type grows by its
    factor and its descendants
    choose their types by fixed shares; each time is an independent sample of cells, as in a real time course.

    Parameters
    ----------
    n_cells
        Cells at each time.
    n_times
        Times `0, 1, ..., T-1`.
    n_features
        `D >= 5`: dimensions of the cell state.
    random_state
        Seed.

    Returns
    -------
    adata : AnnData
        `T * n_cells` cells; `obs["time"]` (float), `obs["cell_type"]` (categorical), `obsm["X_state"]` `[N, D]`,
        `obsm["X_tree"]` `[N, 2]` (a view of the tree to draw on), `uns["cell_type_colors"]`.
    truth : BranchingTruth

    Examples
    --------
    >>> adata, truth = branching_process(100)
    >>> adata.n_obs, truth.types[:2]
    (500, ('stem', 'A progenitor'))
    """
    import pandas as pd
    from anndata import AnnData

    if n_features < 5:
        raise ValueError(f"n_features is {n_features}, must be at least 5: the tree needs five directions")
    rng = np.random.default_rng(checked_seed(random_state))
    composition = [_START]
    for _ in range(1, n_times):
        descendants = (composition[-1] * _GROWTH) @ _TRANSITION
        composition.append(descendants / descendants.sum())

    cos, sin, edge = 0.5, np.sqrt(0.75), 5.0
    centers = np.zeros((len(_TYPES), n_features))
    centers[1, 0], centers[2, 1] = edge, edge
    centers[3, [0, 2]] = edge * (1 + cos), edge * sin
    centers[4, [0, 3]] = edge * (1 + cos), edge * sin
    centers[5, [1, 4]] = edge * (1 + cos), edge * sin
    rotation = np.linalg.qr(rng.standard_normal((n_features, n_features)))[0]
    spread = rng.uniform(0.6, 1.1, size=(len(_TYPES), n_features))
    drift = np.zeros(n_features)
    drift[[0, 1]] = 0.2  # all types move a little with time

    kinds = [rng.choice(len(_TYPES), size=n_cells, p=shares) for shares in composition]
    kind = np.concatenate(kinds)
    time = np.repeat(np.arange(n_times, dtype=np.float64), n_cells)
    state = centers[kind] + time[:, None] * drift + spread[kind] * rng.standard_normal((len(kind), n_features))
    # Two directions of the plane in which the five branches fan out: only for the eye.
    angles = np.deg2rad([25.0, -35.0, 60.0, -5.0, -60.0])
    tree = state[:, :5] @ np.stack([np.cos(angles), np.sin(angles)], axis=1)

    obs = pd.DataFrame(
        {"time": time, "cell_type": pd.Categorical.from_codes(kind, categories=pd.Index(_TYPES))},
        index=[f"cell{i}" for i in range(len(kind))],
    )
    adata = AnnData(obs=obs, obsm={"X_state": state @ rotation, "X_tree": tree})
    adata.uns["cell_type_colors"] = ["#4d4d4d", "#8c6bb1", "#41ab5d", "#d6604d", "#f4a582", "#2b8cbe"]
    return adata, BranchingTruth(_TYPES, _TRANSITION.copy(), _GROWTH.copy(), np.stack(composition))


@dataclass(frozen=True)
class PerturbationTruth:
    """What `perturbed_counts` knows about its cells.

    Attributes
    ----------
    types
        Names of the cell types, `K` of them.
    means
        `[K, G]`: mean counts of an untreated cell of size one.
    fold_changes
        `[K, G]`: factor by which treatment changes them; 1 for genes that do not respond.
    dispersion
        `[G]`: variances are `mean + dispersion * mean**2`.
    responding
        Names of the genes that rise in every type.
    """

    types: tuple[str, ...]
    means: Array
    fold_changes: Array
    dispersion: Array
    responding: tuple[str, ...]


def perturbed_counts(
    n_cells: int = 1000, *, n_genes: int = 200, n_types: int = 4, n_responding: int = 15, random_state: int = 0
) -> tuple[AnnData, PerturbationTruth]:
    """Generate counts of control and treated cells whose types and fold changes are known.

    Counts are negative binomial. Every type has marker genes; under treatment the responding genes rise in all types, 3
    to 12 fold, each type by its own factor. Cells differ in depth.

    Parameters
    ----------
    n_cells
        Cells of each condition.
    n_genes, n_types, n_responding
        `G`, `K`, and the number of genes that respond.
    random_state
        Seed.

    Returns
    -------
    adata : AnnData
        `2 * n_cells` cells with sparse counts in `X`; `obs["condition"]` (`"control"`, `"treated"`),
        `obs["cell_type"]`, `obs["size"]` (true size factor).
    truth : PerturbationTruth

    Examples
    --------
    >>> adata, truth = perturbed_counts(100)
    >>> adata.shape, len(truth.responding)
    ((200, 200), 15)
    """
    import pandas as pd
    from anndata import AnnData
    from scipy import sparse

    if n_responding > n_genes:
        raise ValueError(
            f"n_responding is {n_responding} and n_genes {n_genes}; give at most as many as there are genes"
        )
    rng = np.random.default_rng(checked_seed(random_state))
    K, G = n_types, n_genes
    means = np.exp(rng.normal(-0.5, 1.0, size=G)) * np.exp(0.2 * rng.standard_normal((K, G)))
    order = rng.permutation(G)
    responding, others = np.sort(order[:n_responding]), order[n_responding:]
    for k, genes in enumerate(others[: K * (G // (3 * K))].reshape(K, -1)):
        means[k, genes] *= rng.uniform(4.0, 10.0, size=genes.size)
    # What treatment switches on is nearly off before: depth stays about what it was.
    means[:, responding] = rng.uniform(0.1, 0.4, size=(K, n_responding))
    folds = np.ones((K, G))
    folds[:, responding] = rng.uniform(3.0, 8.0, size=n_responding) * rng.uniform(1.0, 1.5, size=(K, n_responding))
    dispersion = rng.uniform(0.1, 0.5, size=G)

    kind = rng.choice(K, size=2 * n_cells, p=rng.dirichlet(np.full(K, 20.0)))
    treated = np.arange(2 * n_cells) >= n_cells
    size = np.exp(0.3 * rng.standard_normal(2 * n_cells))
    expected = size[:, None] * means[kind] * np.where(treated[:, None], folds[kind], 1.0)
    counts = rng.poisson(rng.gamma(1.0 / dispersion, dispersion * expected))

    types = tuple(f"type {k}" for k in range(K))
    obs = pd.DataFrame(
        {
            "condition": pd.Categorical.from_codes(treated.astype(int), categories=pd.Index(["control", "treated"])),
            "cell_type": pd.Categorical.from_codes(kind, categories=pd.Index(types)),
            "size": size,
        },
        index=[f"cell{i}" for i in range(2 * n_cells)],
    )
    gene_names = [f"gene{g}" for g in range(G)]
    adata = AnnData(sparse.csr_matrix(counts.astype(np.float32)), obs=obs, var=pd.DataFrame(index=gene_names))
    truth = PerturbationTruth(types, means, folds, dispersion, tuple(gene_names[g] for g in responding))
    return adata, truth
