"""Fitting counts: M-steps against numerical maximisers, size factors, dispersions, and what is refused."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, sparse, special, stats
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import adjusted_rand_score

from omt.families import (
    Bernoulli,
    Multinomial,
    NegativeBinomial,
    NegativeBinomialComponents,
    Poisson,
    PoissonComponents,
)
from omt.families.loggamma import log_factorials, log_rising, rising_table
from omt.families.sizes import lattice, size_basis
from omt.fitting.em import em_step, fit_mixture

NU = 1e-2  # pseudo-samples, the default of every family of counts


@pytest.fixture
def counts():
    """Counts of four groups in 40 features, their labels and the depth of each sample."""
    rng = np.random.default_rng(0)
    rates = rng.gamma(0.6, 2.0, (4, 40)) + 0.05
    labels = rng.choice(4, size=1200, p=[0.1, 0.2, 0.3, 0.4])
    depth = rng.lognormal(0.0, 0.5, 1200)
    return {
        "rates": rates,
        "labels": labels,
        "depth": depth,
        "plain": rng.poisson(rates[labels]).astype(float),
        "deep": rng.poisson(depth[:, None] * rates[labels]).astype(float),
        "bursty": rng.poisson(rng.gamma(2.0, 0.5 * depth[:, None] * rates[labels])).astype(float),
    }


def recipe_and_data(name, counts):
    return {
        "poisson": (Poisson(), counts["plain"]),
        "poisson/total": (Poisson(size_factors="total"), counts["deep"]),
        "poisson/given": (Poisson(size_factors=counts["depth"]), counts["deep"]),
        "nb": (NegativeBinomial(), counts["plain"]),
        "nb/fixed": (NegativeBinomial(dispersion=0.5), counts["plain"]),
        "nb/total": (NegativeBinomial(size_factors="total"), counts["bursty"]),
        "nb/given": (NegativeBinomial(dispersion=0.5, size_factors=counts["depth"]), counts["bursty"]),
        "multinomial": (Multinomial(), counts["deep"]),
        "bernoulli": (Bernoulli(), (counts["plain"] > 0).astype(float)),
    }[name]


NAMES = (
    "poisson",
    "poisson/total",
    "poisson/given",
    "nb",
    "nb/fixed",
    "nb/total",
    "nb/given",
    "multinomial",
    "bernoulli",
)


# ------------------------------------------------------------------------------------------------------- fits at large
@pytest.mark.parametrize("name", NAMES)
def test_separated_groups_are_found(counts, name):
    family, X = recipe_and_data(name, counts)
    mixture = fit_mixture(sparse.csr_matrix(X), 4, family=family)
    found = mixture.responsibilities(X).argmax(axis=1)
    assert adjusted_rand_score(counts["labels"], found) >= 0.98
    np.testing.assert_allclose(mixture.weights, [0.4, 0.3, 0.2, 0.1], atol=0.04)


@pytest.mark.parametrize("name", NAMES)
def test_the_objective_never_falls(counts, name):
    family, X = recipe_and_data(name, counts)
    # More components than groups, so that there is something to do for many iterations.
    weight = np.random.default_rng(0).uniform(0.2, 2.0, len(X))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        mixture = fit_mixture(X, 9, family=family, n_init=1, tol=1e-9, max_iter=60, sample_weight=weight)
    assert mixture.report.n_iter > 8
    assert np.diff(mixture.report.history).min() >= -1e-10


@pytest.mark.parametrize("name", NAMES)
def test_the_report_has_the_log_likelihood_of_the_mixture(counts, name):
    family, X = recipe_and_data(name, counts)
    mixture = fit_mixture(X, 4, family=family, tol=1e-10)
    if name.endswith("given"):  # new samples get their size from their total
        size = counts["depth"]
        scores = mixture.components.log_prob(X, size=size) + np.log(mixture.weights)
        value = special.logsumexp(scores, axis=1).mean()
    else:
        value = mixture.log_prob(X).mean()
    assert mixture.report.log_likelihood == pytest.approx(value, rel=1e-9)


def test_poisson_rates_are_within_three_standard_errors(counts):
    X, labels, rates = counts["plain"], counts["labels"], counts["rates"]
    mixture = fit_mixture(X, 4, family="poisson")
    order = np.argsort(
        [
            np.bincount(labels[row == 1], minlength=4).argmax()
            for row in np.eye(4)[mixture.responsibilities(X).argmax(1)].T
        ]
    )
    n = np.bincount(labels)[:, None]
    error = (mixture.components.rates[order] - rates) / np.sqrt(rates / n)
    assert np.mean(np.abs(error) <= 3) >= 0.99


@pytest.mark.parametrize("name", NAMES)
def test_a_component_of_one_sample_is_finite(counts, name):
    family, X = recipe_and_data(name, counts)
    labels = np.where(np.arange(len(X)) == 7, "single", "rest")
    with pytest.warns(UserWarning, match="labels with one sample: single"):
        mixture = fit_mixture(X, labels=labels, family=family)
    assert np.isfinite(mixture.log_prob(X)).all()
    assert np.isfinite(mixture.components.kl(mixture.components)).all()


@pytest.mark.parametrize("name", NAMES)
def test_features_without_any_count_are_legal(counts, name):
    family, X = recipe_and_data(name, counts)
    X = X.copy()
    X[:, 3] = 0
    mixture = fit_mixture(sparse.csr_matrix(X), 4, family=family)
    new = X.copy()
    new[0, 3] = 1
    assert np.isfinite(mixture.log_prob(new)).all()
    assert adjusted_rand_score(counts["labels"], mixture.responsibilities(X).argmax(axis=1)) >= 0.97


@pytest.mark.parametrize("name", NAMES)
def test_samples_without_any_count_are_legal(counts, name):
    family, X = recipe_and_data(name, counts)
    X = X.copy()
    X[[0, 1199]] = 0
    mixture = fit_mixture(sparse.csr_matrix(X), 4, family=family)
    assert np.isfinite(mixture.log_prob(X)).all()


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_component_finds_the_samples_that_nothing_explains(counts, name):
    """A component far from all samples is placed anew, at the group that the others do not cover."""
    from omt.chunks import as_source
    from omt.fitting.iterate import State, batch
    from omt.fitting.progress import Progress
    from omt.fitting.supervision import Supervision
    from omt.fitting.sweeps import Data, Model, start

    family, X = recipe_and_data(name, counts)
    data = Data(as_source(sparse.csr_matrix(X)), 256, np.dtype(float))
    if getattr(family, "size_factors", None) is not None:
        family, data.size = family.with_sizes(X.sum(axis=1))
    labels = counts["labels"]
    data.supervision = Supervision(np.where(labels == 3, -1, labels), np.arange(3))
    known, prior = start(data, family, 3)
    data.supervision = Supervision()
    state = State.of(known, prior)
    nobody = family.m_step(*_one_component(family, data, X, prior))
    joined = _joined(known.components, nobody)
    state = State.of(Model(np.array([0.3, 0.3, 0.4 - 1e-9, 1e-9]), joined), prior)
    batch(data, family, state, 60, 1e-8, None, Progress(False))
    found = state.model.components.log_prob(X, **({} if data.size is None else {"size": data.size}))
    assert int(state.attempts[3]) == 1
    assert adjusted_rand_score(labels, (found + np.log(state.model.weights)).argmax(axis=1)) >= 0.95


def _one_component(family, data, X, prior):
    """Statistics of a component that has seen the sample least like any other: a single feature, often."""
    statistics = family.empty(1, X.shape[1], None)
    odd = np.zeros((1, X.shape[1]))
    odd[0, 0] = 1.0
    size = {} if data.size is None else {"size": np.ones(1)}
    for _ in range(1000 if getattr(family, "name", "") != "bernoulli" else 1):
        family.accumulate(statistics, odd, np.ones((1, 1)), **size)
    return statistics, prior


def _joined(first, second):
    arrays = {key: np.concatenate([getattr(first, key), getattr(second, key)]) for key in first._arrays}
    return type(first)(**{**first.parameters(), **arrays})


# -------------------------------------------------------------------------------------------- M-step by brute force
def weighted(name, counts):
    """One component's responsibilities, and the statistics and prior of three."""
    family, X = recipe_and_data(name, counts)
    R = np.random.default_rng(5).dirichlet([0.5, 0.5, 0.5], len(X))
    statistics = family.empty(3, X.shape[1], None)
    family.accumulate(statistics, X, R)
    prior = family.prior(statistics)
    return X, R, prior, family.m_step(statistics, prior)


