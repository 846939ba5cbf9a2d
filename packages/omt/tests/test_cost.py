"""The cost table against quadrature, grids, POT and its own boundary cases."""

from __future__ import annotations

import re

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.spatial.distance import cdist
from scipy.stats import multivariate_normal, norm

from omt.families import GaussianComponents
from omt.mixture import Mixture
from omt.pairs.cost import component_cost, inner_epsilon
from omt.pairs.divergences import diagonal_bhattacharyya, gaussian_bhattacharyya, squared_hellinger

TYPES = ["full", "diag", "spherical", "tied", "lowrank"]


def gaussians(seed: int, K: int, d: int, covariance_type: str) -> Mixture:
    rng = np.random.default_rng(seed)
    G = rng.normal(size=(K, d, d)) / np.sqrt(d)
    full = G @ G.transpose(0, 2, 1) + 0.2 * np.eye(d)
    parameters = {
        "full": {"covariances": full},
        "tied": {"covariances": full[0]},
        "diag": {"variances": rng.uniform(0.2, 2.0, (K, d))},
        "spherical": {"variances": rng.uniform(0.2, 2.0, K)},
        "lowrank": {"factors": G[:, :, :2], "noise": rng.uniform(0.2, 1.0, (K, d))},
    }[covariance_type]
    return Mixture(np.full(K, 1.0 / K), GaussianComponents(rng.normal(size=(K, d)), covariance_type, **parameters))


def one_dimensional(moments: list[tuple[float, float]]) -> Mixture:
    means, variances = (np.array(column)[:, None] for column in zip(*moments, strict=True))
    return Mixture(np.full(len(moments), 1 / len(moments)), GaussianComponents(means, "diag", variances=variances))


SOURCE, TARGET = [(0.0, 1.0), (2.0, 0.3)], [(0.5, 2.0), (-1.0, 0.6), (0.0, 1.0)]


def table(value) -> np.ndarray:
    """``value(p, q)`` of every source and target law, as frozen scipy normals."""
    laws = [[norm(m, np.sqrt(v)) for m, v in side] for side in (SOURCE, TARGET)]
    return np.array([[value(p, q) for q in laws[1]] for p in laws[0]])


def kullback_leibler(p, q) -> float:
    return quad(lambda x: p.pdf(x) * (p.logpdf(x) - q.logpdf(x)), -15, 15, epsabs=1e-12, limit=200)[0]


@pytest.mark.parametrize("source", TYPES)
@pytest.mark.parametrize("target", TYPES)
def test_w2_equals_pot_for_every_two_covariance_types(source, target):
    ot_gmm = pytest.importorskip("ot.gmm")
    P, Q = gaussians(0, 3, 4, source), gaussians(1, 2, 4, target)
    p, q = P.components, Q.components
    expected = ot_gmm.dist_bures_squared(p.means, q.means, p.covariance_matrices(), q.covariance_matrices())
    np.testing.assert_allclose(component_cost(P, Q), expected, rtol=1e-9)


def test_kl_equals_quadrature():
    ours = component_cost(one_dimensional(SOURCE), one_dimensional(TARGET), cost="kl")
    np.testing.assert_allclose(ours, table(kullback_leibler), atol=1e-9)


def test_jeffreys_equals_quadrature():
    ours = component_cost(one_dimensional(SOURCE), one_dimensional(TARGET), cost="jeffreys")
    np.testing.assert_allclose(ours, table(lambda p, q: kullback_leibler(p, q) + kullback_leibler(q, p)), atol=1e-9)


def test_hellinger_equals_quadrature():
    def squared(p, q) -> float:
        return 0.5 * quad(lambda x: (np.sqrt(p.pdf(x)) - np.sqrt(q.pdf(x))) ** 2, -15, 15, epsabs=1e-12, limit=200)[0]

    ours = component_cost(one_dimensional(SOURCE), one_dimensional(TARGET), cost="hellinger")
    np.testing.assert_allclose(ours, table(squared), atol=1e-9)


@pytest.mark.parametrize("covariance_type", ["full", "tied", "lowrank"])
def test_hellinger_of_general_covariances_equals_a_sum_on_a_grid(covariance_type):
    P, Q = gaussians(3, 2, 2, covariance_type), gaussians(4, 3, 2, covariance_type)
    axis = np.linspace(-12, 12, 401)
    grid = np.stack(np.meshgrid(axis, axis), axis=-1)
    roots = [
        [np.sqrt(multivariate_normal(m, S).pdf(grid)) for m, S in zip(c.means, c.covariance_matrices(), strict=True)]
        for c in (P.components, Q.components)
    ]
    overlap = np.array([[(p * q).sum() for q in roots[1]] for p in roots[0]]) * (axis[1] - axis[0]) ** 2
    np.testing.assert_allclose(component_cost(P, Q, cost="hellinger"), 1.0 - overlap, atol=1e-9)


def test_hellinger_does_not_underflow_in_dimension_512():
    rng = np.random.default_rng(0)
    d = 512
    v, v2 = rng.uniform(1e-4, 2e-4, (1, d)), rng.uniform(1e-4, 2e-4, (1, d))
    m = np.zeros((1, d))
    general = gaussian_bhattacharyya(m, np.eye(d)[None] * v[:, None], m, np.eye(d)[None] * v2[:, None])
    by_axis = -np.log(np.sqrt(2 * np.sqrt(v * v2) / (v + v2))).sum()
    np.testing.assert_allclose(general, by_axis, rtol=1e-10)
    np.testing.assert_allclose(diagonal_bhattacharyya(m, v, m, v2), by_axis, rtol=1e-10)


