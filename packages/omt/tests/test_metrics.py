"""Metrics against closed forms, brute force and linear programs written out."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment, linprog
from scipy.spatial.distance import cdist
from scipy.stats import energy_distance as scipy_energy_distance

from omt import metrics
from omt.metrics import energy_distance, l2_uvp, lineage_consistency, w2


def test_l2_uvp_of_the_constant_map_to_the_mean_is_a_hundred():
    truth = np.random.default_rng(0).normal(size=(50, 3))
    assert l2_uvp(np.tile(truth.mean(axis=0), (50, 1)), truth) == pytest.approx(100.0)


def test_l2_uvp_of_the_true_map_is_zero():
    truth = np.random.default_rng(0).normal(size=(50, 3))
    assert l2_uvp(truth, truth) == 0.0


def test_w2_equals_the_best_assignment():
    rng = np.random.default_rng(1)
    X, Y = rng.normal(size=(20, 2)), rng.normal(size=(20, 2))
    cost = cdist(X, Y, "sqeuclidean")
    rows, columns = linear_sum_assignment(cost)
    assert w2(X, Y) == pytest.approx(np.sqrt(cost[rows, columns].mean()), rel=1e-10)


def test_w2_in_one_dimension_is_the_distance_of_sorted_samples():
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=30), rng.gamma(2.0, size=30)
    assert w2(x[:, None], y[:, None]) == pytest.approx(np.sqrt(((np.sort(x) - np.sort(y)) ** 2).mean()), rel=1e-10)


def test_w2_of_weighted_samples_equals_that_of_repeated_ones():
    rng = np.random.default_rng(3)
    X, Y = rng.normal(size=(4, 2)), rng.normal(size=(5, 2))
    repeats = np.array([1, 2, 3, 4])
    assert w2(X, Y, mu=repeats / 10) == pytest.approx(w2(np.repeat(X, repeats, axis=0), Y), rel=1e-10)


def test_w2_of_a_shift_is_its_length():
    X = np.random.default_rng(4).normal(size=(15, 3))
    assert w2(X, X + np.array([3.0, 0.0, 4.0])) == pytest.approx(5.0)


def test_energy_distance_equals_scipy_in_one_dimension():
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=40), rng.normal(1.0, 2.0, size=30)
    assert energy_distance(x[:, None], y[:, None]) == pytest.approx(scipy_energy_distance(x, y) ** 2, rel=1e-10)


@given(st.integers(0, 10**6))
def test_energy_distance_is_not_negative(seed):
    rng = np.random.default_rng(seed)
    assert energy_distance(rng.normal(size=(6, 3)), rng.normal(size=(9, 3))) >= -1e-12


def test_block_size_does_not_change_the_energy_distance(monkeypatch):
    rng = np.random.default_rng(6)
    X, Y = rng.normal(size=(20, 3)), rng.normal(size=(15, 3))
    whole = energy_distance(X, Y)
    monkeypatch.setattr(metrics, "_BLOCK_ENTRIES", 40)
    assert energy_distance(X, Y) == pytest.approx(whole, rel=1e-12)


def test_lineage_share_is_the_mass_on_allowed_transitions():
    W = pd.DataFrame([[0.2, 0.1], [0.3, 0.4]], index=["A", "B"], columns=["A", "B"])
    assert lineage_consistency(W, {}).share == pytest.approx(0.6)
    assert lineage_consistency(W, {"B": ["A", "B"]}).share == pytest.approx(0.9)


@given(st.integers(0, 10**6))
def test_lineage_bound_is_the_best_coupling_with_the_same_marginals(seed):
    rng = np.random.default_rng(seed)
    K, L = rng.integers(1, 5, 2)
    W = rng.dirichlet(np.ones(K * L)).reshape(K, L)
    allowed = rng.random((K, L)) < 0.5
    table = pd.DataFrame(W, index=[f"s{k}" for k in range(K)], columns=[f"t{l}" for l in range(L)])
    result = lineage_consistency(table, {f"s{k}": [f"t{l}" for l in range(L) if allowed[k, l]] for k in range(K)})
    marginals = np.vstack([np.kron(np.eye(K), np.ones(L)), np.kron(np.ones(K), np.eye(L))])
    best = linprog(
        -allowed.ravel().astype(float), A_eq=marginals, b_eq=np.r_[W.sum(axis=1), W.sum(axis=0)], method="highs"
    )
    assert result.bound == pytest.approx(-best.fun, abs=1e-9)
    assert result.share <= result.bound + 1e-12


def test_lineage_ratio_relates_share_to_bound():
    W = pd.DataFrame([[0.25, 0.25], [0.0, 0.5]], index=["A", "B"], columns=["A", "B"])
    result = lineage_consistency(W, {})
    assert result.bound == pytest.approx(0.75)
    assert result.ratio == pytest.approx(1.0)


def test_components_of_one_type_may_share_its_name():
    W = pd.DataFrame([[0.2, 0.3], [0.1, 0.4]], index=["A", "A"], columns=["A", "B"])
    assert lineage_consistency(W, {}).share == pytest.approx(0.3)


# ----------------------------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: l2_uvp([[0.0]], [[0.0], [1.0]]), r"mapped has shape \(1, 1\) and truth \(2, 1\)"),
        (lambda: l2_uvp([[0.0]], [[0.0]]), "the target's variance is 0; it must be > 0"),
        (lambda: l2_uvp([[0.0]], [[0.0]], np.inf), "the target's variance is inf; it must be > 0 and finite"),
        (lambda: w2([[0.0]], [[0.0]], mu=[0.5], nu=[1.0]), "mu sums to 0.5 and nu to 1; they must have equal sums"),
        (lambda: w2([[0.0]], [[0.0, 1.0]]), "X has 1 features and Y has 2; they must have the same"),
        (
            lambda: w2([[0.0]], [[0.0]], mu=[0.5, 0.5]),
            r"mu has shape \(2,\); it must hold one weight for each of the 1",
        ),
        (lambda: energy_distance([0.0], [[0.0]]), r"X has shape \(1,\); it must be \[samples, features\]"),
        (lambda: energy_distance([[0.0]], [[np.inf]]), "Y has the value inf at row 0, column 0"),
        (lambda: lineage_consistency(pd.DataFrame([[-1.0]]), {}), "coupling must hold finite masses ≥ 0"),
    ],
)
def test_bad_input_is_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()