def maximum(objective, low, high):
    found = optimize.minimize_scalar(
        lambda u: -objective(u), bounds=(low, high), method="bounded", options={"xatol": 1e-12}
    )
    return found.x


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("g", [0, 17])
def test_poisson_m_step_maximises_the_penalised_likelihood(counts, k, g):
    X, R, prior, fitted = weighted("poisson", counts)
    m = X[:, g].mean()

    def objective(u):
        return R[:, k] @ stats.poisson.logpmf(X[:, g], np.exp(u)) + NU * (m * u - np.exp(u))

    assert prior["pooled"][g] == pytest.approx(m)
    assert np.log(fitted.rates[k, g]) == pytest.approx(maximum(objective, -6, 6), abs=1e-6)


@pytest.mark.parametrize("g", [0, 17])
def test_negative_binomial_m_step_maximises_the_penalised_likelihood(counts, g):
    X, R, _, fitted = weighted("nb/fixed", counts)
    m = X[:, g].mean()

    def objective(u):
        law = stats.nbinom(2.0, 1 / (1 + 0.5 * np.exp(u)))
        pseudo = m * (u - np.log1p(0.5 * np.exp(u))) - 2.0 * np.log1p(0.5 * np.exp(u))
        return R[:, 1] @ law.logpmf(X[:, g]) + NU * pseudo

    assert np.log(fitted.means[1, g]) == pytest.approx(maximum(objective, -6, 6), abs=1e-6)


