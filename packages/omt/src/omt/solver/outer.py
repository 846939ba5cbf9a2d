"""The outer problem: a plan between component weights, from its linear program to a converged entropic plan.

Letters: ``K`` source components, ``L`` target components.
"""

from __future__ import annotations

import warnings
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from omt.solver.inputs import check_reachable, checked_problem
from omt.solver.lp import centred_potentials, feasible_blocks, is_strictly_complementary, solve_lp, vertex_potentials
from omt.solver.semidual import SemiDual
from omt.solver.solution import ConvergenceWarning, Solution

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from omt.solver.semidual import Point

_LP_ENTRIES = 4_000_000  # above this many entries the linear program takes longer than ε-scaling
_SWEEPS = 5  # after the warm start, before Newton
_EASY = 100  # sweeps that cost less than a linear program and a few Newton steps
_WATCHED = 10  # sweeps after which their progress is judged
_FIRST_SWEEPS = 30  # at the hottest temperature of ε-scaling, where sweeps contract fast
_COOLING = 4.0
_ROW_RATIO = 1e-6  # relative accuracy asked of every row, so that the transitions of rare components are right too
_EXTRA = 20  # Newton steps spent on that once the tolerance is met
_POLISH = 2  # steps that take a converged plan to rounding; Newton is quadratic there


@dataclass
class _Effort:
    """Steps spent, and Newton steps still allowed; the error after each step at the final temperature."""

    budget: int
    n_newton: int = 0
    n_sinkhorn: int = 0
    errors: list[tuple[float, bool]] = field(default_factory=list)

    def note(self, point: Point, *, newton: bool) -> None:
        """Count a step, and keep the error it led to."""
        if newton:
            self.n_newton += 1
        else:
            self.n_sinkhorn += 1
        self.errors.append((point.error, newton))


