"""Samples whose truth is known in closed form: a smooth optimal map, and a process on straight lines.

Letters: `N` samples, `D` features, `J` places.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from omt.scalars import checked_seed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

__all__ = ["ConvexPotential", "convex_potential", "moving_clusters"]


@dataclass(frozen=True)
class ConvexPotential:
    """A source and an optimal map that is no affine one: the gradient of a smooth convex function.

    `T(x) = flat * x + Σ_j p_j(x) targets[j]` with `p(x) = softmax(sharpness * (targets @ x) + offsets)`. It is the
    gradient of `flat * |x|² / 2 + log Σ_j exp(sharpness * targets[j] @ x + offsets[j]) / sharpness`, and so the optimal
    map from any source to its image (Brenier).

    Attributes
    ----------
    means
        `[K, D]`: the source is an equal mixture of unit Gaussians around them.
    targets, offsets
        `[J, D]`, `[J]`.
    sharpness, flat
        How fast the map turns from one target to another, and how much of the identity there is.
    """

    means: Array
    targets: Array
    offsets: Array
    sharpness: float
    flat: float

    def sample_source(self, n: int, rng: np.random.Generator) -> Array:
        """Draw `n` source samples `[N, D]`."""
        noise = rng.standard_normal((n, self.means.shape[1]))
        drawn: Array = self.means[rng.integers(len(self.means), size=n)] + noise
        return drawn

    def map(self, X: Array) -> Array:
        """Apply the optimal map: `[N, D] -> [N, D]`."""
        scores = self.sharpness * (X @ self.targets.T) + self.offsets
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        image: Array = self.flat * X + (shares / shares.sum(axis=1, keepdims=True)) @ self.targets
        return image


def convex_potential(n_features: int = 2, *, n_targets: int = 6, random_state: int = 0) -> ConvexPotential:
    """Generate a smooth optimal map that gathers a mixture of three Gaussians around several places.

    Parameters
    ----------
    n_features
        `D`.
    n_targets
        Places `J`; more than the source has components, so that components are no images of one another.
    random_state
        Seed.

    Examples
    --------
    >>> import numpy as np
    >>> problem = convex_potential(2)
    >>> X = problem.sample_source(5, np.random.default_rng(0))
    >>> problem.map(X).shape
    (5, 2)
    """
    rng = np.random.default_rng(checked_seed(random_state))
    targets = 3.0 * rng.standard_normal((n_targets, n_features))
    return ConvexPotential(
        means=2.0 * rng.standard_normal((3, n_features)),
        targets=targets,
        offsets=-0.5 * np.einsum("jd,jd->j", targets, targets),
        sharpness=1.0,
        flat=0.3,
    )


def moving_clusters(n_cells: int = 400, *, n_features: int = 3, random_state: int = 0) -> tuple[Array, Array, Array]:
    """Generate independent samples of a process at three times, `t = 0, 1/2, 1`: clusters that move on straight lines
    while they turn and change shape, one of which splits in two.

    Parameters
    ----------
    n_cells
        Samples at each time.
    n_features
        `D >= 2`.
    random_state
        Seed.

    Returns
    -------
    first, middle, last : ndarray
        `[N, D]` each.

    Examples
    --------
    >>> first, middle, last = moving_clusters(50)
    >>> middle.shape
    (50, 3)
    """
    if n_features < 2:
        raise ValueError(f"n_features is {n_features}, must be at least 2")
    rng = np.random.default_rng(checked_seed(random_state))
    # Where each stream starts and ends, in the first two axes; the first two streams start as one cluster.
    start = np.zeros((4, n_features))
    start[:, :2] = [[0.0, 0.0], [0.0, 0.0], [6.0, 0.0], [0.0, 6.0]]
    end = np.zeros((4, n_features))
    end[:, :2] = [[-3.0, -3.0], [3.0, -3.0], [8.0, 4.0], [3.0, 9.0]]
    rotation = np.linalg.qr(rng.standard_normal((4, n_features, n_features)))[0]
    stretch = (rotation * rng.uniform(0.4, 1.8, size=(4, 1, n_features))) @ rotation.swapaxes(1, 2)
    spread = rng.uniform(0.5, 1.2, size=(3, n_features))[[0, 0, 1, 2]]

    def at(t: float) -> Array:
        # Shares are exact: distances between two times then tell of the process, not of the draw of cells.
        stream = np.searchsorted([0.25, 0.5, 0.7], (np.arange(n_cells) + 0.5) / n_cells)
        centred = spread[stream] * rng.standard_normal((n_cells, n_features))
        moved = end[stream] + np.einsum("nij,nj->ni", stretch[stream], centred)
        state: Array = (1.0 - t) * (start[stream] + centred) + t * moved
        return state

    return at(0.0), at(0.5), at(1.0)