def test_bernoulli_m_step_maximises_the_penalised_likelihood(counts):
    X, R, _, fitted = weighted("bernoulli", counts)
    m = X[:, 4].mean()

    def objective(p):
        return R[:, 1] @ stats.bernoulli.logpmf(X[:, 4], p) + NU * (m * np.log(p) + (1 - m) * np.log1p(-p))

    assert fitted.probs[1, 4] == pytest.approx(maximum(objective, 1e-6, 1 - 1e-6), abs=1e-6)


def test_no_other_proportions_have_a_higher_penalised_likelihood(counts):
    X, R, _, fitted = weighted("multinomial", {**counts, "deep": counts["deep"][:, :6]})
    pooled = X.mean(axis=0)
    assert fitted.total == pytest.approx(X.sum(axis=1).mean())

    def objective(logits):
        p = special.softmax(logits)
        return -(R[:, 1] @ stats.multinomial.logpmf(X, X.sum(axis=1), p) + NU * pooled @ np.log(p))

    best = optimize.minimize(objective, np.zeros(6), method="BFGS", options={"gtol": 1e-3})
    np.testing.assert_allclose(fitted.probs[1], special.softmax(best.x), atol=1e-6)


def nb_objective(u, x, r, s, phi, m):
    mean = s * np.exp(u)
    pseudo = m * (u - np.log1p(phi * np.exp(u))) - np.log1p(phi * np.exp(u)) / phi
    return r @ stats.nbinom.logpmf(x, 1 / phi, 1 / (1 + phi * mean)) + NU * pseudo


