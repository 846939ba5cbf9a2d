"""A first guess of the potential between points: what the plan between components says it is.

Letters: ``n`` points, ``d`` features, ``K`` components.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from omt.mixture import Mixture

    FloatArray = NDArray[np.float64]

__all__ = ["component_potential"]


def component_potential(
    points: FloatArray, P: Mixture, Q: Mixture, W: FloatArray, f: FloatArray
) -> NDArray[np.float64] | None:
    """Potential [n] at points of the source: that of the component plus the quadratic one of its affine map.

    For an affine map ``x ↦ m' + G(x − m)`` the potential is ``‖x‖² − 2⟨m', x − m⟩ − ⟨x − m, G(x − m)⟩`` up to a
    constant, which makes its mean over the component ``f_k``; points belong to components by their responsibilities.

    Parameters
    ----------
    points : array [n, d]
        Points of the source.
    P, Q : Mixture
        Source and target.
    W : array [K, L]
        Coupling of their components.
    f : array [K]
        Potential of the source components.

    Returns
    -------
    array [n] or None
        None where the components are not Gaussian.
    """
    from omt.pairs.affine import folded_maps

    if P.family != "gaussian":
        return None
    offsets, matrices = folded_maps(P, Q, W)
    means, covariances = P.components.mean(), P.components.cov()
    R = np.asarray(P.responsibilities(points))
    result = np.einsum("nd,nd->n", points, points)
    for k in range(P.K):
        rows = np.flatnonzero(R[:, k] > 1e-12)
        centred = points[rows] - means[k]
        G = np.diag(matrices[k]) if matrices[k].ndim == 1 else matrices[k]
        bent = 2.0 * centred @ offsets[k] + np.einsum("nd,nd->n", centred @ G, centred)
        level = f[k] - means[k] @ means[k] - np.trace(covariances[k]) + np.sum(G * covariances[k])
        result[rows] += R[rows, k] * (level - bent)
    return np.asarray(result)