def solve(
    C: ArrayLike,
    a: ArrayLike,
    b: ArrayLike,
    *,
    lam: float,
    tau: float | tuple[float, float] = (1.0, 1.0),
    tol: float = 1e-9,
    max_iter: int = 500,
    forbidden: ArrayLike | None = None,
    source_names: Sequence[str] | None = None,
    target_names: Sequence[str] | None = None,
) -> Solution:
    """Solve ``min_W ⟨C, W⟩ + λ KL(W‖a⊗b)`` between component weights, balanced or relaxed.

    The plan and the potentials scale with the problem: multiplying ``C`` and ``lam`` by a constant leaves ``W`` as it
    is.

    Parameters
    ----------
    C : array_like [K, L]
        Cost between components; ``inf`` forbids an entry.
    a, b : array_like [K], [L]
        Weights, all positive. Their sums must agree where both sides are balanced.
    lam : float
        Temperature ``λ ≥ 0`` in units of ``C``. Zero solves the linear program exactly.
    tau : float or pair of floats in (0, 1]
        How strictly each marginal holds: ``τ = ρ/(ρ+λ)`` with the weight ``ρ`` of ``KL(W1‖a)``; 1 is exact.
    tol : float
        Largest marginal error ``‖W1 − a‖₁ + ‖Wᵀ1 − b‖₁`` of a converged plan.
    max_iter : int
        Most Newton steps.
    forbidden : bool array_like [K, L], optional
        True where no mass may go.
    source_names, target_names : sequences of str, optional
        Names of components for messages.

    Returns
    -------
    Solution
        Plan, potentials and what they cost.

    Raises
    ------
    ValueError
        For inputs outside these ranges, and for a ``forbidden`` pattern that no plan fits.

    Warns
    -----
    ConvergenceWarning
        If the tolerance is not reached; the result then has ``converged=False``.

    Notes
    -----
    Hot balanced problems are solved by sweeps, if a few of them show that this is quick. The others start from the
    linear program: from its potentials moved to the middle of the optimal set, and filled so that the plan has the
    vertex's values on its support; then come five sweeps. Larger problems (more than 4·10⁶ entries) and relaxed ones
    start hot and cool by factors of four, with the weights ``ρ`` held fixed, so that the first problems are strongly
    relaxed and easy. Then damped Newton runs on the semi-dual (`omt.solver.semidual`).

    References
    ----------
    M. Cuturi, Sinkhorn Distances, 2013. L. Chizat et al., Scaling algorithms for unbalanced optimal transport problems,
    2018. B. Schmitzer, Stabilized sparse scaling algorithms for entropy regularized transport problems, 2019.

    Examples
    --------
    >>> from omt.solver import solve
    >>> solution = solve([[0.0, 1.0], [1.0, 0.0]], [0.5, 0.5], [0.25, 0.75], lam=0.1)
    >>> solution.coupling.round(3).tolist()
    [[0.25, 0.25], [0.0, 0.5]]
    >>> solution.converged
    True
    """
    cost, source, target, pair = checked_problem(C, a, b, lam, tau, tol, max_iter, forbidden)
    K, L = cost.shape
    names = (
        [str(name) for name in source_names] if source_names is not None else [str(k) for k in range(K)],
        [str(name) for name in target_names] if target_names is not None else [str(l) for l in range(L)],
    )
    check_reachable(cost, names)
    effort = _Effort(budget=max_iter)
    if pair != (1.0, 1.0):
        relaxed = _solve_relaxed(cost, source, target, lam, pair, tol, effort)
        return _finished(cost, source, target, lam, pair, tol, effort, *relaxed)

    target = target * (source.sum() / target.sum())
    allowed = np.isfinite(cost)
    blocks = [(np.arange(K), np.arange(L))]
    if not allowed.all():
        blocks = feasible_blocks(allowed, source, target, *names)
    W, f, g = np.zeros((K, L)), np.zeros(K), np.zeros(L)
    complementary = True
    for rows, columns in blocks:
        part, a_part, b_part = cost[np.ix_(rows, columns)], source[rows], target[columns]
        b_part = b_part * (a_part.sum() / b_part.sum())
        if lam == 0.0:
            plan, f_part, g_part = solve_lp(part, a_part, b_part)
            complementary = complementary and is_strictly_complementary(part, plan, f_part, g_part)
        else:
            if effort.errors:
                effort.errors.append((float("nan"), False))  # a block ends here
            plan, f_part, g_part = _solve_balanced(part, a_part, b_part, lam, tol, effort)
        shift = 0.5 * float(a_part @ f_part - b_part @ g_part) / float(a_part.sum())
        W[np.ix_(rows, columns)], f[rows], g[columns] = plan, f_part - shift, g_part + shift
    solution = _finished(cost, source, target, lam, pair, tol, effort, W, f, g)
    return solution if lam > 0.0 else replace(solution, strictly_complementary=complementary)


# -- starts ----------------------------------------------------------------------------------------------------------


