"""What maps need of a coupling of components: the pairs that carry mass, and where mass goes from each.

Letters: ``K``/``L`` source/target components, ``n`` pairs, ``N`` points.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from omt.families.base import FloatArray

if TYPE_CHECKING:
    from omt.mixture import Mixture

__all__ = ["NEGLIGIBLE", "by_pair", "carried_pairs", "check_coupling", "conditional"]

NEGLIGIBLE = 1e-12
"""Pairs below this share of the largest entry carry no mass that float64 sums would notice."""


def carried_pairs(W: FloatArray) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Source and target index of the pairs that carry mass, ``W_kl > 1e-12 · max W``, sorted by source.

    Parameters
    ----------
    W : array [K, L]
        Coupling.

    Returns
    -------
    k, l : array [n]
        Indices.

    Examples
    --------
    >>> import numpy as np
    >>> k, l = carried_pairs(np.array([[0.5, 1e-20], [0.0, 0.5]]))
    >>> k.tolist(), l.tolist()
    ([0, 1], [0, 1])
    """
    k, l = np.nonzero(_carried(W))
    return k, l


def by_pair(
    source: NDArray[np.intp], target: NDArray[np.intp], L: int
) -> tuple[NDArray[np.intp], NDArray[np.intp], list[NDArray[np.intp]]]:
    """Sort points by their pair of components.

    Parameters
    ----------
    source, target : int array [N]
        Pair of each point.
    L : int
        Number of target components.

    Returns
    -------
    k, l : int array [n]
        The pairs that occur.
    members : list of int arrays
        Points of each.

    Examples
    --------
    >>> import numpy as np
    >>> k, l, members = by_pair(np.array([1, 0, 1]), np.array([0, 2, 0]), 3)
    >>> k.tolist(), l.tolist(), [rows.tolist() for rows in members]
    ([0, 1], [2, 0], [[1], [0, 2]])
    """
    pair = source * L + target
    order = np.argsort(pair, kind="stable")
    used, first = np.unique(pair[order], return_index=True)
    k, l = np.divmod(used, L)
    return k, l, np.split(order, first[1:])


def conditional(W: FloatArray) -> FloatArray:
    """``W_kl / W_k·``; rows without mass stay zero."""
    kept = np.where(_carried(W), W, 0.0)
    mass = kept.sum(axis=1, keepdims=True)
    return np.asarray(np.divide(kept, mass, out=np.zeros_like(kept), where=mass > 0.0))


def _carried(W: FloatArray) -> NDArray[np.bool_]:
    threshold = NEGLIGIBLE * W.max(initial=0.0)
    return np.asarray(np.greater(W, threshold))


def check_coupling(W: FloatArray, P: Mixture, Q: Mixture) -> None:
    """Raise ``ValueError`` if a coupling does not have a row and a column for each component."""
    if W.shape != (P.K, Q.K):
        raise ValueError(f"the coupling has shape {W.shape}; with these mixtures it must be [{P.K}, {Q.K}]")