def test_squared_hellinger_keeps_its_digits_for_nearly_equal_components():
    assert squared_hellinger(np.array([1e-18]))[0] == pytest.approx(1e-18, rel=1e-12)


@pytest.mark.parametrize("name", ["euclidean", "sqeuclidean"])
def test_distances_of_means_ignore_covariances(name):
    P, Q = gaussians(0, 3, 4, "full"), gaussians(1, 2, 4, "diag")
    np.testing.assert_allclose(component_cost(P, Q, cost=name), cdist(P.components.means, Q.components.means, name))


def test_entropic_cost_uses_the_temperature_in_units_of_the_mean_cost():
    P, Q = gaussians(0, 3, 4, "full"), gaussians(1, 2, 4, "full")
    epsilon = 0.05 * component_cost(P, Q).mean()
    np.testing.assert_allclose(
        component_cost(P, Q, cost="entropic", inner_reg=0.05), component_cost(P, Q, cost="entropic", epsilon=epsilon)
    )


def test_w2_cost_does_not_depend_on_the_inner_temperature():
    P, Q = gaussians(0, 3, 4, "full"), gaussians(1, 2, 4, "full")
    np.testing.assert_array_equal(component_cost(P, Q, inner_reg=0.1), component_cost(P, Q))


def test_entropic_cost_is_never_below_the_w2_cost():
    P, Q = gaussians(0, 4, 3, "full"), gaussians(1, 5, 3, "full")
    assert (component_cost(P, Q, cost="entropic", epsilon=0.7) >= component_cost(P, Q) - 1e-12).all()


def test_w2_of_a_mixture_with_itself_has_a_zero_diagonal():
    P = gaussians(0, 4, 6, "full")
    assert np.abs(np.diag(component_cost(P, P))).max() < 1e-13


def test_permuting_components_permutes_the_cost():
    P, Q = gaussians(0, 4, 3, "full"), gaussians(1, 5, 3, "full")
    order = [2, 0, 3, 1]
    permuted = Mixture(P.weights[order], P.components.select(order))
    np.testing.assert_allclose(component_cost(permuted, Q), component_cost(P, Q)[order], rtol=1e-13)


def test_cost_may_be_a_function_of_the_mixtures():
    P, Q = gaussians(0, 3, 4, "full"), gaussians(1, 2, 4, "full")
    np.testing.assert_array_equal(
        component_cost(P, Q, cost=lambda p, q: np.full((p.K, q.K), 2.0)), np.full((3, 2), 2.0)
    )


def test_cost_may_be_a_finished_table_and_is_copied():
    P, Q = gaussians(0, 3, 4, "full"), gaussians(1, 2, 4, "full")
    given = np.arange(6.0).reshape(3, 2)
    ours = component_cost(P, Q, cost=given)
    given[:] = -1.0
    np.testing.assert_array_equal(ours, np.arange(6.0).reshape(3, 2))


def test_component_of_one_cell_has_a_finite_cost_when_floored():
    tiny = GaussianComponents(np.zeros((1, 5)), "spherical", variances=np.array([1e-12]))
    P = Mixture(np.ones(1), tiny)
    for name in ("w2", "kl", "jeffreys", "hellinger"):
        assert np.isfinite(component_cost(P, gaussians(1, 3, 5, "full"), cost=name)).all()


# ----------------------------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"cost": "wasserstein"}, "cost is 'wasserstein'; it must be one of w2, entropic, kl"),
        ({"cost": "entropic"}, "cost='entropic' needs an inner temperature: give inner_reg > 0 or epsilon > 0"),
        ({"cost": "entropic", "inner_reg": -0.1}, "inner_reg is -0.1; it must be a finite number ≥ 0"),
        ({"cost": "entropic", "epsilon": float("nan")}, "epsilon is nan; it must be a finite number ≥ 0"),
        ({"cost": "entropic", "epsilon": 1.0, "inner_reg": 0.1}, "give inner_reg (0.1) or epsilon (1.0), not both"),
        (
            {"cost": np.zeros((2, 2))},
            "cost is an array of shape (2, 2); it must be [3, 2], source by target components",
        ),
        (
            {"cost": lambda p, q: np.zeros(3)},
            "the function given as cost returned an array of shape (3,); it must be [3, 2]",
        ),
        (
            {"cost": np.array([[0, 1], [np.inf, 0], [0, 0]])},
            "cost is an array with inf at [1, 0]; costs must be finite (name impossible transitions by forbidden=)",
        ),
    ],
)
def test_bad_cost_is_refused_by_name(keywords, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        component_cost(gaussians(0, 3, 4, "full"), gaussians(1, 2, 4, "full"), **keywords)


def test_different_numbers_of_features_are_refused():
    with pytest.raises(ValueError, match="source has d=4 features and target d=3; fit both on the same features"):
        component_cost(gaussians(0, 3, 4, "full"), gaussians(1, 2, 3, "full"))


def test_wide_low_rank_covariances_are_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"low-rank covariances with d=600 features .* covariance='diag'"):
        component_cost(gaussians(0, 2, 600, "lowrank"), gaussians(1, 2, 600, "lowrank"))


def test_inner_epsilon_is_zero_without_temperature():
    assert inner_epsilon(gaussians(0, 2, 3, "full"), gaussians(1, 2, 3, "full")) == 0.0
