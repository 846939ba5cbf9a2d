"""The balanced outer solver: against POT, against itself under changes that must not matter, and on hard inputs."""

from __future__ import annotations

import warnings

import numpy as np
import ot
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from omt.pairs.cost import component_cost
from omt.solver import ConvergenceWarning, block_coordinate_descent, solve


@st.composite
def problems(draw):
    """Shapes 1×1 … 40×60, weights down to 1e-8, ties, duplicated components."""
    K, L = draw(st.integers(1, 40)), draw(st.integers(1, 60))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    X, Y = rng.normal(size=(K, 3)), rng.normal(size=(L, 3))
    if draw(st.booleans()):
        X, Y = X.round(), Y.round()  # ties and duplicates
    C = ((X[:, None] - Y) ** 2).sum(axis=2)
    kind = draw(st.sampled_from(["equal", "dirichlet", "tiny"]))
    weights = []
    for n in (K, L):
        w = np.ones(n) if kind == "equal" else rng.dirichlet(np.ones(n)) + 1e-8
        if kind == "tiny":
            w = np.where(rng.random(n) < 0.3, 1e-8, w)
        weights.append(w / w.sum())
    return C, weights[0], weights[1], draw(st.sampled_from([1e-1, 1e-2, 1e-3, 1e-4]))


def temperature(C, reg):
    return reg * C.mean() if C.mean() > 0 else reg


# -- against peers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("K", "L", "equal"), [(1, 1, True), (7, 4, False), (30, 30, True), (25, 60, False)])
def test_zero_temperature_is_the_linear_program(random_problem, K, L, equal):
    C, a, b = random_problem(0, K, L, equal=equal)
    solution = solve(C, a, b, lam=0.0)
    assert solution.transport_cost == pytest.approx(ot.emd2(a, b, C), rel=1e-12)
    assert solution.marginal_error < 1e-12


def test_linear_program_agrees_with_highs(random_problem):
    C, a, b = random_problem(3, 8, 6)
    marginals = np.vstack([np.kron(np.eye(8), np.ones(6)), np.kron(np.ones(8), np.eye(6))])
    reference = linprog(C.ravel(), A_eq=marginals, b_eq=np.concatenate([a, b]), method="highs")
    assert solve(C, a, b, lam=0.0).objective == pytest.approx(reference.fun, rel=1e-9)


def test_potentials_of_the_linear_program_are_feasible_and_tight(random_problem):
    C, a, b = random_problem(1, 20, 15)
    solution = solve(C, a, b, lam=0.0)
    slack = C - solution.f[:, None] - solution.g
    assert slack.min() > -1e-12
    assert abs(slack[solution.coupling > 0]).max() < 1e-12


@pytest.mark.parametrize("reg", [0.3, 0.1])
@pytest.mark.parametrize(("K", "L", "equal"), [(20, 20, True), (13, 31, False), (31, 13, False)])
def test_moderate_temperature_agrees_with_log_domain_sinkhorn(random_problem, K, L, equal, reg):
    C, a, b = random_problem(5, K, L, equal=equal)
    lam = reg * C.mean()
    peer = ot.sinkhorn(a, b, C, lam, method="sinkhorn_log", stopThr=1e-12, numItermax=20000)
    assert abs(solve(C, a, b, lam=lam).coupling - peer).sum() < 1e-9


def test_small_temperature_tends_to_the_linear_program(random_problem):
    C, a, b = random_problem(2, 15, 12)
    exact = ot.emd(a, b, C)
    gaps = [abs(solve(C, a, b, lam=reg * C.mean()).coupling - exact).sum() for reg in (1e-1, 1e-2, 1e-3, 1e-5)]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 1e-12


# -- convergence -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reg", [1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 3e-4])
@pytest.mark.parametrize("equal", [True, False])
def test_two_hundred_components_converge_in_25_newton_steps(random_problem, reg, equal):
    for seed in range(3):
        C, a, b = random_problem(seed, 200, 200, equal=equal)
        solution = solve(C, a, b, lam=reg * C.mean())
        assert solution.converged
        assert abs(solution.coupling.sum(axis=1) - a).sum() + abs(solution.coupling.sum(axis=0) - b).sum() <= 1e-9
        assert solution.n_newton <= 25