@pytest.mark.parametrize("given", ["total", "explicit"])
def test_negative_binomial_with_sizes_converges_to_the_numerical_maximiser(counts, given):
    X, depth = counts["bursty"], counts["depth"]
    sizes = depth if given == "explicit" else X.sum(axis=1) / X.sum(axis=1).mean()
    family = NegativeBinomial(dispersion=0.5, size_factors=depth if given == "explicit" else "total")
    R = np.random.default_rng(5).dirichlet([0.5, 0.5, 0.5], len(X))
    mixture = fit_mixture(X, responsibilities=R, family=family, tol=1e-14)
    m = X.sum(axis=0) / sizes.sum()
    for k, g in [(0, 0), (1, 7), (2, 39)]:
        best = maximum(lambda u, k=k, g=g: nb_objective(u, X[:, g], R[:, k], sizes, 0.5, m[g]), -6, 6)
        assert np.log(mixture.components.means[k, g]) == pytest.approx(best, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    dispersion=st.sampled_from([1e-3, 0.1, 1.0, 30.0]),
    start=st.floats(-8, 8),
    spread=st.sampled_from([0.0, 0.5, 2.0]),
    level=st.sampled_from([0.01, 1.0, 100.0]),
)
def test_no_step_with_sizes_lowers_the_objective(seed, dispersion, start, spread, level):
    """From any starting point, however far, for one component and five features."""
    rng = np.random.default_rng(seed)
    s = rng.lognormal(0.0, spread, 30)
    r = rng.uniform(0, 1, 30)
    X = rng.poisson(rng.gamma(1 / dispersion, dispersion * s[:, None] * level * rng.lognormal(0, 1, 5))).astype(float)
    family = NegativeBinomial(dispersion=dispersion, size_factors=s)
    prior = {"pooled": X.mean(axis=0) + 1e-4, "shrinkage": np.asarray(NU), "dispersion": np.full(5, dispersion)}
    before = NegativeBinomialComponents(np.full((1, 5), np.exp(start)), dispersion)
    statistics = family.empty(1, 5, before.centre())
    family.accumulate(statistics, X, r[:, None], size=s)
    after = family.m_step(statistics, prior, before)
    for g in range(5):
        old, new = (
            nb_objective(np.log(c.means[0, g]), X[:, g], r, s, dispersion, prior["pooled"][g]) for c in (before, after)
        )
        assert new >= old - 1e-9 * max(1.0, abs(old))


def test_an_em_step_of_counts_takes_the_recipe_of_the_mixture(counts):
    X = sparse.csr_matrix(counts["bursty"])
    mixture = fit_mixture(X, 4, family="negative_binomial", size_factors="total", max_iter=200, tol=1e-8)
    after = em_step(X, mixture)
    assert after.report.log_likelihood == pytest.approx(mixture.report.log_likelihood, abs=1e-6)
    np.testing.assert_allclose(after.components.means, mixture.components.means, rtol=2e-2)
    np.testing.assert_array_equal(after.components.dispersion, mixture.components.dispersion)


# ------------------------------------------------------------------------------------------------- size factors
@pytest.mark.parametrize("dispersion", [1e-6, 0.5, 40.0])
def test_negative_binomial_density_with_sizes_is_that_of_scipy(dispersion):
    rng = np.random.default_rng(0)
    means, s = rng.gamma(1.0, 3.0, (3, 6)) + 0.01, rng.lognormal(0.0, 2.0, 50)
    X = rng.poisson(s[:, None] * means[rng.integers(3, size=50)]).astype(float)
    X[3] = 0
    c = NegativeBinomialComponents(means, dispersion)
    mean = s[:, None, None] * means
    if dispersion > 1e-5:
        expected = stats.nbinom.logpmf(X[:, None], 1 / dispersion, 1 / (1 + dispersion * mean)).sum(axis=2)
    else:  # where scipy loses its digits, the limit: exact to O(φ x²)
        expected = stats.poisson.logpmf(X[:, None], mean).sum(axis=2)
    for kind in (np.asarray, sparse.csr_matrix):
        tolerance = 1e-10 if dispersion > 1e-5 else 1e-2
        np.testing.assert_allclose(c.log_prob(kind(X), size=s), expected, rtol=tolerance, atol=tolerance)


def test_poisson_density_with_sizes_is_that_of_scipy():
    rng = np.random.default_rng(0)
    rates, s = rng.gamma(1.0, 3.0, (3, 6)) + 0.01, rng.lognormal(0.0, 2.0, 50)
    X = rng.poisson(s[:, None] * rates[0]).astype(float)
    expected = stats.poisson.logpmf(X[:, None], s[:, None, None] * rates).sum(axis=2)
    np.testing.assert_allclose(PoissonComponents(rates).log_prob(X, size=s), expected, rtol=1e-10)


