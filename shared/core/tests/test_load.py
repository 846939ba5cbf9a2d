"""Load metrics against values worked out by hand, and against scipy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from shared_core import load_stats

count_lists = st.lists(st.integers(0, 10**6), min_size=2, max_size=40).filter(any)


def test_hand_computed_metrics():
    # Mean 4, deviations 2, -2, 0, 0: variance 2.
    s = load_stats([6, 2, 4, 4])
    assert s.cv == pytest.approx(np.sqrt(2) / 4)
    assert s.max_violation == pytest.approx(0.5)
    assert s.dead_fraction == 0
    # Ascending 2, 4, 4, 6 with weights -3, -1, 1, 3: (−6 − 4 + 4 + 18) / (4 · 16).
    assert s.gini == pytest.approx(12 / 64)
    # Shares 3/8, 1/8, 1/4, 1/4.
    assert s.entropy == pytest.approx(
        -(3 / 8 * np.log(3 / 8) + 1 / 8 * np.log(1 / 8) + 0.5 * np.log(1 / 4)) / np.log(4)
    )


def test_equal_loads_are_perfect_balance():
    s = load_stats(np.full(7, 3))
    assert (s.cv, s.max_violation, s.entropy, s.dead_fraction, s.gini) == pytest.approx((0, 0, 1, 0, 0), abs=1e-12)


def test_one_expert_doing_everything_is_the_worst_balance():
    s = load_stats([0, 0, 0, 12])
    expected = (np.sqrt(3), 3, 0, 0.75, 0.75)
    assert (s.cv, s.max_violation, s.entropy, s.dead_fraction, s.gini) == pytest.approx(expected)


def test_nothing_assigned_is_undefined_balance_and_all_dead():
    s = load_stats([0, 0, 0])
    assert s.dead_fraction == 1
    assert np.isnan([s.cv, s.max_violation, s.entropy, s.gini]).all()


def test_a_single_expert_is_balanced():
    assert load_stats([5]).entropy == 1
    assert load_stats([5]).max_violation == 0


@given(count_lists)
def test_entropy_equals_scipy(counts):
    expected = stats.entropy(counts) / np.log(len(counts))
    assert load_stats(counts).entropy == pytest.approx(expected, abs=1e-12)


@given(count_lists)
def test_cv_equals_scipy(counts):
    assert load_stats(counts).cv == pytest.approx(stats.variation(counts), abs=1e-9)


@given(count_lists)
def test_gini_equals_mean_absolute_difference_over_twice_the_mean(counts):
    c = np.array(counts, dtype=float)
    assert load_stats(counts).gini == pytest.approx(np.abs(c[:, None] - c).mean() / (2 * c.mean()), abs=1e-12)


@given(count_lists, st.integers(2, 1000))
def test_metrics_depend_on_shares_only(counts, factor):
    one, many = load_stats(counts), load_stats([factor * count for count in counts])
    for name in ("cv", "max_violation", "entropy", "dead_fraction", "gini"):
        assert getattr(one, name) == pytest.approx(getattr(many, name), abs=1e-9)


@given(count_lists, st.randoms(use_true_random=False))
def test_metrics_do_not_depend_on_the_order_of_experts(counts, random):
    shuffled = counts.copy()
    random.shuffle(shuffled)
    for name in ("cv", "max_violation", "entropy", "dead_fraction", "gini"):
        assert getattr(load_stats(counts), name) == pytest.approx(getattr(load_stats(shuffled), name), abs=1e-9)


def test_layers_are_measured_one_by_one():
    layers = np.array([[6, 2, 4, 4], [0, 0, 0, 12], [0, 0, 0, 0]])
    together = load_stats(layers)
    for name in ("cv", "max_violation", "entropy", "dead_fraction", "gini"):
        alone = [getattr(load_stats(layer), name) for layer in layers]
        np.testing.assert_allclose(getattr(together, name), alone)


def test_effective_number_counts_equally_used_experts():
    assert load_stats([5, 5, 0, 5, 0, 0]).effective_number == pytest.approx(3)


def test_soft_counts_are_loads_too():
    assert load_stats([0.25, 0.75]).max_violation == pytest.approx(0.5)


def test_integer_counts_are_kept_as_they_are():
    counts = np.array([3, 1])
    assert load_stats(counts).counts.dtype == counts.dtype


def test_counts_beyond_int64_sums_do_not_overflow():
    assert load_stats(np.full(4, 2**62)).max_violation == 0


@pytest.mark.parametrize("dtype", ["int64", "int32", "float32", "bfloat16"])
def test_torch_tensors_give_the_same_metrics(dtype):
    torch = pytest.importorskip("torch")
    tensor = torch.tensor([6, 2, 4, 4]).to(getattr(torch, dtype))
    assert load_stats(tensor).cv == load_stats([6, 2, 4, 4]).cv


def test_a_torch_tensor_that_requires_grad_is_accepted():
    torch = pytest.importorskip("torch")
    assert load_stats(torch.tensor([1.0, 3.0], requires_grad=True)).max_violation == 0.5


def test_printing_gives_one_readable_line():
    assert str(load_stats([6, 2, 4, 4])) == "cv=0.354 max_violation=0.5 entropy=0.953 dead_fraction=0.0"


@pytest.mark.parametrize(
    ("counts", "error", "message"),
    [
        ([3, -1], ValueError, r"finite and not negative, but counts\[1\] is -1"),
        ([[3, 1], [np.nan, 1]], ValueError, r"counts\[1, 0\] is nan"),
        ([np.inf, 1], ValueError, r"counts\[0\] is inf"),
        ([], ValueError, r"shape \[E\] or \[L, E\] with at least one expert, not \[0\]"),
        (3, ValueError, r"not \[\]"),
        (np.ones((2, 2, 2)), ValueError, r"not \[2, 2, 2\]"),
        (["a"], TypeError, "counts must hold real numbers"),
        ([1j], TypeError, "counts must hold real numbers, not complex128"),
    ],
)
def test_bad_counts_are_named(counts, error, message):
    with pytest.raises(error, match=message):
        load_stats(counts)


def test_loads_whose_sum_no_float_holds_are_measured():
    assert load_stats([1e308, 1e308, 0, 0]).cv == load_stats([1, 1, 0, 0]).cv == 1.0
