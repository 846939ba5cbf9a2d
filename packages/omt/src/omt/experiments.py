"""Experiments with a known answer: each returns numbers, none draws or prints. `omt demo` runs them, tests assert them.

Letters: `N` samples, `D` features, `K`, `L` components of source and target, `T` times.
"""

from __future__ import annotations

import itertools
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from omt import datasets

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from numpy.typing import NDArray

    from omt.metrics import LineageConsistency
    from omt.mixture import Mixture
    from omt.transport import Transport

    Array = NDArray[np.float64]

__all__ = [
    "Branching",
    "DigitImages",
    "KnownMapResult",
    "branching",
    "consistency",
    "digit_images",
    "halves",
    "known_map",
    "shifted_digits",
]


def consistency(plan: Transport, descendants: Mapping[str, Collection[str]] | None = None) -> LineageConsistency:
    """How much of a plan's mass goes to a component of an allowed name; by default only to its own name."""
    import pandas as pd

    from omt.metrics import lineage_consistency

    table = pd.DataFrame(np.asarray(plan.coupling), index=list(plan.source.names), columns=list(plan.target.names))
    return lineage_consistency(table, {} if descendants is None else descendants)


class KnownMapResult(NamedTuple):
    """Error of the map on new samples (L2-UVP, percent), mass between samples of the same true component, and the
    most there could be.
    """

    uvp: float
    mass: float
    bound: float


def known_map(n: int, *, seed: int, n_test: int = 2000) -> KnownMapResult:
    """Ten separated components in 20 dimensions, each moved by its own affine map; components are found, not given."""
    from omt.fitting.em import fit_mixture
    from omt.metrics import l2_uvp
    from omt.transport import transport

    problem = datasets.known_map(random_state=seed)
    rng = np.random.default_rng([seed, 1])
    X, x_true = problem.sample_source(n, rng)
    Y, y_true = problem.sample_target(n, rng)
    P = fit_mixture(X, 10, random_state=seed, progress=False)
    Q = fit_mixture(Y, 10, random_state=seed, progress=False)
    plan = transport(P, Q)
    x_test, component = problem.sample_source(n_test, rng)
    truth = problem.map(x_test, component)
    share_x, share_y = (np.bincount(k, minlength=10) / n for k in (x_true, y_true))
    mass = float(np.sum(_shares(P, X, x_true) * (np.asarray(plan.coupling) @ _shares(Q, Y, y_true))))
    return KnownMapResult(l2_uvp(plan.map(x_test), truth), mass, float(np.minimum(share_x, share_y).sum()))


def _shares(mixture: Mixture, X: Array, true: NDArray[np.int64]) -> Array:
    """Share `[K, 10]` of each true component in each fitted one."""
    R = np.asarray(mixture.responsibilities(X))
    counts = R.T @ np.eye(10)[true]
    shares: Array = counts / counts.sum(axis=1, keepdims=True)
    return shares


def halves(*, seed: int, tau: float = 1.0) -> tuple[LineageConsistency, Transport]:
    """Two random halves of 700 blood cells (pbmc68k), cell types as components: each type should stay where it is."""
    adata = datasets.pbmc68k_reduced()
    X = np.asarray(adata.obsm["X_pca"][:, :20], dtype=np.float64)
    labels = adata.obs["bulk_labels"].astype(str).to_numpy()
    first = np.random.default_rng(seed).permutation(len(X)) < len(X) // 2
    plan = _between_labels(X[first], labels[first], X[~first], labels[~first], tau)
    return consistency(plan), plan


def shifted_digits(*, seed: int, tau: float = 1.0) -> LineageConsistency:
    """Half of the handwritten digits against the other half, moved by 0.6 pixel and dimmed; 20 principal components."""
    images, digit = datasets.digits()
    first = np.random.default_rng(seed).permutation(len(images)) < len(images) // 2
    center, axes = _principal_axes(images[first], 20)
    moved = datasets.shift_and_dim(images[~first])
    names = digit.astype(str)
    plan = _between_labels((images[first] - center) @ axes, names[first], (moved - center) @ axes, names[~first], tau)
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
    plan = _between_labels(Z[low], names[low], Z[~low], names[~low], 1.0)
    rng = np.random.default_rng(seed)
    chosen = np.concatenate([rng.choice(np.flatnonzero(digit == d), n, replace=False) for d in range(5)])
    # The target nearest to each mapped image: a real image to compare with.
    mapped = plan.map(Z[chosen], kind="barycentric")
    targets = np.flatnonzero(~low)
    nearest = targets[((mapped[:, None, :] - Z[targets][None]) ** 2).sum(axis=2).argmin(axis=1)]
    drawn = plan.map(Z[chosen], kind="sample", rng=rng)
    return DigitImages(images[chosen], mapped @ axes.T + center, drawn @ axes.T + center, images[nearest], plan)


class Branching(NamedTuple):
    """What a chain found in the branching process.

    Attributes
    ----------
    share, bound
        Mass on possible descents and the most there could be, means over the steps.
    fate_error
        Mean over the types at the first time of the total-variation distance between the found and the true
        distribution over types at the last time: 0 to 1.
    """

    share: float
    bound: float
    fate_error: float


def branching(*, seed: int, tau: float = 1.0, growth_known: bool = False, n_cells: int = 600) -> Branching:
    """Five times of a branching differentiation; cell types as components.

    With `growth_known` the weights of each source are multiplied by the growth of its types, so that a balanced plan
    has the true marginals.
    """
    from omt.chain import TransportChain
    from omt.fitting.em import fit_mixture
    from omt.transport import transport

    adata, truth = datasets.branching_process(n_cells, random_state=seed)
    X, time = np.asarray(adata.obsm["X_state"]), adata.obs["time"].to_numpy()
    labels = adata.obs["cell_type"].astype(str).to_numpy()
    times = np.unique(time)
    index = {name: k for k, name in enumerate(truth.types)}
    descendants = {name: [truth.types[l] for l in np.flatnonzero(truth.allowed[k])] for name, k in index.items()}
    mixtures = [fit_mixture(X[time == t], labels=labels[time == t], progress=False) for t in times]
    plans = []
    for P, Q in itertools.pairwise(mixtures):
        grown = P.weights * truth.growth[[index[name] for name in P.names]]
        plans.append(transport(replace(P, weights=grown / grown.sum()) if growth_known else P, Q, tau=tau))
    steps = [consistency(plan, descendants) for plan in plans]
    found = TransportChain(mixtures, [float(t) for t in times], plans).transition_matrix(
        float(times[0]), float(times[-1])
    )
    first, last = ([index[name] for name in mixture.names] for mixture in (mixtures[0], mixtures[-1]))
    true = np.linalg.matrix_power(truth.transition, len(times) - 1)[np.ix_(first, last)]
    return Branching(
        float(np.mean([step.share for step in steps])),
        float(np.mean([step.bound for step in steps])),
        float(np.mean(0.5 * np.abs(np.asarray(found) - true).sum(axis=1))),
    )


def _between_labels(
    X: Array, x_labels: Sequence[str] | Array, Y: Array, y_labels: Sequence[str] | Array, tau: float
) -> Transport:
    from omt.fitting.em import fit_mixture
    from omt.transport import transport

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
