r"""Plans of Gaussian pairs as affine maps of points, and the folding of all targets of a component into one map.

Letters: ``N`` points, ``d`` features, ``K``/``L`` source/target components, ``n`` pairs. Inside a pair the inner plan
gives ``y | x ~ N(m'_l + T_kl (x − m_k), Cov_kl)`` (:mod:`omt.pairs.gaussian`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from omt.families.base import FloatArray
from omt.pairs.cost import axis_aligned, distinct_covariances, gaussian_pair
from omt.pairs.coupled import by_pair, carried_pairs, check_coupling, conditional
from omt.pairs.gaussian import InnerPlans, covariance_factors, diagonal_plans, gaussian_plans

if TYPE_CHECKING:
    from omt.mixture import Mixture

__all__ = ["AffineImages", "folded_maps", "iterate_plans"]

_BLOCK_ENTRIES = 1 << 20


class AffineImages:
    """Images of points under the plans between Gaussian mixtures.

    Parameters
    ----------
    P, Q : Mixture
        Source and target.
    W : array [K, L]
        Coupling of their components.
    epsilon : float
        Inner temperature in units of the cost.
    """

    def __init__(self, P: Mixture, Q: Mixture, W: FloatArray, epsilon: float) -> None:
        self._P, self._Q, self._W, self._epsilon = P, Q, W, epsilon
        self._means_p, self._means_q = P.components.mean(), Q.components.mean()

    @cached_property
    def _folded(self) -> tuple[FloatArray, FloatArray]:
        return folded_maps(self._P, self._Q, self._W, self._epsilon)

    def folded(self, k: int, points: FloatArray) -> FloatArray:
        """Mean image of points [n, d] of component ``k`` over all targets: one affine map, whatever ``L`` is."""
        offsets, matrices = self._folded
        return np.asarray(offsets[k] + _apply(matrices[k], points - self._means_p[k]))

    def paired(
        self,
        points: FloatArray,
        source: NDArray[np.intp],
        target: NDArray[np.intp],
        rng: np.random.Generator | None,
    ) -> FloatArray:
        """Image of ``points[i]`` under pair ``(source[i], target[i])``; a draw if ``rng`` is given, else the mean."""
        out = np.empty_like(points)
        k, l, members = by_pair(source, target, self._Q.K)
        for block, plans in iterate_plans(self._P, self._Q, k, l, self._epsilon):
            maps = plans.maps()
            noise = plans.noise_factors() if rng is not None else None
            for i, index in enumerate(range(block.start, block.stop)):
                rows = members[index]
                image = self._means_q[l[index]] + _apply(maps[i], points[rows] - self._means_p[k[index]])
                if rng is not None and noise is not None and noise[i].any():
                    z = rng.standard_normal((len(rows), points.shape[1]))
                    image += z * noise[i] if plans.axis_aligned else z @ noise[i].T
                out[rows] = image
        return out


def folded_maps(P: Mixture, Q: Mixture, W: FloatArray, epsilon: float = 0.0) -> tuple[FloatArray, FloatArray]:
    """Affine barycentric map of each source component: ``x ↦ offset_k + G_k (x − m_k)``.

    Parameters
    ----------
    P, Q : Mixture
        Source and target.
    W : array [K, L]
        Coupling of their components. Only pairs with ``W_kl > 1e-12 · max W`` are computed.
    epsilon : float
        Inner temperature in units of the cost.

    Returns
    -------
    offsets : array [K, d]
        ``Σ_l (W_kl / W_k·) m'_l``.
    matrices : array [K, d, d], or [K, d] for axis-aligned components
        ``G_k = Σ_l (W_kl / W_k·) T_kl``.

    Raises
    ------
    ValueError
        If ``W`` has the wrong shape.

    Examples
    --------
    >>> import numpy as np
    >>> from omt.mixture import Mixture
    >>> P = Mixture.from_gaussians([1.0], [[0.0]], [[[1.0]]])
    >>> Q = Mixture.from_gaussians([0.5, 0.5], [[0.0], [4.0]], [[[1.0]], [[9.0]]])
    >>> folded_maps(P, Q, np.array([[0.5, 0.5]]))
    (array([[2.]]), array([[[2.]]]))
    """
    check_coupling(W, P, Q)
    onward = conditional(W)
    k, l = carried_pairs(W)
    matrices: FloatArray | None = None
    for block, plans in iterate_plans(P, Q, k, l, epsilon):
        maps = plans.maps()
        if matrices is None:
            matrices = np.zeros((P.K, *maps.shape[1:]))
        weights = onward[k[block], l[block]]
        np.add.at(matrices, k[block], maps * weights.reshape(-1, *[1] * (maps.ndim - 1)))
    if matrices is None:
        raise ValueError("the coupling is zero: no pair of components carries mass")
    return onward @ Q.components.mean(), matrices


def iterate_plans(
    P: Mixture, Q: Mixture, k: NDArray[np.intp], l: NDArray[np.intp], epsilon: float
) -> Iterator[tuple[slice, InnerPlans]]:
    """Inner plans of the pairs ``(k[i], l[i])``, in blocks of bounded memory.

    Parameters
    ----------
    P, Q : Mixture
        Source and target.
    k, l : array [n]
        Component indices of the pairs.
    epsilon : float
        Inner temperature in units of the cost.

    Yields
    ------
    block : slice
        Which pairs.
    plans : InnerPlans
        Their plans; axis-aligned where both mixtures are.
    """
    p, q = gaussian_pair(P, Q)
    if axis_aligned(p, q):
        step = max(1, _BLOCK_ENTRIES // P.d)
        variances_p, variances_q = p.diagonal_variances(), q.diagonal_variances()
        for start in range(0, len(k), step):
            block = slice(start, min(start + step, len(k)))
            yield block, diagonal_plans(variances_p[k[block]], variances_q[l[block]], epsilon)
        return
    F, G = (np.broadcast_to(covariance_factors(distinct_covariances(c)), (c.K, c.d, c.d)) for c in (p, q))
    step = max(1, _BLOCK_ENTRIES // P.d**2)
    for start in range(0, len(k), step):
        block = slice(start, min(start + step, len(k)))
        yield block, gaussian_plans(F[k[block]], G[l[block]], epsilon)


def _apply(matrix: FloatArray, centred: FloatArray) -> FloatArray:
    """Rows of ``centred`` times a symmetric map [d, d], or its diagonal [d]."""
    return np.asarray(centred * matrix if matrix.ndim == 1 else centred @ matrix)