@pytest.mark.parametrize("make", [PoissonComponents, lambda r, ref: NegativeBinomialComponents(r, 0.3, ref)])
def test_new_samples_take_their_size_from_their_total(make):
    rng = np.random.default_rng(0)
    c = make(rng.gamma(1.0, 3.0, (3, 6)), 20.0)
    X = rng.poisson(4.0, (30, 6)).astype(float)
    X[5] = 0  # of size zero, certain to have no counts
    np.testing.assert_allclose(c.log_prob(X), c.log_prob(X, size=X.sum(axis=1) / 20.0), rtol=1e-12)
    assert c.log_prob(X)[5].tolist() == [0.0, 0.0, 0.0]


def test_interpolation_in_the_size_factor_is_exact_to_rounding():
    s = np.concatenate([np.exp(np.random.default_rng(0).uniform(-18, 18, 2000)), lattice()[::7], [1e-8, 1e8]])
    basis = size_basis(s)
    nodes = lattice()[basis.nodes]
    for scale in (1e-3, 1.0, 1e3):
        for f in (np.log1p, lambda v: v / (1 + v), lambda v: v / (1 + v) ** 2):
            np.testing.assert_allclose(basis.weights @ f(scale * nodes), f(scale * s), rtol=2e-11, atol=2e-12)


@pytest.mark.parametrize("family", ["poisson", "negative_binomial"])
def test_with_sizes_depth_does_not_split_a_group(counts, family):
    X = sparse.csr_matrix(counts["deep"])
    sized = fit_mixture(X, 4, family=family, size_factors="total")
    assert adjusted_rand_score(counts["labels"], sized.responsibilities(X).argmax(axis=1)) >= 0.98
    # The same samples at three times the depth belong to the same components.
    thrice = sparse.csr_matrix(
        np.random.default_rng(1).poisson(3 * counts["depth"][:, None] * counts["rates"][counts["labels"]])
    )
    assert np.mean(sized.responsibilities(thrice).argmax(axis=1) == sized.responsibilities(X).argmax(axis=1)) > 0.98


def test_total_sizes_refer_to_the_mean_total(counts):
    X = counts["deep"]
    assert fit_mixture(X, 2, family="poisson", size_factors="total").components.reference == X.sum() / len(X)


def test_given_sizes_leave_a_reference_for_new_samples(counts):
    X, depth = counts["deep"], counts["depth"]
    mixture = fit_mixture(X, 2, family="poisson", size_factors=depth)
    assert mixture.components.reference == pytest.approx(X.sum() / depth.sum())


def test_a_reference_of_one_s_own_sets_the_unit(counts):
    X = counts["deep"]
    by_mean = fit_mixture(X, 3, family=Poisson(size_factors="total"))
    by_million = fit_mixture(X, 3, family=Poisson(size_factors="total", reference=1e6))
    assert by_million.components.reference == 1e6
    np.testing.assert_allclose(by_million.components.rates.sum(axis=1), 1e6, rtol=1e-3)
    assert adjusted_rand_score(*(m.responsibilities(X).argmax(axis=1) for m in (by_mean, by_million))) > 0.99


def test_given_sizes_follow_their_samples_through_subsamples_and_shuffles(counts, monkeypatch):
    """A large fit draws a subsample and shuffled batches; with the sizes of other rows the rates would be off."""
    monkeypatch.setattr("omt.fitting.em._BATCH_LIMIT", 500)
    monkeypatch.setattr("omt.fitting.starts._SUBSAMPLE", 400)
    X, depth, labels = counts["deep"], counts["depth"], counts["labels"]
    mixture = fit_mixture(sparse.csr_matrix(X), 4, family="poisson", size_factors=depth, batch_size=128, epochs=3)
    assert mixture.report.method == "stepwise"
    group = np.array(
        [
            np.bincount(labels[found], minlength=4).argmax()
            for found in (mixture.components.log_prob(X, size=depth).argmax(axis=1) == k for k in range(4))
        ]
    )
    share = np.bincount(labels)[group]
    error = (mixture.components.rates - counts["rates"][group]) * np.sqrt(share[:, None] / counts["rates"][group])
    assert np.sqrt((error**2).mean()) < 1.3  # in standard errors


