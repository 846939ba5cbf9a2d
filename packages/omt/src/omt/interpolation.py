r"""Between the ends of a transport: the mixture, or moved samples, at a time ``t`` from 0 (source) to 1 (target).

Inside a pair of components mass moves on straight lines, ``x ↦ (1−t) x + t y``. With ``y = m' + T (x − m)`` a Gaussian
stays Gaussian, ``N((1−t) m + t m', D A Dᵀ)`` with ``D = (1−t) I + t T``: at ``ε = 0`` the geodesic of Wasserstein space
(McCann). In the canonical coordinates of the pair (:mod:`omt.pairs.gaussian`) ``D A^{1/2}`` is ``(1−t) F U + t G V
diag(c)``, so the covariance is a Gram matrix and stays positive semi-definite to the last bit.

A plan at temperature ``ε > 0`` also spreads: ``y | x`` has covariance ``B − T A Tᵀ``. The marginal of the Schrödinger
bridge adds ``t² (B − T A Tᵀ)`` for it, and ``t (1−t) ε/2`` of the Brownian motion on the way.

Letters: ``N`` samples, ``n`` moved ones, ``d`` features, ``K``/``L`` source/target components.

References
----------
McCann, "A convexity principle for interacting gases", Adv. Math. 128, 1997. Léonard, "A survey of the Schrödinger
problem and some of its connections with optimal transport", Discrete Contin. Dyn. Syst. 34, 2014.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from omt.chunks import require_finite
from omt.families.gaussian import GaussianComponents
from omt.families.positive import LogNormalComponents
from omt.families.product import ProductComponents
from omt.pairs.affine import AffineImages, iterate_plans
from omt.pairs.cost import logarithm
from omt.pairs.coupled import by_pair
from omt.pairs.product import product_images
from omt.scalars import generator, whole

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from omt.mixture import Mixture
    from omt.transport import Transport

    FloatArray = NDArray[np.float64]

__all__ = [
    "MovedSamples",
    "drawn",
    "interpolate",
    "interpolate_samples",
    "kept_pairs",
    "moved_samples",
    "pair_masses",
    "place_in_time",
    "resampled",
]

_DROPPED = 1e-8  # pairs with a smaller share of the mass are left out


class MovedSamples(NamedTuple):
    """Samples on their way.

    Attributes
    ----------
    points : array [n, d]
        Where they are.
    origin : int array [n]
        Row of each in the samples it was taken from.
    source, target : int array [n]
        The components that it moves between.
    """

    points: FloatArray
    origin: NDArray[np.intp]
    source: NDArray[np.intp]
    target: NDArray[np.intp]


def pair_masses(transport: Transport, t: float) -> FloatArray:
    """Mass of each pair of components at time ``t``, [K, L] with sum 1.

    A pair has the mass of its source component's share at ``t = 0``, of its target component's at ``t = 1``, and
    between them their geometric mean ``m₀^{1−t} m₁^t``: growth at a constant rate. In a balanced plan both are
    ``W_kl``.
    """
    start = transport.source.weights[:, None] * transport.conditional("forward")
    end = (transport.target.weights[:, None] * transport.conditional("backward")).T
    masses: FloatArray = start ** (1.0 - t) * end**t
    return np.asarray(masses / masses.sum())


def kept_pairs(transport: Transport, t: float) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Source and target component of each component of the mixture at time ``t``, in its order."""
    k, l = np.nonzero(pair_masses(transport, t) >= _DROPPED)
    return k, l


def interpolate(transport: Transport, t: float, *, bridge: bool = False) -> Mixture:
    """The mixture at time ``t`` on the way from the source to the target.

    Each pair of components that carries at least 1e-8 of the mass becomes a component, named ``"A→B"``. In an
    unbalanced plan masses grow or shrink at a constant rate.

    Parameters
    ----------
    transport : Transport
        The plan.
    t : float in [0, 1]
        0 gives the source and 1 the target, exactly.
    bridge : bool
        For plans with an inner temperature: the marginal of the Schrödinger bridge, with the spread that the plan
        gives each point and that of the Brownian motion on the way. False moves every point to its mean partner on
        a straight line.

    Returns
    -------
    Mixture

    Raises
    ------
    ValueError
        If ``t`` is outside, or for a family that the way leads out of (all but Gaussian and log-normal).

    Examples
    --------
    >>> import omt
    >>> P = omt.Mixture.from_gaussians([1.0], [[0.0]], [[[1.0]]], names=["stem"])
    >>> Q = omt.Mixture.from_gaussians([1.0], [[4.0]], [[[9.0]]], names=["neuron"])
    >>> middle = omt.transport(P, Q).interpolate(0.5)
    >>> middle.names, middle.mean().round(9), middle.cov().round(9)
    (('stem→neuron',), array([2.]), array([[4.]]))
    """
    from omt.mixture import Mixture

    t = _checked_time(t)
    P, Q = transport.source, transport.target
    if t in {0.0, 1.0}:
        return Q if t else P
    if P.family not in {"gaussian", "lognormal"}:
        raise ValueError(
            f"half-way between two {P.family} components there is no {P.family} component, so no mixture can be "
            "returned; interpolate_samples moves samples of this family"
        )
    masses = pair_masses(transport, t)
    k, l = kept_pairs(transport, t)
    names = tuple(f"{P.names[i]}→{Q.names[j]}" for i, j in zip(k, l, strict=True))
    if len(set(names)) < len(names):  # names that contain the arrow themselves
        names = tuple(f"({P.names[i]})→({Q.names[j]})" for i, j in zip(k, l, strict=True))
    weights = masses[k, l] / masses[k, l].sum()
    if P.family == "lognormal":
        inner = _gaussians(logarithm(P), logarithm(Q), k, l, transport.epsilon, t, bridge)
        return Mixture(weights, LogNormalComponents(inner), names=names)
    return Mixture(weights, _gaussians(P, Q, k, l, transport.epsilon, t, bridge), names=names)


