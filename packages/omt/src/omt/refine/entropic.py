"""Balanced entropic transport between weighted points: Sinkhorn's iteration over-relaxed, with a warm start.

Letters: ``n``/``m`` source/target points.

The iteration multiplies ``u`` by ``(a / W1)^ω`` and ``v`` by ``(b / Wᵀ1)^ω``. Near its limit it is successive
over-relaxation of a linear system, so the best ``ω`` follows from how fast errors fall: if they fall by ``ρ`` a sweep
at ``ω``, the plain iteration's rate is ``κ = (ρ + ω − 1)² / (ρ ω²)``, and the best factor ``2 / (1 + √(1 − κ))``. Where
plain sweeps need a thousand, these need a hundred.

References
----------
Thibault, Chizat, Dossal, Papadakis, "Overrelaxed Sinkhorn-Knopp algorithm for regularized optimal transport",
Algorithms 14, 2021. Lehmann, von Renesse, Sambale, Uschmajew, "A note on overrelaxation in the Sinkhorn algorithm",
Optimization Letters 16, 2022.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    FloatArray = NDArray[np.float64]

__all__ = ["Potentials", "self_potential", "solve_points"]

_FOLD = 1e100  # scalings beyond this move into the kernel
_LARGEST_OMEGA = 1.95
_ESTIMATE_EVERY = 20
_RATE_STEPS = 5
_COOLING = 4.0
_ROUGH = 1e-2  # marginal error at which a hotter temperature has done its work
_SELF_SWEEPS = 1000
_NEWTON_STEPS = 50


class Potentials(NamedTuple):
    """``f`` [n] and ``g`` [m] in units of cost, the plan being ``a b exp((f ⊕ g − C)/ε)``; what was reached, and the
    sweeps and Newton steps it took.
    """

    f: FloatArray
    g: FloatArray
    marginal_error: float
    n_sweeps: int
    n_newton: int = 0


def solve_points(
    C: FloatArray,
    a: FloatArray,
    b: FloatArray,
    epsilon: float,
    *,
    start: FloatArray | None = None,
    easy: float,
    tol: float,
    max_iter: int,
) -> Potentials:
    """Solve ``min ⟨C, W⟩ + ε KL(W‖a⊗b)`` with marginals ``a``, ``b``.

    Parameters
    ----------
    C : array [n, m]
        Cost.
    a, b : array [n], [m]
        Weights with equal sums.
    epsilon : float
        Temperature in units of cost.
    start : array [n], optional
        Guess of ``f``.
    easy : float
        Temperature from which on no hotter one has to be solved first.
    tol : float
        Error ``‖W1 − a‖₁`` at which to stop; the other marginal is exact.
    max_iter : int
        Most sweeps at a temperature; at the last one Newton steps follow where they are not enough.
    """
    f = C.min(axis=1) if start is None else start
    ladder = [epsilon]
    while ladder[-1] < easy:
        ladder.append(ladder[-1] * _COOLING)
    sweeps = 0
    for temperature in ladder[:0:-1]:
        rough = _swept(C, a, b, temperature, f, _ROUGH, max_iter)
        f, sweeps = rough.f, sweeps + rough.n_sweeps
    result = _swept(C, a, b, epsilon, f, tol, max_iter)
    if result.marginal_error > tol:
        result = _climbed(C, a, b, epsilon, result, tol)
    return result._replace(n_sweeps=result.n_sweeps + sweeps)


def _climbed(C: FloatArray, a: FloatArray, b: FloatArray, epsilon: float, start: Potentials, tol: float) -> Potentials:
    """Newton's method of the outer solver, for what sweeps leave: groups of points that hardly exchange mass.

    A step costs as much as a hundred sweeps, and a few are enough.
    """
    from omt.solver.semidual import SemiDual

    # In reduced costs the potentials that are looked for are near zero: no digits are lost.
    problem = SemiDual((C - start.f[:, None] - start.g) / epsilon, a, b, (1.0, 1.0))
    point, damping, steps = problem.at(np.zeros_like(a)), 1e-6, 0
    while point.error > tol and steps < _NEWTON_STEPS:
        stepped, damping = problem.newton(point, damping)
        if stepped is None:
            stepped, damping = problem.swept(point), 1e-3
        point, steps = stepped, steps + 1
    f, g = start.f + epsilon * point.phi, start.g + epsilon * point.psi
    return Potentials(f, g, point.residual, start.n_sweeps, start.n_newton + steps)


def self_potential(C: FloatArray, a: FloatArray, epsilon: float, tol: float) -> FloatArray:
    """Potential ``h`` [n] of the transport of points onto themselves, ``a a exp((h ⊕ h − C)/ε)``.

    The symmetric iteration ``u ← √(u a / W1)`` halves the error's logarithm a step, whatever the temperature.

    References
    ----------
    Feydy et al., "Interpolating between optimal transport and MMD using Sinkhorn divergences", AISTATS 2019, section 3.
    """
    kernel = C / -epsilon
    np.exp(kernel, out=kernel)
    u = np.ones_like(a)
    for _ in range(_SELF_SWEEPS):
        ratio = u * (kernel @ (a * u))
        if float(a @ np.abs(ratio - 1.0)) <= tol:
            break
        u /= np.sqrt(ratio)
    return np.asarray(epsilon * np.log(u))


def _swept(
    C: FloatArray, a: FloatArray, b: FloatArray, epsilon: float, f: FloatArray, tol: float, max_iter: int
) -> Potentials:
    g = _best(C, a, f, epsilon)
    f = _best(C.T, b, g, epsilon)  # every row of the kernel now sums to one: none can underflow
    kernel = _kernel(C, f, g, epsilon)
    u, v = np.ones_like(a), np.ones_like(b)
    omega, errors = 1.0, list[float]()
    fallback = (u.copy(), v.copy())
    sweeps = 0
    while sweeps < max_iter:
        sweeps += 1
        row = u * (kernel @ (b * v))
        error = float(a @ np.abs(row - 1.0))
        if error <= tol:
            v = 1.0 / ((a * u) @ kernel)
            error = float(a @ np.abs(u * (kernel @ (b * v)) - 1.0))
            if error <= tol:
                break
            row = u * (kernel @ (b * v))
        if omega > 1.0 and not error < 10.0 * errors[0]:  # relaxed too much: back, and plain sweeps from there
            (u, v), omega, errors = fallback, 1.0, []
            row = u * (kernel @ (b * v))
        errors.append(error)
        if len(errors) > _ESTIMATE_EVERY:
            omega = _faster(omega, errors)
            errors = [error]
            fallback = (u.copy(), v.copy())
        u = u * row**-omega
        v = v * (v * ((a * u) @ kernel)) ** -omega
        if max(u.max(), v.max()) > _FOLD or min(u.min(), v.min()) < 1.0 / _FOLD:
            f, g = f + epsilon * np.log(u), g + epsilon * np.log(v)
            g = _best(C, a, f, epsilon)
            f = _best(C.T, b, g, epsilon)
            kernel = _kernel(C, f, g, epsilon)
            u, v = np.ones_like(a), np.ones_like(b)
            fallback, omega, errors = (u.copy(), v.copy()), 1.0, []
    v = 1.0 / ((a * u) @ kernel)
    error = float(a @ np.abs(u * (kernel @ (b * v)) - 1.0))
    return Potentials(f + epsilon * np.log(u), g + epsilon * np.log(v), error, sweeps)


def _faster(omega: float, errors: list[float]) -> float:
    """Relaxation that fits the rate at which errors fell; the old one where that says nothing."""
    rate = (errors[-1] / errors[-1 - _RATE_STEPS]) ** (1.0 / _RATE_STEPS)
    if not omega - 1.0 < rate < 1.0:
        return omega
    kappa = min((rate + omega - 1.0) ** 2 / (rate * omega**2), 1.0)
    return max(omega, min(2.0 / (1.0 + float(np.sqrt(1.0 - kappa))), _LARGEST_OMEGA))


def _kernel(C: FloatArray, f: FloatArray, g: FloatArray, epsilon: float) -> FloatArray:
    kernel = f[:, None] - C
    kernel += g
    kernel /= epsilon
    np.exp(kernel, out=kernel)
    return kernel


def _best(C: FloatArray, a: FloatArray, f: FloatArray, epsilon: float) -> FloatArray:
    """The target's potential ``−ε log Σ_i a_i exp((f_i − C_ij)/ε)`` [m] for a given ``f``."""
    exponent = (f[:, None] - C) / epsilon
    top = exponent.max(axis=0)
    exponent -= top
    np.exp(exponent, out=exponent)
    return np.asarray(-epsilon * (np.log(a @ exponent) + top))
