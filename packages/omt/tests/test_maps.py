"""Maps between mixtures: push-forward laws, closed forms, POT, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.spatial.distance import cdist

from omt.families import GaussianComponents
from omt.mixture import Mixture
from omt.pairs import maps
from omt.pairs.maps import barycentric_map, carried_pairs, folded_maps, mode_map, sample_map


def mixture(seed: int, K: int, d: int, covariance_type: str = "full", spread: float = 2.0) -> Mixture:
    rng = np.random.default_rng(seed)
    G = rng.normal(size=(K, d, d)) / np.sqrt(d)
    full = G @ G.transpose(0, 2, 1) + 0.2 * np.eye(d)
    parameters = {
        "full": {"covariances": full},
        "tied": {"covariances": full[0]},
        "diag": {"variances": rng.uniform(0.2, 2.0, (K, d))},
        "spherical": {"variances": rng.uniform(0.2, 2.0, K)},
        "lowrank": {"factors": G[:, :, :1], "noise": rng.uniform(0.2, 1.0, (K, d))},
    }[covariance_type]
    weights = rng.dirichlet(np.full(K, 5.0))
    return Mixture(weights, GaussianComponents(spread * rng.normal(size=(K, d)), covariance_type, **parameters))


def coupling(P: Mixture, Q: Mixture, seed: int = 0) -> np.ndarray:
    """A random coupling of the weights: two independent halves of unequal association."""
    W = np.random.default_rng(seed).uniform(0.05, 1.0, (P.K, Q.K)) ** 3
    for _ in range(2000):
        W *= (P.weights / W.sum(axis=1))[:, None]
        W *= Q.weights / W.sum(axis=0)
    return W


def energy_permutation_p(X: np.ndarray, Y: np.ndarray, rng: np.random.Generator, permutations: int = 199) -> float:
    """p-value of the energy-distance permutation test that two samples have one law."""
    n = len(X)
    D = cdist(np.vstack([X, Y]), np.vstack([X, Y]))

    def statistic(sign: np.ndarray) -> float:
        return -sign @ D @ sign  # n² times the energy distance, for equal sample sizes

    sign = np.repeat([1.0, -1.0], n)
    observed = statistic(sign)
    beaten = sum(statistic(rng.permutation(sign)) >= observed for _ in range(permutations))
    return (1 + beaten) / (1 + permutations)


# ---------------------------------------------------------------------------------------------------------- sample map
@pytest.mark.parametrize("covariance_type", ["full", "diag", "spherical", "tied", "lowrank"])
@pytest.mark.parametrize("epsilon", [0.0, 0.5])
def test_sampled_images_have_the_moments_of_the_target(covariance_type, epsilon):
    P, Q = mixture(0, 3, 3, covariance_type), mixture(1, 4, 3, covariance_type)
    rng = np.random.default_rng(2)
    n = 100_000
    Y = sample_map(P.sample(n, rng), P, Q, coupling(P, Q), epsilon, rng)
    centred = Y - Q.mean()
    mean_error = np.abs(centred.mean(axis=0)) / (Y.std(axis=0) / np.sqrt(n))
    assert mean_error.max() < 4.0
    products = centred[:, :, None] * centred[:, None, :]
    covariance_error = np.abs(products.mean(axis=0) - Q.cov()) / (products.std(axis=0) / np.sqrt(n))
    assert covariance_error.max() < 4.0


@pytest.mark.parametrize("epsilon", [0.0, 0.5])
def test_sampled_images_cannot_be_told_from_the_target(epsilon):
    P, Q = mixture(0, 3, 3), mixture(1, 4, 3)
    rng = np.random.default_rng(3)
    Y = sample_map(P.sample(500, rng), P, Q, coupling(P, Q), epsilon, rng)
    assert energy_permutation_p(Y, Q.sample(500, rng), rng) > 0.01


def test_the_permutation_test_tells_the_source_from_the_target():
    P, Q = mixture(0, 3, 3), mixture(1, 4, 3)
    rng = np.random.default_rng(3)
    assert energy_permutation_p(P.sample(500, rng), Q.sample(500, rng), rng) < 0.01


def test_sampled_images_weighted_by_growth_have_the_target_marginal_of_an_unbalanced_coupling():
    P, Q = mixture(0, 3, 2), mixture(1, 4, 2)
    W = coupling(P, Q) * np.array([[2.0], [0.5], [1.0]])
    rng = np.random.default_rng(4)
    n = 100_000
    X = P.sample(n, rng)
    growth = np.asarray(P.responsibilities(X)) @ (W.sum(axis=1) / P.weights)
    Y = sample_map(X, P, Q, W, 0.3, rng)
    expected = W.sum(axis=0) @ Q.components.means / W.sum()
    terms = growth[:, None] * (Y - expected)  # mean zero under the claim
    assert (np.abs(terms.mean(axis=0)) / (terms.std(axis=0) / np.sqrt(n))).max() < 4.0


def test_sampled_images_are_the_same_for_the_same_seed():
    P, Q = mixture(0, 3, 3), mixture(1, 4, 3)
    X = P.sample(200, 0)
    first, second = (sample_map(X, P, Q, coupling(P, Q), 0.4, np.random.default_rng(7)) for _ in range(2))
    np.testing.assert_array_equal(first, second)


# ----------------------------------------------------------------------------------------------------- barycentric map
@pytest.mark.parametrize("covariance_type", ["full", "diag", "tied"])
@pytest.mark.parametrize("epsilon", [0.0, 0.5])
def test_barycentric_map_is_the_mean_of_sampled_images(covariance_type, epsilon):
    P, Q = mixture(0, 3, 2, covariance_type), mixture(1, 4, 2, covariance_type)
    W, x = coupling(P, Q), P.sample(3, 1)
    n = 40_000
    draws = sample_map(np.repeat(x, n, axis=0), P, Q, W, epsilon, np.random.default_rng(0)).reshape(3, n, 2)
    error = np.abs(draws.mean(axis=1) - barycentric_map(x, P, Q, W, epsilon)) / (draws.std(axis=1) / np.sqrt(n))
    assert error.max() < 4.5


def test_barycentric_map_equals_pot():
    ot_gmm = pytest.importorskip("ot.gmm")
    P, Q = mixture(0, 3, 4), mixture(1, 4, 4)
    W, X = coupling(P, Q), P.sample(20, 2)
    p, q = P.components, Q.components
    theirs = ot_gmm.gmm_ot_apply_map(X, p.means, q.means, p.covariances, q.covariances, P.weights, Q.weights, plan=W)
    np.testing.assert_allclose(barycentric_map(X, P, Q, W), theirs, atol=1e-8)


def test_barycentric_map_of_a_separated_mixture_to_itself_is_the_identity():
    P = mixture(0, 4, 3, spread=40.0)
    X = P.sample(50, 0)
    np.testing.assert_allclose(barycentric_map(X, P, P, np.diag(P.weights)), X, atol=1e-8)


def test_one_component_a_side_gives_the_linear_map():
    P, Q = mixture(0, 1, 3), mixture(1, 1, 3)
    X = P.sample(50_000, 0)
    Y = barycentric_map(X, P, Q, np.ones((1, 1)))
    np.testing.assert_allclose(np.cov(Y.T), Q.cov(), atol=0.1)
    np.testing.assert_allclose(Y.mean(axis=0), Q.mean(), atol=0.05)


def test_folded_maps_leave_out_pairs_without_mass():
    P, Q = mixture(0, 2, 3), mixture(1, 3, 3)
    W = np.array([[0.5, 0.0, 0.0], [0.0, 0.5, 1e-16]])
    k, l = carried_pairs(W)
    assert list(zip(k.tolist(), l.tolist(), strict=True)) == [(0, 0), (1, 1)]
    offsets, _ = folded_maps(P, Q, W)
    np.testing.assert_allclose(offsets, Q.components.means[:2])


@pytest.mark.parametrize("covariance_type", ["full", "diag"])
def test_block_size_does_not_change_images(monkeypatch, covariance_type):
    P, Q = mixture(0, 3, 3, covariance_type), mixture(1, 4, 3, covariance_type)
    W, X = coupling(P, Q), P.sample(50, 0)
    whole = [f(X, P, Q, W, 0.2) for f in (barycentric_map, mode_map)]
    monkeypatch.setattr(maps, "_BLOCK_ROWS", 7)
    monkeypatch.setattr(maps, "_BLOCK_ENTRIES", 9)
    for before, f in zip(whole, (barycentric_map, mode_map), strict=True):
        np.testing.assert_allclose(f(X, P, Q, W, 0.2), before, atol=1e-12)


# ------------------------------------------------------------------------------------------------------------ mode map
def test_mode_map_uses_the_pair_with_the_largest_probability():
    P, Q = mixture(0, 3, 2), mixture(1, 4, 2)
    W, X = coupling(P, Q), P.sample(30, 5)
    R = np.asarray(P.responsibilities(X))
    for x, r, image in zip(X, R, mode_map(X, P, Q, W, 0.3), strict=True):
        k, l = np.unravel_index((r[:, None] * W / P.weights[:, None]).argmax(), W.shape)
        only = np.zeros_like(W)
        only[k, l] = 1.0
        single = Mixture(np.ones(1), P.components.select([k])), Mixture(np.ones(1), Q.components.select([l]))
        np.testing.assert_allclose(image, barycentric_map(x[None], *single, np.ones((1, 1)), 0.3)[0], atol=1e-12)


# ----------------------------------------------------------------------------------------------------------- bad input
ALL = [
    barycentric_map,
    mode_map,
    lambda X, P, Q, W: sample_map(X, P, Q, W, 0.0, np.random.default_rng(0)),
]


@pytest.mark.parametrize("function", ALL)
def test_points_with_other_features_are_refused(function):
    P, Q = mixture(0, 2, 3), mixture(1, 2, 3)
    with pytest.raises(ValueError, match=r"X has shape \(5, 2\); the source mixture has d=3 features"):
        function(np.zeros((5, 2)), P, Q, coupling(P, Q))


@pytest.mark.parametrize("function", ALL)
def test_points_that_are_not_finite_are_refused_by_row_and_column(function):
    P, Q = mixture(0, 2, 3), mixture(1, 2, 3)
    X = np.zeros((5, 3))
    X[3, 1] = np.nan
    with pytest.raises(ValueError, match="X has nan in row 3, column 1"):
        function(X, P, Q, coupling(P, Q))


@pytest.mark.parametrize("function", ALL)
def test_coupling_of_another_shape_is_refused(function):
    P, Q = mixture(0, 2, 3), mixture(1, 2, 3)
    with pytest.raises(ValueError, match=r"the coupling has shape \(3, 2\); with these mixtures it must be \[2, 2\]"):
        function(np.zeros((5, 3)), P, Q, np.ones((3, 2)))


@pytest.mark.parametrize("function", ALL)
def test_point_of_a_component_that_transports_nothing_is_refused_by_row(function):
    P, Q = mixture(0, 2, 3, spread=200.0), mixture(1, 2, 3)
    X = P.components.means[[0, 1]]
    with pytest.raises(
        ValueError, match="row 1 of X belongs only to source components from which nothing is transported"
    ):
        function(X, P, Q, np.array([[0.5, 0.5], [0.0, 0.0]]))
