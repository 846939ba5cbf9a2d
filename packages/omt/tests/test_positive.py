"""Fitting positive numbers: M-steps against numerical maximisers and scipy, and what is refused."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from scipy import optimize, sparse, special, stats
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import adjusted_rand_score

from omt.families import Exponential, Gamma, Gaussian, LogNormal
from omt.families.positive_fit import gamma_shapes
from omt.fitting.em import em_step, fit_mixture
from omt.mixture import Mixture

FAMILIES = {
    "gamma": Gamma(),
    "exponential": Exponential(),
    "lognormal": LogNormal(),
    "lognormal/diag": LogNormal("diag"),
}


@pytest.fixture
def labels():
    return np.random.default_rng(9).choice(3, size=900, p=[0.2, 0.3, 0.5])


@pytest.fixture
def positive(labels):
    """Samples of three groups in twelve features, by family."""
    rng = np.random.default_rng(0)
    means = rng.lognormal(0.0, 1.5, (3, 12))
    gamma = rng.gamma(3.0, means[labels] / 3.0)
    wide = rng.lognormal(0.0, 2.2, (3, 12))
    normal = np.log(means)[labels] + 0.5 * rng.normal(size=(900, 12))
    return {
        "gamma": gamma,
        "exponential": rng.exponential(wide[labels]),
        "lognormal": np.exp(normal),
        "lognormal/diag": np.exp(normal),
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_separated_groups_are_found(positive, labels, name):
    X = positive[name]
    mixture = fit_mixture(X, 3, family=FAMILIES[name])
    assert adjusted_rand_score(labels, mixture.responsibilities(X).argmax(axis=1)) >= 0.98
    np.testing.assert_allclose(mixture.weights, [0.5, 0.3, 0.2], atol=0.04)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_objective_never_falls(positive, name):
    weight = np.random.default_rng(0).uniform(0.2, 2.0, 900)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        mixture = fit_mixture(
            positive[name], 7, family=FAMILIES[name], n_init=1, tol=1e-10, max_iter=60, sample_weight=weight
        )
    assert mixture.report.n_iter > 8
    assert np.diff(mixture.report.history).min() >= -1e-10


@pytest.mark.parametrize("name", FAMILIES)
def test_an_em_step_at_the_optimum_changes_little(positive, name):
    X = positive[name]
    mixture = fit_mixture(X, 3, family=FAMILIES[name], tol=1e-12)
    after = em_step(X, mixture)
    assert after.report.log_likelihood == pytest.approx(mixture.report.log_likelihood, abs=1e-8)
    np.testing.assert_allclose(after.components.mean(), mixture.components.mean(), rtol=1e-2)


def test_gamma_m_step_maximises_the_penalised_likelihood(positive):
    X = positive["gamma"]
    R = np.random.default_rng(5).dirichlet([0.5, 0.5], len(X))
    family = Gamma()
    statistics = family.empty(2, 12, None)
    family.accumulate(statistics, X, R)
    prior = family.prior(statistics)
    fitted = family.m_step(statistics, prior)
    for g in (0, 5):

        def loss(u, g=g):
            a, b = np.exp(u)
            shape_prior = a * np.log(a) - special.gammaln(a) - a - a * prior["pooled"][g]
            return -(R[:, 1] @ stats.gamma.logpdf(X[:, g], a, scale=1 / b) + shape_prior)

        best = np.exp(
            optimize.minimize(loss, [0.0, 0.0], method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-10}).x
        )
        np.testing.assert_allclose([fitted.shapes[1, g], fitted.rates[1, g]], best, rtol=1e-6)


def test_gamma_without_shrinkage_is_the_maximum_likelihood_of_scipy(positive, labels):
    X = positive["gamma"]
    fitted = fit_mixture(X, labels=labels, family=Gamma(shrinkage=1e-9)).components
    for k, g in [(0, 0), (2, 11)]:
        a, _, scale = stats.gamma.fit(X[labels == k, g], floc=0)
        np.testing.assert_allclose([fitted.shapes[k, g], fitted.rates[k, g]], [a, 1 / scale], rtol=1e-4)


def test_gamma_shapes_are_the_roots_that_a_bracketing_solver_finds():
    spread = np.logspace(-6, 2, 41)
    expected = [
        optimize.brentq(lambda u, s=s: np.log(np.exp(u)) - special.digamma(np.exp(u)) - s, -8, 20, xtol=1e-13)
        for s in spread
    ]
    # At a shape of half a million the equation itself has six digits left of float64's sixteen.
    np.testing.assert_allclose(np.log(gamma_shapes(spread)), expected, atol=1e-8)


def test_exponential_m_step_maximises_the_penalised_likelihood(positive, labels):
    X = positive["exponential"]
    fitted = fit_mixture(X, labels=labels, family="exponential").components
    x, m = X[labels == 1, 3], X[:, 3].mean()
    best = optimize.minimize_scalar(
        lambda u: -(stats.expon.logpdf(x, scale=np.exp(-u)).sum() + 1e-2 * (u - np.exp(u) * m)),
        bounds=(-9, 9),
        options={"xatol": 1e-10},
    )
    assert np.log(fitted.rates[1, 3]) == pytest.approx(best.x, abs=1e-6)


@pytest.mark.parametrize("kind", ["full", "diag", "spherical", "tied", "lowrank"])
def test_lognormal_is_gaussian_on_the_logarithms(positive, kind):
    X = positive["lognormal"]
    ours = fit_mixture(X, 3, family="lognormal", covariance=kind)
    peer = fit_mixture(np.log(X), 3, family=Gaussian(kind))
    np.testing.assert_allclose(ours.components.gaussian.means, peer.components.means, rtol=1e-9)
    np.testing.assert_allclose(ours.log_prob(X), peer.log_prob(np.log(X)) - np.log(X).sum(axis=1), rtol=1e-9)


def test_lognormal_in_single_precision_has_the_responsibilities_of_double(positive):
    X = positive["lognormal"]
    single, double = (fit_mixture(X, 3, family="lognormal", dtype=dtype) for dtype in ("float32", "float64"))
    np.testing.assert_allclose(single.responsibilities(X), double.responsibilities(X), atol=1e-3)


@pytest.mark.parametrize("name", FAMILIES)
def test_other_units_change_only_the_scale(positive, name):
    X, scale = positive[name], np.logspace(-6, 6, 12)
    here, there = (fit_mixture(Y, 3, family=FAMILIES[name]) for Y in (X, X * scale))
    np.testing.assert_allclose(there.components.mean(), here.components.mean() * scale, rtol=1e-6)
    np.testing.assert_allclose(there.weights, here.weights, rtol=1e-6)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_component_of_one_sample_has_a_width(positive, name):
    X = positive[name]
    single = np.where(np.arange(900) == 7, "single", "rest")
    with pytest.warns(UserWarning, match="labels with one sample: single"):
        mixture = fit_mixture(X, labels=single, family=FAMILIES[name])
    k = mixture.names.index("single")
    relative = np.sqrt(mixture.components.variances()[k]) / mixture.components.mean()[k]
    assert (relative > 0.1).all()
    assert np.isfinite(mixture.log_prob(X)).all()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_constant_feature_is_legal(positive, labels, name):
    X = positive[name].copy()
    X[:, 2] = 5.0
    mixture = fit_mixture(X, 3, family=FAMILIES[name])
    assert np.isfinite(mixture.log_prob(X)).all()
    np.testing.assert_allclose(mixture.components.mean()[:, 2], 5.0, rtol=1e-2)
    assert adjusted_rand_score(labels, mixture.responsibilities(X).argmax(axis=1)) >= 0.97


@pytest.mark.parametrize("name", FAMILIES)
def test_a_component_without_samples_is_placed_at_the_worst_explained(positive, labels, name):
    from omt.chunks import as_source
    from omt.fitting.supervision import Supervision
    from omt.fitting.sweeps import Data, Model, refill, start, sweep

    X, family = positive[name], FAMILIES[name]
    data = Data(as_source(X), 256, np.dtype(float), None, Supervision(labels, np.arange(3)))
    model, prior = start(data, family, 3)
    data.supervision = Supervision()
    found = sweep(data, family, Model(model.weights, model.components))
    for values in found.statistics.sums.values():
        values[1] = 0.0
    attempts = np.zeros(3, dtype=np.int64)
    keep, placed = refill(family, found, prior, attempts, supervised=False)
    assert (keep.all(), placed, attempts.tolist()) == (True, 1, [0, 1, 0])
    after = family.m_step(found.statistics, prior, model.components)
    worst = X[model.components.log_prob(X).max(axis=1).argmin()]
    assert after.log_prob(worst[None])[0].argmax() == 1


# ------------------------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize("family", ["gamma", "exponential", "lognormal"])
@pytest.mark.parametrize(("value", "shown"), [(0.0, "0"), (-2.5, "-2.5")])
def test_numbers_that_are_not_positive_are_named(positive, family, value, shown):
    X = positive["gamma"].copy()
    X[700, 4] = value
    with pytest.raises(ValueError, match=f"X has {shown} in row 700, column 4; family .{family}. needs numbers > 0"):
        fit_mixture(X, 3, family=family, batch_size=64)


@pytest.mark.parametrize("family", ["gamma", "exponential", "lognormal"])
def test_sparse_samples_are_refused_with_the_first_zero(family):
    X = sparse.csr_matrix(np.array([[1.0, 2.0], [3.0, 0.0]]))
    with pytest.raises(ValueError, match=r"X is sparse \(row 1, column 1 is 0\); family '\w+' needs a dense array"):
        fit_mixture(X, 1, family=family)


def test_a_fitted_mixture_refuses_what_is_not_positive():
    mixture = Mixture.from_params("gamma", [1.0], shapes=[[1.0]], rates=[[1.0]])
    with pytest.raises(ValueError, match="X has -1 in row 1, column 0; family 'gamma' needs numbers > 0"):
        mixture.log_prob(np.array([[1.0], [-1.0]]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Gamma(shrinkage=0.0), "shrinkage is 0.0; it must be a finite number > 0"),
        (lambda: Gamma(floor=0.0), "floor is 0.0; it must be a finite number > 0"),
        (lambda: Exponential(shrinkage=np.inf), "shrinkage is inf"),
        (lambda: LogNormal("round"), "covariance is 'round'; it must be one of full"),
    ],
)
def test_recipes_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
