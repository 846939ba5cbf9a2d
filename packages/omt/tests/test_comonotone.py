"""Comonotone plans on the line against POT, linear programs, exact probabilities of SciPy and quadrature."""

from __future__ import annotations

import itertools

import numpy as np
import ot
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, special, stats

from omt.pairs.comonotone import count_cost, count_draw, count_mean
from omt.pairs.countlaws import CountLaws, log_pmf, lower_table, tails, upper_table, windows
from omt.pairs.positive import gamma_cost, gamma_map


def law(mean: float, dispersion: float = 0.0) -> CountLaws:
    return CountLaws(np.array([float(mean)]), np.array([float(dispersion)]))


def peer(mean: float, dispersion: float = 0.0):
    """The same law in SciPy."""
    if dispersion == 0.0:
        return stats.poisson(mean)
    if dispersion == -1.0:
        return stats.bernoulli(mean)
    return stats.nbinom(1.0 / dispersion, 1.0 / (1.0 + dispersion * mean))


def end(*laws) -> int:
    """A count that is rarer than 1e-13 under all of the laws."""
    return int(max(2, *(p.isf(1e-13) for p in laws))) + 2


def cost(p: tuple[float, float], q: tuple[float, float]) -> float:
    return float(count_cost(law(*p), law(*q))[0])


PAIRS = [
    ((1e-3, 0.0), (2e-3, 0.0)),
    ((0.5, 0.0), (0.7, 0.0)),
    ((0.1, 0.0), (5.0, 0.0)),
    ((3.0, 0.0), (3.01, 0.0)),
    ((50.0, 0.0), (60.0, 0.0)),
    ((400.0, 0.0), (900.0, 0.0)),
    ((1e-3, 0.5), (2e-3, 2.0)),
    ((1.0, 1.0), (2.0, 1.0)),
    ((5.0, 3.0), (4.0, 0.1)),
    ((30.0, 0.5), (60.0, 0.2)),
    ((2.0, 0.0), (2.0, 1.0)),
    ((0.2, -1.0), (0.7, -1.0)),
]