def test_sized_negative_binomials_fit_by_stepwise_em(counts, monkeypatch):
    monkeypatch.setattr("omt.fitting.em._BATCH_LIMIT", 500)
    monkeypatch.setattr("omt.fitting.starts._SUBSAMPLE", 400)
    X = sparse.csr_matrix(counts["bursty"])
    mixture = fit_mixture(X, 4, family="negative_binomial", size_factors="total", batch_size=128, epochs=3)
    batch = fit_mixture(X, 4, family=NegativeBinomial(mixture.components.dispersion, "total"), n_init=1, tol=1e-6)
    assert adjusted_rand_score(*(m.responsibilities(X).argmax(axis=1) for m in (mixture, batch))) > 0.95


# ------------------------------------------------------------------------------------------------------ dispersion
@pytest.mark.parametrize("sizes", [None, "total"])
def test_the_dispersion_of_each_feature_is_estimated_from_the_spread_within_components(sizes):
    rng = np.random.default_rng(0)
    phi = np.repeat([0.1, 0.5, 2.0], 20)
    means = rng.gamma(3.0, 3.0, (3, 60)) + 1
    labels = rng.integers(3, size=6000)
    s = rng.lognormal(0, 0.4, 6000) if sizes else np.ones(6000)
    X = rng.poisson(rng.gamma(1 / phi, phi * s[:, None] * means[labels])).astype(float)
    mixture = fit_mixture(X, labels=labels, family=NegativeBinomial(size_factors=None if sizes is None else s))
    np.testing.assert_allclose(mixture.components.dispersion, phi, rtol=0.25)
    assert np.median(np.abs(mixture.components.dispersion / phi - 1)) < 0.06


def test_counts_without_overdispersion_get_the_smallest_dispersion():
    X = np.full((50, 2), 3.0)
    assert fit_mixture(X, 1, family="negative_binomial").components.dispersion.tolist() == [1e-3, 1e-3]


@pytest.mark.parametrize("phi", [1e-9, 1e-4, 0.3, 50.0])
def test_rising_factorials_are_sums_of_logarithms(phi):
    x = np.array([0.0, 1.0, 2.0, 15.0, 16.0, 700.0])
    expected = [np.log1p(phi * np.arange(int(n))).sum() - np.log(np.arange(1, int(n) + 1)).sum() for n in x]
    found = log_rising(x, np.zeros(6, dtype=int), np.array([phi]), rising_table(np.array([phi])))
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_factorials_are_right_on_both_sides_of_the_table():
    x = np.array([0.0, 1.0, 1023.0, 1024.0, 1e6])
    np.testing.assert_allclose(log_factorials(x), special.gammaln(x + 1), rtol=1e-14)


@pytest.mark.parametrize("spread", [1.0, 60.0, 400.0])
def test_sums_with_sizes_are_those_of_all_samples_however_certain_the_responsibilities(spread):
    rng = np.random.default_rng(0)
    X, size = rng.poisson(1.0, (200, 30)).astype(float), rng.lognormal(0.0, 0.5, 200)
    R = special.softmax(spread * rng.normal(size=(200, 6)), axis=1)
    means = rng.gamma(2.0, 1.0, (6, 30))
    family = NegativeBinomial(dispersion=0.3, size_factors=size)
    statistics = family.empty(6, 30, NegativeBinomialComponents(means, 0.3).centre())
    family.accumulate(statistics, sparse.csr_array(X), R, size=size)
    wanted = np.einsum("nk,ng,nkg->kg", R, X, 1.0 / (1.0 + 0.3 * size[:, None, None] * means))
    np.testing.assert_allclose(statistics.sums["shrunk"], wanted, rtol=1e-12)
