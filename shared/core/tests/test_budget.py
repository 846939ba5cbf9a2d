"""Budgeted selection against HiGHS, brute force and hand-made cases."""

from __future__ import annotations

import itertools
import pickle
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from shared_core import InfeasibleBudgetError, solve_mckp


def highs_optimum(costs, values, budget):
    """Best value by the MILP solver HiGHS."""
    sizes = [len(c) for c in costs]
    n = sum(sizes)
    one_each = csr_array((np.ones(n), (np.repeat(np.arange(len(sizes)), sizes), np.arange(n))))
    result = milp(
        -np.concatenate(values),
        constraints=[
            LinearConstraint(one_each, 1, 1),
            LinearConstraint(np.concatenate(costs)[None].astype(float), -np.inf, budget),
        ],
        integrality=np.ones(n),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0},
    )
    assert result.success
    return -result.fun


def brute_force(costs, values, budget):
    """Best value by trying everything."""
    return max(
        sum(v[j] for v, j in zip(values, pick, strict=True))
        for pick in itertools.product(*(range(len(c)) for c in costs))
        if sum(int(c[j]) for c, j in zip(costs, pick, strict=True)) <= budget
    )


def random_problem(seed):
    """Ragged groups; values negative, non-concave, duplicated, or following the cost; costs small or large."""
    rng = np.random.default_rng(seed)
    most = rng.choice([4, 30, 1000, 10**9])
    costs = [rng.integers(0, most, rng.integers(1, 8)) for _ in range(rng.integers(1, 13))]
    kind = rng.integers(4)
    values = [
        (
            rng.normal(size=len(c)),
            rng.integers(-3, 4, len(c)).astype(float),
            c * 1.0 + rng.integers(0, 3, len(c)),
            -rng.random(len(c)) * rng.choice([1, 100], len(c)),
        )[kind]
        for c in costs
    ]
    low, high = sum(c.min() for c in costs), sum(c.max() for c in costs)
    return costs, values, int(rng.integers(low, high + 1))


def total(costs, values, choice):
    return (
        sum(int(c[j]) for c, j in zip(costs, choice, strict=True)),
        sum(float(v[j]) for v, j in zip(values, choice, strict=True)),
    )


@pytest.mark.parametrize("block", range(10))
def test_exact_value_equals_highs_on_200_random_problems(block):
    for seed in range(20 * block, 20 * block + 20):
        costs, values, budget = random_problem(seed)
        best = highs_optimum(costs, values, budget)
        assert solve_mckp(costs, values, budget).value == pytest.approx(best, rel=1e-7, abs=1e-7), f"seed {seed}"


@pytest.mark.parametrize("block", range(10))
def test_greedy_value_optimum_and_bound_are_in_order_on_200_random_problems(block):
    for seed in range(20 * block, 20 * block + 20):
        costs, values, budget = random_problem(seed)
        greedy = solve_mckp(costs, values, budget, method="greedy")
        best = highs_optimum(costs, values, budget)
        slack = 1e-7 * max(1.0, abs(best))
        assert greedy.value <= best + slack, f"seed {seed}"
        assert best <= greedy.upper_bound + slack, f"seed {seed}"


small_problems = st.lists(
    st.lists(st.tuples(st.integers(0, 12), st.integers(-8, 8)), min_size=1, max_size=4), min_size=1, max_size=5
)


@given(small_problems, st.integers(0, 40))
def test_exact_value_equals_brute_force(groups, extra):
    costs = [np.array([c for c, _ in group]) for group in groups]
    values = [np.array([v for _, v in group], dtype=float) for group in groups]
    budget = sum(int(c.min()) for c in costs) + extra
    assert solve_mckp(costs, values, budget).value == brute_force(costs, values, budget)