def test_cooling_without_the_linear_program_gives_the_same_plan(random_problem, monkeypatch):
    C, a, b = random_problem(4, 60, 80)
    expected = solve(C, a, b, lam=1e-3 * C.mean())
    monkeypatch.setattr("omt.solver.outer._LP_ENTRIES", 0)
    monkeypatch.setattr("omt.solver.outer.solve_lp", lambda *_: pytest.fail("the linear program was solved"))
    cooled = solve(C, a, b, lam=1e-3 * C.mean())
    assert cooled.converged
    assert abs(cooled.coupling - expected.coupling).sum() < 1e-9


def test_an_unconverged_plan_is_flagged_and_warned_about(random_problem):
    C, a, b = random_problem(0, 50, 50, equal=True)
    with pytest.warns(ConvergenceWarning, match=r"stopped after 1 Newton steps .* above tol=1e-09 .* raise max_iter"):
        solution = solve(C, a, b, lam=1e-3 * C.mean(), max_iter=1)
    assert not solution.converged
    assert solution.marginal_error > 1e-9


@given(problems())
def test_every_problem_converges_with_both_optimality_conditions(problem):
    C, a, b, reg = problem
    lam = temperature(C, reg)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solution = solve(C, a, b, lam=lam)
    W = solution.coupling
    assert abs(W.sum(axis=1) - a).sum() + abs(W.sum(axis=0) - b).sum() <= 1e-9
    gibbs = np.outer(a, b) * np.exp((solution.f[:, None] + solution.g - C) / lam)
    np.testing.assert_allclose(W, gibbs, rtol=1e-6, atol=1e-15)


@given(problems())
def test_rare_components_are_as_accurate_as_common_ones(problem):
    C, a, b, reg = problem
    W = solve(C, a, b, lam=temperature(C, reg)).coupling
    assert abs(W.sum(axis=1) / a - 1).max() < 1e-5
    assert abs(W.sum(axis=0) / b - 1).max() < 1e-5


@given(problems(), st.floats(-9, 12))
def test_plan_does_not_depend_on_the_unit_of_cost(problem, exponent):
    C, a, b, reg = problem
    lam, scale = temperature(C, reg), 10.0**exponent
    first, second = solve(C, a, b, lam=lam), solve(scale * C, a, b, lam=scale * lam)
    assert abs(first.coupling - second.coupling).sum() < 3e-9


@given(problems(), st.integers(0, 2**32 - 1))
def test_permuting_components_permutes_the_plan(problem, seed):
    C, a, b, reg = problem
    rng = np.random.default_rng(seed)
    rows, columns = rng.permutation(len(a)), rng.permutation(len(b))
    lam = temperature(C, reg)
    plain = solve(C, a, b, lam=lam)
    permuted = solve(C[np.ix_(rows, columns)], a[rows], b[columns], lam=lam)
    assert abs(plain.coupling[np.ix_(rows, columns)] - permuted.coupling).sum() < 3e-9


@given(problems())
def test_transposing_the_problem_transposes_the_plan(problem):
    C, a, b, reg = problem
    lam = temperature(C, reg)
    assert abs(solve(C, a, b, lam=lam).coupling - solve(C.T, b, a, lam=lam).coupling.T).sum() < 3e-9


@given(problems())
def test_duality_gap_closes(problem):
    C, a, b, reg = problem
    lam = temperature(C, reg)
    solution = solve(C, a, b, lam=lam)
    dual = a @ solution.f + b @ solution.g  # the exponential term is constant where marginals hold
    assert solution.objective == pytest.approx(dual, abs=1e-7 * (abs(dual) + lam + abs(C).max()))


@given(problems())
def test_objective_is_below_that_of_other_couplings(problem):
    C, a, b, reg = problem
    lam = temperature(C, reg)
    independent = np.outer(a, b)
    solution = solve(C, a, b, lam=lam)
    exact = ot.emd(a / a.sum(), b / b.sum(), C)
    other = 0.5 * (exact + independent)
    ratio = other / independent
    value = (C * other).sum() + lam * (other * np.log(np.where(other > 0, ratio, 1.0))).sum()
    assert solution.objective <= value + 1e-9 * (abs(value) + lam)


