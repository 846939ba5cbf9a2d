"""Every family of counts and positive numbers against scipy: densities, moments, divergences, exponential form."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from scipy import sparse, stats

from omt.families import (
    BernoulliComponents,
    ExponentialComponents,
    GammaComponents,
    GaussianComponents,
    LogNormalComponents,
    MultinomialComponents,
    NegativeBinomialComponents,
    PoissonComponents,
)
from omt.families.base import Components, bhattacharyya_coefficient, bregman_kl
from omt.families.build import components_from
from omt.mixture import Mixture

K, L, D = 3, 2, 4
DISPERSION = np.array([0.05, 0.5, 2.0, 30.0])
TOTAL = 12


def draw(seed, rows):
    return np.random.default_rng(seed).gamma(1.5, 1.5, (rows, D)) + 0.05


def probabilities(seed, rows):
    return np.random.default_rng(seed).dirichlet(np.full(D, 2.0), rows)


def lognormal(seed, rows):
    return LogNormalComponents(
        GaussianComponents(np.log(draw(seed, rows)), "diag", variances=0.1 + 0.2 * draw(seed + 9, rows))
    )


MAKE = {
    "poisson": lambda seed, rows: PoissonComponents(draw(seed, rows)),
    "negative_binomial": lambda seed, rows: NegativeBinomialComponents(draw(seed, rows), DISPERSION),
    "multinomial": lambda seed, rows: MultinomialComponents(probabilities(seed, rows), TOTAL),
    "bernoulli": lambda seed, rows: BernoulliComponents(np.random.default_rng(seed).uniform(0.05, 0.95, (rows, D))),
    "gamma": lambda seed, rows: GammaComponents(draw(seed, rows), draw(seed + 9, rows)),
    "exponential": lambda seed, rows: ExponentialComponents(draw(seed, rows)),
    "lognormal": lognormal,
}
# scipy's one-dimensional law of feature j of component k.
LAW = {
    "poisson": lambda c, k, j: stats.poisson(c.rates[k, j]),
    "negative_binomial": lambda c, k, j: stats.nbinom(1 / c.dispersion[j], 1 / (1 + c.dispersion[j] * c.means[k, j])),
    "bernoulli": lambda c, k, j: stats.bernoulli(c.probs[k, j]),
    "gamma": lambda c, k, j: stats.gamma(c.shapes[k, j], scale=1 / c.rates[k, j]),
    "exponential": lambda c, k, j: stats.expon(scale=1 / c.rates[k, j]),
    "lognormal": lambda c, k, j: stats.lognorm(
        np.sqrt(c.gaussian.variances[k, j]), scale=np.exp(c.gaussian.means[k, j])
    ),
}
COUNTS = ("poisson", "negative_binomial", "multinomial", "bernoulli")
ALL = tuple(MAKE)


@pytest.fixture(params=ALL)
def name(request):
    return request.param


@pytest.fixture
def p(name):
    return MAKE[name](0, K)


@pytest.fixture
def q(name):
    return MAKE[name](1, L)


def samples(p):
    return p.sample(np.repeat(np.arange(K), 40), np.random.default_rng(3))


def scipy_log_prob(name, c, X):
    if name == "multinomial":
        return np.stack([stats.multinomial.logpmf(X, X.sum(axis=1), row) for row in c.probs], axis=1)
    kind = "logpmf" if name in COUNTS else "logpdf"
    columns = [[getattr(LAW[name](c, k, j), kind)(X[:, j]) for j in range(D)] for k in range(c.K)]
    return np.sum(columns, axis=1).T


def total_over(name, f, laws):
    """Sum or integral of ``f`` over the support of one feature of some laws."""
    if name in COUNTS:
        top = int(max(law.isf(1e-14) for law in laws)) + 50
        return f(np.arange(top + 1)).sum()
    edges = np.unique([law.ppf(u) for law in laws for u in (1e-13, 1e-6, 0.01, 0.5, 0.99, 1 - 1e-9)])
    ends = np.exp(np.linspace(np.log(max(edges[0], 1e-250)), np.log(edges[-1] * 3), 60))
    # Gauss-Legendre on panels of log x.
    points, weights = np.polynomial.legendre.leggauss(30)
    half = np.diff(np.log(ends))[:, None] / 2
    x = np.exp(np.log(ends[:-1])[:, None] + half * (points + 1))
    return (half * weights * x * f(x)).sum()


# --------------------------------------------------------------------------------------------------------- density
def test_log_prob_is_that_of_scipy(name, p):
    X = samples(p)
    np.testing.assert_allclose(p.log_prob(X), scipy_log_prob(name, p, X), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", COUNTS)
def test_sparse_samples_have_the_density_of_dense_ones(name):
    p = MAKE[name](0, K)
    X = np.concatenate([np.zeros((2, D)), samples(p), np.zeros((1, D))])
    X[:, 2] = 0
    for kind in (sparse.csr_matrix, sparse.csr_array):
        np.testing.assert_allclose(p.log_prob(kind(X)), p.log_prob(X), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["poisson", "negative_binomial", "multinomial"])
def test_large_counts_have_the_density_of_scipy(name):
    p = MAKE[name](0, K)
    X = np.array([[0.0, 15.0, 16.0, 17.0], [1023.0, 1024.0, 1025.0, 2e4], [1.0, 2.0, 3.0, 0.0]])
    np.testing.assert_allclose(p.log_prob(X), scipy_log_prob(name, p, X), rtol=1e-10)


def test_log_prob_fills_the_array_that_it_is_given(p):
    X = samples(p)
    out = np.empty((len(X), K))
    assert p.log_prob(X, out=out) is out
    assert np.array_equal(out, p.log_prob(X))


def test_samples_of_another_width_are_refused(p):
    with pytest.raises(ValueError, match=r"must be \[N, 4\]"):
        p.log_prob(np.ones((2, 3)))


# --------------------------------------------------------------------------------------------------------- moments
def test_moments_are_those_of_scipy(name, p):
    if name == "multinomial":
        covariances = np.stack([stats.multinomial(TOTAL, row).cov() for row in p.probs])
        np.testing.assert_allclose(p.cov(), covariances, atol=1e-12)
        np.testing.assert_allclose(p.variances(), np.diagonal(covariances, axis1=1, axis2=2), atol=1e-12)
        return
    laws = [[LAW[name](p, k, j) for j in range(D)] for k in range(K)]
    np.testing.assert_allclose(p.mean(), [[law.mean() for law in row] for row in laws], rtol=1e-10)
    variances = np.array([[law.var() for law in row] for row in laws])
    np.testing.assert_allclose(p.variances(), variances, rtol=1e-10)
    np.testing.assert_allclose(p.cov(), [np.diag(row) for row in variances], rtol=1e-10, atol=1e-15)


def test_samples_have_the_mean_and_variance_of_their_component(name, p):
    n = 40_000
    X = p.sample(np.full(n, 1), np.random.default_rng(0))
    error = np.sqrt(p.variances()[1] / n)
    assert (np.abs(X.mean(axis=0) - p.mean()[1]) < 5 * error).all()
    if name != "lognormal":  # whose fourth moment is too large for this
        fourth = ((X - X.mean(axis=0)) ** 4).mean(axis=0)
        assert (np.abs(X.var(axis=0) - p.variances()[1]) < 6 * np.sqrt(fourth / n)).all()


def test_lognormal_covariance_is_that_of_many_samples():
    rng = np.random.default_rng(0)
    A = rng.normal(size=(2, 2)) * 0.4
    c = LogNormalComponents(
        GaussianComponents(np.zeros((1, 2)), "full", covariances=(A @ A.T + 0.05 * np.eye(2))[None])
    )
    X = c.sample(np.zeros(200_000, dtype=int), rng)
    np.testing.assert_allclose(np.cov(X.T), c.cov()[0], rtol=0.05)


@pytest.mark.parametrize("name", ["poisson", "negative_binomial", "bernoulli", "gamma", "exponential"])
def test_covariances_that_would_not_fit_in_memory_are_refused(name):
    wide = np.full((2, 20_000), 0.5)
    arrays = {
        "negative_binomial": {"means": wide, "dispersion": 1.0},
        "bernoulli": {"probs": wide},
        "gamma": {"shapes": wide, "rates": wide},
    }.get(name, {"rates": wide})
    components = components_from(name, arrays)
    with pytest.raises(ValueError, match=r"d = 20000 features have 8e\+08 entries; use the components' variances"):
        components.cov()
    with pytest.raises(ValueError, match=r"use the components' variances"):
        Mixture(np.full(2, 0.5), components).cov()


def test_mixture_covariance_is_within_plus_between(name, p):
    m = Mixture(np.array([0.2, 0.3, 0.5]), p)
    second = np.einsum("k,kij->ij", m.weights, p.cov() + p.mean()[:, :, None] * p.mean()[:, None, :])
    np.testing.assert_allclose(m.cov(), second - np.outer(m.mean(), m.mean()), rtol=1e-9, atol=1e-9)


# ----------------------------------------------------------------------------------------------------- divergences
def test_kl_is_the_sum_or_integral_of_its_definition(name, p, q):
    if name == "multinomial":
        expected = TOTAL * np.array([[stats.entropy(a, b) for b in q.probs] for a in p.probs])
    else:
        expected = np.zeros((K, L))
        kind = "logpmf" if name in COUNTS else "logpdf"
        for k, l, j in np.ndindex(K, L, D):
            a, b = LAW[name](p, k, j), LAW[name](q, l, j)
            log_a, log_b = getattr(a, kind), getattr(b, kind)

            def f(x, log_a=log_a, log_b=log_b):
                mass = np.exp(log_a(x))
                return np.where(mass > 0, mass * (np.nan_to_num(log_a(x)) - np.nan_to_num(log_b(x))), 0.0)

            expected[k, l] += total_over(name, f, (a, b))
    np.testing.assert_allclose(p.kl(q), expected, rtol=2e-7, atol=1e-9)


def test_kl_to_itself_is_zero(p):
    np.testing.assert_allclose(np.diag(p.kl(p)), 0.0, atol=1e-12)


def test_generic_bregman_divergence_is_the_closed_form(p, q):
    np.testing.assert_allclose(bregman_kl(p, q), p.kl(q), rtol=1e-8, atol=1e-10)


def test_bhattacharyya_coefficient_is_the_sum_or_integral_of_its_definition(name, p, q):
    if name == "multinomial":
        expected = (np.sqrt(p.probs) @ np.sqrt(q.probs).T) ** TOTAL
    else:
        expected = np.ones((K, L))
        kind = "pmf" if name in COUNTS else "pdf"
        for k, l, j in np.ndindex(K, L, D):
            a, b = LAW[name](p, k, j), LAW[name](q, l, j)
            pa, pb = getattr(a, kind), getattr(b, kind)
            expected[k, l] *= total_over(name, lambda x, pa=pa, pb=pb: np.sqrt(pa(x) * pb(x)), (a, b))
    np.testing.assert_allclose(bhattacharyya_coefficient(p, q), expected, rtol=2e-5)


def test_components_of_different_families_have_no_divergence(name, p):
    if name == "lognormal":
        return
    other = MAKE["poisson" if name != "poisson" else "gamma"](1, L)
    with pytest.raises(ValueError, match="they must be the same"):
        p.kl(other)


@pytest.mark.parametrize("name", ALL)
def test_components_of_different_width_have_no_divergence(name):
    p = MAKE[name](0, K)
    narrow = {
        "lognormal": lambda: LogNormalComponents(
            GaussianComponents(np.zeros((1, 2)), "diag", variances=np.ones((1, 2)))
        ),
        "negative_binomial": lambda: NegativeBinomialComponents(np.ones((1, 2)), 1.0),
        "multinomial": lambda: MultinomialComponents(np.full((1, 2), 0.5), 3),
        "bernoulli": lambda: BernoulliComponents(np.full((1, 2), 0.5)),
        "gamma": lambda: GammaComponents(np.ones((1, 2)), np.ones((1, 2))),
        "exponential": lambda: ExponentialComponents(np.ones((1, 2))),
        "poisson": lambda: PoissonComponents(np.ones((1, 2))),
    }[name]()
    with pytest.raises(ValueError, match="4 and 2 features; they must have the same"):
        p.kl(narrow)


# ------------------------------------------------------------------------------------------------ exponential form
def test_mean_parameters_are_the_gradient_of_the_log_partition(name, p):
    eta = p.natural_parameters()
    step = 1e-5 * np.maximum(np.abs(eta), 0.1)
    # The quadratic statistics of a Gaussian come twice in a symmetric matrix; its own tests look at them.
    for i in range(D if name == "lognormal" else eta.shape[1]):
        shift = np.zeros_like(eta)
        shift[:, i] = step[:, i]
        slope = (p.log_partition(eta + shift) - p.log_partition(eta - shift)) / (2 * step[:, i])
        np.testing.assert_allclose(slope, p.mean_parameters()[:, i], rtol=2e-5, atol=1e-7)


def test_components_satisfy_the_protocol(name, p):
    assert isinstance(p, Components)
    assert (p.family, p.K, p.d) == (name, K, D)


def test_selected_components_come_in_the_order_asked_for(name, p):
    X = samples(p)
    np.testing.assert_allclose(p.select([2, 0]).log_prob(X), p.log_prob(X)[:, [2, 0]], rtol=1e-13)
    mask = np.array([False, True, False])
    np.testing.assert_allclose(p.select(mask).log_prob(X), p.log_prob(X)[:, [1]], rtol=1e-13)


def test_parameters_rebuild_the_components(name, p):
    X = samples(p)
    np.testing.assert_array_equal(components_from(name, p.parameters()).log_prob(X), p.log_prob(X))


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("poisson", K * D),
        ("negative_binomial", K * D + D),
        ("multinomial", K * (D - 1)),
        ("bernoulli", K * D),
        ("gamma", 2 * K * D),
        ("exponential", K * D),
        ("lognormal", 2 * K * D),
    ],
)
def test_free_parameters_are_counted(name, number):
    assert MAKE[name](0, K).n_parameters == number


def test_bic_counts_parameters_and_weights(name, p):
    m = Mixture(np.full(K, 1 / K), p)
    X = samples(p)
    expected = (p.n_parameters + K - 1) * np.log(len(X)) - 2 * m.log_prob(X).sum()
    assert m.bic(X) == pytest.approx(expected, rel=1e-12)


def test_mixture_samples_have_the_mixture_mean(name, p):
    m = Mixture(np.array([0.2, 0.3, 0.5]), p)
    n = 20_000
    assert (np.abs(m.sample(n, 0).mean(axis=0) - m.mean()) < 5 * np.sqrt(np.diag(m.cov()) / n)).all()


# ----------------------------------------------------------------------------------------------------- from_params
def test_mixture_from_params_takes_plain_lists():
    m = Mixture.from_params("negative_binomial", [0.5, 0.5], means=[[1.0, 2.0], [3.0, 4.0]], dispersion=0.5, names="ab")
    assert (m.family, m.names, m.d) == ("negative_binomial", ("a", "b"), 2)
    np.testing.assert_array_equal(m.components.dispersion, [0.5, 0.5])


@pytest.mark.parametrize(
    ("arrays", "kind"),
    [
        ({"covariances": np.stack([np.eye(2)] * 3)}, "full"),
        ({"covariances": np.eye(2)}, "tied"),
        ({"variances": np.ones((3, 2))}, "diag"),
        ({"variances": np.ones(3)}, "spherical"),
        ({"factors": np.ones((3, 2, 1)), "noise": np.ones((3, 2))}, "lowrank"),
    ],
)
@pytest.mark.parametrize("family", ["gaussian", "lognormal"])
def test_the_shape_of_covariances_is_seen_from_the_arrays(family, arrays, kind):
    m = Mixture.from_params(family, np.full(3, 1 / 3), means=np.zeros((3, 2)), **arrays)
    assert m.components.covariance_type == kind


@pytest.mark.parametrize(
    ("family", "arrays", "message"),
    [
        ("poisson", {}, "family 'poisson' needs rates; it takes rates and optionally reference"),
        ("poisson", {"rates": [[1.0]], "means": [[1.0]]}, "family 'poisson' does not know means; it takes rates"),
        ("gamma", {"shapes": [[1.0]]}, "family 'gamma' needs rates; it takes shapes, rates"),
        ("negative_binomial", {"means": [[1.0]]}, "needs dispersion; it takes means, dispersion and optionally"),
    ],
)
def test_missing_and_unknown_parameters_are_named(family, arrays, message):
    with pytest.raises(TypeError, match=message):
        Mixture.from_params(family, [1.0], **arrays)


def test_an_unknown_family_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="family is 'cauchy'; it must be one of gaussian, poisson, negative_binomial"):
        Mixture.from_params("cauchy", [1.0], rates=[[1.0]])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PoissonComponents(np.ones(3)), r"rates has shape \(3,\); it must be \[K, d\]"),
        (lambda: PoissonComponents([[1.0, 0.0]]), r"rates\[0, 1\] is 0; every entry must be > 0 and finite"),
        (lambda: PoissonComponents([[1.0, np.nan]]), r"rates\[0, 1\] is nan"),
        (lambda: PoissonComponents([[1.0]], -1.0), "reference is -1.0; it must be a positive total count"),
        (
            lambda: NegativeBinomialComponents([[1.0, 1.0]], [1.0]),
            r"dispersion has shape \(1,\); it must be one number, or \[2\]",
        ),
        (lambda: NegativeBinomialComponents([[1.0]], 0.0), "dispersion of feature 0 is 0; .*use family='poisson'"),
        (lambda: MultinomialComponents([[0.5, 0.4]], 3), "probs of component 0 sum to 0.9; they must sum to 1"),
        (lambda: MultinomialComponents([[0.5, 0.5]], 0), "total is 0.0; it must be a positive count"),
        (lambda: BernoulliComponents([[0.5], [1.0]]), r"probs\[1, 0\] is 1; every entry must be > 0 and < 1"),
        (lambda: GammaComponents([[1.0]], [[1.0, 2.0]]), r"rates has shape \(1, 2\); shapes has \(1, 1\)"),
    ],
)
def test_malformed_parameters_are_refused_with_the_reason(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_negative_binomials_of_different_dispersion_have_no_closed_divergence():
    p, q = NegativeBinomialComponents([[1.0, 1.0]], [1.0, 1.0]), NegativeBinomialComponents([[1.0, 1.0]], [1.0, 2.0])
    with pytest.raises(ValueError, match=r"dispersion of feature 1 is 1 on one side and 2 on the other.*cost='w2'"):
        p.kl(q)


def test_parameters_are_read_only(name, p):
    arrays = [value for value in p.parameters().values() if isinstance(value, np.ndarray)]
    assert arrays
    for value in arrays:
        with pytest.raises(ValueError, match="read-only"):
            value[0] = 1.0


def test_every_public_family_has_a_case_here():
    from omt import families

    classes = {n for n, c in vars(families).items() if inspect.isclass(c) and n.endswith("Components")}
    assert len(classes) == len(MAKE) + 1  # Gaussian components have a file of their own
