"""Inner plans of Gaussian pairs against POT, OTT, a grid Sinkhorn, joint Gaussian densities and brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import logsumexp
from scipy.stats import multivariate_normal, norm

from omt.pairs import gaussian as pairs
from omt.pairs.gaussian import covariance_factors, diagonal_cost, diagonal_plans, gaussian_cost, gaussian_plans


def covariances(rng: np.random.Generator, n: int, d: int, floor: float = 0.1) -> np.ndarray:
    G = rng.normal(size=(n, d, d))
    return G @ G.transpose(0, 2, 1) / d + floor * np.eye(d)


def two_lists(seed: int, K: int, L: int, d: int):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(K, d)), covariances(rng, K, d), rng.normal(size=(L, d)), covariances(rng, L, d)


def one_pair(seed: int, d: int):
    rng = np.random.default_rng(seed)
    return covariances(rng, 1, d), covariances(rng, 1, d)


def sinkhorn_on_a_grid(m: float, v: float, m2: float, v2: float, epsilon: float, points: int = 400) -> float:
    """Entropic cost of two 1-D Gaussians by log-domain Sinkhorn on fine grids."""
    x = np.linspace(m - 8 * np.sqrt(v), m + 8 * np.sqrt(v), points)
    y = np.linspace(m2 - 8 * np.sqrt(v2), m2 + 8 * np.sqrt(v2), points)
    log_p, log_q = norm.logpdf(x, m, np.sqrt(v)), norm.logpdf(y, m2, np.sqrt(v2))
    log_p, log_q = log_p - logsumexp(log_p), log_q - logsumexp(log_q)
    scaled_cost = (x[:, None] - y[None, :]) ** 2 / epsilon
    f, g = np.zeros(points), np.zeros(points)
    for _ in range(2000):
        f = -logsumexp(g - scaled_cost + log_q, axis=1)
        new = -logsumexp(f[:, None] - scaled_cost + log_p[:, None], axis=0)
        if np.abs(new - g).max() < 1e-13:
            break
        g = new
    return float(epsilon * (np.exp(log_p) @ f + np.exp(log_q) @ g))


# ---------------------------------------------------------------------------------------------------------------- cost
@pytest.mark.parametrize("d", [1, 2, 6, 20])
def test_cost_without_temperature_equals_pot(d):
    ot_gmm = pytest.importorskip("ot.gmm")
    m, A, m2, B = two_lists(d, 4, 5, d)
    np.testing.assert_allclose(gaussian_cost(m, A, m2, B), ot_gmm.dist_bures_squared(m, m2, A, B), rtol=1e-10)


def test_cost_without_temperature_equals_ott():
    gaussian = pytest.importorskip("ott.tools.gaussian_mixture.gaussian")
    m, A, m2, B = two_lists(3, 1, 1, 4)
    source, target = (gaussian.Gaussian.from_mean_and_cov(mean[0], cov[0]) for mean, cov in ((m, A), (m2, B)))
    np.testing.assert_allclose(gaussian_cost(m, A, m2, B)[0, 0], float(source.w2_dist(target)), rtol=1e-4)  # float32


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 10.0])
def test_entropic_cost_equals_sinkhorn_on_a_grid(epsilon):
    m, v, m2, v2 = 0.3, 1.3, -1.1, 0.4
    ours = diagonal_cost(np.array([[m]]), np.array([[v]]), np.array([[m2]]), np.array([[v2]]), epsilon)[0, 0]
    assert ours == pytest.approx(sinkhorn_on_a_grid(m, v, m2, v2, epsilon), abs=1e-5)


def test_entropic_cost_of_rotated_product_laws_is_the_sum_of_their_axes():
    rng = np.random.default_rng(5)
    Q = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    v, v2, m, m2 = rng.uniform(0.3, 2, 3), rng.uniform(0.3, 2, 3), rng.normal(size=3), rng.normal(size=3)
    rotated = gaussian_cost((Q @ m)[None], (Q * v @ Q.T)[None], (Q @ m2)[None], (Q * v2 @ Q.T)[None], 1.5)[0, 0]
    axes = sum(sinkhorn_on_a_grid(*args, 1.5) for args in zip(m, v, m2, v2, strict=True))
    assert rotated == pytest.approx(axes, abs=3e-5)


@given(st.integers(0, 10**6), st.sampled_from([0.05, 1.0, 20.0]))
def test_no_cross_covariance_costs_less_than_the_closed_form(seed, epsilon):
    rng = np.random.default_rng(seed)
    d = 3
    A, B = one_pair(seed, d)
    zero = np.zeros((1, d))
    T = gaussian_plans(covariance_factors(A), covariance_factors(B), epsilon).maps()[0]

    def value(K: np.ndarray) -> float:
        joint = np.block([[A[0], K], [K.T, B[0]]])
        mutual_information = 0.5 * (
            np.linalg.slogdet(A[0])[1] + np.linalg.slogdet(B[0])[1] - np.linalg.slogdet(joint)[1]
        )
        return np.trace(A[0]) + np.trace(B[0]) - 2 * np.trace(K) + epsilon * mutual_information

    optimum = gaussian_cost(zero, A, zero, B, epsilon)[0, 0]
    assert optimum == pytest.approx(value(A[0] @ T), rel=1e-9)
    contraction = rng.normal(size=(d, d))
    contraction *= rng.uniform(0.1, 0.99) / np.linalg.norm(contraction, 2)
    other = np.linalg.cholesky(A[0]) @ contraction @ np.linalg.cholesky(B[0]).T
    assert value(other) >= optimum - 1e-9
    assert value(0.9 * A[0] @ T + 0.1 * other) >= optimum - 1e-9


def test_entropic_cost_tends_to_the_wasserstein_cost_as_the_temperature_falls():
    args = two_lists(7, 3, 4, 5)
    exact = gaussian_cost(*args)
    gaps = [np.abs(gaussian_cost(*args, epsilon) - exact).max() for epsilon in (1e-2, 1e-4, 1e-6, 1e-8)]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 1e-6


def test_entropic_cost_tends_to_the_cost_of_independent_laws_as_the_temperature_rises():
    m, A, m2, B = two_lists(8, 3, 4, 5)
    independent = ((m[:, None] - m2[None]) ** 2).sum(-1) + np.trace(A, axis1=1, axis2=2)[:, None]
    independent = independent + np.trace(B, axis1=1, axis2=2)
    np.testing.assert_allclose(gaussian_cost(m, A, m2, B, 1e9), independent, rtol=1e-7)


@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.3, 5.0]))
def test_exchanging_the_sides_transposes_the_cost(seed, epsilon):
    m, A, m2, B = two_lists(seed, 2, 3, 3)
    np.testing.assert_allclose(gaussian_cost(m, A, m2, B, epsilon), gaussian_cost(m2, B, m, A, epsilon).T, rtol=1e-9)


@given(st.floats(1e-6, 1e6), st.sampled_from([0.0, 0.7]))
def test_cost_scales_with_the_square_of_the_units(scale, epsilon):
    m, A, m2, B = two_lists(1, 2, 3, 3)
    scaled = gaussian_cost(scale * m, scale**2 * A, scale * m2, scale**2 * B, scale**2 * epsilon)
    np.testing.assert_allclose(scaled, scale**2 * gaussian_cost(m, A, m2, B, epsilon), rtol=1e-9)


@pytest.mark.parametrize("epsilon", [0.0, 0.8])
def test_axis_aligned_cost_equals_the_general_one(epsilon):
    rng = np.random.default_rng(2)
    m, v, m2, v2 = (
        rng.normal(size=(3, 6)),
        rng.uniform(0.1, 2, (3, 6)),
        rng.normal(size=(4, 6)),
        rng.uniform(0.1, 2, (4, 6)),
    )
    general = gaussian_cost(m, np.eye(6) * v[:, None], m2, np.eye(6) * v2[:, None], epsilon)
    np.testing.assert_allclose(diagonal_cost(m, v, m2, v2, epsilon), general, rtol=1e-10)


@pytest.mark.parametrize("epsilon", [0.0, 0.8])
def test_shared_covariance_gives_the_cost_of_its_copies(epsilon):
    m, A, m2, B = two_lists(4, 3, 4, 5)
    copies = gaussian_cost(m, np.repeat(A[:1], 3, axis=0), m2, np.repeat(B[:1], 4, axis=0), epsilon)
    np.testing.assert_allclose(gaussian_cost(m, A[:1], m2, B[:1], epsilon), copies, rtol=1e-12)


@pytest.mark.parametrize("epsilon", [0.0, 0.8])
def test_block_size_does_not_change_the_cost(monkeypatch, epsilon):
    m, A, m2, B = two_lists(4, 7, 5, 3)
    v, v2 = np.diagonal(A, axis1=1, axis2=2), np.diagonal(B, axis1=1, axis2=2)
    whole = gaussian_cost(m, A, m2, B, epsilon), diagonal_cost(m, v, m2, v2, epsilon)
    monkeypatch.setattr(pairs, "_BLOCK_ENTRIES", 20)
    np.testing.assert_allclose(gaussian_cost(m, A, m2, B, epsilon), whole[0], rtol=1e-13)
    np.testing.assert_allclose(diagonal_cost(m, v, m2, v2, epsilon), whole[1], rtol=1e-13)


def test_cost_of_equal_singular_components_is_zero():
    G = np.random.default_rng(0).normal(size=(1, 8, 3))
    A = G @ G.transpose(0, 2, 1)  # rank 3 of 8
    m = np.zeros((1, 8))
    assert gaussian_cost(m, A, m, A)[0, 0] < 1e-13 * np.trace(A[0])


@pytest.mark.parametrize("epsilon", [0.0, 0.5])
def test_cost_from_a_point_is_the_second_moment_about_it(epsilon):
    _, _, m2, B = two_lists(0, 1, 1, 4)
    point = np.zeros((1, 4, 4))
    expected = (m2**2).sum() + np.trace(B[0])
    assert gaussian_cost(np.zeros((1, 4)), point, m2, B, epsilon)[0, 0] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("epsilon", [0.0, 1e-4])
def test_dimension_512_with_tiny_variances_does_not_underflow(epsilon):
    rng = np.random.default_rng(1)
    d = 512
    Q = np.linalg.qr(rng.normal(size=(d, d)))[0]
    v, v2 = rng.uniform(1e-4, 2e-4, d), rng.uniform(1e-4, 2e-4, d)  # determinants of order 1e-2000
    m = np.zeros((1, d))
    general = gaussian_cost(m, (Q * v @ Q.T)[None], m, (Q * v2 @ Q.T)[None], epsilon)[0, 0]
    assert general == pytest.approx(diagonal_cost(m, v[None], m, v2[None], epsilon)[0, 0], rel=1e-9)
    plans = gaussian_plans(covariance_factors((Q * v @ Q.T)[None]), covariance_factors((Q * v2 @ Q.T)[None]), epsilon)
    expected = diagonal_plans(v[None], v2[None], epsilon).maps()[0]
    np.testing.assert_allclose(plans.maps()[0], Q * expected @ Q.T, atol=1e-9)


# ---------------------------------------------------------------------------------------------------------------- maps
@given(st.integers(0, 10**6), st.sampled_from([1, 2, 5, 12]))
def test_map_without_temperature_pushes_one_covariance_to_the_other(seed, d):
    A, B = one_pair(seed, d)
    T = gaussian_plans(covariance_factors(A), covariance_factors(B)).maps()[0]
    np.testing.assert_allclose(T @ A[0] @ T, B[0], atol=1e-9 * np.abs(B).max())


@given(st.integers(0, 10**6), st.sampled_from([0.0, 1e-3, 4.0]))
def test_maps_are_exactly_symmetric_and_positive_semidefinite(seed, epsilon):
    A, B = one_pair(seed, 5)
    T = gaussian_plans(covariance_factors(A), covariance_factors(B), epsilon).maps()[0]
    np.testing.assert_array_equal(T, T.T)
    assert np.linalg.eigvalsh(T).min() >= -1e-14 * np.abs(T).max()


def test_map_without_temperature_equals_pot():
    ot_gaussian = pytest.importorskip("ot.gaussian")
    A, B = one_pair(11, 6)
    zero = np.zeros(6)
    linear, _ = ot_gaussian.bures_wasserstein_mapping(zero, zero, A[0], B[0])
    np.testing.assert_allclose(
        gaussian_plans(covariance_factors(A), covariance_factors(B)).maps()[0], linear, atol=1e-10
    )


def test_map_without_temperature_equals_ott():
    gaussian = pytest.importorskip("ott.tools.gaussian_mixture.gaussian")
    m, A, m2, B = two_lists(12, 1, 1, 4)
    source, target = (gaussian.Gaussian.from_mean_and_cov(mean[0], cov[0]) for mean, cov in ((m, A), (m2, B)))
    x = np.random.default_rng(0).normal(size=(6, 4))
    ours = m2 + (x - m) @ gaussian_plans(covariance_factors(A), covariance_factors(B)).maps()[0]
    np.testing.assert_allclose(ours, np.asarray(source.transport(target, x)), atol=1e-3)  # float32


def test_entropic_map_tends_to_the_wasserstein_map_as_the_temperature_falls():
    A, B = one_pair(13, 4)
    F, G = covariance_factors(A), covariance_factors(B)
    exact = gaussian_plans(F, G).maps()
    gaps = [np.abs(gaussian_plans(F, G, epsilon).maps() - exact).max() for epsilon in (1e-2, 1e-4, 1e-6)]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 1e-5


def test_correlations_are_the_canonical_correlations_of_the_joint_law():
    A, B = one_pair(14, 4)
    plans = gaussian_plans(covariance_factors(A), covariance_factors(B), 0.7)
    cross = A[0] @ plans.maps()[0]
    white = np.linalg.solve(np.linalg.cholesky(A[0]), cross) @ np.linalg.inv(np.linalg.cholesky(B[0])).T
    np.testing.assert_allclose(
        np.sort(plans.correlations()[0]), np.sort(np.linalg.svd(white, compute_uv=False)), atol=1e-12
    )


@given(st.integers(0, 10**6), st.sampled_from([0.0, 1e-3, 0.5, 50.0]))
def test_image_plus_noise_has_the_target_covariance(seed, epsilon):
    A, B = one_pair(seed, 4)
    plans = gaussian_plans(covariance_factors(A), covariance_factors(B), epsilon)
    T, H = plans.maps()[0], plans.noise_factors()[0]
    np.testing.assert_allclose(T @ A[0] @ T + H @ H.T, B[0], atol=1e-9 * np.abs(B).max())


@pytest.mark.parametrize("epsilon", [0.0, 0.4])
def test_image_plus_noise_has_the_target_covariance_for_a_singular_source(epsilon):
    G = np.random.default_rng(3).normal(size=(1, 5, 2))
    A, B = G @ G.transpose(0, 2, 1), one_pair(3, 5)[1]
    plans = gaussian_plans(covariance_factors(A), covariance_factors(B), epsilon)
    T, H = plans.maps()[0], plans.noise_factors()[0]
    np.testing.assert_allclose(T @ A[0] @ T + H @ H.T, B[0], atol=1e-10)


def test_noise_vanishes_without_temperature():
    A, B = one_pair(4, 5)
    assert not gaussian_plans(covariance_factors(A), covariance_factors(B)).noise_factors().any()


@pytest.mark.parametrize("epsilon", [0.0, 0.6])
def test_inverse_maps_are_the_maps_of_the_exchanged_pair(epsilon):
    A, B = one_pair(5, 5)
    F, G = covariance_factors(A), covariance_factors(B)
    there, back = gaussian_plans(F, G, epsilon), gaussian_plans(G, F, epsilon)
    np.testing.assert_allclose(there.inverse_maps(), back.maps(), atol=1e-11)


@pytest.mark.parametrize("epsilon", [0.0, 0.6])
def test_axis_aligned_plans_equal_the_general_ones(epsilon):
    rng = np.random.default_rng(6)
    v, v2 = rng.uniform(0.2, 2, (3, 4)), rng.uniform(0.2, 2, (3, 4))
    general = gaussian_plans(
        covariance_factors(np.eye(4) * v[:, None]), covariance_factors(np.eye(4) * v2[:, None]), epsilon
    )
    diagonal = diagonal_plans(v, v2, epsilon)
    assert diagonal.axis_aligned
    np.testing.assert_allclose(general.maps(), np.eye(4) * diagonal.maps()[:, None], atol=1e-12)
    H = general.noise_factors()
    np.testing.assert_allclose(H @ H.transpose(0, 2, 1), np.eye(4) * diagonal.noise_factors()[:, None] ** 2, atol=1e-12)


def test_axis_with_a_tiny_variance_is_still_mapped_exactly_when_axis_aligned():
    maps = diagonal_plans(np.array([[1.0, 1e-40]]), np.array([[4.0, 9e-40]])).maps()
    np.testing.assert_allclose(maps, [[2.0, 3.0]], rtol=1e-12)


# ------------------------------------------------------------------------------------------------------- density ratio
@pytest.mark.parametrize("axis_aligned", [False, True])
@pytest.mark.parametrize("epsilon", [0.3, 3.0])
def test_density_ratio_equals_joint_over_product_of_marginals(epsilon, axis_aligned):
    rng = np.random.default_rng(8)
    d = 3
    if axis_aligned:
        v, v2 = rng.uniform(0.3, 2, (1, d)), rng.uniform(0.3, 2, (1, d))
        A, B = np.diag(v[0]), np.diag(v2[0])
        plans = diagonal_plans(v, v2, epsilon)
        cross = A * plans.maps()[0]
    else:
        A, B = (c[0] for c in one_pair(8, d))
        plans = gaussian_plans(covariance_factors(A[None]), covariance_factors(B[None]), epsilon)
        cross = A @ plans.maps()[0]
    joint = np.block([[A, cross], [cross.T, B]])
    x, y = rng.normal(size=(4, d)), rng.normal(size=(5, d))
    log_pi = np.array([[multivariate_normal.logpdf(np.r_[a, b], np.zeros(2 * d), joint) for b in y] for a in x])
    log_p, log_q = multivariate_normal.logpdf(x, np.zeros(d), A), multivariate_normal.logpdf(y, np.zeros(d), B)
    expected = log_pi - log_p[:, None] - log_q[None, :]
    np.testing.assert_allclose(plans.log_density_ratio(0, x, y), expected, atol=1e-8)


def test_density_ratio_without_temperature_is_refused():
    plans = diagonal_plans(np.ones((1, 2)), np.ones((1, 2)))
    with pytest.raises(ValueError, match=r"a plan at epsilon=0 is a map and has no density; use epsilon > 0"):
        plans.log_density_ratio(0, np.zeros((1, 2)), np.zeros((1, 2)))


def test_negative_eigenvalue_is_refused_by_component():
    matrices = np.stack([np.eye(2), np.diag([1.0, -1.0])])
    with pytest.raises(ValueError, match=r"covariance 1 is not positive semi-definite: its smallest eigenvalue is -1"):
        covariance_factors(matrices)