@given(small_problems, st.integers(0, 40), st.sampled_from(["exact", "greedy"]))
def test_reported_value_and_cost_are_those_of_the_choice_and_within_the_budget(groups, extra, method):
    costs = [np.array([c for c, _ in group]) for group in groups]
    values = [np.array([v for _, v in group], dtype=float) for group in groups]
    budget = sum(int(c.min()) for c in costs) + extra
    a = solve_mckp(costs, values, budget, method=method)
    assert (a.cost, a.value) == total(costs, values, a.choice)
    assert a.cost <= budget


@given(small_problems, st.integers(0, 40))
def test_greedy_that_claims_to_be_optimal_is(groups, extra):
    costs = [np.array([c for c, _ in group]) for group in groups]
    values = [np.array([v for _, v in group], dtype=float) for group in groups]
    budget = sum(int(c.min()) for c in costs) + extra
    greedy = solve_mckp(costs, values, budget, method="greedy")
    assert not greedy.optimal or greedy.value == brute_force(costs, values, budget)


@given(small_problems, st.integers(1, 1000))
def test_scaling_costs_and_budget_together_changes_no_choice(groups, factor):
    costs = [np.array([c for c, _ in group]) for group in groups]
    values = [np.array([v for _, v in group], dtype=float) for group in groups]
    budget = sum(int(c.min()) for c in costs) + 7
    plain, scaled = solve_mckp(costs, values, budget), solve_mckp([c * factor for c in costs], values, budget * factor)
    assert plain.value == scaled.value
    assert scaled.cost == factor * plain.cost


def test_concave_values_with_equal_steps_are_solved_by_the_greedy_alone():
    rng = np.random.default_rng(0)
    values = np.cumsum(-np.sort(-rng.random((50, 6)), axis=1), axis=1)
    costs = np.tile(np.arange(6), (50, 1))
    greedy = solve_mckp(costs, values, 111, method="greedy")
    assert greedy.optimal
    assert greedy.value == pytest.approx(highs_optimum(list(costs), list(values), 111))


def test_exact_goes_beyond_the_greedy_where_the_greedy_is_wrong():
    # By slope: 6 for 1, which leaves 9 for nothing; better is 10 for 10.
    costs, values = [[0, 1], [0, 10]], [[0.0, 6.0], [0.0, 50.0]]
    assert solve_mckp(costs, values, 10, method="greedy").value == 6
    assert solve_mckp(costs, values, 10).value == 50


def test_multiplier_is_the_slope_of_the_increment_that_no_longer_fits():
    # Increments: 8 for 2 (slope 4), 6 for 3 (slope 2). Budget 4 leaves 2 units at slope 2.
    a = solve_mckp([[0, 2], [0, 3]], [[0.0, 8.0], [0.0, 6.0]], 4, method="greedy")
    assert (a.value, a.multiplier, a.upper_bound) == (8.0, 2.0, 12.0)


def test_a_budget_that_does_not_bind_has_price_zero():
    a = solve_mckp([[0, 2], [0, 3]], [[0.0, 8.0], [0.0, 6.0]], 5)
    assert (a.value, a.multiplier, a.optimal) == (14.0, 0.0, True)


def test_infinite_budget_picks_the_most_valuable_choices():
    assert solve_mckp([[5, 2], [1, 3]], [[1.0, 8.0], [4.0, -6.0]], np.inf).choice.tolist() == [1, 0]


def test_first_of_equal_choices_is_taken():
    assert solve_mckp([[1, 1, 1]], [[2.0, 2.0, 2.0]], 1).choice.tolist() == [0]


def test_masked_choices_are_never_picked_and_never_looked_at():
    mask = np.array([[True, False, True], [False, True, True]])
    costs, values = np.array([[0.0, np.nan, 2.0], [-3.0, 1.0, 2.0]]), np.array([[0.0, np.inf, 5.0], [9.0, 1.0, 3.0]])
    masked = solve_mckp(costs, values, 4, mask=mask)
    assert masked.choice.tolist() == [2, 2]
    assert masked.value == 8


