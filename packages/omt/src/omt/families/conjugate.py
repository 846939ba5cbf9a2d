"""Fitting by sums alone: what the recipes of counts and exponentials share.

The maximum-likelihood mean parameter of an exponential family is the average of its statistic. The conjugate prior
adds ν samples whose statistic is the pooled average, so the maximum a posteriori is an average again, and the
objective (log-likelihood plus log-prior) never falls.

Letters: ``n`` rows of a block, ``d`` features, ``K`` components.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from omt.families.base import Components, FloatArray, Prior, Statistics
from omt.families.product import transposed_times

# A feature that no sample has counts as this part of one count among all samples together: its logarithm exists.
UNSEEN = 1e-2


def check_shrinkage(shrinkage: float) -> None:
    """Raise ``ValueError`` unless the number of pseudo-samples is finite and positive."""
    if not (np.isfinite(shrinkage) and shrinkage > 0):
        raise ValueError(
            f"shrinkage is {shrinkage}; it must be a finite number > 0 of pseudo-samples, so that a feature that a "
            "component never shows keeps a density"
        )


class ConjugateFamily:
    """Statistics, prior and placement of families whose statistic is the sample itself."""

    shrinkage: float

    @property
    def single_precision(self) -> bool:
        """``False``: log-densities are sums over all features, too long for float32."""
        return False

    @property
    def one_step(self) -> bool:
        """Whether the M-step needs nothing but sums that do not depend on the previous components."""
        return True

    def empty(self, K: int, d: int, centre: FloatArray | None) -> Statistics:
        """Sums of no samples: responsibilities ``[K]``, responsibilities times size factors ``[K]``, and samples
        ``[K, d]``.
        """
        return Statistics({"weight": np.zeros(K), "size": np.zeros(K), "first": np.zeros((K, d))})

    def accumulate(self, statistics: Statistics, X: Any, R: NDArray[Any], size: FloatArray | None = None) -> None:
        """Add samples ``X [n, d]`` with weighted responsibilities ``R [n, K]`` and sizes ``[n]``, in place."""
        weight = R.sum(axis=0, dtype=np.float64)
        statistics.sums["weight"] += weight
        statistics.sums["size"] += weight if size is None else size @ R
        statistics.sums["first"] += transposed_times(X, R)

    def prior(self, statistics: Statistics) -> Prior:
        """Pooled means ``[d]`` of a sample of size one, and the number of pseudo-samples of size one: as many as weigh
        like ν samples of the mean size.
        """
        size = max(float(statistics.sums["size"].sum()), np.finfo(float).tiny)
        pooled = np.maximum(statistics.sums["first"].sum(axis=0), UNSEEN) / size
        return {"pooled": pooled, "shrinkage": np.asarray(self.shrinkage * size / float(statistics.weight.sum()))}

    def averages(self, statistics: Statistics, prior: Prior) -> FloatArray:
        """Means of each component with ν pseudo-samples, ``[K, d]``."""
        nu = float(prior["shrinkage"])
        return (statistics.sums["first"] + nu * prior["pooled"]) / (statistics.sums["size"] + nu)[:, None]

    def place(self, statistics: Statistics, k: int, x: FloatArray, prior: Prior, weight: float) -> None:
        """Make component ``k`` one of ``weight`` samples, half like ``x [d]`` and half like all others, in place.

        One sparse sample alone would exclude every feature that it happens not to show.
        """
        pooled = prior["pooled"]
        size = max(float(x.sum() / pooled.sum()), np.finfo(float).tiny)
        statistics.sums["weight"][k] = statistics.sums["size"][k] = weight
        statistics.sums["first"][k] = weight * 0.5 * (x / size + pooled)

    def log_prior(self, components: Components, prior: Prior) -> float:
        """``ν Σ_k (⟨η_k, T̄⟩ − A(η_k))``: the log-density of ν samples at the pooled means under each component."""
        eta = components.natural_parameters()
        value = float((eta @ prior["pooled"]).sum() - components.log_partition(eta).sum())
        return float(prior["shrinkage"]) * value
