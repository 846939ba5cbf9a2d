"""A map that no affine map of components is: error of the linear, the component and the refined map on new samples.

Letters: `N` samples, `D` features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from omt import datasets

if TYPE_CHECKING:
    import os

    from numpy.typing import NDArray

    Array = NDArray[np.float64]

__all__ = ["W2Benchmark", "w2_benchmark", "w2_benchmark_files", "w2_benchmark_generated"]


class W2Benchmark(NamedTuple):
    """Errors of maps on new samples (L2-UVP, percent), and CPU seconds.

    Attributes
    ----------
    linear
        The optimal map between the two samples' Gaussians.
    component
        `Transport.map`.
    refined
        `Transport.refine()`: points drawn from the mixtures.
    refined_samples
        `Transport.refine(X=, Y=)`: points that stand for the samples.
    fit_seconds, refine_seconds
        CPU time of both fits with the transport, and of `refine()`; without mapping.
    """

    linear: float
    component: float
    refined: float
    refined_samples: float
    fit_seconds: float
    refine_seconds: float


def w2_benchmark(
    X: Array,
    Y: Array,
    x_test: Array,
    truth: Array,
    *,
    n_components: int = 20,
    n_points: int = 2000,
    reg: float = 0.02,
    n_init: int = 3,
    seed: int = 0,
) -> W2Benchmark:
    """Learn maps from unpaired samples `[N, D]` and compare them on `x_test` with their images under the true map."""
    from time import process_time

    from omt.fitting.em import fit_mixture
    from omt.metrics import l2_uvp
    from omt.mixture import Mixture
    from omt.problem import transport

    def gaussian(Z: Array) -> Mixture:
        return Mixture.from_gaussians([1.0], Z.mean(axis=0)[None], np.cov(Z, rowvar=False)[None])

    linear = l2_uvp(transport(gaussian(X), gaussian(Y)).map(x_test), truth)
    start = process_time()
    P, Q = (fit_mixture(Z, n_components, n_init=n_init, random_state=seed, progress=False) for Z in (X, Y))
    plan = transport(P, Q)
    fitted = process_time()
    refined = plan.refine(n_points, reg, seed=seed)
    done = process_time()
    sampled = plan.refine(n_points, reg, X=X, Y=Y, seed=seed)
    component, drawn, of_samples = (l2_uvp(m.map(x_test), truth) for m in (plan, refined, sampled))
    return W2Benchmark(linear, component, drawn, of_samples, fitted - start, done - fitted)


def w2_benchmark_files(path: str | os.PathLike[str], d: int, *, seed: int = 0) -> W2Benchmark:
    """The published pairs "Mix3toMix10" in `d` = 2 or 8 dimensions, from the folder that holds their files.

    References
    ----------
    Korotin, Li, Genevay, Solomon, Filippov, Burnaev, "Do neural optimal transport solvers work? A continuous
    Wasserstein-2 benchmark", NeurIPS 2021.
    """
    from pathlib import Path

    with np.load(Path(path) / f"mix3to10_d{d}.npz", allow_pickle=False) as stored:
        X, Y, x_test, truth = (stored[k].astype(np.float64) for k in ("x_train", "y_train", "x_test", "tx_test"))
    return w2_benchmark(X, Y, x_test, truth, seed=seed)


def w2_benchmark_generated(d: int = 2, *, n: int = 4000, n_components: int = 10, seed: int = 0) -> W2Benchmark:
    """The same on a generated map, the gradient of a convex function."""
    problem = datasets.convex_potential(d, random_state=seed)
    rng = np.random.default_rng([seed, 1])
    X, Y = problem.sample_source(n, rng), problem.map(problem.sample_source(n, rng))
    x_test = problem.sample_source(2000, rng)
    return w2_benchmark(
        X, Y, x_test, problem.map(x_test), n_components=n_components, n_points=1000, n_init=1, seed=seed
    )
