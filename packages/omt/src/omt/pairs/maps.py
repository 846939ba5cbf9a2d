r"""Maps of points from a source mixture to a target mixture, out of sample.

Letters: ``N`` points, ``d`` features, ``K``/``L`` source/target components. A point ``x`` belongs to source component
``k`` with probability ``r_k(x)``; the coupling ``W`` sends component ``k`` to ``l`` with probability ``W_kl / W_k·``;
inside the pair the inner plan says where ``x`` goes: to ``N(m'_l + T_kl (x − m_k), Cov_kl)`` for Gaussian components
(:mod:`omt.pairs.gaussian`), feature by feature to the same quantile for product families (:mod:`omt.pairs.product`),
and for log-normal ones as their logarithms go.

In an unbalanced coupling, mass is created or lost: ``W_k· ≠ a_k``. A map moves only what is transported, so a point
then belongs to component ``k`` with probability proportional to ``r_k(x) W_k· / a_k``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from omt.chunks import as_source, require_finite
from omt.families.base import FloatArray
from omt.families.product import ProductComponents
from omt.pairs.affine import AffineImages, folded_maps, iterate_plans
from omt.pairs.cost import checked_pair, checked_temperature, logarithm
from omt.pairs.coupled import NEGLIGIBLE, by_pair, carried_pairs, check_coupling, conditional
from omt.pairs.product import product_images

if TYPE_CHECKING:
    from omt.mixture import Mixture

__all__ = ["barycentric_map", "carried_pairs", "folded_maps", "iterate_plans", "mode_map", "sample_map"]

_BLOCK_ROWS = 1 << 14
# Points of many features are mapped in blocks of fewer: 16 MiB of float64.
_BLOCK_ENTRIES = 1 << 21


class _Images(Protocol):
    """Where the inner plans of one kind of components take points."""

    def folded(self, k: int, points: Any) -> FloatArray:
        """Mean image [n, d] of points of component ``k`` over all targets."""

    def paired(
        self, points: Any, source: NDArray[np.intp], target: NDArray[np.intp], rng: np.random.Generator | None
    ) -> FloatArray:
        """Image of each point under its pair of components; a draw if ``rng`` is given."""


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
    images = _images(P, Q, W, epsilon)

    def move(points: Any, membership: FloatArray) -> FloatArray:
        out = np.zeros(points.shape)
        for k in range(P.K):
            rows = np.flatnonzero(membership[:, k] > NEGLIGIBLE)
            if rows.size:
                out[rows] += membership[rows, k, None] * images.folded(k, points[rows])
        return out

    return _mapped(X, P, W, move)


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
    images = _images(P, Q, W, epsilon)
    onward = np.cumsum(conditional(W), axis=1)

    def move(points: Any, membership: FloatArray) -> FloatArray:
        k = _draw(np.cumsum(membership, axis=1), rng)
        return images.paired(points, k, _draw(onward[k], rng), rng)

    return _mapped(X, P, W, move)


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
    images = _images(P, Q, W, epsilon)
    best = W.argmax(axis=1)
    share = conditional(W)[np.arange(P.K), best]

    def move(points: Any, membership: FloatArray) -> FloatArray:
        k = (membership * share).argmax(axis=1)
        return images.paired(points, k, best[k], None)

    return _mapped(X, P, W, move)


class _ProductImages:
    """Images of samples of product families, pair by pair."""

    def __init__(self, p: ProductComponents, q: ProductComponents, W: FloatArray) -> None:
        self._p, self._q, self._onward = p, q, conditional(W)

    def folded(self, k: int, points: Any) -> FloatArray:
        out = np.zeros(points.shape)
        for l in np.flatnonzero(self._onward[k]):
            out += self._onward[k, l] * product_images(points, self._p, self._q, k, int(l))
        return out

    def paired(
        self, points: Any, source: NDArray[np.intp], target: NDArray[np.intp], rng: np.random.Generator | None
    ) -> FloatArray:
        out = np.empty(points.shape)
        for k, l, rows in zip(*by_pair(source, target, self._q.K), strict=True):
            out[rows] = product_images(points[rows], self._p, self._q, int(k), int(l), rng)
        return out


class _LogImages:
    """Images of positive points, given those of their logarithms."""

    def __init__(self, images: _Images) -> None:
        self._images = images

    def folded(self, k: int, points: FloatArray) -> FloatArray:
        return self._images.folded(k, np.log(points))

    def paired(
        self, points: FloatArray, source: NDArray[np.intp], target: NDArray[np.intp], rng: np.random.Generator | None
    ) -> FloatArray:
        return self._images.paired(np.log(points), source, target, rng)


def _images(P: Mixture, Q: Mixture, W: FloatArray, epsilon: float) -> _Images:
    checked_pair(P, Q)
    checked_temperature(P, epsilon)
    check_coupling(W, P, Q)
    if not carried_pairs(W)[0].size:
        raise ValueError("the coupling is zero: no pair of components carries mass")
    if P.family == "gaussian":
        return AffineImages(P, Q, W, epsilon)
    if P.family == "lognormal":
        return _LogImages(AffineImages(logarithm(P), logarithm(Q), W, epsilon))
    return _ProductImages(cast("ProductComponents", P.components), cast("ProductComponents", Q.components), W)


def _mapped(X: Any, P: Mixture, W: FloatArray, move: Callable[[Any, FloatArray], FloatArray]) -> FloatArray:
    """Move points block by block; sparse blocks stay sparse for the families that read them so."""
    shape = np.shape(X) if not callable(X) else (-1, P.d)
    if len(shape) != 2 or shape[1] != P.d:
        raise ValueError(f"X has shape {shape}; the source mixture has d={P.d} features, so X must be [N, {P.d}]")
    source = as_source(X)
    out = np.empty((source.n_samples, P.d))
    for start, points in source.chunks(max(1, min(_BLOCK_ROWS, _BLOCK_ENTRIES // P.d))):
        require_finite(points, start)
        if isinstance(P.components, ProductComponents):
            P.components.check(points, start)
        elif hasattr(points, "toarray"):
            points = points.toarray()  # noqa: PLW2901  # affine maps mix all features
        out[start : start + points.shape[0]] = move(points, _transported_membership(points, P, W, start))
    return np.exp(out, out=out) if P.family == "lognormal" else out


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