def _gaussians(
    P: Mixture, Q: Mixture, k: NDArray[np.intp], l: NDArray[np.intp], epsilon: float, t: float, bridge: bool
) -> GaussianComponents:
    """The pairs' laws at time ``t``."""
    means = (1.0 - t) * P.components.mean()[k] + t * Q.components.mean()[l]
    brownian = 0.5 * t * (1.0 - t) * epsilon if bridge else 0.0
    parts = []
    aligned = False
    for _, plans in iterate_plans(P, Q, k, l, epsilon):
        aligned = plans.axis_aligned
        c = plans.correlations()
        # At ε = 0 the noise is that of a source without spread on some axis, which has to split: part of the geodesic.
        noise = plans.noise_factors() if bridge or epsilon == 0.0 else np.zeros_like(plans.target_axes)
        if aligned:
            root = (1.0 - t) * plans.source_axes + t * plans.target_axes * c
            parts.append(root**2 + (t * noise) ** 2 + brownian)
        else:
            root = (1.0 - t) * plans.source_axes + t * plans.target_axes * c[:, None, :]
            covariances = root @ root.swapaxes(1, 2) + t**2 * (noise @ noise.swapaxes(1, 2))
            covariances = 0.5 * (covariances + covariances.swapaxes(1, 2))
            parts.append(covariances + brownian * np.eye(P.d))
    spread = np.concatenate(parts)
    if aligned:
        return GaussianComponents(means, "diag", variances=spread)
    return GaussianComponents(means, "full", covariances=spread)


def interpolate_samples(
    transport: Transport,
    X: Any,
    t: float,
    n: int | None = None,
    rng: np.random.Generator | int | None = None,
    *,
    bridge: bool = False,
) -> FloatArray:
    """Samples of the source, moved part of their way to the target.

    Each goes to a pair of components by its responsibilities and the plan, and then on a straight line. Every
    sample is taken equally often, up to rounding; in an unbalanced plan as often as its components grow.

    Parameters
    ----------
    transport : Transport
        The plan.
    X : array [N, d]
        Samples of the source.
    t : float in [0, 1]
        0 gives samples themselves, 1 their images.
    n : int, optional
        How many; as many as there are if not given.
    rng : Generator or int, optional
        Randomness of what is taken and where it goes.
    bridge : bool
        As in :func:`interpolate`.

    Returns
    -------
    array [n, d]

    Raises
    ------
    ValueError
        If ``t`` or ``n`` is out of range, or ``X`` does not fit the source.

    Examples
    --------
    >>> import omt
    >>> P = omt.Mixture.from_gaussians([1.0], [[0.0]], [[[1.0]]])
    >>> Q = omt.Mixture.from_gaussians([1.0], [[4.0]], [[[9.0]]])
    >>> omt.transport(P, Q).interpolate_samples([[1.0]], 0.5).round(9)
    array([[4.]])
    """
    return moved_samples(transport, X, t, n, rng, bridge=bridge).points


