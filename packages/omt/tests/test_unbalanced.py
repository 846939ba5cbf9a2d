"""Relaxed marginals: against POT, a general convex solver, limits in tau, and optimality conditions."""

from __future__ import annotations

import numpy as np
import ot
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.special import rel_entr

from omt.solver import solve


def kl(p, q):
    return float(np.sum(rel_entr(p, q) - p + q))


def objective(W, C, a, b, lam, tau):
    value = float((C * W).sum()) + lam * kl(W, np.outer(a, b))
    for marginal, weights, t in ((W.sum(axis=1), a, tau[0]), (W.sum(axis=0), b, tau[1])):
        if t < 1:
            value += lam * t / (1 - t) * kl(marginal, weights)
    return value


@pytest.mark.parametrize("tau", [0.5, 0.9, 0.98])
@pytest.mark.parametrize(("K", "L"), [(8, 8), (12, 20), (20, 12)])
def test_agrees_with_pot(random_problem, K, L, tau):
    C, a, b = random_problem(K + L, K, L)
    lam = 0.1 * C.mean()
    peer = ot.unbalanced.sinkhorn_unbalanced(
        a, b, C, lam, lam * tau / (1 - tau), reg_type="kl", method="sinkhorn", numItermax=20000, stopThr=1e-14
    )
    np.testing.assert_allclose(solve(C, a, b, lam=lam, tau=tau).coupling, peer, rtol=1e-7, atol=1e-13)


@pytest.mark.parametrize("tau", [(0.9, 0.6), (0.4, 0.95)])
def test_sides_may_differ_and_agree_with_pot(random_problem, tau):
    C, a, b = random_problem(3, 9, 14)
    lam = 0.1 * C.mean()
    rho = tuple(lam * t / (1 - t) for t in tau)
    peer = ot.unbalanced.sinkhorn_unbalanced(a, b, C, lam, rho, reg_type="kl", numItermax=20000, stopThr=1e-14)
    np.testing.assert_allclose(solve(C, a, b, lam=lam, tau=tau).coupling, peer, rtol=1e-7, atol=1e-13)


def test_agrees_with_a_general_convex_solver(random_problem):
    C, a, b = random_problem(0, 3, 4)
    lam, tau = 0.2 * C.mean(), (0.8, 0.9)
    result = minimize(
        lambda logs: objective(np.exp(logs).reshape(3, 4), C, a, b, lam, tau),
        np.log(np.outer(a, b)).ravel(),
        method="BFGS",
        options={"gtol": 1e-10},
    )
    solution = solve(C, a, b, lam=lam, tau=tau)
    assert solution.objective == pytest.approx(result.fun, rel=1e-9)
    assert solution.objective == pytest.approx(objective(solution.coupling, C, a, b, lam, tau), rel=1e-12)


@st.composite
def problems(draw):
    K, L = draw(st.integers(1, 30)), draw(st.integers(1, 30))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    C = ((rng.normal(size=(K, 3))[:, None] - rng.normal(size=(L, 3))) ** 2).sum(axis=2)
    weights = [np.where(rng.random(n) < 0.2, 1e-8, rng.dirichlet(np.ones(n)) + 1e-8) for n in (K, L)]
    tau = tuple(draw(st.sampled_from([0.3, 0.9, 0.99, 0.9999, 1.0])) for _ in range(2))
    return (
        C,
        weights[0] / weights[0].sum(),
        weights[1] / weights[1].sum(),
        draw(st.sampled_from([0.1, 0.01, 1e-3])),
        tau,
    )


@given(problems())
def test_every_problem_satisfies_its_optimality_conditions(problem):
    C, a, b, reg, tau = problem
    lam = reg * C.mean()
    solution = solve(C, a, b, lam=lam, tau=tau)
    assert solution.converged
    W = solution.coupling
    np.testing.assert_allclose(
        W, np.outer(a, b) * np.exp((solution.f[:, None] + solution.g - C) / lam), rtol=1e-6, atol=1e-15
    )
    for marginal, weights, potential, t in ((W.sum(1), a, solution.f, tau[0]), (W.sum(0), b, solution.g, tau[1])):
        wanted = weights if t == 1.0 else weights * np.exp(-potential * (1 - t) / (t * lam))
        assert abs(marginal - wanted).sum() <= 1e-9


@given(problems())
def test_no_nearby_plan_is_better(problem):
    C, a, b, reg, tau = problem
    if tau == (1.0, 1.0) or 1.0 in tau:
        tau = (0.9, 0.9)
    lam = reg * C.mean()
    solution = solve(C, a, b, lam=lam, tau=tau)
    rng = np.random.default_rng(0)
    for size in (1e-3, 1e-1):
        other = solution.coupling * np.exp(size * rng.normal(size=C.shape))
        assert solution.objective <= objective(other, C, a, b, lam, tau) + 1e-12 * abs(solution.objective)


@given(problems(), st.floats(-9, 12))
def test_plan_does_not_depend_on_the_unit_of_cost(problem, exponent):
    C, a, b, reg, tau = problem
    lam, scale = reg * C.mean(), 10.0**exponent
    first, second = solve(C, a, b, lam=lam, tau=tau), solve(scale * C, a, b, lam=scale * lam, tau=tau)
    assert abs(first.coupling - second.coupling).sum() < 1e-8


def test_tau_near_one_tends_to_the_balanced_plan(random_problem):
    C, a, b = random_problem(1, 15, 10)
    lam = 0.01 * C.mean()
    balanced = solve(C, a, b, lam=lam).coupling
    gaps = [abs(solve(C, a, b, lam=lam, tau=t).coupling - balanced).sum() for t in (0.9, 0.99, 0.9999, 1 - 1e-7)]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 1e-4


def test_a_side_with_tau_one_keeps_its_weights(random_problem):
    C, a, b = random_problem(2, 15, 10)
    W = solve(C, a, b, lam=0.02 * C.mean(), tau=(1.0, 0.8)).coupling
    np.testing.assert_allclose(W.sum(axis=1), a, rtol=1e-9)
    assert abs(W.sum(axis=0) - b).sum() > 1e-3


def test_weights_may_have_unequal_sums(random_problem):
    C, a, b = random_problem(4, 6, 7)
    lam = 0.1 * C.mean()
    peer = ot.unbalanced.sinkhorn_unbalanced(
        a, 1.5 * b, C, lam, 9 * lam, reg_type="kl", numItermax=20000, stopThr=1e-14
    )
    np.testing.assert_allclose(solve(C, a, 1.5 * b, lam=lam, tau=0.9).coupling, peer, rtol=1e-7)


def test_an_isolated_component_dies_out_and_the_others_keep_their_partners():
    C = np.array([[0.0, 9.0], [9.0, 0.0], [400.0, 400.0]])
    W = solve(C, np.full(3, 1 / 3), np.full(2, 0.5), lam=1.0, tau=(0.9, 1.0)).coupling
    assert W[2].sum() < 1e-10
    assert W[0, 0] == pytest.approx(0.5, abs=1e-3)


def test_forbidden_entries_carry_no_mass(random_problem):
    C, a, b = random_problem(5, 10, 12)
    forbidden = np.random.default_rng(0).random(C.shape) < 0.4
    solution = solve(C, a, b, lam=0.05 * C.mean(), tau=0.9, forbidden=forbidden)
    assert solution.converged
    assert solution.coupling[forbidden].max() == 0.0
    assert solution.coupling[~forbidden].min() > 0.0
