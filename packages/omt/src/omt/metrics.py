"""How good a map, a sample or a table of transitions is.

Letters: ``N``/``M`` points of two samples, ``d`` features, ``K``/``L`` source/target components.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy.spatial.distance import cdist

from omt.families.base import FloatArray
from omt.plans.inputs import checked_weights

__all__ = ["LineageConsistency", "energy_distance", "l2_uvp", "lineage_consistency", "w2"]

_BLOCK_ENTRIES = 1 << 22


def l2_uvp(mapped: ArrayLike, truth: ArrayLike, target_variance: float | None = None) -> float:
    """Unexplained variance of a transport map, in percent: ``100 · mean‖T̂(x) − T*(x)‖² / Var(Q)``.

    Parameters
    ----------
    mapped : array [N, d]
        Images under the map that is judged.
    truth : array [N, d]
        Images of the same points under the true map.
    target_variance : float, optional
        Total variance of the target (trace of its covariance); that of ``truth`` if not given.

    Returns
    -------
    float
        0 for the true map, about 100 for the constant map to the target's mean.

    Raises
    ------
    ValueError
        If shapes differ or the variance is not positive.

    References
    ----------
    Korotin, Li, Genevay, Solomon, Filippov, Burnaev, "Do neural optimal transport solvers
    work? A continuous Wasserstein-2 benchmark", NeurIPS 2021.

    Examples
    --------
    >>> l2_uvp([[0.0], [2.0]], [[1.0], [3.0]], target_variance=4.0)
    25.0
    """
    image, goal = _sample(mapped, "mapped"), _sample(truth, "truth")
    if image.shape != goal.shape:
        raise ValueError(f"mapped has shape {image.shape} and truth {goal.shape}; they must hold the same points")
    variance = float(goal.var(axis=0).sum()) if target_variance is None else float(target_variance)
    if not (variance > 0.0 and np.isfinite(variance)):
        raise ValueError(f"the target's variance is {variance:g}; it must be > 0 and finite")
    return float(100.0 * ((image - goal) ** 2).sum(axis=1).mean() / variance)


def w2(X: ArrayLike, Y: ArrayLike, mu: ArrayLike | None = None, nu: ArrayLike | None = None) -> float:
    """Wasserstein-2 distance between two weighted samples, by the exact linear program.

    Parameters
    ----------
    X, Y : array [N, d], [M, d]
        Samples; time grows about as ``N M log N``, memory as ``N M``.
    mu, nu : array [N], [M], optional
        Weights with equal sums; equal weights if not given.

    Returns
    -------
    float
        Distance (not squared), in units of the features.

    Raises
    ------
    ValueError
        If the samples or weights do not fit each other.
    RuntimeError
        If the linear program is not solved.

    Examples
    --------
    >>> w2([[0.0], [1.0]], [[3.0], [4.0]])
    3.0
    """
    import ot  # heavy, and needed here only

    x, y = _pair(X, Y)
    a, b = checked_weights(mu, len(x), "mu"), checked_weights(nu, len(y), "nu")
    if not np.isclose(a.sum(), b.sum(), rtol=1e-6, atol=0.0):
        raise ValueError(f"mu sums to {a.sum():.9g} and nu to {b.sum():.9g}; they must have equal sums")
    squared, log = ot.emd2(a, b, cdist(x, y, "sqeuclidean"), numItermax=10**7, log=True, return_matrix=False)
    if log["warning"] is not None:
        raise RuntimeError(f"the linear program of {len(x)} × {len(y)} samples was not solved: {log['warning']}")
    return float(np.sqrt(max(float(squared), 0.0)))


def energy_distance(X: ArrayLike, Y: ArrayLike) -> float:
    """Energy distance ``2 E‖x − y‖ − E‖x − x'‖ − E‖y − y'‖`` between two samples.

    The means within a sample run over all pairs, each point with itself too, so the distance is never negative,
    zero for equal samples, and about ``(1/N + 1/M) · E‖x − x'‖`` for two samples of one law.

    Parameters
    ----------
    X, Y : array [N, d], [M, d]
        Samples.

    Returns
    -------
    float
        Distance (not its root), in units of the features.

    Raises
    ------
    ValueError
        If the samples do not fit each other.

    References
    ----------
    Székely, Rizzo, "Energy statistics: a class of statistics based on distances", J. Stat. Plan. Inference 143, 2013.

    Examples
    --------
    >>> energy_distance([[0.0], [2.0]], [[0.0], [2.0]])
    0.0
    >>> energy_distance([[0.0]], [[1.0]])
    2.0
    """
    x, y = _pair(X, Y)
    return 2.0 * _mean_distance(x, y) - _mean_distance(x, x) - _mean_distance(y, y)


@dataclass(frozen=True)
class LineageConsistency:
    """Share of transported mass that goes where a known lineage allows.

    Parameters
    ----------
    share : float
        Mass on allowed transitions over all mass.
    bound : float
        The largest share that any coupling with the same marginals can reach: what the composition of the samples
        allows.
    """

    share: float
    bound: float

    @property
    def ratio(self) -> float:
        """``share / bound``; NaN where the bound is zero."""
        return self.share / self.bound if self.bound > 0.0 else float("nan")


def lineage_consistency(coupling: pd.DataFrame, descendants: Mapping[Any, Collection[Any]]) -> LineageConsistency:
    """Compare a table of transitions with a known lineage.

    Parameters
    ----------
    coupling : pandas.DataFrame [K, L]
        Masses (not row shares), source names in the index and target names in the columns. Names may occur several
        times, as for several components of one cell type.
    descendants : mapping of name to names
        What each source may become. A source that is not in it may become only itself.

    Returns
    -------
    LineageConsistency

    Raises
    ------
    ValueError
        If the table has negative, not finite or no masses.

    Examples
    --------
    >>> W = pd.DataFrame([[0.4, 0.1], [0.0, 0.5]], index=["stem", "B"], columns=["A", "B"])
    >>> result = lineage_consistency(W, {"stem": ["A"]})
    >>> round(result.share, 12), round(result.bound, 12)
    (0.9, 0.9)
    """
    import ot  # heavy, and needed here only

    mass = coupling.to_numpy(dtype=np.float64)
    if not (np.isfinite(mass).all() and (mass >= 0.0).all() and mass.sum() > 0.0):
        raise ValueError("coupling must hold finite masses ≥ 0 with a positive sum")
    mass = mass / mass.sum()
    allowed = np.array(
        [[target in descendants.get(source, {source}) for target in coupling] for source in coupling.index]
    )
    # The most mass on allowed transitions is a linear program with cost 1 on all others.
    bound = 1.0 - float(ot.emd2(mass.sum(axis=1), mass.sum(axis=0), 1.0 - allowed))
    return LineageConsistency(float(mass[allowed].sum()), bound)


def _sample(value: ArrayLike, name: str) -> FloatArray:
    array = np.asarray(value, dtype=np.float64)
    if array.ndim != 2 or 0 in array.shape:
        raise ValueError(f"{name} has shape {array.shape}; it must be [samples, features], with at least one of each")
    if not np.isfinite(array).all():
        row, column = (int(i) for i in np.argwhere(~np.isfinite(array))[0])
        raise ValueError(f"{name} has the value {array[row, column]} at row {row}, column {column}; all must be finite")
    return array


def _pair(X: ArrayLike, Y: ArrayLike) -> tuple[FloatArray, FloatArray]:
    x, y = _sample(X, "X"), _sample(Y, "Y")
    if x.shape[1] != y.shape[1]:
        raise ValueError(f"X has {x.shape[1]} features and Y has {y.shape[1]}; they must have the same")
    return x, y


def _mean_distance(x: FloatArray, y: FloatArray) -> float:
    """Mean distance of all pairs, in blocks of rows so that memory does not grow with ``N M``."""
    step = max(1, _BLOCK_ENTRIES // len(y))
    total = sum(float(cdist(x[i : i + step], y).sum()) for i in range(0, len(x), step))
    return total / (len(x) * len(y))