def test_frontier_corners_are_optimal_for_the_budget_that_they_cost():
    costs, values, budget = random_problem(7)
    frontier = solve_mckp(costs, values, budget, pareto=True).frontier
    for cost, value in frontier:
        assert value == pytest.approx(highs_optimum(costs, values, cost), abs=1e-6)


def test_frontier_is_concave():
    costs, values, budget = random_problem(11)
    cost, value = solve_mckp(costs, values, budget, pareto=True).frontier.T
    slopes = np.diff(value) / np.diff(cost)
    assert len(slopes) >= 3
    assert (np.diff(slopes) <= 1e-9).all()


def test_frontier_ends_at_the_best_choice_of_every_group():
    costs, values, budget = random_problem(7)
    frontier = solve_mckp(costs, values, budget, pareto=True).frontier
    assert frontier[-1, 1] == pytest.approx(sum(v.max() for v in values))


def test_no_groups_need_no_budget():
    a = solve_mckp([], [], 0)
    assert (a.choice.tolist(), a.value, a.cost, a.optimal) == ([], 0.0, 0, True)


def test_infeasible_budget_says_what_is_required():
    with pytest.raises(InfeasibleBudgetError, match=r"budget 5 is less than 6, the cost of the cheapest") as caught:
        solve_mckp([[2, 3], [4]], [[1.0, 2.0], [0.0]], 5)
    assert caught.value.required == 6


def test_infeasible_budget_error_survives_pickling():
    error = InfeasibleBudgetError("too little", required=6)
    assert pickle.loads(pickle.dumps(error)).required == 6


@pytest.mark.parametrize(
    ("costs", "values", "budget", "message"),
    [
        ([[0, 1], []], [[0.0, 1.0], []], 1, r"group 1 is empty"),
        ([[0, 1]], [[0.0, np.nan]], 1, r"group 0, choice 1: value nan is not finite"),
        ([[0, 1]], [[0.0, -np.inf]], 1, r"group 0, choice 1: value -inf is not finite"),
        ([[0], [0, -1]], [[0.0], [0.0, 1.0]], 1, r"group 1, choice 1: cost -1 is negative"),
        ([[0], [0.0, 1.5]], [[0.0], [0.0, 1.0]], 1, r"group 1, choice 1: cost 1.5 is fractional: .* scale"),
        ([[0, np.nan]], [[0.0, 1.0]], 1, r"group 0, choice 1: cost nan is not finite"),
        ([[0, 1]], [[0.0]], 1, r"group 0 has 2 costs but 1 values"),
        ([[0], [1]], [[0.0]], 1, r"costs has 2 groups but values has 1"),
        ([[0]], [[0.0]], np.nan, r"budget is NaN"),
        ([[[0]]], [[0.0]], 1, r"costs of group 0 must be one-dimensional, not of shape \[1, 1\]"),
        (np.zeros(3, int), np.zeros(3), 1, r"costs must have shape \[n, m\] or be a list of arrays, not \[3\]"),
        ([[2**61], [2**61]], [[0.0], [0.0]], 2**62, r"costs add up to more than 2\*\*62"),
        ([[0, 1]], [[1e308, -1e308]], 1, r"values add up to more than a float can hold"),
    ],
)
def test_bad_input_is_named(costs, values, budget, message):
    with pytest.raises(ValueError, match=message):
        solve_mckp(costs, values, budget)


def test_values_that_are_no_numbers_are_refused():
    with pytest.raises(TypeError, match="values must hold real numbers, not "):
        solve_mckp([[0, 1]], [["a", "b"]], 1)


def test_mask_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"mask \[1, 3\] must have the shape \[n, m\]"):
        solve_mckp([[0, 1]], [[0.0, 1.0]], 1, mask=np.ones((1, 3), bool))


