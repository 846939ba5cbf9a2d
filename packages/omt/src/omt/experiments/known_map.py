"""Components that each move by their own affine map: error of the map on new samples.

Letters: `N` samples, `K` components.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from omt import datasets

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from omt.mixture import Mixture

    Array = NDArray[np.float64]

__all__ = ["KnownMapResult", "known_map"]


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
    from omt.problem import transport

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
