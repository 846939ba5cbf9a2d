"""Does an interpolation meet cells it has not seen? Its distance to a held-out time, beside what else could be said.

Letters: ``N`` samples, ``d`` features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from omt.metrics import w2

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from omt.transport import Transport

    FloatArray = NDArray[np.float64]

__all__ = ["METHODS", "distances_to_held_out", "entropic_interpolation", "random_interpolation"]

METHODS = ("omt", "cell-level entropic", "random pairing", "first", "last", "noise floor")
"""Rows of the table of :func:`distances_to_held_out`."""


def distances_to_held_out(
    transport: Transport,
    first: FloatArray,
    held_out: FloatArray,
    last: FloatArray,
    t: float,
    *,
    n_repeats: int = 5,
    n_cells: int = 1000,
    reg: float = 0.02,
    seed: int = 0,
) -> pd.DataFrame:
    """Wasserstein-2 distance of an interpolation, and of its rivals, to samples of a time in between.

    Parameters
    ----------
    transport : Transport
        Between mixtures of ``first`` and ``last``; it has not seen ``held_out``.
    first, held_out, last : array [N_0, d], [N, d], [N_1, d]
        Samples of three times.
    t : float in (0, 1)
        Where the middle time lies between the others.
    n_repeats : int
        Random draws, each compared on its own.
    n_cells : int
        Most samples to compare: of larger sets a random part is taken in each repeat. Exact distances take time.
    reg : float
        Temperature of the cell-level plan, as a multiple of its mean cost.
    seed : int
        Randomness.

    Returns
    -------
    pandas.DataFrame
        A row for each of: ``"omt"``, the moved samples of the transport; ``"cell-level entropic"``, pairs drawn from an
        entropic plan between all samples; ``"random pairing"``, pairs drawn without a plan; ``"first"`` and ``"last"``,
        samples that do not move; ``"noise floor"``, one half of the held-out samples against the other, a little more
        than a perfect method would reach. Columns: ``w2`` (mean over the repeats, in units of the features), ``sd``,
        and ``explained``, the share of the way from random pairing (0) to the noise floor (1).

    Raises
    ------
    ValueError
        If there are fewer than two held-out samples, or a number is out of range.

    References
    ----------
    Schiebinger et al., "Optimal-transport analysis of single-cell gene expression identifies developmental
    trajectories in reprogramming", Cell 176, 2019 (validation by held-out time points).
    """
    if not 0.0 < t < 1.0:
        raise ValueError(f"t is {t!r}; a held-out time lies between the others, so t must be above 0 and below 1")
    if n_repeats < 1 or n_cells < 2:
        raise ValueError(f"n_repeats is {n_repeats} and n_cells {n_cells}; they must be at least 1 and 2")
    if len(held_out) < 2:
        raise ValueError(f"there is {len(held_out)} held-out sample; a distance to them needs at least 2")
    results: list[list[float]] = []
    for repeat in range(n_repeats):
        rng = np.random.default_rng([seed, repeat])
        x, middle, y = (_part(z, n_cells, rng) for z in (first, held_out, last))
        n = len(middle)
        half = rng.permutation(n)
        rivals = {
            "omt": transport.interpolate_samples(x, t, n, rng, bridge=True),
            "cell-level entropic": entropic_interpolation(x, y, t, n, rng, reg=reg),
            "random pairing": random_interpolation(x, y, t, n, rng),
            "first": _part(x, n, rng),
            "last": _part(y, n, rng),
        }
        distances = [w2(rivals[name], middle) for name in METHODS[:-1]]
        results.append([*distances, w2(middle[half[: n // 2]], middle[half[n // 2 :]])])
    values = np.array(results)
    mean = values.mean(axis=0)
    floor, chance = mean[METHODS.index("noise floor")], mean[METHODS.index("random pairing")]
    sd = values.std(axis=0, ddof=1) if n_repeats > 1 else np.full(len(METHODS), np.nan)
    explained = (chance - mean) / (chance - floor) if chance > floor else np.full(len(METHODS), np.nan)
    return pd.DataFrame({"w2": mean, "sd": sd, "explained": explained}, index=pd.Index(METHODS, name="method"))


def entropic_interpolation(
    x: FloatArray, y: FloatArray, t: float, n: int, rng: np.random.Generator, *, reg: float = 0.02
) -> FloatArray:
    """``(1−t) x_i + t y_j`` [n, d] of pairs drawn from the entropic plan between two samples.

    Parameters
    ----------
    x, y : array [N, d], [M, d]
        Samples.
    t : float
        Between 0 and 1.
    n : int
        Pairs.
    rng : numpy.random.Generator
        Randomness.
    reg : float
        Temperature as a multiple of the mean squared distance.
    """
    from scipy.spatial.distance import cdist

    from omt.interpolation import drawn, resampled
    from omt.refine.entropic import solve_points

    C = cdist(x, y, "sqeuclidean")
    a, b = np.full(len(x), 1.0 / len(x)), np.full(len(y), 1.0 / len(y))
    mean = float(C.mean())
    f, g, *_ = solve_points(C, a, b, reg * mean, easy=0.02 * mean, tol=1e-6, max_iter=500)
    # Like the moved samples of a transport, each start is taken equally often: no noise of composition on either side.
    i = resampled(a, n, rng)
    j = drawn(np.exp((g - C[i] + f[i, None]) / (reg * mean)), rng)
    return np.asarray((1.0 - t) * x[i] + t * y[j])


def random_interpolation(x: FloatArray, y: FloatArray, t: float, n: int, rng: np.random.Generator) -> FloatArray:
    """``(1−t) x_i + t y_j`` [n, d] of pairs drawn at random."""
    from omt.interpolation import resampled

    i, j = (resampled(np.ones(len(z)), n, rng) for z in (x, y))
    return np.asarray((1.0 - t) * x[i] + t * y[j])


def _part(z: FloatArray, n: int, rng: np.random.Generator) -> FloatArray:
    return z if len(z) <= n else z[rng.choice(len(z), n, replace=False)]