def moved_samples(
    transport: Transport,
    X: Any,
    t: float,
    n: int | None = None,
    rng: np.random.Generator | int | None = None,
    *,
    bridge: bool = False,
) -> MovedSamples:
    """Samples moved to time ``t``, with where they come from and which way they go.

    Parameters and errors are those of :func:`interpolate_samples`.
    """
    t = _checked_time(t)
    P = transport.source
    if len(np.shape(X)) != 2 or np.shape(X)[1] != P.d or np.shape(X)[0] == 0:
        raise ValueError(
            f"X has shape {np.shape(X)}; the source mixture has d={P.d} features, so X must be [N, {P.d}] with N ≥ 1"
        )
    count = _checked_count(np.shape(X)[0] if n is None else n)
    X = X.tocsr() if hasattr(X, "tocsr") else np.asarray(X)
    if X.dtype.kind not in "fiub":
        raise ValueError(f"X has dtype {X.dtype}; it must hold real numbers")
    require_finite(X, 0)
    random = generator(rng)
    masses = pair_masses(transport, t)
    relative = masses / P.weights[:, None]
    membership = np.asarray(P.responsibilities(X)) * relative.sum(axis=1)
    demand = membership.sum(axis=1)
    if not demand.sum() > 0.0:
        raise ValueError("X belongs only to source components from which nothing is transported")
    origin = resampled(demand, count, random)
    source = drawn(membership[origin], random)
    target = drawn(relative[source], random)
    start = X[origin]
    start = np.asarray(start.toarray() if hasattr(start, "toarray") else start, dtype=np.float64)
    if t == 0.0:
        return MovedSamples(start, origin, source, target)
    noisy = bridge or transport.epsilon == 0.0 or t == 1.0
    partner = _partners(transport, start, source, target, random if noisy else None)
    logarithmic = P.family == "lognormal"
    points = (1.0 - t) * (np.log(start) if logarithmic else start) + t * partner
    if bridge and transport.epsilon > 0.0:
        points += np.sqrt(0.5 * t * (1.0 - t) * transport.epsilon) * random.standard_normal(points.shape)
    return MovedSamples(np.exp(points) if logarithmic else points, origin, source, target)


def _partners(
    transport: Transport,
    start: FloatArray,
    source: NDArray[np.intp],
    target: NDArray[np.intp],
    rng: np.random.Generator | None,
) -> FloatArray:
    """Image of each sample under its pair; on the log scale for log-normal mixtures."""
    P, Q, W, epsilon = transport.source, transport.target, transport.coupling, transport.epsilon
    if P.family == "gaussian":
        return AffineImages(P, Q, W, epsilon).paired(start, source, target, rng)
    if P.family == "lognormal":
        return AffineImages(logarithm(P), logarithm(Q), W, epsilon).paired(np.log(start), source, target, rng)
    p, q = cast("ProductComponents", P.components), cast("ProductComponents", Q.components)
    p.check(start, 0)
    out = np.empty_like(start)
    for k, l, rows in zip(*by_pair(source, target, Q.K), strict=True):
        out[rows] = product_images(start[rows], p, q, int(k), int(l), rng)
    return out


def place_in_time(times: Sequence[float], t: object, argument: str = "t") -> tuple[int, float]:
    """Which step of a course a time is in, and how far through it (0 to 1).

    Parameters
    ----------
    times : sequence of float
        Increasing.
    t : float
        Between the first and the last.
    argument : str
        Name by which the caller gave it.

    Returns
    -------
    step : int
        Index of the time at or before ``t``; for the last time the step before it.
    share : float
        0 at that time, 1 at the next.

    Raises
    ------
    ValueError
        If ``t`` is outside; the message lists the times.

    Examples
    --------
    >>> place_in_time([0, 2, 4], 3)
    (1, 0.5)
    """
    listed = ", ".join(f"{time:g}" for time in times)
    if not isinstance(t, int | float | np.number) or not times[0] <= t <= times[-1]:
        raise ValueError(f"{argument}={t!r} is not between the first and the last time; the times are {listed}")
    step = min(int(np.searchsorted(times, t, side="right")) - 1, len(times) - 2)
    return step, float((t - times[step]) / (times[step + 1] - times[step]))


def _checked_time(t: object) -> float:
    if not isinstance(t, int | float | np.number) or not 0.0 <= t <= 1.0:
        raise ValueError(f"t is {t!r}; it must be between 0 (the source) and 1 (the target)")
    return float(t)


def _checked_count(n: object) -> int:
    return whole(n, "n")


def resampled(demand: FloatArray, n: int, rng: np.random.Generator) -> NDArray[np.intp]:
    """``n`` rows in proportion to ``demand``, each as often as its share says, rounded up or down, in random order."""
    order = rng.permutation(len(demand))
    edges = np.cumsum(demand[order])
    ticks = (rng.random() + np.arange(n)) * (edges[-1] / n)
    rows = order[np.minimum(np.searchsorted(edges, ticks, side="right"), len(demand) - 1)]
    return np.asarray(rng.permutation(rows), dtype=np.intp)


def drawn(weights: FloatArray, rng: np.random.Generator) -> NDArray[np.intp]:
    """One column for each row of weights [n, K]."""
    cumulative = np.cumsum(weights, axis=1)
    u = rng.random((len(weights), 1)) * cumulative[:, -1:]
    return np.asarray(np.minimum((cumulative <= u).sum(axis=1), weights.shape[1] - 1), dtype=np.intp)
