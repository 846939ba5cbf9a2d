"""Transport between points that stand for two mixtures, and the out-of-sample map that it gives.

The plan between components restricts mass to whole pairs of components. Where components are not images of one
another that is coarse, and :func:`refine` drops the restriction: it solves entropic transport between the mixtures
themselves, on points, and maps new samples by the entropic map. Its cost depends on the number of points, never on
the number of samples.

Letters: ``N`` samples, ``n``/``m`` source/target points, ``d`` features, ``K``/``L`` components.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from omt.refine.entropic import self_potential, solve_points
from omt.refine.start import component_potential
from omt.refine.support import Support, drawn_support, quantised

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from numpy.typing import ArrayLike, NDArray

    from omt.mixture import Mixture
    from omt.transport import Transport

    FloatArray = NDArray[np.float64]

__all__ = ["RefinedTransport", "refine"]

_FORMAT = 1
_LEAST_REG = 1e-9  # relative temperature below which exponents are rounded away
_MOST_POINTS = 30_000  # a table between more points needs over 7 GB
_EASY_REG = 0.02  # relative temperature from which on no hotter one has to be solved first
_BLOCK_ENTRIES = 1 << 20


@dataclass(frozen=True, eq=False)
class RefinedTransport:
    """Entropic transport between points of a source and a target; :meth:`omt.Transport.refine` makes it.

    Attributes
    ----------
    source_points, target_points : array [n, d], [m, d]
        Points that stand for the mixtures or samples.
    source_weights, target_weights : array [n], [m]
        Their weights; each sum to 1.
    f, g : array [n], [m]
        Potentials in units of cost: the plan is ``a b exp((f ⊕ g − C)/ε)`` with squared Euclidean ``C``.
    self_potential : array [n]
        Potential of the source's transport onto itself, which removes the bias of ``ε`` from the map.
    epsilon : float
        Temperature ``ε`` in units of cost.
    marginal_error : float
        ``‖W1 − a‖₁`` of the plan; the target's marginal is exact.
    tol : float
        What the solver was asked for.
    n_sweeps, n_newton : int
        Sweeps and Newton steps of the solver.
    logarithmic : bool
        Whether points and cost are on the logarithm of the features, as for log-normal mixtures.
    bounded : bool
        Whether features have bounds, as counts and positive numbers do. A debiased image may cross them.
    """

    source_points: FloatArray
    source_weights: FloatArray
    target_points: FloatArray
    target_weights: FloatArray
    f: FloatArray
    g: FloatArray
    self_potential: FloatArray
    epsilon: float
    marginal_error: float
    tol: float
    n_sweeps: int
    n_newton: int
    logarithmic: bool = False
    bounded: bool = False

    def __repr__(self) -> str:
        n, d = self.source_points.shape
        return (
            f"RefinedTransport(points={n}→{len(self.target_points)}, d={d}, epsilon={self.epsilon:.4g}, "
            f"converged={self.converged}, marginal_error={self.marginal_error:.2g}, n_sweeps={self.n_sweeps}, "
            f"n_newton={self.n_newton})"
        )

    @property
    def converged(self) -> bool:
        """Whether the marginal error is at most the tolerance."""
        return self.marginal_error <= self.tol

    def map(self, X: ArrayLike, *, debias: bool | None = None) -> FloatArray:
        """Map samples, also new ones.

        The entropic map ``T_ε(x)`` is the mean of the target points under the plan extended to ``x``. The temperature
        pulls it towards the middle of its surroundings, in the same way as it pulls the source's map onto itself,
        ``S_ε``, away from the identity. The debiased map is ``x + T_ε(x) − S_ε(x)``.

        Parameters
        ----------
        X : array [N, d]
            Samples.
        debias : bool, optional
            False gives ``T_ε`` itself, whose images stay within the convex hull of the target points. By default true,
            except for :attr:`bounded` features.

        Returns
        -------
        array [N, d]
            Images.

        Raises
        ------
        ValueError
            If ``X`` does not fit the source.

        References
        ----------
        Pooladian, Niles-Weed, "Entropic estimation of optimal transport maps", 2021. Pooladian, Cuturi, Niles-Weed,
        "Debiaser beware: pitfalls of centering regularized transport maps", ICML 2022.
        """
        points = np.asarray(X.toarray() if hasattr(X, "toarray") else X, dtype=np.float64)
        d = self.source_points.shape[1]
        if points.ndim != 2 or points.shape[1] != d:
            raise ValueError(f"X has shape {points.shape}; the source has d={d} features, so X must be [N, {d}]")
        if not np.isfinite(points).all():
            row, column = (int(i) for i in np.argwhere(~np.isfinite(points))[0])
            raise ValueError(f"X has the value {points[row, column]} at row {row}, column {column}; all must be finite")
        if self.logarithmic:
            if not (points > 0.0).all():
                row, column = (int(i) for i in np.argwhere(points <= 0.0)[0])
                raise ValueError(f"X is {points[row, column]:g} at row {row}, column {column}; it must be positive")
            points = np.log(points)
        image = _mean_partner(points, self.target_points, self.target_weights, self.g, self.epsilon)
        if not self.bounded if debias is None else debias:
            own = _mean_partner(points, self.source_points, self.source_weights, self.self_potential, self.epsilon)
            image += points - own
        return np.exp(image) if self.logarithmic else image

    def plan(self) -> FloatArray:
        """The plan between the points, [n, m]; its sums are the weights."""
        C = _cost(self.source_points, self.target_points)
        W = np.exp((self.f[:, None] + self.g - C) / self.epsilon)
        W *= self.source_weights[:, None]
        W *= self.target_weights
        return W

    # ----------------------------------------------------------------------------------------------------- storage
    def to_dict(self) -> dict[str, Any]:
        """Arrays and numbers that determine it."""
        return {"format": _FORMAT, **{field.name: getattr(self, field.name) for field in fields(self)}}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        """Rebuild what :meth:`to_dict` gave.

        Raises
        ------
        ValueError
            If the format version is unknown, an entry is missing, or arrays do not fit each other.
        """
        version = stored.get("format")
        if str(version) != str(_FORMAT):
            raise ValueError(
                f"this refined transport is stored in format {version}; this version of omt reads format {_FORMAT}"
            )
        missing = [field.name for field in fields(cls) if field.name not in stored]
        if missing:
            raise ValueError(f"this stored refined transport has no {missing[0]}")
        values: dict[str, Any] = {}
        for field in fields(cls):
            kind = {"float": float, "int": int, "bool": bool}.get(str(field.type))
            raw = stored[field.name]
            values[field.name] = np.asarray(raw, dtype=np.float64) if kind is None else kind(raw)
        n, m = len(values["source_points"]), len(values["target_points"])
        for name, length in (
            ("source_weights", n), ("f", n), ("self_potential", n), ("target_weights", m), ("g", m),
        ):  # fmt: skip
            if values[name].shape != (length,):
                raise ValueError(
                    f"{name} of this stored refined transport has shape {values[name].shape}; it must be ({length},)"
                )
        return cls(**values)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it into the folder ``path``: ``refined.npz`` and ``meta.json``; an interrupted run leaves the old files
        or the new ones.
        """
        from omt import archive

        archive.save(path, "refined", self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what :meth:`save` wrote; nothing is unpickled.

        Raises
        ------
        FileNotFoundError
            If the folder or its files do not exist.
        ValueError
            If a file is truncated or damaged, or written in an unknown format version.
        """
        from omt import archive

        with archive.rebuilding(f"the refined transport in {path}"):
            return cls.from_dict(archive.load(path, "refined", _FORMAT))


def refine(
    transport: Transport,
    n_points: int = 2000,
    reg: float = 0.02,
    *,
    X: ArrayLike | None = None,
    Y: ArrayLike | None = None,
    tol: float = 1e-6,
    max_iter: int = 500,
    seed: int | np.random.Generator = 0,
) -> RefinedTransport:
    """Entropic transport between points of both mixtures, free of the components' restriction.

    Points are drawn from every component in proportion to its weight, or stand for the samples ``X``, ``Y``: then
    the map depends on the mixtures only through its start, and their error does not reach it. Where the plan
    changes the masses of components (``tau < 1``, growth), points carry the changed masses: the map moves what is
    transported.

    Parameters
    ----------
    transport : Transport
        Between the two mixtures.
    n_points : int
        Points on each side, at least one for each component; time and memory grow with its square.
    reg : float
        Temperature as a multiple of the mean squared distance between the points, > 0.
    X, Y : array [N, d], [M, d], optional
        Samples of the source and of the target, more than ``n_points`` if there are.
    tol : float
        Marginal error at which the solver stops.
    max_iter : int
        Most sweeps of Sinkhorn's iteration; Newton steps follow where they are not enough.
    seed : int or Generator
        Randomness of the points.

    Returns
    -------
    omt.refine.RefinedTransport
        With a ``map`` for new samples.

    Raises
    ------
    ValueError
        If a parameter is out of range, samples do not fit the mixtures, or transitions are forbidden.

    Warns
    -----
    omt.solver.ConvergenceWarning
        If ``tol`` is not reached.

    Examples
    --------
    >>> import omt
    >>> P = omt.Mixture.from_gaussians([1.0], [[0.0]], [[[1.0]]])
    >>> Q = omt.Mixture.from_gaussians([1.0], [[3.0]], [[[4.0]]])
    >>> refined = omt.transport(P, Q).refine(500)
    >>> refined.converged, bool(abs(refined.map([[1.0]])[0, 0] - 5.0) < 0.1)
    (True, True)
    """
    from omt.pairs.cost import logarithm
    from omt.scalars import generator, is_number
    from omt.solver import ConvergenceWarning

    if np.ndim(n_points):
        raise TypeError("n_points is an array; it must be a whole number: give samples by name, refine(X=X, Y=Y)")
    if isinstance(n_points, bool) or not isinstance(n_points, int | np.integer):
        raise TypeError(f"n_points is {n_points!r}; it must be a whole number")
    if not is_number(reg) or not (np.isfinite(reg) and reg > 0.0):
        raise ValueError(f"reg is {reg!r}; it must be a finite number > 0, relative to the mean squared distance")
    if reg < _LEAST_REG:  # exponents C/ε would be rounded by more than they may err
        raise ValueError(
            f"reg is {reg!r}; below {_LEAST_REG:g} float64 cannot tell the plan from rounding, and 0.02 is a good start"
        )
    if not is_number(tol) or not is_number(max_iter) or not 0.0 < tol < np.inf or not max_iter >= 1:
        raise ValueError(f"tol is {tol!r} and max_iter {max_iter!r}; they must be > 0 and ≥ 1")
    if transport.forbidden is not None:
        raise ValueError(
            "this transport has forbidden transitions between components, which points do not know: use map, or solve "
            "it without forbidden= before refining"
        )
    P, Q = transport.source, transport.target
    logarithmic = P.family == "lognormal"
    if logarithmic:
        P, Q = logarithm(P), logarithm(Q)
    rng = generator(seed, "seed")
    W = transport.coupling / transport.coupling.sum()
    keeps_mass = transport.balanced and transport.growth is None
    sides = []
    for name, mixture, data, moved in (("X", P, X, W.sum(axis=1)), ("Y", Q, Y, W.sum(axis=0))):
        if (n_points if data is None else min(n_points, np.shape(data)[0] if np.ndim(data) else 0)) > _MOST_POINTS:
            raise ValueError(
                f"n_points is {n_points}; a table of the square of more than {_MOST_POINTS} points does not fit in "
                "memory, and a few thousand are enough"
            )
        if data is None:
            if n_points < mixture.K:
                raise ValueError(
                    f"n_points is {n_points}; it must be at least the {mixture.K} components, one point for each"
                )
            support = drawn_support(mixture, moved / moved.sum(), int(n_points), rng)
        else:
            support = _sampled(name, data, mixture, None if keeps_mass else moved, int(n_points), logarithmic, rng)
        positive = support.weights > 0.0
        sides.append(Support(support.points[positive], support.weights[positive] / support.weights[positive].sum()))
    (x, a), (y, b) = sides
    C = _cost(x, y)
    mean = float(a @ C @ b)
    if not mean > 0.0:
        raise ValueError("source and target are one and the same point: there is nothing to refine")
    epsilon = reg * mean
    start = component_potential(x, P, Q, W, transport.f)
    f, g, error, sweeps, steps = solve_points(
        C, a, b, epsilon, start=start, easy=_EASY_REG * mean, tol=tol, max_iter=max_iter
    )
    if error > tol:
        warnings.warn(
            f"refine stopped after {sweeps} sweeps and {steps} Newton steps at a marginal error of {error:.2g}, above "
            f"tol={tol:.2g}: raise tol, or take a larger reg (now {reg:g})",
            ConvergenceWarning,
            stacklevel=3,
        )
    h = self_potential(_cost(x, x), a, epsilon, tol)
    bounded = P.family not in {"gaussian", "lognormal"}
    return RefinedTransport(x, a, y, b, f, g, h, epsilon, error, tol, sweeps, steps, logarithmic, bounded)


def _sampled(
    name: str,
    data: Any,
    mixture: Mixture,
    moved: FloatArray | None,
    n: int,
    logarithmic: bool,
    rng: np.random.Generator,
) -> Support:
    """Support of samples. Where the plan changes the components' masses (to ``moved``), samples change with them."""
    if n < 1:
        raise ValueError(f"n_points is {n}; it must be at least 1")
    samples = np.asarray(data.toarray() if hasattr(data, "toarray") else data, dtype=np.float64)
    if samples.ndim != 2 or samples.shape[1] != mixture.d or len(samples) == 0:
        raise ValueError(
            f"{name} has shape {samples.shape}; its mixture has d={mixture.d} features, so it must be "
            f"[samples, {mixture.d}]"
        )
    if not np.isfinite(samples).all():
        row, column = (int(i) for i in np.argwhere(~np.isfinite(samples))[0])
        raise ValueError(
            f"{name} has the value {samples[row, column]} at row {row}, column {column}; it must be finite"
        )
    if logarithmic:
        if not (samples > 0.0).all():
            raise ValueError(f"{name} holds values ≤ 0; log-normal samples are positive")
        samples = np.log(samples)
    weights = np.full(len(samples), 1.0 / len(samples))
    if moved is not None:
        weights = weights * (np.asarray(mixture.responsibilities(samples)) @ (moved / mixture.weights))
    return quantised(samples, weights / weights.sum(), n, rng)


def _cost(x: FloatArray, y: FloatArray) -> FloatArray:
    from scipy.spatial.distance import cdist

    return np.asarray(cdist(x, y, "sqeuclidean"))


def _mean_partner(
    x: FloatArray, points: FloatArray, weights: FloatArray, potential: FloatArray, epsilon: float
) -> FloatArray:
    """``Σ_j y_j p_j(x)``, ``p_j(x) ∝ b_j exp((g_j − ‖x − y_j‖²)/ε)``; products of matrices, in blocks of rows."""
    centre = weights @ points
    centred = points - centre
    constant = np.log(weights) + (potential - np.einsum("nd,nd->n", centred, centred)) / epsilon
    linear = np.ascontiguousarray(centred.T) * (2.0 / epsilon)
    out = np.empty_like(x)
    step = max(1, _BLOCK_ENTRIES // len(points))
    for begin in range(0, len(x), step):
        exponent = (x[begin : begin + step] - centre) @ linear
        exponent += constant
        exponent -= exponent.max(axis=1, keepdims=True)
        np.exp(exponent, out=exponent)
        out[begin : begin + step] = centre + (exponent @ centred) / exponent.sum(axis=1, keepdims=True)
    return out