def test_splitting_a_component_splits_its_row(random_problem):
    C, a, b = random_problem(6, 10, 8)
    lam = 0.01 * C.mean()
    whole = solve(C, a, b, lam=lam).coupling
    split = solve(np.vstack([C, C[:1]]), np.append(a, 0.25 * a[0]) * np.r_[0.75, np.ones(10)], b, lam=lam).coupling
    np.testing.assert_allclose(split[0] + split[-1], whole[0], atol=1e-10)
    np.testing.assert_allclose(split[-1] / 0.25, split[0] / 0.75, atol=1e-10)


def test_identical_costs_give_the_independent_plan():
    a, b = np.array([0.25, 0.75]), np.array([0.1, 0.2, 0.7])
    for value in (0.0, 3.0):
        np.testing.assert_allclose(solve(np.full((2, 3), value), a, b, lam=0.5).coupling, np.outer(a, b), atol=1e-15)


def test_one_far_component_does_not_spoil_the_others(random_problem):
    C, a, b = random_problem(7, 12, 12)
    far = C.copy()
    far[0] += 1e12
    lam = 0.05 * C.mean()
    # A constant added to a row cannot change the plan.
    assert abs(solve(far, a, b, lam=lam).coupling - solve(C, a, b, lam=lam).coupling).sum() < 1e-3
    assert solve(far, a, b, lam=lam).converged


# -- uniqueness ------------------------------------------------------------------------------------------------------


def test_linear_program_with_one_solution_is_strictly_complementary(random_problem):
    C, a, b = random_problem(0, 9, 7)
    assert solve(C, a, b, lam=0.0).strictly_complementary is True
    assert solve(C, a, b, lam=0.1).strictly_complementary is None


def test_linear_program_with_ties_is_not_strictly_complementary():
    half = np.full(2, 0.5)
    assert solve([[1.0, 1.0], [1.0, 1.0]], half, half, lam=0.0).strictly_complementary is False
    assert solve([[0.0, 1.0], [1.0, 2.0]], half, half, lam=0.0).strictly_complementary is False
    assert solve([[0.0, 1.0], [1.0, 0.0]], half, half, lam=0.0).strictly_complementary is True


def test_degenerate_assignment_with_one_solution_is_strictly_complementary(random_problem):
    C, a, b = random_problem(1, 12, 12, equal=True)  # the simplex's own potentials are tight off the plan here
    assert solve(C, a, b, lam=0.0).strictly_complementary is True


def gaussian_problem(seed, K=4, L=5, d=3):
    rng = np.random.default_rng(seed)

    def covariances(n):
        G = rng.normal(size=(n, d, d))
        return G @ G.transpose(0, 2, 1) + 0.3 * np.eye(d)

    return (
        (rng.dirichlet(np.full(K, 3.0)), rng.normal(size=(K, d)), covariances(K)),
        (rng.dirichlet(np.full(L, 3.0)), rng.normal(size=(L, d)), covariances(L)),
    )


@pytest.fixture(scope="module")
def descents():
    """Block-coordinate descent from twenty random interior starts."""
    source, target = gaussian_problem(0)
    results = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        W = rng.uniform(0.1, 1.0, (4, 5))
        for _ in range(500):
            W *= (source[0] / W.sum(axis=1))[:, None]
            W *= target[0] / W.sum(axis=0)
        R = rng.normal(size=(4, 5, 3, 3))
        R *= rng.uniform(0.05, 0.95, (4, 5, 1, 1)) / np.linalg.norm(R, ord=2, axis=(2, 3), keepdims=True)
        results.append(block_coordinate_descent(*source, *target, lam=0.3, epsilon=0.5, coupling=W, contraction=R))
    return results


def test_block_descent_never_raises_the_objective(descents):
    for result in descents:
        assert np.all(np.diff(result.objectives) <= 1e-12 * abs(result.objectives[-1]))


def test_block_descent_reaches_the_minimum_in_its_first_sweep(descents):
    for result in descents:
        assert result.objectives[0] > result.objectives[-1] + 1e-3
        assert result.objectives[2] == pytest.approx(result.objectives[-1], rel=1e-12)


