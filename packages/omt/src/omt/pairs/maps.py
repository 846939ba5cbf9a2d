r"""Maps of points from a source mixture to a target mixture, out of sample.

Letters: ``N`` points, ``d`` features, ``K``/``L`` source/target components, ``n`` pairs. A point ``x`` belongs to
source component ``k`` with probability ``r_k(x)``; the coupling ``W`` sends component ``k`` to ``l`` with
probability ``W_kl / W_k·``; inside the pair the inner plan gives ``y | x ~ N(m'_l + T_kl (x − m_k), Cov_kl)``
(:mod:`omt.pairs.gaussian`).

In an unbalanced coupling, mass is created or lost: ``W_k· ≠ a_k``. A map moves only what is transported, so a point
then belongs to component ``k`` with probability proportional to ``r_k(x) W_k· / a_k``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from omt.chunks import require_finite
from omt.families.base import FloatArray
from omt.pairs.cost import axis_aligned, distinct_covariances, gaussian_pair
from omt.pairs.gaussian import InnerPlans, covariance_factors, diagonal_plans, gaussian_plans

if TYPE_CHECKING:
    from omt.mixture import Mixture

__all__ = ["barycentric_map", "carried_pairs", "folded_maps", "iterate_plans", "mode_map", "sample_map"]

# Pairs below this share of the largest entry carry no mass that float64 sums would notice.
_NEGLIGIBLE = 1e-12
_BLOCK_ROWS = 1 << 14
_BLOCK_ENTRIES = 1 << 20


def barycentric_map(X: Any, P: Mixture, Q: Mixture, W: FloatArray, epsilon: float = 0.0) -> FloatArray:
    """Mean of where each point goes: ``Σ_k r_k(x) Σ_l (W_kl / W_k·) (m'_l + T_kl (x − m_k))``.

    The sum over ``l`` is folded into one affine map per source component first (:func:`folded_maps`), so mapping costs
    ``O(N d²)`` per component that a point belongs to, whatever ``L`` is.

    Parameters
    ----------
    X : array [N, d]
        Points.
    P, Q : Mixture
        Source and target.
    W : array [K, L]
        Coupling of their components.
    epsilon : float
        Inner temperature in units of the cost.

    Returns
    -------
    array [N, d]
        Images.

    Raises
    ------
    ValueError
        If shapes do not fit, a value of ``X`` is not finite, or a point belongs only to components that transport
        nothing.

    References
    ----------
    Delon, Desolneux, "A Wasserstein-type distance in the space of Gaussian mixture models", SIAM J. Imaging Sci.
    13, 2020.

    Examples
    --------
    >>> from omt.mixture import Mixture
    >>> P = Mixture.from_gaussians([1.0], [[0.0]], [[[1.0]]])
    >>> Q = Mixture.from_gaussians([1.0], [[5.0]], [[[4.0]]])
    >>> import numpy as np
    >>> barycentric_map([[1.0]], P, Q, np.ones((1, 1)))
    array([[7.]])
    """
    points = _points(X, P.d)
    offsets, matrices = folded_maps(P, Q, W, epsilon)
    means = P.components.mean()
    out = np.zeros_like(points)
    for start in range(0, len(points), _BLOCK_ROWS):
        block = points[start : start + _BLOCK_ROWS]
        membership = _transported_membership(block, P, W, start)
        for k in range(P.K):
            rows = np.flatnonzero(membership[:, k] > _NEGLIGIBLE)
            image = offsets[k] + _apply(matrices[k], block[rows] - means[k])
            out[start + rows] += membership[rows, k, None] * image
    return out


def sample_map(X: Any, P: Mixture, Q: Mixture, W: FloatArray, epsilon: float, rng: np.random.Generator) -> FloatArray:
    """One random image per point: ``k ~ r(x)``, ``l ~ W_k·``, then ``y`` from the inner plan of ``(k, l)`` given ``x``.

    If ``X`` is drawn from ``P`` and ``W`` is balanced, the images are draws from ``Q``, exactly and for every
    ``epsilon``.

    Parameters
    ----------
    X : array [N, d]
        Points.
    P, Q : Mixture
        Source and target.
    W : array [K, L]
        Coupling of their components.
    epsilon : float
        Inner temperature in units of the cost.
    rng : numpy.random.Generator
        Source of randomness; the same state gives the same images.

    Returns
    -------
    array [N, d]
        Images.

    Raises
    ------
    ValueError
        As :func:`barycentric_map`.

    Examples
    --------
    >>> import numpy as np
    >>> from omt.mixture import Mixture
    >>> P = Mixture.from_gaussians([1.0], [[0.0]], [[[1.0]]])
    >>> Q = Mixture.from_gaussians([0.5, 0.5], [[-9.0], [9.0]], [[[1.0]], [[1.0]]])
    >>> y = sample_map(np.zeros((4, 1)), P, Q, np.array([[0.5, 0.5]]), 0.0, np.random.default_rng(0))
    >>> np.abs(y).ravel()
    array([9., 9., 9., 9.])
    """
    points = _points(X, P.d)
    _check_coupling(W, P, Q)
    source = np.empty(len(points), dtype=np.intp)
    target = np.empty(len(points), dtype=np.intp)
    onward = np.cumsum(_conditional(W), axis=1)
    for start in range(0, len(points), _BLOCK_ROWS):
        block = points[start : start + _BLOCK_ROWS]
        membership = _transported_membership(block, P, W, start)
        k = _draw(np.cumsum(membership, axis=1), rng)
        source[start : start + len(block)] = k
        target[start : start + len(block)] = _draw(onward[k], rng)
    return _apply_pairs(points, P, Q, source, target, epsilon, rng)


def mode_map(X: Any, P: Mixture, Q: Mixture, W: FloatArray, epsilon: float = 0.0) -> FloatArray:
    """Image of each point under its most probable pair of components, the largest ``r_k(x) W_kl / a_k``.

    Unlike the barycentric map it never averages over target components, so images stay inside the target.

    Parameters
    ----------
    X : array [N, d]
        Points.
    P, Q : Mixture
        Source and target.
    W : array [K, L]
        Coupling of their components.
    epsilon : float
        Inner temperature in units of the cost.

    Returns
    -------
    array [N, d]
        Images.

    Raises
    ------
    ValueError
        As :func:`barycentric_map`.

    Examples
    --------
    >>> import numpy as np
    >>> from omt.mixture import Mixture
    >>> P = Mixture.from_gaussians([1.0], [[0.0]], [[[1.0]]])
    >>> Q = Mixture.from_gaussians([0.3, 0.7], [[-9.0], [9.0]], [[[1.0]], [[1.0]]])
    >>> mode_map([[0.5]], P, Q, np.array([[0.3, 0.7]]))
    array([[9.5]])
    """
    points = _points(X, P.d)
    _check_coupling(W, P, Q)
    best = W.argmax(axis=1)
    share = _conditional(W)[np.arange(P.K), best]
    source = np.empty(len(points), dtype=np.intp)
    for start in range(0, len(points), _BLOCK_ROWS):
        block = points[start : start + _BLOCK_ROWS]
        source[start : start + len(block)] = (_transported_membership(block, P, W, start) * share).argmax(axis=1)
    return _apply_pairs(points, P, Q, source, best[source], epsilon, None)


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
    _check_coupling(W, P, Q)
    onward = _conditional(W)
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


def _apply_pairs(
    points: FloatArray,
    P: Mixture,
    Q: Mixture,
    source: NDArray[np.intp],
    target: NDArray[np.intp],
    epsilon: float,
    rng: np.random.Generator | None,
) -> FloatArray:
    """Image of ``points[i]`` under pair ``(source[i], target[i])``; a draw if ``rng`` is given, else the mean."""
    means_p, means_q = P.components.mean(), Q.components.mean()
    pair = source * Q.K + target
    order = np.argsort(pair, kind="stable")
    used, first = np.unique(pair[order], return_index=True)
    k, l = np.divmod(used, Q.K)
    members = np.split(order, first[1:])
    out = np.empty_like(points)
    for block, plans in iterate_plans(P, Q, k, l, epsilon):
        maps = plans.maps()
        noise = plans.noise_factors() if rng is not None else None
        for i, index in enumerate(range(block.start, block.stop)):
            rows = members[index]
            image = means_q[l[index]] + _apply(maps[i], points[rows] - means_p[k[index]])
            if rng is not None and noise is not None and noise[i].any():
                z = rng.standard_normal((len(rows), P.d))
                image += z * noise[i] if plans.axis_aligned else z @ noise[i].T
            out[rows] = image
    return out


def _apply(matrix: FloatArray, centred: FloatArray) -> FloatArray:
    """Rows of ``centred`` times a symmetric map [d, d], or its diagonal [d]."""
    return np.asarray(centred * matrix if matrix.ndim == 1 else centred @ matrix)


def _conditional(W: FloatArray) -> FloatArray:
    """``W_kl / W_k·``; rows without mass stay zero."""
    kept = np.where(_carried(W), W, 0.0)
    mass = kept.sum(axis=1, keepdims=True)
    return np.asarray(np.divide(kept, mass, out=np.zeros_like(kept), where=mass > 0.0))


def _carried(W: FloatArray) -> NDArray[np.bool_]:
    threshold = _NEGLIGIBLE * W.max(initial=0.0)
    return np.asarray(np.greater(W, threshold))


def _transported_membership(points: FloatArray, P: Mixture, W: FloatArray, first_row: int) -> FloatArray:
    """``r_k(x) W_k· / a_k``, normalised over ``k``: [N, K]. Equal to the responsibilities where ``W`` is balanced."""
    survival = np.asarray(W.sum(axis=1) / P.weights)
    membership = np.asarray(P.responsibilities(points), dtype=np.float64) * survival
    total = membership.sum(axis=1, keepdims=True)
    if not (total > 0.0).all():
        row = int(np.flatnonzero(total[:, 0] <= 0.0)[0])
        raise ValueError(
            f"row {first_row + row} of X belongs only to source components from which nothing is transported"
        )
    return np.asarray(membership / total)


def _draw(cumulative: FloatArray, rng: np.random.Generator) -> NDArray[np.intp]:
    """One index per row, from cumulative weights [N, K]."""
    u = rng.random((len(cumulative), 1)) * cumulative[:, -1:]
    index = (cumulative <= u).sum(axis=1)
    return np.asarray(np.minimum(index, cumulative.shape[1] - 1))


def _points(X: Any, d: int) -> FloatArray:
    points = np.asarray(X.toarray() if hasattr(X, "toarray") else X, dtype=np.float64)
    if points.ndim != 2 or points.shape[1] != d:
        raise ValueError(f"X has shape {points.shape}; the source mixture has d={d} features, so X must be [N, {d}]")
    require_finite(points, 0)
    return points


def _check_coupling(W: FloatArray, P: Mixture, Q: Mixture) -> None:
    if W.shape != (P.K, Q.K):
        raise ValueError(f"the coupling has shape {W.shape}; with these mixtures it must be [{P.K}, {Q.K}]")