# ---------------------------------------------------------------------------------------------------------- tables
@pytest.mark.parametrize("p", [(0.01, 0.0), (7.0, 0.0), (800.0, 0.0), (0.3, 2.0), (20.0, 0.4), (0.3, -1.0)])
def test_tables_hold_the_tails_of_the_law(p):
    low, high = windows(law(*p), 27.7)
    x = np.arange(low[0], high[0])
    np.testing.assert_allclose(upper_table(law(*p), low, x.size)[0], peer(*p).sf(x), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(lower_table(law(*p), low, x.size)[0], peer(*p).cdf(x), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("p", [(0.01, 0.0), (7.0, 0.0), (800.0, 0.0), (0.3, 2.0), (20.0, 0.4)])
def test_what_a_window_cuts_off_is_rarer_than_its_depth(p):
    low, high = windows(law(*p), 27.7)
    assert peer(*p).sf(high[0] - 1) < 1e-12
    assert peer(*p).cdf(low[0] - 1) < 1e-12


def test_tails_keep_their_digits_far_out():
    lower, upper = tails(np.array([300.0, 2.0]), CountLaws(np.array([3.0, 200.0]), np.zeros(2)))
    assert upper[0] == pytest.approx(stats.poisson(3.0).sf(300), rel=1e-10)
    assert upper[0] < 1e-250
    assert lower[1] == pytest.approx(stats.poisson(200.0).cdf(2), rel=1e-10)


# ------------------------------------------------------------------------------------------------------------ cost
@pytest.mark.parametrize(("p", "q"), PAIRS)
def test_cost_equals_pot_on_exact_probabilities(p, q):
    x = np.arange(end(peer(*p), peer(*q)))
    a, b = peer(*p).pmf(x), peer(*q).pmf(x)
    expected = ot.wasserstein_1d(x, x, a / a.sum(), b / b.sum(), p=2)
    assert cost(p, q) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("p", "q"), [((0.5, 0.0), (2.0, 0.0)), ((1.0, 1.0), (3.0, 0.5)), ((6.0, 0.0), (4.0, 0.3))])
def test_comonotone_plan_is_the_optimum_of_the_linear_program(p, q):
    x = np.arange(end(peer(*p), peer(*q)))
    a, b = peer(*p).pmf(x), peer(*q).pmf(x)
    expected = ot.emd2(a / a.sum(), b / b.sum(), np.subtract.outer(x, x).astype(float) ** 2)
    assert cost(p, q) == pytest.approx(expected, rel=1e-8)


def test_cost_of_short_and_of_long_tables_is_one_function():
    means = np.exp(np.linspace(np.log(1e-4), np.log(3e3), 60))
    dispersion = np.where(np.arange(60) % 2, 0.3, 0.0)
    i, j = (index.ravel() for index in np.meshgrid(np.arange(60), np.arange(60), indexing="ij"))
    laws = CountLaws(means, dispersion)
    together = count_cost(laws, laws, i, j)
    alone = [cost((means[k], dispersion[k]), (means[l], dispersion[l])) for k, l in zip(i[::37], j[::37], strict=True)]
    np.testing.assert_allclose(together[::37], alone, rtol=1e-9)


laws = st.tuples(st.floats(1e-4, 30.0), st.sampled_from([0.0, 0.2, 1.5]))


@given(laws, laws)
@settings(max_examples=30)
def test_cost_is_symmetric_and_zero_for_equal_laws_only(p, q):
    assert cost(p, p) == 0.0
    assert cost(p, q) == pytest.approx(cost(q, p), rel=1e-9)
    assert cost(p, q) > 0.0 or p == q


@given(laws, laws, laws)
@settings(max_examples=30)
def test_root_of_the_cost_obeys_the_triangle_inequality(p, q, r):
    assert np.sqrt(cost(p, r)) <= (np.sqrt(cost(p, q)) + np.sqrt(cost(q, r))) * (1.0 + 1e-9)


@given(laws, laws)
@settings(max_examples=30)
def test_cost_is_at_least_the_squared_distance_of_the_means(p, q):
    assert cost(p, q) >= (p[0] - q[0]) ** 2 * (1.0 - 1e-9)


# ------------------------------------------------------------------------------------------------------------ maps
def average_quantile(x: int, p, q) -> float:
    """``1/P(X = x) ∫ G⁻¹(u) du`` over ``(F(x − 1), F(x)]`` by stepping through the quantiles of ``q``."""
    u = np.unique(np.concatenate([[p.cdf(x - 1), p.cdf(x)], q.cdf(np.arange(end(q)))]))
    u = u[(u >= p.cdf(x - 1)) & (u <= p.cdf(x))]
    return float(np.sum(np.diff(u) * q.ppf(0.5 * (u[1:] + u[:-1]))) / (u[-1] - u[0]))


@pytest.mark.parametrize(("p", "q"), PAIRS)
def test_conditional_mean_is_the_average_of_the_target_quantile(p, q):
    for x in {0, int(peer(*p).median()), int(peer(*p).ppf(0.99))}:
        ours = count_mean(np.array([float(x)]), law(*p), law(*q))[0]
        assert ours == pytest.approx(average_quantile(x, peer(*p), peer(*q)), rel=1e-7, abs=1e-12)


@pytest.mark.parametrize(("p", "q"), PAIRS)
def test_conditional_means_average_to_the_mean_of_the_target(p, q):
    x = np.arange(float(end(peer(*p))))
    zeros = np.zeros(x.size, dtype=int)
    image = count_mean(x, law(*p), law(*q), zeros, zeros)
    assert peer(*p).pmf(x) @ image == pytest.approx(peer(*q).mean(), rel=1e-8)


def test_conditional_means_rise_with_the_count_as_far_as_float64_reaches():
    x = np.arange(0.0, 3000.0, 7.0)
    zeros = np.zeros(x.size, dtype=int)
    for p, q in (((1.0, 0.0), (2.0, 0.0)), ((900.0, 0.0), (3.0, 0.0)), ((2.0, 1.0), (50.0, 0.3))):
        image = count_mean(x, law(*p), law(*q), zeros, zeros)
        assert np.isfinite(image).all()
        assert (np.diff(image) >= -1e-9).all()


def test_map_between_equal_laws_is_the_identity_in_both_tails():
    x = np.array([0.0, 1.0, 40.0, 150.0, 900.0])
    for p in ((60.0, 0.0), (60.0, 0.5), (2.0, 0.0)):
        zeros = np.zeros(x.size, dtype=int)
        np.testing.assert_allclose(count_mean(x, law(*p), law(*p), zeros, zeros), x, atol=1e-9)


@pytest.mark.parametrize(("p", "q"), PAIRS)
def test_draws_follow_the_target_exactly(p, q):
    n = 40_000
    x = peer(*p).rvs(n, random_state=1).astype(float)
    zeros = np.zeros(n, dtype=int)
    y = count_draw(x, law(*p), law(*q), np.random.default_rng(2), zeros, zeros)
    values = np.arange(int(y.max()) + 1)
    expected = n * peer(*q).pmf(values)
    often = expected > 10.0
    observed = np.bincount(y.astype(int), minlength=values.size)
    observed, expected = observed[often], expected[often]
    rest = n - observed.sum(), n - expected.sum()
    if rest[1] > 1e-6:
        observed, expected = np.append(observed, rest[0]), np.append(expected, rest[1])
    assert stats.chisquare(observed, expected).pvalue > 1e-4


def test_mean_of_draws_is_the_conditional_mean():
    p, q = law(1.5, 0.4), law(4.0, 0.2)
    x = np.repeat(np.arange(5.0), 20_000)
    zeros = np.zeros(x.size, dtype=int)
    y = count_draw(x, p, q, np.random.default_rng(0), zeros, zeros).reshape(5, -1)
    expected = count_mean(np.arange(5.0), p, q, zeros[:5], zeros[:5])
    assert (np.abs(y.mean(axis=1) - expected) < 5.0 * y.std(axis=1) / np.sqrt(20_000) + 1e-12).all()


# ----------------------------------------------------------------------------------------------------------- gamma
def one(value: float) -> np.ndarray:
    return np.array([[value]])


def gamma_pair(a: float, b: float, a2: float, b2: float) -> float:
    return float(gamma_cost(one(a), one(b), one(a2), one(b2))[0, 0])


def numeric(a: float, b: float, a2: float, b2: float) -> float:
    """``∫ (x − G⁻¹(F(x)))² f(x) dx`` by adaptive quadrature between quantiles of the source."""
    p, q = stats.gamma(a, scale=1 / b), stats.gamma(a2, scale=1 / b2)

    def integrand(x: float) -> float:
        image = q.ppf(p.cdf(x)) if p.cdf(x) < 0.5 else q.isf(p.sf(x))
        return float((x - image) ** 2 * p.pdf(x))

    ends = [0.0, *p.ppf([1e-9, 1e-5, 1e-2, 0.1, 0.5]), *p.isf([0.1, 1e-2, 1e-5, 1e-9, 1e-14])]
    return sum(integrate.quad(integrand, *pair, epsabs=0, epsrel=1e-10)[0] for pair in itertools.pairwise(ends))


def test_cost_of_exponential_laws_is_closed():
    assert gamma_pair(1.0, 2.0, 1.0, 5.0) == pytest.approx(2.0 * (0.5 - 0.2) ** 2, rel=1e-12)


def test_cost_of_equal_shapes_is_a_change_of_scale():
    assert gamma_pair(3.7, 2.0, 3.7, 0.5) == pytest.approx(3.7 * 4.7 * (0.5 - 2.0) ** 2, rel=1e-12)


@pytest.mark.parametrize(
    "laws", [(1, 1, 2, 1), (1, 2, 1.01, 2), (0.3, 1, 0.1, 3), (100, 1, 120, 1.1), (50, 2, 0.5, 1), (30, 1, 31, 1)]
)
def test_cost_of_gamma_laws_equals_numeric_integration(laws):
    assert gamma_pair(*laws) == pytest.approx(numeric(*laws), rel=1e-8)


@given(*[st.floats(0.05, 20.0)] * 4)
@settings(max_examples=30)
def test_cost_of_gamma_laws_is_symmetric(a, b, a2, b2):
    assert gamma_pair(a, b, a2, b2) == pytest.approx(gamma_pair(a2, b2, a, b), rel=1e-7, abs=1e-12)


def test_costs_of_several_features_add_up():
    rng = np.random.default_rng(0)
    a, b, a2, b2 = rng.uniform(0.5, 5, (3, 4)), rng.uniform(0.5, 5, (3, 4)), *rng.uniform(0.5, 5, (2, 2, 4))
    expected = [[sum(gamma_pair(*pair) for pair in zip(a[k], b[k], a2[l], b2[l], strict=True)) for l in range(2)]
                for k in range(3)]  # fmt: skip
    np.testing.assert_allclose(gamma_cost(a, b, a2, b2), expected, rtol=1e-10)


@pytest.mark.parametrize("laws", [(1, 1, 2, 3), (0.1, 1, 5, 2), (200, 1, 3, 1)])
def test_gamma_map_keeps_the_tail_probability(laws):
    a, b, a2, b2 = laws
    p, q = stats.gamma(a, scale=1 / b), stats.gamma(a2, scale=1 / b2)
    u = np.array([1e-12, 1e-4, 0.2, 0.5])
    low, high = gamma_map(p.ppf(u), *map(np.array, laws)), gamma_map(p.isf(u), *map(np.array, laws))
    np.testing.assert_allclose(q.cdf(low), u, rtol=1e-8)
    np.testing.assert_allclose(q.sf(high), u, rtol=1e-8)


def test_gamma_map_is_finite_and_rises_where_tails_underflow():
    x = np.concatenate([np.geomspace(1e-300, 1.0, 20), np.geomspace(2.0, 1e5, 20)])
    image = gamma_map(x, np.array(2.0), np.array(1.0), np.array(0.7), np.array(3.0))
    assert np.isfinite(image).all()
    assert (np.diff(image) >= 0.0).all()


@pytest.mark.parametrize(("p", "q"), [((1e-8, 0.0), (1e4, 0.0)), ((0.3, 0.3), (2e3, 0.0)), ((5e3, 1e-6), (1e4, 0.5))])
def test_cost_of_laws_so_far_apart_that_one_underflows_where_the_other_lives(p, q):
    counts = np.arange(int(max(peer(*p).isf(1e-15), peer(*q).isf(1e-15))) + 1.0)
    F, G = peer(*p).cdf(counts), peer(*q).cdf(counts)
    levels = np.unique(np.concatenate([[0.0], F, G, [1.0]]))
    middle = 0.5 * (levels[1:] + levels[:-1])
    gap = np.searchsorted(F, middle) - np.searchsorted(G, middle)
    assert count_cost(law(*p), law(*q))[0] == pytest.approx(np.diff(levels) @ gap.astype(float) ** 2, rel=1e-6)


def test_log_probability_of_a_nearly_poisson_law_keeps_its_digits():
    x, phi = 10_300.0, 1e-9
    exact = np.log1p(phi * np.arange(x)).sum() - special.gammaln(x + 1.0) + x * np.log(1e4)
    exact -= (x + 1.0 / phi) * np.log1p(phi * 1e4)
    assert log_pmf(np.array([x]), law(1e4, phi))[0] == pytest.approx(exact, abs=1e-9)