def test_all_starts_of_block_descent_agree(descents):
    for result in descents[1:]:
        assert abs(result.coupling - descents[0].coupling).sum() < 1e-9
        assert abs(result.contraction - descents[0].contraction).max() < 1e-9


def test_block_descent_finds_the_plan_of_the_direct_solver(descents):
    from omt.mixture import Mixture

    source, target = gaussian_problem(0)
    C = component_cost(Mixture.from_gaussians(*source), Mixture.from_gaussians(*target), cost="entropic", epsilon=0.5)
    direct = solve(C, source[0], target[0], lam=0.3)
    assert descents[0].objectives[-1] == pytest.approx(direct.objective, rel=1e-10)
    assert abs(descents[0].coupling - direct.coupling).sum() < 1e-9


def test_block_descent_needs_both_temperatures():
    source, target = gaussian_problem(1)
    with pytest.raises(ValueError, match=r"lam and epsilon must be positive, got lam=0\.1, epsilon=0\.0"):
        block_coordinate_descent(*source, *target, lam=0.1, epsilon=0.0)


# -- forbidden transitions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lam", [0.0, 0.05, 1e-4])
def test_forbidden_entries_carry_no_mass(random_problem, lam):
    C, a, b = random_problem(8, 10, 12)
    forbidden = np.random.default_rng(0).random(C.shape) < 0.3
    solution = solve(C, a, b, lam=lam, forbidden=forbidden)
    assert solution.converged
    assert solution.coupling[forbidden].max() == 0.0


def test_forbidding_is_the_limit_of_a_large_cost(random_problem):
    C, a, b = random_problem(9, 8, 8)
    forbidden = np.random.default_rng(1).random(C.shape) < 0.3
    lam = 0.05 * C.mean()
    expensive = solve(np.where(forbidden, 1e3 * C.max(), C), a, b, lam=lam)
    assert abs(solve(C, a, b, lam=lam, forbidden=forbidden).coupling - expensive.coupling).sum() < 1e-9


def test_entries_that_no_plan_can_fill_are_zero_and_the_rest_is_exact():
    # Source 0 can only go to target 0 and fills it, so source 1 may not use target 0 although it is allowed to.
    forbidden = np.array([[False, True, True], [False, False, False]])
    C = np.array([[1.0, 0.0, 0.0], [0.0, 3.0, 1.0]])
    solution = solve(C, [0.4, 0.6], [0.4, 0.3, 0.3], lam=0.2, forbidden=forbidden)
    np.testing.assert_allclose(solution.coupling, [[0.4, 0, 0], [0, 0.3, 0.3]], atol=1e-15)


def test_lineage_blocks_are_solved_separately(random_problem):
    C, a, b = random_problem(10, 9, 9)
    block = np.arange(9) // 3
    forbidden = block[:, None] != block
    for k in range(3):  # equal masses of the blocks
        a[block == k] /= 3 * a[block == k].sum()
        b[block == k] /= 3 * b[block == k].sum()
    lam = 0.02 * C.mean()
    whole = solve(C, a, b, lam=lam, forbidden=forbidden).coupling
    for k in range(3):
        part = np.ix_(block == k, block == k)
        alone = solve(C[part], 3 * a[block == k], 3 * b[block == k], lam=lam).coupling
        np.testing.assert_allclose(whole[part], alone / 3, atol=1e-11)


def test_infeasible_pattern_names_the_component():
    forbidden = np.array([[False, True], [False, False]])
    with pytest.raises(
        ValueError, match=r"source component 'stem' of weight 0\.7 may only go to 'early' of weight 0\.4, so 0\.3"
    ):
        solve(
            np.ones((2, 2)),
            [0.7, 0.3],
            [0.4, 0.6],
            lam=0.1,
            forbidden=forbidden,
            source_names=["stem", "nerve"],
            target_names=["early", "late"],
        )


def test_infeasible_set_of_components_is_named_whole():
    forbidden = np.ones((4, 4), dtype=bool)
    forbidden[[0, 1, 2], 0] = forbidden[[0, 1], 1] = False  # three sources of weight 1/4 share two targets
    forbidden[3] = False
    forbidden[2, 1] = False
    with pytest.raises(ValueError, match=r"source component '0', '1', '2' of weight 0\.75 may only go to '0', '1' "):
        solve(np.ones((4, 4)), np.full(4, 0.25), np.full(4, 0.25), lam=0.1, forbidden=forbidden)


