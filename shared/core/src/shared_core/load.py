"""Load metrics: how evenly rows are spread over experts. numpy only; torch tensors are accepted, torch is not imported.

Letters: ``E`` experts, ``L`` layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Metric = float | NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class LoadStats:
    r"""Metrics of one load vector (floats) or of one per layer (arrays ``[L]``).

    Attributes
    ----------
    cv
        Coefficient of variation: population standard deviation over mean; 0 is perfect balance.
    max_violation
        Largest load over mean load, minus 1; 0 is perfect balance, ``E - 1`` is one expert doing everything.
    entropy
        Entropy of the load shares divided by :math:`\ln E`, in [0, 1]; 1 is perfect balance (also for one expert).
    dead_fraction
        Share of experts that got nothing.
    gini
        Gini coefficient of the loads; 0 is perfect balance, ``(E - 1) / E`` is one expert doing everything.
    counts
        The loads, ``[E]`` or ``[L, E]``.
    """

    cv: Metric
    max_violation: Metric
    entropy: Metric
    dead_fraction: Metric
    gini: Metric
    counts: NDArray[Any]

    @property
    def effective_number(self) -> Metric:
        r"""Effective number of experts in use: the exponential of the load entropy, between 1 and ``E``."""
        return float(self.counts.shape[-1]) ** self.entropy

    def __str__(self) -> str:
        fields = ("cv", "max_violation", "entropy", "dead_fraction")
        return " ".join(f"{field}={np.asarray(getattr(self, field)).round(3).tolist()}" for field in fields)


def load_stats(counts: ArrayLike) -> LoadStats:
    r"""Measure how evenly load is spread over experts.

    With loads :math:`c_e`, their sum :math:`N` and shares :math:`f_e = c_e/N`: ``cv`` is std/mean (population),
    ``max_violation`` is max/mean - 1 [1]_, ``entropy`` is :math:`-\sum_e f_e \ln f_e / \ln E`, and ``gini`` is
    :math:`\sum_e (2e - E - 1)\, c_{(e)} / (E N)` with the loads in ascending order.

    Parameters
    ----------
    counts
        Assignments per expert, ``[E]`` or ``[L, E]`` for one row per layer. Non-negative and finite; soft counts
        (real numbers) are fine. A numpy array, nested sequence, or a torch tensor on any device.

    Returns
    -------
    LoadStats
        Floats for ``[E]``, arrays ``[L]`` for ``[L, E]``. Where all counts are 0, ``dead_fraction`` is 1 and the
        other metrics are NaN: nothing was assigned, so balance is undefined.

    Raises
    ------
    ValueError
        If `counts` is not 1-D or 2-D, has no experts, or holds a negative or non-finite number.
    TypeError
        If `counts` does not hold real numbers.

    References
    ----------
    .. [1] Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024, section 4.1.

    Examples
    --------
    >>> print(load_stats([6, 2, 4, 4]))
    cv=0.354 max_violation=0.5 entropy=0.953 dead_fraction=0.0
    >>> load_stats([[4, 4], [8, 0]]).dead_fraction
    array([0. , 0.5])
    """
    loads = _to_numpy(counts)
    if loads.dtype.kind not in "biuf":
        raise TypeError(f"counts must hold real numbers, not {loads.dtype}")
    if loads.ndim not in (1, 2) or loads.shape[-1] == 0:
        raise ValueError(f"counts must have shape [E] or [L, E] with at least one expert, not {list(loads.shape)}")
    c = loads.astype(np.float64)
    if not np.isfinite(c).all() or (c < 0).any():
        where = [int(i) for i in np.argwhere(~(np.isfinite(c) & (c >= 0)))[0]]
        raise ValueError(f"counts must be finite and not negative, but counts{where} is {loads[tuple(where)]}")

    E = c.shape[-1]
    if c.size:
        c = c / np.maximum(c.max(-1, keepdims=True), np.finfo(np.float64).tiny)  # their sum may exceed a float
    total = c.sum(-1)
    # NaN, not a warning, where nothing was assigned.
    share = c / np.where(total > 0, total, np.nan)[..., None]
    with np.errstate(divide="ignore"):
        information = np.where(share == 0, 0.0, -np.log(share))
    entropy = (share * information).sum(-1) / np.log(E) if E > 1 else share.sum(-1)
    rank = 2 * np.arange(1, E + 1) - E - 1
    metrics = {
        "cv": share.std(-1) * E,  # the mean share is 1/E
        "max_violation": share.max(-1) * E - 1,
        "entropy": entropy,
        "dead_fraction": (c == 0).mean(-1),
        "gini": (rank * np.sort(share, -1)).sum(-1) / E,
    }
    if loads.ndim == 1:
        return LoadStats(**{name: float(value) for name, value in metrics.items()}, counts=loads)
    return LoadStats(**metrics, counts=loads)


def _to_numpy(counts: Any) -> NDArray[Any]:
    """View `counts` as an array; a torch tensor is recognised by its methods, so that torch need not be here."""
    if hasattr(counts, "detach") and hasattr(counts, "is_floating_point"):
        tensor = counts.detach().cpu()
        # numpy has no bfloat16.
        return np.asarray((tensor.double() if tensor.is_floating_point() else tensor).numpy())
    return np.asarray(counts)