def test_mask_that_is_not_bool_is_refused():
    with pytest.raises(TypeError, match="mask must be bool, not int64"):
        solve_mckp([[0, 1]], [[0.0, 1.0]], 1, mask=np.ones((1, 2), np.int64))


def test_mask_that_hides_a_whole_group_is_refused():
    with pytest.raises(ValueError, match="group 1 is empty"):
        solve_mckp([[0, 1], [0, 1]], [[0.0, 1.0], [0.0, 1.0]], 1, mask=np.array([[True, True], [False, False]]))


def test_unknown_method_lists_the_known_ones():
    with pytest.raises(ValueError, match="method must be 'exact' or 'greedy', not 'magic'"):
        solve_mckp([[0]], [[0.0]], 1, method="magic")


def even_costs_and_odd_budget():
    """Value equals cost, so nothing is dominated; one odd cost keeps the greedy from its bound."""
    costs = 2 * np.random.default_rng(0).integers(1, 500, (300, 5))
    costs[0, 0] = 1
    return costs, costs.astype(float), int(costs.sum() / 5) | 1


def test_memory_limit_names_the_size_and_suggests_the_greedy():
    costs, values, budget = even_costs_and_odd_budget()
    with pytest.raises(ValueError, match=r"needs \d+ MiB or more .* memory_limit is 1 MiB: .* method='greedy'"):
        solve_mckp(costs, values, budget, memory_limit=2**20)


def test_greedy_of_6144_groups_takes_at_most_two_seconds():
    rng = np.random.default_rng(1)
    costs, values = rng.integers(0, 1000, (6144, 6)), rng.random((6144, 6))
    start = time.process_time()
    solve_mckp(costs, values, int(1.5 * costs.min(1).sum()), method="greedy")
    assert time.process_time() - start <= 2


@pytest.mark.parametrize("kind", ["sorted", "convex", "shuffled", "follows cost"])
def test_exact_of_3072_groups_with_non_concave_values_takes_at_most_ten_seconds_and_one_gibibyte(kind):
    rng = np.random.default_rng(2)
    costs = np.tile(np.arange(5), (3072, 1)) if kind != "follows cost" else rng.integers(1, 1000, (3072, 5))
    values = {
        "sorted": np.sort(rng.random((3072, 5)), axis=1),
        "convex": np.tile(np.arange(5.0) ** 2, (3072, 1)) + rng.random((3072, 1)),
        "shuffled": rng.random((3072, 5)),
        "follows cost": costs + rng.integers(0, 10, (3072, 5)),
    }[kind]
    tracemalloc.start()
    start = time.process_time()
    a = solve_mckp(costs, values, int(costs.sum() / 5))
    seconds, peak = time.process_time() - start, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert a.optimal
    assert seconds <= 10
    assert peak <= 2**30


def test_a_large_problem_agrees_with_highs():
    rng = np.random.default_rng(3)
    costs, values = np.sort(rng.integers(1, 10**9, (400, 5)), axis=1), np.sort(rng.random((400, 5)), axis=1)
    budget = int(costs.sum() / 5)
    assert solve_mckp(costs, values, budget).value == pytest.approx(
        highs_optimum(list(costs), list(values), budget), rel=1e-9
    )


def test_costs_beyond_2_to_the_53_stay_exact_beside_a_group_of_floats():
    odd = 2**53 + 1
    best = solve_mckp([np.array([odd]), np.array([0.0, 1.0])], [[1.0], [0.0, 1.0]], odd)
    assert (best.choice.tolist(), best.cost) == ([0, 0], odd)


def test_a_budget_beyond_every_float_is_no_limit():
    assert solve_mckp([[0, 5]], [[0.0, 1.0]], 10**400).value == 1.0


@pytest.mark.parametrize("budget", ["5", None])
def test_a_budget_that_is_no_number_is_refused(budget):
    with pytest.raises(TypeError, match="budget must be a number, not"):
        solve_mckp([[1]], [[1.0]], budget)