def test_component_without_any_partner_is_named():
    forbidden = np.array([[False, False], [True, True]])
    with pytest.raises(ValueError, match="source component '1' has no allowed target component"):
        solve(np.ones((2, 2)), [0.5, 0.5], [0.5, 0.5], lam=0.1, forbidden=forbidden)
    with pytest.raises(ValueError, match="target component '1' has no allowed source component"):
        solve(np.ones((2, 2)), [0.5, 0.5], [0.5, 0.5], lam=0.1, tau=0.9, forbidden=forbidden.T)


@settings(max_examples=30)
@given(problems(), st.integers(0, 2**32 - 1))
def test_any_feasible_pattern_converges(problem, seed):
    C, a, b, reg = problem
    rng = np.random.default_rng(seed)
    allowed = (ot.emd(a / a.sum(), b / b.sum(), rng.random(C.shape)) > 0) | (rng.random(C.shape) < 0.2)
    solution = solve(C, a, b, lam=temperature(C, reg), forbidden=~allowed)
    assert solution.converged
    assert solution.coupling[~allowed].sum() == 0.0


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"C": np.ones((2, 3))}, r"C has shape \(2, 3\), but a and b have 2 and 2 weights"),
        ({"C": [[0.0, np.nan], [1.0, 0.0]]}, r"C\[0, 1\] is nan; costs must be finite"),
        ({"a": [0.0, 1.0]}, r"a\[0\] is 0\.0; weights must be finite and > 0"),
        ({"b": [1.5, -0.5]}, r"b\[1\] is -0\.5; weights must be finite and > 0"),
        ({"b": [0.5, 0.6]}, r"a sums to 1 and b to 1\.1: balanced transport needs equal sums"),
        ({"lam": -1.0}, r"lam is -1\.0; it must be a finite number ≥ 0"),
        ({"lam": np.inf}, "lam is inf; it must be a finite number ≥ 0"),
        ({"tau": 0.0}, r"tau is 0\.0; it must be a number in \(0, 1\] or a pair"),
        ({"tau": (0.5, 1.5)}, r"tau is \(0\.5, 1\.5\); it must be a number in \(0, 1\] or a pair"),
        ({"tau": np.nan}, r"tau is nan; it must be a number in \(0, 1\]"),
        ({"lam": 0.0, "tau": 0.9}, r"tau is \(0\.9, 0\.9\), which needs lam \(or reg\) > 0"),
        ({"tol": 0.0}, r"tol is 0\.0; it must be a finite number > 0"),
        ({"max_iter": 0}, "max_iter is 0; it must be a whole number of at least 1"),
        ({"forbidden": np.zeros((2, 3), bool)}, r"forbidden must be a bool array of shape \(2, 2\), got bool \(2, 3\)"),
        ({"forbidden": np.zeros((2, 2))}, r"forbidden must be a bool array of shape \(2, 2\), got float64"),
    ],
)
def test_bad_input_is_named(change, message):
    arguments = {"C": [[0.0, 1.0], [1.0, 0.0]], "a": [0.5, 0.5], "b": [0.5, 0.5], "lam": 0.1} | change
    with pytest.raises(ValueError, match=message):
        solve(arguments.pop("C"), arguments.pop("a"), arguments.pop("b"), **arguments)


def test_sweeps_stop_where_they_no_longer_get_on(monkeypatch):
    rng = np.random.default_rng(31)
    C = ((rng.normal(size=(12, 1, 3)) - rng.normal(size=(1, 12, 3))) ** 2).sum(axis=-1)
    a, b = (w / w.sum() for w in rng.dirichlet(np.full(12, 0.1), 2) + 1e-12)
    solution = solve(C, a, b, lam=0.1 * C.mean(), tol=1e-6)  # its first sweeps are fast, the next hundreds slow
    assert solution.n_sinkhorn < 50
    monkeypatch.setattr("omt.solver.outer._swept_if_easy", lambda *_: None)
    np.testing.assert_allclose(solution.coupling, solve(C, a, b, lam=0.1 * C.mean(), tol=1e-6).coupling, atol=1e-12)