def _solve_balanced(
    cost: NDArray[np.float64],
    a: NDArray[np.float64],
    b: NDArray[np.float64],
    lam: float,
    tol: float,
    effort: _Effort,
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Plan and potentials with both marginals prescribed, from the linear program or, if it is large, by cooling."""
    if cost.shape[0] > cost.shape[1]:  # Newton runs on the shorter side
        W, g, f = _solve_balanced(cost.T, b, a, lam, tol, effort)
        return W.T, f, g
    f0 = cost.min(axis=1)
    g0 = np.min(cost - f0[:, None], axis=0)
    problem = SemiDual((cost - f0[:, None] - g0) / lam, a, b, (1.0, 1.0))
    noted = len(effort.errors)
    point = _swept_if_easy(problem, tol, effort)
    if point is None:
        del effort.errors[noted:]  # another start follows
        vertex, f0, g0 = _start(cost, a, b, lam, effort)
        # In reduced costs the potentials that Newton looks for are near zero, and no digits are lost to large offsets.
        problem = SemiDual((cost - f0[:, None] - g0) / lam, a, b, (1.0, 1.0))
        point = problem.at(np.zeros_like(a))
        if vertex is not None:
            filled = problem.at(vertex_potentials(vertex, a, b, problem.c))
            point = filled if problem.gain(point, filled) > 0.0 else point
        effort.errors.append((point.error, False))
        point = _climbed(problem, _swept(problem, point, _SWEEPS, tol, effort), tol, effort)
    return point.plan, f0 + lam * point.phi, g0 + lam * point.psi


def _swept_if_easy(problem: SemiDual, tol: float, effort: _Effort) -> Point | None:
    """Solve by sweeps alone where a few of them show that this takes fewer than ``_EASY`` more; None elsewhere.

    Hot problems are like this. A sweep costs two matrix-vector products, so that trying costs next to nothing.
    """
    goal = max(1e-5 * tol, 1e-15)
    start = problem.at(np.zeros_like(problem.a))
    effort.errors.append((start.error, False))
    point = _swept(problem, start, _SWEEPS, goal, effort)
    later = _swept(problem, point, _SWEEPS, goal, effort)
    if later.error > goal:
        rate = (later.error / point.error) ** (1.0 / _SWEEPS)
        if not (rate < 1.0 and np.log(goal / later.error) / np.log(rate) <= _EASY):
            return None
        later = _swept_while_it_pays(problem, later, 2 * _EASY, tol, goal, effort)
    return later if later.error <= tol and later.worst_ratio <= _ROW_RATIO else None


def _start(
    cost: NDArray[np.float64], a: NDArray[np.float64], b: NDArray[np.float64], lam: float, effort: _Effort
) -> tuple[NDArray[np.float64] | None, NDArray[np.float64], NDArray[np.float64]]:
    """Optimal vertex of the linear program and potentials in the middle of its dual; no vertex if it is large."""
    if cost.size <= _LP_ENTRIES:
        with suppress(RuntimeError):  # weights too small for the simplex; cooling does not mind them
            W, f, g = solve_lp(cost, a, b)
            return W, *centred_potentials(cost, W, f, g)
    f = _cooled_potential(cost, a, b, lam, (1.0, 1.0), effort)
    return None, f, np.min(cost - f[:, None], axis=0)


def _solve_relaxed(
    cost: NDArray[np.float64],
    a: NDArray[np.float64],
    b: NDArray[np.float64],
    lam: float,
    tau: tuple[float, float],
    tol: float,
    effort: _Effort,
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Plan and potentials with at least one relaxed marginal, by cooling."""
    if cost.shape[0] > cost.shape[1]:
        W, g, f = _solve_relaxed(cost.T, b, a, lam, tau[::-1], tol, effort)
        return W.T, f, g
    problem = SemiDual(cost / lam, a, b, tau)
    start = problem.at(_cooled_potential(cost, a, b, lam, tau, effort) / lam)
    effort.errors.append((start.error, False))
    point = _climbed(problem, _swept(problem, start, _SWEEPS, tol, effort), tol, effort)
    return point.plan, lam * point.phi, lam * point.psi


def _cooled_potential(
    cost: NDArray[np.float64],
    a: NDArray[np.float64],
    b: NDArray[np.float64],
    lam: float,
    tau: tuple[float, float],
    effort: _Effort,
) -> NDArray[np.float64]:
    """Potential ``f`` for a start at ``lam``: solve roughly at hotter temperatures, holding ``ρ = λτ/(1−τ)`` fixed."""
    finite = cost[np.isfinite(cost)]
    easy = 0.1 * float(finite.mean() - finite.min())

    def tau_at(temperature: float) -> tuple[float, float]:
        first, second = (t if t == 1.0 else t * lam / (t * lam + (1.0 - t) * temperature) for t in tau)
        return first, second

    ladder = [lam]
    while ladder[-1] < easy and np.prod(tau_at(ladder[-1])) > 0.8:
        ladder.append(ladder[-1] * _COOLING)
    f: NDArray[np.float64] = cost.min(axis=1) if tau == (1.0, 1.0) else np.zeros_like(a)
    sweeps, noted = _FIRST_SWEEPS, len(effort.errors)
    for temperature in reversed(ladder):
        problem = SemiDual(cost / temperature, a, b, tau_at(temperature))
        point = _swept(problem, problem.at(f / temperature), sweeps, 1e-2, effort)
        if temperature > lam:
            point = _climbed(problem, point, 1e-2, effort, rough=True)
        f, sweeps = temperature * point.phi, _SWEEPS
    del effort.errors[noted:]  # of other temperatures
    return f


# -- loops -----------------------------------------------------------------------------------------------------------


def _swept(problem: SemiDual, point: Point, sweeps: int, tol: float, effort: _Effort) -> Point:
    for _ in range(sweeps):
        if point.error <= tol and point.worst_ratio <= _ROW_RATIO:
            break
        point = problem.swept(point)
        effort.note(point, newton=False)
    return point


def _swept_while_it_pays(
    problem: SemiDual, point: Point, budget: int, tol: float, goal: float, effort: _Effort
) -> Point:
    """Sweeps towards ``goal`` as long as they get on: to ``tol`` within the budget, and beyond it by half each time."""
    for left in range(budget - _WATCHED, -1, -_WATCHED):
        before = point
        point = _swept(problem, before, _WATCHED, goal, effort)
        if point.error <= tol:
            getting_on = goal < point.error < 0.5 * before.error
        else:
            needed = np.log(point.error / tol)
            getting_on = left * np.log(before.error / point.error) >= _WATCHED * needed
        if not getting_on:
            break
    return point


def _climbed(problem: SemiDual, point: Point, tol: float, effort: _Effort, *, rough: bool = False) -> Point:
    """Newton steps until the tolerance; a sweep where no damping of a step helps."""
    damping = 1e-6
    extra = _EXTRA
    while effort.n_newton < effort.budget:
        if point.error <= tol:
            if rough or extra == 0 or point.worst_ratio <= _ROW_RATIO:
                break
            extra -= 1
        stepped, damping = problem.newton(point, damping)
        effort.note(point if stepped is None else stepped, newton=True)
        if stepped is None:
            stepped, damping = problem.swept(point), 1e-3
            effort.note(stepped, newton=False)
        point = stepped
    if rough or point.error > tol:
        return point
    for _ in range(_POLISH):
        if point.error <= 1e-14:
            break
        stepped, damping = problem.newton(point, damping)
        if stepped is None or stepped.error >= point.error:
            effort.note(point, newton=True)
            break
        point = stepped
        effort.note(point, newton=True)
    return point


# -- results ---------------------------------------------------------------------------------------------------------


def _finished(
    cost: NDArray[np.float64],
    a: NDArray[np.float64],
    b: NDArray[np.float64],
    lam: float,
    tau: tuple[float, float],
    tol: float,
    effort: _Effort,
    W: NDArray[np.float64],
    f: NDArray[np.float64],
    g: NDArray[np.float64],
) -> Solution:
    """Measure the plan itself, not the iteration that led to it, and warn where it is not good enough."""
    transport_cost = float(np.sum(W * np.where(W > 0.0, cost, 0.0)))
    objective = transport_cost + (lam * _kl(W, np.outer(a, b)) if lam > 0.0 else 0.0)
    error = 0.0
    for marginal, weights, potential, t in ((W.sum(axis=1), a, f, tau[0]), (W.sum(axis=0), b, g, tau[1])):
        wanted = weights
        if t < 1.0:
            rho = lam * t / (1.0 - t)
            wanted = weights * np.exp(-potential / rho)
            objective += rho * _kl(marginal, weights)
        error += float(np.abs(marginal - wanted).sum())
    converged = error <= tol
    if not converged:
        warnings.warn(
            f"the outer solver stopped after {effort.n_newton} Newton steps at a marginal error of {error:.2g}, above "
            f"tol={tol:.2g} (lam={lam:.3g}, costs up to {float(cost[np.isfinite(cost)].max()):.3g}): the plan does not "
            f"have the marginals it should; raise max_iter (now {effort.budget}) or tol, or take a larger reg",
            ConvergenceWarning,
            stacklevel=3,
        )
    return Solution(
        coupling=W,
        f=f,
        g=g,
        lam=float(lam),
        objective=objective,
        transport_cost=transport_cost,
        converged=converged,
        marginal_error=error,
        n_newton=effort.n_newton,
        n_sinkhorn=effort.n_sinkhorn,
        errors=np.array([value for value, _ in effort.errors], dtype=np.float64),
        newton=np.array([newton for _, newton in effort.errors], dtype=bool),
    )


def _kl(p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
    """Generalised ``KL(p‖q) = Σ p log(p/q) − p + q``."""
    ratio = np.divide(p, q, out=np.ones_like(p), where=p > 0.0)
    return float(np.sum(p * np.log(ratio) - p + q))
