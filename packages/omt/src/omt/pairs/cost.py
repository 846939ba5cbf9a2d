"""The cost table between the components of two mixtures, and the temperature of the inner plans.

Letters: ``K`` source components, ``L`` target components, ``d`` features.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike
from scipy.spatial.distance import cdist

from omt.families import (
    GaussianComponents,
    LogNormalComponents,
    MultinomialComponents,
    NegativeBinomialComponents,
    PoissonComponents,
)
from omt.families.base import FloatArray, bhattacharyya_coefficient
from omt.mixture import check_features
from omt.pairs.divergences import diagonal_bhattacharyya, gaussian_bhattacharyya, squared_hellinger
from omt.pairs.gaussian import diagonal_cost, gaussian_cost
from omt.pairs.product import product_cost
from omt.scalars import finite_at_least_zero

if TYPE_CHECKING:
    from omt.mixture import Mixture

__all__ = [
    "CostName",
    "axis_aligned",
    "checked_pair",
    "checked_temperature",
    "component_cost",
    "distinct_covariances",
    "gaussian_pair",
    "inner_epsilon",
    "logarithm",
]

CostName: TypeAlias = Literal["w2", "entropic", "kl", "jeffreys", "hellinger", "euclidean", "sqeuclidean"]
_NAMES = ("w2", "entropic", "kl", "jeffreys", "hellinger", "euclidean", "sqeuclidean")
# Above this dimension low-rank covariances are not expanded to dense matrices: K d² numbers and K L d³ work.
_MAX_DENSE_FEATURES = 512


def component_cost(
    P: Mixture,
    Q: Mixture,
    *,
    cost: CostName | Callable[[Mixture, Mixture], ArrayLike] | ArrayLike = "w2",
    inner_reg: float = 0.0,
    epsilon: float | None = None,
) -> FloatArray:
    r"""Cost of moving each component of ``P`` to each component of ``Q``.

    Parameters
    ----------
    P, Q : Mixture
        Source and target, of one family and with the same features.
    cost : str, callable or array [K, L]
        * ``"w2"``: squared Wasserstein-2 distance, whatever the inner temperature; that one then shapes maps and cell
          plans only. Gaussian: squared distance of the means plus the Bures term. Product families (counts, gamma,
          exponential): sum of the features' distances, exact. Log-normal: the distance of the logarithms, on which
          plans and maps work too. Counts with size factors are compared at size one. Multinomial has none.
        * ``"entropic"``: optimal value of the inner plan at temperature ``ε``, ``min_π ∫‖x−y‖² dπ + ε KL(π‖p⊗q)``.
          Needs ``inner_reg`` or ``epsilon`` above zero, and Gaussian or log-normal components.
        * ``"kl"``: ``KL(p_k ‖ q_l)``; ``"jeffreys"``: ``KL(p‖q) + KL(q‖p)``; ``"hellinger"``: squared Hellinger
          distance in [0, 1].
        * ``"euclidean"``, ``"sqeuclidean"``: distance of the means, and its square.
        * a function of ``(P, Q)``, or the finished table, for any other cost (for example distance along a graph).
    inner_reg : float
        Inner temperature in units of the mean ``"w2"`` cost; see :func:`inner_epsilon`.
    epsilon : float, optional
        Inner temperature in units of the cost, instead of ``inner_reg``.

    Returns
    -------
    array [K, L]
        Finite costs.

    Raises
    ------
    ValueError
        If the mixtures do not fit each other, the name is unknown, the family has no such cost in closed form, a given
        table has the wrong shape or is not finite, or low-rank covariances have too many features for a dense
        computation.

    References
    ----------
    Delon, Desolneux, "A Wasserstein-type distance in the space of Gaussian mixture models",
    SIAM J. Imaging Sci. 13, 2020.

    Examples
    --------
    >>> import numpy as np
    >>> from omt.mixture import Mixture
    >>> P = Mixture.from_gaussians([0.5, 0.5], [[0.0], [4.0]], [[[1.0]], [[1.0]]])
    >>> Q = Mixture.from_gaussians([1.0], [[0.0]], [[[9.0]]])
    >>> component_cost(P, Q)
    array([[ 4.],
           [20.]])
    >>> component_cost(P, Q, cost="sqeuclidean")
    array([[ 0.],
           [16.]])
    """
    p, q = checked_pair(P, Q)
    if not isinstance(cost, str):
        return _given_cost(P, Q, cost)
    if cost not in _NAMES:
        raise ValueError(
            f"cost is {cost!r}; it must be one of {', '.join(_NAMES)}, a function of (P, Q), or an array [K, L]"
        )
    if cost in {"euclidean", "sqeuclidean"}:
        return np.asarray(cdist(p.mean(), q.mean(), "euclidean" if cost == "euclidean" else "sqeuclidean"))
    if cost == "w2":
        return _transport_cost(p, q, 0.0)
    if cost == "entropic":
        temperature = inner_epsilon(P, Q, inner_reg=inner_reg, epsilon=epsilon)
        if temperature == 0.0:
            checked_temperature(P, np.inf)
            raise ValueError(
                "cost='entropic' needs an inner temperature: give inner_reg > 0 or epsilon > 0, or use cost='w2'"
            )
        return _transport_cost(p, q, temperature)
    if cost == "kl":
        return np.asarray(p.kl(q))
    if cost == "jeffreys":
        return np.asarray(p.kl(q) + q.kl(p).T)
    return _hellinger(p, q)


def inner_epsilon(
    P: Mixture, Q: Mixture, *, inner_reg: float = 0.0, epsilon: float | None = None, w2_cost: FloatArray | None = None
) -> float:
    """Temperature ``ε`` of the inner plans in units of the cost.

    Parameters
    ----------
    P, Q : Mixture
        Source and target.
    inner_reg : float
        ``ε`` as a multiple of the mean of the ``"w2"`` cost table; 0 gives the deterministic inner plans.
    epsilon : float, optional
        ``ε`` itself; then ``inner_reg`` must be 0.
    w2_cost : array [K, L], optional
        The ``"w2"`` cost table, where the caller has it already.

    Returns
    -------
    float
        ``ε ≥ 0``.

    Raises
    ------
    ValueError
        If a value is negative or not finite, or both are given.

    Examples
    --------
    >>> from omt.mixture import Mixture
    >>> P = Mixture.from_gaussians([1.0], [[0.0]], [[[1.0]]])
    >>> Q = Mixture.from_gaussians([1.0], [[3.0]], [[[1.0]]])
    >>> round(inner_epsilon(P, Q, inner_reg=0.01), 12)
    0.09
    """
    for name, value in (("inner_reg", inner_reg), ("epsilon", 0.0 if epsilon is None else epsilon)):
        finite_at_least_zero(value, name)
    if epsilon is not None:
        if inner_reg > 0.0:
            raise ValueError(f"give inner_reg ({inner_reg!r}) or epsilon ({epsilon!r}), not both")
        checked_temperature(P, epsilon)
        return float(epsilon)
    if inner_reg == 0.0:
        return 0.0
    checked_temperature(P, inner_reg)
    table = component_cost(P, Q) if w2_cost is None else w2_cost
    return float(inner_reg * table.mean())


def checked_pair(P: Mixture, Q: Mixture) -> tuple[Any, Any]:
    """Components of a source and a target mixture, checked to fit each other and brought to one sample size.

    Rates of counts with size factors are per sample of size one, and what size one is may differ between two fits; so
    both sides are rescaled to the geometric mean of their references. Nothing changes where these are equal.

    Parameters
    ----------
    P, Q : Mixture
        Source and target.

    Returns
    -------
    p, q : Components
        Of the same class.

    Raises
    ------
    ValueError
        If families, numbers of features or their names differ, or only one side has size factors.
    TypeError
        If one is no mixture.
    """
    for side, mixture in (("source", P), ("target", Q)):
        if not hasattr(mixture, "components"):
            raise TypeError(f"the {side} is of type {type(mixture).__name__}; it must be a Mixture (omt.fit_mixture)")
    if P.family != Q.family:
        raise ValueError(
            f"source is a mixture of family {P.family!r} and target of {Q.family!r}; they must be the same"
        )
    check_features(P, Q)
    p, q = P.components, Q.components
    if isinstance(p, MultinomialComponents) and isinstance(q, MultinomialComponents):
        total = math.sqrt(p.total * q.total)
        return replace(p, total=total), replace(q, total=total)
    if isinstance(p, PoissonComponents | NegativeBinomialComponents):
        assert isinstance(q, PoissonComponents | NegativeBinomialComponents)  # noqa: S101  # the same family
        return _at_one_size(p, q)
    return p, q


def gaussian_pair(P: Mixture, Q: Mixture) -> tuple[GaussianComponents, GaussianComponents]:
    """Gaussian components of a source and a target mixture, checked to fit each other.

    Parameters
    ----------
    P, Q : Mixture
        Source and target.

    Returns
    -------
    p, q : GaussianComponents
        Their components.

    Raises
    ------
    ValueError
        If the mixtures do not fit each other, or are not Gaussian.
    """
    p, q = checked_pair(P, Q)
    if not isinstance(p, GaussianComponents) or not isinstance(q, GaussianComponents):
        raise ValueError(
            f"the inner plans of family {P.family!r} have no densities, which a plan between cells and all else "
            "Gaussian needs; use resolution='component', or fit with family='gaussian'"
        )
    return p, q


def logarithm(P: Mixture) -> Mixture:
    """The Gaussian mixture of the logarithms of a log-normal one."""
    assert isinstance(P.components, LogNormalComponents)  # noqa: S101  # narrows the type
    return replace(P, components=P.components.gaussian)


def checked_temperature(P: Mixture, epsilon: float) -> None:
    """Raise ``ValueError`` if inner plans of this family are asked for at a temperature above zero and have no closed
    form there.
    """
    if epsilon > 0.0 and P.family not in {"gaussian", "lognormal"}:
        raise ValueError(
            f"family {P.family!r} has no closed entropic plan inside a pair: inner_reg and epsilon must be 0, and "
            "cost='entropic' needs Gaussian or log-normal components (reg, between components, is free)"
        )


def axis_aligned(p: GaussianComponents, q: GaussianComponents) -> bool:
    """Whether all covariances of both sides are diagonal, so that plans decouple into axes."""
    return all(c.covariance_type in {"diag", "spherical"} for c in (p, q))


def distinct_covariances(p: GaussianComponents) -> FloatArray:
    """Covariances [K, d, d], or [1, d, d] where all components share one."""
    _refuse_wide_low_rank(p)
    return p.covariance_matrices()[: 1 if p.covariance_type == "tied" else None]


def _given_cost(P: Mixture, Q: Mixture, cost: Any) -> FloatArray:
    origin = "the function given as cost returned" if callable(cost) else "cost is"
    table: FloatArray = np.array(cost(P, Q) if callable(cost) else cost, dtype=np.float64)
    if table.shape != (P.K, Q.K):
        raise ValueError(
            f"{origin} an array of shape {table.shape}; it must be [{P.K}, {Q.K}], source by target components"
        )
    if not np.isfinite(table).all():
        k, l = (int(i) for i in np.argwhere(~np.isfinite(table))[0])
        raise ValueError(
            f"{origin} an array with {table[k, l]} at [{k}, {l}]; costs must be finite "
            "(name impossible transitions by forbidden=)"
        )
    return table


def _transport_cost(p: Any, q: Any, epsilon: float) -> FloatArray:
    """Cost of the optimal inner plans; that of log-normal components is the cost of their logarithms."""
    if isinstance(p, LogNormalComponents):
        return _transport_cost(p.gaussian, q.gaussian, epsilon)
    if not isinstance(p, GaussianComponents):
        return product_cost(p, q)
    _refuse_wide_low_rank(p)
    _refuse_wide_low_rank(q)
    if axis_aligned(p, q):
        return diagonal_cost(p.means, p.diagonal_variances(), q.means, q.diagonal_variances(), epsilon)
    return gaussian_cost(p.means, distinct_covariances(p), q.means, distinct_covariances(q), epsilon)


def _hellinger(p: Any, q: Any) -> FloatArray:
    if isinstance(p, LogNormalComponents):  # overlaps do not change with the scale of the axis
        return _hellinger(p.gaussian, q.gaussian)
    if not isinstance(p, GaussianComponents):
        if isinstance(p, NegativeBinomialComponents):
            p.kl(q)  # refuses dispersions that differ: such laws are not of one exponential family
        return np.asarray(np.clip(1.0 - bhattacharyya_coefficient(p, q), 0.0, 1.0))
    if axis_aligned(p, q):
        overlap = diagonal_bhattacharyya(p.means, p.diagonal_variances(), q.means, q.diagonal_variances())
    else:
        overlap = gaussian_bhattacharyya(p.means, distinct_covariances(p), q.means, distinct_covariances(q))
    return squared_hellinger(overlap)


def _at_one_size(p: Any, q: Any) -> tuple[Any, Any]:
    """Components of counts at a common reference; see :func:`checked_pair`."""
    if (p.reference is None) != (q.reference is None):
        sides = ("source", "target") if q.reference is None else ("target", "source")
        raise ValueError(
            f"the {sides[0]} was fitted with size factors and the {sides[1]} without; fit both with the same ones"
        )
    if p.reference == q.reference:
        return p, q
    reference = math.sqrt(p.reference * q.reference)
    name = p._arrays[0]
    first, second = (
        replace(c, **{name: getattr(c, name) * (reference / c.reference)}, reference=reference) for c in (p, q)
    )
    return first, second


def _refuse_wide_low_rank(p: GaussianComponents) -> None:
    if p.d > _MAX_DENSE_FEATURES and p.covariance_type == "lowrank":
        raise ValueError(
            f"low-rank covariances with d={p.d} features would become dense matrices (limit {_MAX_DENSE_FEATURES}); "
            "fit with covariance='diag', or on fewer features (for example principal components)"
        )
