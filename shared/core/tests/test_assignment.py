"""Soft assignment against scipy's softmax and log-sum-exp."""

from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.special import logsumexp, softmax

from shared_core import soft_assign

tables = hnp.arrays(
    np.float64, st.tuples(st.integers(1, 6), st.integers(1, 9)), elements=st.floats(-700, 700, allow_subnormal=False)
)
# Both layouts of blocks (few and many components), and more than one block.
SHAPES = [(5, 3), (3000, 30), (4000, 64), (4000, 65), (50, 1000), (3, 100_000), (0, 4), (7, 1)]


def scores(shape, dtype=np.float64, seed=0):
    return (5 * np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_responsibilities_equal_scipy_softmax(shape, dtype):
    z = scores(shape, dtype)
    r, _ = soft_assign(z)
    assert r.dtype == dtype
    np.testing.assert_allclose(r, softmax(z, axis=1), rtol=40 * np.finfo(dtype).eps, atol=np.finfo(dtype).tiny)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_log_normalizer_equals_scipy_logsumexp(shape, dtype):
    z = scores(shape, dtype)
    _, log_normalizer = soft_assign(z)
    assert log_normalizer.dtype == dtype
    np.testing.assert_allclose(log_normalizer, logsumexp(z, axis=1), rtol=20 * np.finfo(dtype).eps, atol=1e-6)


@given(tables)
def test_rows_sum_to_one(z):
    np.testing.assert_allclose(soft_assign(z)[0].sum(1), 1, rtol=1e-12)


@given(tables, st.floats(-300, 300))
def test_adding_a_constant_shifts_the_log_normalizer_alone(z, constant):
    r, log_normalizer = soft_assign(z)
    shifted, shifted_normalizer = soft_assign(z + constant)
    np.testing.assert_allclose(shifted, r, atol=1e-9)
    np.testing.assert_allclose(shifted_normalizer, log_normalizer + constant, atol=1e-9)


def test_large_scores_do_not_overflow():
    r, log_normalizer = soft_assign(np.array([[1e300, 0.0], [-1e300, -1e300]]))
    np.testing.assert_array_equal(r, [[1, 0], [0.5, 0.5]])
    np.testing.assert_array_equal(log_normalizer, [1e300, -1e300])


@pytest.mark.parametrize("C", [3, 100])
def test_a_row_of_minus_infinity_gets_zeros_and_minus_infinity(C):
    z = scores((4, C))
    z[2] = -np.inf
    r, log_normalizer = soft_assign(z)
    assert not r[2].any()
    assert log_normalizer[2] == -np.inf
    np.testing.assert_allclose(np.delete(r, 2, 0), softmax(np.delete(z, 2, 0), axis=1))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("C", [3, 100])
def test_nan_and_plus_infinity_make_their_row_nan_and_no_other(C, bad):
    z = scores((4, C))
    z[1, 2] = bad
    r, log_normalizer = soft_assign(z)
    assert np.isnan(r[1]).any()
    assert np.isnan(log_normalizer[1])
    assert np.isfinite(np.delete(r, 1, 0)).all()


def test_unavailable_components_get_nothing():
    z = np.array([[0.0, -np.inf, np.log(3)]])
    np.testing.assert_allclose(soft_assign(z)[0], [[0.25, 0, 0.75]])


@pytest.mark.parametrize("C", [5, 90])
def test_logit_bias_equals_scores_with_the_bias_added(C):
    z, bias = scores((40, C)), scores((C,), seed=1)
    with_bias, without = soft_assign(z, logit_bias=bias), soft_assign(z + bias)
    np.testing.assert_array_equal(with_bias[0], without[0])
    np.testing.assert_array_equal(with_bias[1], without[1])


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("C", [5, 90])
def test_in_place_gives_the_same_and_overwrites_the_scores(C, order):
    z = np.asarray(scores((5000, C)), order=order)
    expected = softmax(z, axis=1)
    r, _ = soft_assign(z, out=z)
    assert r is z
    np.testing.assert_allclose(z, expected, rtol=1e-12)


def test_scores_are_left_alone_without_out():
    z = scores((5000, 7))
    before = z.copy()
    soft_assign(z)
    np.testing.assert_array_equal(z, before)


@pytest.mark.parametrize("C", [30, 200])
def test_a_row_does_not_depend_on_the_rows_around_it(C):
    z = scores((4001, C))
    r, log_normalizer = soft_assign(z)
    for piece in (slice(0, 1), slice(17, 1234), slice(4000, 4001)):
        alone, alone_normalizer = soft_assign(z[piece])
        np.testing.assert_array_equal(alone, r[piece])
        np.testing.assert_array_equal(alone_normalizer, log_normalizer[piece])


@pytest.mark.parametrize(("C", "top_k"), [(9, 3), (9, 9), (200, 4), (200, 17)])
def test_top_k_equals_a_stable_sort_of_scipy_softmax(C, top_k):
    z = scores((3000, C)).round(1)  # rounded, so that there are ties
    trace, log_normalizer = soft_assign(z, top_k=top_k)
    order = np.argsort(-z, axis=1, kind="stable")[:, :top_k]
    np.testing.assert_array_equal(trace.indices, order)
    np.testing.assert_allclose(trace.weights, np.take_along_axis(softmax(z, axis=1), order, 1), rtol=1e-6)
    np.testing.assert_allclose(log_normalizer, logsumexp(z, axis=1), rtol=1e-12)


def test_top_k_of_too_few_available_components_is_filled_with_the_sentinel():
    z = np.array([[-np.inf, 1.0, -np.inf, 0.0], [-np.inf] * 4])
    trace, _ = soft_assign(z, top_k=3)
    assert trace.indices.tolist() == [[1, 3, 4], [4, 4, 4]]
    assert trace.weights[:, 2].tolist() == [0, 0]
    assert trace.num_experts == 4


def test_renormalized_top_k_sums_to_one_except_where_nothing_is_available():
    z = scores((50, 9))
    z[3] = -np.inf
    sums = soft_assign(z, top_k=3, renormalize=True)[0].weights.sum(1)
    np.testing.assert_allclose(sums, np.where(np.arange(50) == 3, 0, 1), rtol=1e-6)


def test_top_k_respects_the_logit_bias():
    trace, _ = soft_assign(np.zeros((2, 3)), top_k=1, logit_bias=np.array([0.0, 1.0, 0.5]))
    assert trace.indices.tolist() == [[1], [1]]


@pytest.mark.parametrize(("N", "C"), [(100_000, 30), (20_000, 200)])
def test_in_place_allocates_no_second_table(N, C):
    z = scores((N, C))
    tracemalloc.start()
    soft_assign(z, out=z)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < z.nbytes / 10


@pytest.mark.parametrize(("N", "C"), [(50_000, 10), (30_000, 30), (5_000, 300)])
def test_is_faster_than_scipy_softmax_and_logsumexp(N, C):
    z, out = scores((N, C)), np.empty((N, C))

    def seconds(work):
        start = time.thread_time()
        work()
        return time.thread_time() - start

    pairs = [
        (seconds(lambda: soft_assign(z, out=out)), seconds(lambda: (softmax(z, axis=1), logsumexp(z, axis=1))))
        for _ in range(7)
    ]
    ours, scipys = (min(times) for times in zip(*pairs, strict=True))
    assert scipys / ours > 1.5  # measured: 4 to 10


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"scores": np.zeros(3)}, ValueError, r"shape \[N, C\] with at least one component, not \[3\]"),
        ({"scores": np.zeros((3, 0))}, ValueError, r"not \[3, 0\]"),
        ({"scores": np.array([["a"]])}, TypeError, "scores must hold real numbers"),
        ({"top_k": 0}, ValueError, "top_k=0 must be >= 1"),
        ({"top_k": 5}, ValueError, "top_k=5 exceeds num_components=4"),
        (
            {"logit_bias": np.zeros(3)},
            ValueError,
            r"logit_bias must have shape \[4\] to fit scores \[2, 4\], not \[3\]",
        ),
        ({"out": np.zeros((2, 3))}, ValueError, r"out must have shape \[2, 4\] and dtype float64, not \[2, 3\]"),
        ({"out": np.zeros((2, 4), np.float32)}, ValueError, "not .* and float32"),
        ({"out": np.zeros((2, 4)), "top_k": 2}, ValueError, "out holds dense responsibilities"),
        ({"renormalize": True}, ValueError, "renormalize=True needs top_k"),
    ],
)
def test_bad_input_is_named(arguments, error, message):
    with pytest.raises(error, match=message):
        soft_assign(**{"scores": np.zeros((2, 4)), **arguments})


def test_half_precision_and_integers_are_computed_in_a_wider_type():
    assert soft_assign(np.zeros((2, 3), np.float16))[0].dtype == np.float32
    assert soft_assign(np.zeros((2, 3), np.int32))[0].dtype == np.float64
