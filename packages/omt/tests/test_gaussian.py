"""Gaussian components against scipy, quadrature, scikit-learn and a numerical maximiser."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import integrate, optimize, sparse, stats

from omt.families import Gaussian, GaussianComponents
from omt.families.base import bhattacharyya_coefficient, bregman_kl
from omt.families.gaussian import COVARIANCE_TYPES
from omt.families.gaussian_fit import factor_analysis

K, D = 3, 4


def components(kind: str, seed: int = 0, K: int = K, d: int = D, spread: float = 2.0) -> GaussianComponents:
    rng = np.random.default_rng(seed)
    A = rng.normal(size=(K, d, d)) / np.sqrt(d)
    full = A @ A.swapaxes(1, 2) + 0.3 * np.eye(d)
    parameters = {
        "full": {"covariances": full},
        "tied": {"covariances": full[0]},
        "diag": {"variances": rng.uniform(0.2, 3.0, size=(K, d))},
        "spherical": {"variances": rng.uniform(0.2, 3.0, size=K)},
        "lowrank": {"factors": rng.normal(size=(K, d, 2)), "noise": rng.uniform(0.2, 2.0, size=(K, d))},
    }[kind]
    return GaussianComponents(spread * rng.normal(size=(K, d)), kind, **parameters)


def scipy_log_prob(g: GaussianComponents, X: np.ndarray) -> np.ndarray:
    laws = zip(g.means, g.covariance_matrices(), strict=True)
    return np.stack([np.atleast_1d(stats.multivariate_normal(m, C).logpdf(X)) for m, C in laws], axis=1)


every_kind = pytest.mark.parametrize("kind", COVARIANCE_TYPES)


@every_kind
def test_log_prob_is_that_of_scipy(kind):
    g = components(kind)
    X = np.random.default_rng(1).normal(size=(1500, D)) * 3
    np.testing.assert_allclose(g.log_prob(X), scipy_log_prob(g, X), rtol=1e-10, atol=1e-10)


@every_kind
def test_log_prob_keeps_its_digits_far_from_the_origin_and_between_distant_tight_components(kind):
    g = components(kind)
    far = GaussianComponents(
        g.means * 1e5 + 1e6, kind, **{k: v for k, v in g.parameters().items() if k not in {"means", "covariance_type"}}
    )
    X = far.means[[0, 1, 2, 0]] + np.random.default_rng(1).normal(size=(4, D))
    own = np.arange(4) % 3
    ours, theirs = far.log_prob(X), scipy_log_prob(far, X)
    np.testing.assert_allclose(ours[np.arange(4), own], theirs[np.arange(4), own], rtol=1e-6)
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_log_prob_does_not_underflow_in_512_dimensions():
    g = components("full", K=2, d=512)
    X = g.means + 0.1
    np.testing.assert_allclose(g.log_prob(X), scipy_log_prob(g, X), rtol=1e-10)
    assert np.isfinite(GaussianComponents(g.means, "full", covariances=1e-6 * g.covariances).log_prob(X)).all()


@every_kind
def test_float32_responsibilities_are_within_1e_4(kind):
    g = components(kind, K=8, d=20)
    X = g.sample(np.random.default_rng(2).integers(8, size=2000), np.random.default_rng(3))

    def posterior(scores):
        scores = scores.astype(np.float64)
        p = np.exp(scores - scores.max(axis=1, keepdims=True))
        return p / p.sum(axis=1, keepdims=True)

    single = g.log_prob(X.astype(np.float32), dtype=np.float32)
    assert single.dtype == np.float32
    assert np.abs(posterior(single) - posterior(g.log_prob(X))).max() <= 1e-4


@pytest.mark.parametrize("kind", ["diag", "spherical"])
def test_sparse_samples_score_like_dense_ones(kind):
    g = components(kind)
    X = sparse.random_array((300, D), density=0.4, format="csr", rng=np.random.default_rng(0))
    np.testing.assert_allclose(g.log_prob(X), g.log_prob(X.toarray()), rtol=1e-10, atol=1e-10)


@every_kind
def test_samples_have_the_mean_and_covariance_of_their_component(kind):
    g = components(kind)
    n = 40_000
    labels = np.repeat(np.arange(K), n)
    X = g.sample(labels, np.random.default_rng(5))
    for k in range(K):
        own, C = X[labels == k], g.covariance_matrices()[k]
        assert (np.abs(own.mean(axis=0) - g.means[k]) < 5 * np.sqrt(np.diag(C) / n)).all()
        deviation = np.sqrt((C**2 + np.outer(np.diag(C), np.diag(C))) / n)
        assert (np.abs(np.cov(own.T) - C) < 5 * deviation).all()


@pytest.mark.parametrize(
    ("p", "q"), [(k, k) for k in COVARIANCE_TYPES] + [("full", "diag"), ("diag", "lowrank"), ("tied", "spherical")]
)
def test_kl_is_the_textbook_formula(p, q):
    a, b = components(p, 0), components(q, 1, K=2)
    expected = np.empty((K, 2))
    for k, (m, C) in enumerate(zip(a.means, a.covariance_matrices(), strict=True)):
        for l, (n, S) in enumerate(zip(b.means, b.covariance_matrices(), strict=True)):
            inverse = np.linalg.inv(S)
            log_ratio = np.linalg.slogdet(S)[1] - np.linalg.slogdet(C)[1]
            expected[k, l] = 0.5 * (np.trace(inverse @ C) + (n - m) @ inverse @ (n - m) - D + log_ratio)
    np.testing.assert_allclose(a.kl(b), expected, rtol=1e-9)


@every_kind
def test_kl_is_the_bregman_divergence_of_the_log_partition(kind):
    a, b = components(kind, 0), components(kind, 1)
    np.testing.assert_allclose(a.kl(b), bregman_kl(a, b), rtol=1e-8)


def test_kl_and_bhattacharyya_coefficient_are_their_integrals():
    a = GaussianComponents([[0.5]], "spherical", variances=[0.7])
    b = GaussianComponents([[-1.0]], "spherical", variances=[2.0])
    p, q = stats.norm(0.5, np.sqrt(0.7)), stats.norm(-1.0, np.sqrt(2.0))
    kl = integrate.quad(lambda x: p.pdf(x) * (p.logpdf(x) - q.logpdf(x)), -12, 12)[0]
    overlap = integrate.quad(lambda x: np.sqrt(p.pdf(x) * q.pdf(x)), -15, 15)[0]
    assert a.kl(b)[0, 0] == pytest.approx(kl, rel=1e-8)
    assert bhattacharyya_coefficient(a, b)[0, 0] == pytest.approx(overlap, rel=1e-8)


def test_kl_of_equal_components_is_zero():
    g = components("full")
    assert np.diag(g.kl(g)).max() < 1e-12


# ------------------------------------------------------------------------------------------------------------- M-step
def statistics(family: Gaussian, X, R, centre):
    found = family.empty(R.shape[1], X.shape[1], centre)
    for start in range(0, X.shape[0], 70):
        family.accumulate(found, X[start : start + 70], R[start : start + 70])
    return found


@pytest.fixture
def samples():
    rng = np.random.default_rng(7)
    return rng.normal(size=(400, D)) @ rng.normal(size=(D, D)) + 100.0, rng.dirichlet(np.ones(2), size=400)


def weighted_moments(X, r):
    mean = r @ X / r.sum()
    return mean, (X - mean).T @ ((X - mean) * r[:, None]) / r.sum()


@pytest.mark.parametrize("kind", ["full", "diag", "spherical", "tied"])
def test_m_step_without_shrinkage_is_weighted_maximum_likelihood(kind, samples):
    X, R = samples
    family = Gaussian(kind, shrinkage=0, floor=0)
    found = statistics(family, X, R, np.full((2, D), 99.0))
    fitted = family.m_step(found, family.prior(found))
    moments = [weighted_moments(X, R[:, k]) for k in range(2)]
    covariances = np.stack([C for _, C in moments])
    expected = {
        "full": covariances,
        "diag": covariances * np.eye(D),
        "spherical": np.trace(covariances, axis1=1, axis2=2)[:, None, None] / D * np.eye(D),
        "tied": np.einsum("k,kij->ij", R.sum(axis=0) / 400, covariances),
    }[kind]
    np.testing.assert_allclose(fitted.means, [m for m, _ in moments], rtol=1e-12)
    np.testing.assert_allclose(
        fitted.covariance_matrices(), np.broadcast_to(expected, (2, D, D)), rtol=1e-8, atol=1e-10
    )


def test_low_rank_m_step_reaches_the_maximum_of_the_factor_analysis_likelihood():
    rng = np.random.default_rng(0)
    F, D_ = rng.normal(size=(8, 2)), rng.uniform(0.3, 1.0, size=8)
    X = rng.normal(size=(800, 2)) @ F.T + rng.normal(size=(800, 8)) * np.sqrt(D_)
    S = np.cov(X.T, bias=True)

    def loss(parameters):
        factors, noise = parameters[:16].reshape(8, 2), np.exp(parameters[16:])
        sigma = factors @ factors.T + np.diag(noise)
        return np.linalg.slogdet(sigma)[1] + np.trace(np.linalg.solve(sigma, S))

    best = optimize.minimize(loss, np.concatenate([F.ravel(), np.log(D_)]), tol=1e-10).fun
    factors, noise = factor_analysis(S[None], 2, 1e-9)
    for _ in range(200):
        factors, noise = factor_analysis(S[None], 2, 1e-9, factors, noise)
    reached = loss(np.concatenate([factors[0].ravel(), np.log(noise[0])]))
    assert reached == pytest.approx(best, abs=1e-6)


def test_factor_analysis_steps_never_lower_the_likelihood():
    rng = np.random.default_rng(1)
    A = rng.normal(size=(6, 6))
    S = (A @ A.T)[None]
    factors, noise = rng.normal(size=(1, 6, 2)), np.ones((1, 6))
    values = []
    for _ in range(30):
        sigma = factors[0] @ factors[0].T + np.diag(noise[0])
        values.append(-np.linalg.slogdet(sigma)[1] - np.trace(np.linalg.solve(sigma, S[0])))
        factors, noise = factor_analysis(S, 2, 1e-9, factors, noise)
    assert np.diff(values).min() >= -1e-12


@pytest.mark.parametrize("kind", ["full", "diag", "spherical"])
def test_shrunk_covariances_maximise_likelihood_plus_log_prior(kind, samples):
    X, R = samples
    family = Gaussian(kind, shrinkage=30.0)
    found = statistics(family, X, R, None)
    prior = family.prior(found)
    fitted = family.m_step(found, prior)

    def objective(g):
        return float((R * g.log_prob(X)).sum()) + family.log_prior(g, prior)

    rng = np.random.default_rng(0)
    key = "covariances" if kind == "full" else "variances"
    value = getattr(fitted, key)
    for _ in range(20):
        noise = 1e-2 * rng.normal(size=value.shape)
        step = noise + noise.swapaxes(-1, -2) if kind == "full" else noise
        moved = GaussianComponents(
            fitted.means, kind, **{key: value * np.exp(step) if kind != "full" else value + step * 0.1}
        )
        assert objective(moved) < objective(fitted)


def test_shrinkage_follows_the_formula(samples):
    X, R = samples
    family = Gaussian("full", shrinkage=7.0)
    found = statistics(family, X, R, None)
    fitted = family.m_step(found, family.prior(found))
    N, S = R.sum(axis=0), np.stack([weighted_moments(X, R[:, k])[1] for k in range(2)])
    pooled = np.einsum("k,kij->ij", N, S) / N.sum()
    np.testing.assert_allclose(
        fitted.covariances, (N[:, None, None] * S + 7 * pooled) / (N + 7)[:, None, None], rtol=1e-6
    )


def test_default_shrinkage_is_one_pseudo_sample_a_feature(samples):
    found = statistics(Gaussian(), *samples, None)
    assert float(Gaussian().prior(found)["shrinkage"]) == D


def test_statistics_of_two_halves_merge_to_those_of_the_whole(samples):
    X, R = samples
    whole, first, second = (
        statistics(Gaussian(), x, r, None) for x, r in ((X, R), (X[:150], R[:150]), (X[150:], R[150:]))
    )
    first.merge(second)
    for name, value in whole.sums.items():
        np.testing.assert_allclose(first.sums[name], value, rtol=1e-12)


def test_statistics_about_different_centres_do_not_merge(samples):
    X, R = samples
    with pytest.raises(ValueError, match="different centres"):
        statistics(Gaussian(), X, R, None).merge(statistics(Gaussian(), X, R, np.ones((2, D))))


@pytest.mark.parametrize("kind", ["full", "diag", "tied", "spherical", "lowrank"])
def test_singular_scatter_gives_a_finite_density(kind):
    X = np.repeat(np.random.default_rng(0).normal(size=(2, D)), 5, axis=0)
    X[:, 0] = 3.0
    R = np.repeat(np.eye(2), 5, axis=0)
    family = Gaussian(kind)
    found = statistics(family, X, R, None)
    assert np.isfinite(family.m_step(found, family.prior(found)).log_prob(X)).all()


def test_floor_bounds_every_eigenvalue():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(50, 3)) * [1.0, 1.0, 1e-9]
    family = Gaussian("full", shrinkage=0, floor=1e-3)
    found = statistics(family, X, np.ones((50, 1)), None)
    values = np.linalg.eigvalsh(family.m_step(found, family.prior(found)).covariances[0])
    mean_variance = X.var(axis=0).mean()
    assert values[0] == pytest.approx(1e-3 * mean_variance, rel=1e-6)


# ---------------------------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[0.0]], "round"), "covariance_type is 'round'; it must be one of full, diag"),
        (([0.0], "diag"), r"means has shape \(1,\); it must be \[K, d\]"),
        (([[0.0]], "diag"), "covariance_type 'diag' needs variances"),
        (([[np.nan]], "spherical", None, [1.0]), "means of component 0 are not finite"),
        (([[0.0], [0.0]], "spherical", None, [1.0, 0.0]), "variances of component 1 are not positive"),
        (([[0.0, 0.0]], "diag", None, [[1.0]]), r"variances has shape \(1, 1\); .* must be \[K, d\]"),
        (([[0.0, 0.0]], "full", [[[1.0, 2.0], [2.0, 1.0]]]), "covariance of component 0 is not positive definite"),
        (([[0.0, 0.0]], "tied", [[1.0, 1.0], [1.0, 1.0]]), "the tied covariance is not positive definite"),
        (([[0.0, 0.0]], "full", [[[1.0, 0.5], [0.0, 1.0]]]), "covariances of component 0 are not symmetric"),
        (([[0.0]], "full", [[[1.0]]], [[1.0]]), "covariance_type 'full' takes no variances"),
    ],
)
def test_malformed_components_are_refused_with_the_reason(arguments, message):
    with pytest.raises(ValueError, match=message):
        GaussianComponents(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"covariance": "round"}, "covariance is 'round'; it must be one of full"),
        ({"covariance": "full", "rank": 2}, "only covariance='lowrank' takes it"),
        ({"covariance": "lowrank", "rank": 0}, "rank is 0; it must be at least 1"),
        ({"shrinkage": -1.0}, "shrinkage is -1.0; it must be a finite number ≥ 0"),
        ({"floor": np.nan}, "floor is nan; it must be a finite number ≥ 0"),
    ],
)
def test_malformed_families_are_refused_with_the_reason(arguments, message):
    with pytest.raises(ValueError, match=message):
        Gaussian(**arguments)


def test_diagonal_variances_of_full_covariances_are_refused():
    with pytest.raises(TypeError, match="'full' covariances are not diagonal; use covariance_matrices"):
        components("full").diagonal_variances()


def test_samples_of_another_width_are_refused():
    with pytest.raises(ValueError, match=r"these components have d = 4, so it must be \[N, 4\]"):
        components("full").log_prob(np.zeros((2, 3)))


def test_kl_of_another_width_is_refused():
    with pytest.raises(ValueError, match="the components have 4 and 2 features"):
        components("full").kl(components("full", d=2))
