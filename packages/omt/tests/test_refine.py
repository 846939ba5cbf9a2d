"""Entropic transport on points: the solver against POT, the map against closed forms, points against samples."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import ot
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cdist

import omt
from omt.refine import RefinedTransport
from omt.refine.entropic import self_potential, solve_points
from omt.refine.start import component_potential
from omt.refine.support import allocated, drawn_support, quantised
from omt.solver import ConvergenceWarning


@pytest.fixture
def plan(random_mixture):
    return omt.transport(random_mixture(0, 4, 2), random_mixture(1, 5, 2))


@pytest.fixture
def gaussians():
    """One Gaussian on each side, and the closed-form affine map between them."""
    A, B = np.array([[1.0, 0.3], [0.3, 0.5]]), np.array([[0.6, -0.2], [-0.2, 1.4]])
    P = omt.Mixture.from_gaussians([1.0], [[0.0, 1.0]], [A])
    Q = omt.Mixture.from_gaussians([1.0], [[3.0, -1.0]], [B])
    values, vectors = np.linalg.eigh(A)
    root = vectors * np.sqrt(values) @ vectors.T
    inverse = np.linalg.inv(root)
    values, vectors = np.linalg.eigh(root @ B @ root)
    T = inverse @ (vectors * np.sqrt(values) @ vectors.T) @ inverse
    return omt.transport(P, Q), lambda x: np.array([3.0, -1.0]) + (x - np.array([0.0, 1.0])) @ T.T


# -- the solver on points --------------------------------------------------------------------------------------------


def points(seed, n=60, m=80, d=3):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(n, d)), rng.normal(1.0, 1.5, size=(m, d))
    return cdist(x, y, "sqeuclidean"), rng.dirichlet(np.full(n, 3.0)), rng.dirichlet(np.full(m, 3.0))


@pytest.mark.parametrize("reg", [0.5, 0.05, 0.01])
def test_plan_between_points_is_that_of_pot(reg):
    C, a, b = points(0)
    epsilon = reg * C.mean()
    f, g, error, *_ = solve_points(C, a, b, epsilon, easy=0.02 * C.mean(), tol=1e-11, max_iter=20000)
    W = a[:, None] * b * np.exp((f[:, None] + g - C) / epsilon)
    expected = ot.sinkhorn(a, b, C, epsilon, method="sinkhorn_log", numItermax=100000, stopThr=1e-12)
    np.testing.assert_allclose(W, expected, atol=1e-9)
    assert error <= 1e-11


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.3, 0.03, 0.003]), st.sampled_from([1e-6, 1.0, 1e6]))
def test_marginals_are_reached_from_any_start_at_any_scale(seed, reg, scale):
    C, a, b = points(seed, n=20, m=15)
    C = C * scale
    start = C.mean() * np.random.default_rng(seed).normal(size=20)
    f, g, error, *_ = solve_points(C, a, b, reg * C.mean(), start=start, easy=0.02 * C.mean(), tol=1e-8, max_iter=50000)
    W = a[:, None] * b * np.exp((f[:, None] + g - C) / (reg * C.mean()))
    assert np.abs(W.sum(axis=1) - a).sum() == pytest.approx(error, abs=1e-9)
    assert error <= 1e-8
    np.testing.assert_allclose(W.sum(axis=0), b, rtol=1e-9)


def test_over_relaxation_takes_a_fraction_of_the_plain_sweeps():
    C, a, b = points(1, n=200, m=200, d=2)
    epsilon = 0.01 * C.mean()
    sweeps = solve_points(C, a, b, epsilon, easy=0.0, tol=1e-7, max_iter=50000).n_sweeps
    K = np.exp(-C / epsilon)
    u, plain = np.ones(200), 0
    while True:
        v = b / (K.T @ u)
        plain += 1
        if np.abs(u * (K @ v) - a).sum() <= 1e-7:
            break
        u = a / (K @ v)
    assert sweeps < 0.4 * plain


def test_groups_that_hardly_exchange_mass_are_solved_by_newton_steps():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 2)) + np.repeat([[0.0, 0.0], [40.0, 0.0]], 40, axis=0)
    y = rng.normal(size=(80, 2)) + np.repeat([[0.0, 3.0], [40.0, 3.0]], 40, axis=0)
    C, a = cdist(x, y, "sqeuclidean"), np.full(80, 1 / 80)
    b = np.where(np.arange(80) < 40, 1.02, 0.98) / 80  # a little mass has to cross
    epsilon = 0.02 * C.mean()
    f, g, error, _, steps = solve_points(C, a, b, epsilon, easy=epsilon, tol=1e-9, max_iter=300)
    W = a[:, None] * b * np.exp((f[:, None] + g - C) / epsilon)
    assert (error <= 1e-9, 1 <= steps <= 25) == (True, True)
    assert W[40:, :40].sum() - W[:40, 40:].sum() == pytest.approx(0.01, abs=1e-9)
    np.testing.assert_allclose(W.sum(axis=1), a, atol=1e-9)


def test_self_potential_couples_points_with_their_own_weights():
    a = points(2, n=50)[1]
    x = np.random.default_rng(0).normal(size=(50, 3))
    C = cdist(x, x, "sqeuclidean")
    for epsilon in (2.0, 0.05):
        h = self_potential(C, a, epsilon, 1e-12)
        W = a[:, None] * a * np.exp((h[:, None] + h - C) / epsilon)
        np.testing.assert_allclose(W.sum(axis=1), a, atol=1e-12)


def test_start_between_two_gaussians_is_the_potential_of_their_map(gaussians):
    plan, image = gaussians
    x = plan.source.sample(400, 0)
    guess = component_potential(x, plan.source, plan.target, plan.coupling, plan.f)
    y = image(x)
    # On the graph of the map f(x) + g(y) is the cost, and its gradient is 2 (x − T(x)).
    h = 1e-5
    for axis in range(2):
        step = np.eye(2)[axis] * h
        slope = (
            component_potential(x + step, plan.source, plan.target, plan.coupling, plan.f)
            - component_potential(x - step, plan.source, plan.target, plan.coupling, plan.f)
        ) / (2 * h)
        np.testing.assert_allclose(slope, 2 * (x - y)[:, axis], atol=1e-6)
    assert guess.shape == (400,)


def test_start_from_the_components_saves_sweeps(plan):
    x, a = drawn_support(plan.source, plan.source.weights, 300, np.random.default_rng(0))
    y, b = drawn_support(plan.target, plan.target.weights, 300, np.random.default_rng(1))
    C = cdist(x, y, "sqeuclidean")
    start = component_potential(x, plan.source, plan.target, plan.coupling, plan.f)
    sweeps = [
        solve_points(C, a, b, 0.02 * C.mean(), start=s, easy=0.0, tol=1e-3, max_iter=9999).n_sweeps
        for s in (None, start)
    ]
    assert sweeps[1] < sweeps[0]


# -- supports --------------------------------------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(0, 100))
def test_every_component_gets_a_point_and_all_points_are_used(seed, K, more):
    shares = np.random.default_rng(seed).dirichlet(np.full(K, 0.3))
    counts = allocated(shares, K + more)
    assert counts.min() >= 1
    assert counts.sum() == K + more
    assert np.abs(counts - (1 + shares * more)).max() <= 1.0 + 1e-9


def test_drawn_points_keep_the_components_weights(random_mixture):
    mixture = random_mixture(3, 5, 2, spread=300.0)
    support = drawn_support(mixture, mixture.weights, 200, np.random.default_rng(0))
    R = mixture.responsibilities(support.points)
    np.testing.assert_allclose(support.weights @ R, mixture.weights, atol=1e-9)


def test_group_means_keep_the_mean_and_less_than_the_spread():
    X = np.random.default_rng(0).normal(size=(3000, 2))
    w = np.random.default_rng(1).dirichlet(np.ones(3000))
    support = quantised(X, w, 200, np.random.default_rng(2))
    np.testing.assert_allclose(support.weights @ support.points, w @ X, atol=1e-12)
    assert support.weights.sum() == pytest.approx(1.0)
    lost = w @ (X**2).sum(axis=1) - support.weights @ (support.points**2).sum(axis=1)
    assert 0.0 < lost < 0.03


def test_few_samples_are_their_own_support():
    X = np.random.default_rng(0).normal(size=(30, 2))
    support = quantised(X, np.full(30, 1 / 30), 100, np.random.default_rng(0))
    np.testing.assert_array_equal(support.points, X)


# -- the map ---------------------------------------------------------------------------------------------------------


def test_map_between_gaussians_is_near_their_affine_map(gaussians):
    plan, image = gaussians
    x = plan.source.sample(1000, 5)
    assert omt.metrics.l2_uvp(plan.refine(1000).map(x), image(x)) < 0.5


def test_debiasing_lowers_the_error(gaussians):
    plan, image = gaussians
    x = plan.source.sample(1000, 5)
    refined = plan.refine(1000, reg=0.1)
    errors = [omt.metrics.l2_uvp(refined.map(x, debias=d), image(x)) for d in (True, False)]
    assert errors[0] < 0.5 * errors[1]


def test_plain_map_is_the_entropic_map_of_the_points(plan):
    refined = plan.refine(150)
    W = refined.plan()
    expected = (W @ refined.target_points) / W.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(refined.map(refined.source_points, debias=False), expected, atol=1e-9)


def test_map_of_a_source_onto_itself_is_the_identity(random_mixture):
    P = random_mixture(0, 3, 2)
    X = P.sample(500, 0)
    refined = omt.transport(P, P).refine(200, X=X, Y=X)
    new = P.sample(300, 1)
    # Both supports are group means of the same samples, drawn apart: what is left is the spread inside groups.
    assert omt.metrics.l2_uvp(refined.map(new), new) < 1.0
    same = omt.transport(P, P).refine(500, X=X, Y=X)
    np.testing.assert_allclose(same.map(new), new, atol=1e-5)


def test_refining_with_samples_does_not_inherit_the_mixtures_error():
    problem = omt.datasets.convex_potential(2, random_state=3)
    rng = np.random.default_rng(0)
    X, Y = problem.sample_source(3000, rng), problem.map(problem.sample_source(3000, rng))
    x = problem.sample_source(1000, rng)
    crude = [omt.fit_mixture(Z, 1, progress=False) for Z in (X, Y)]
    plan = omt.transport(*crude)
    drawn, sampled = plan.refine(800).map(x), plan.refine(800, X=X, Y=Y).map(x)
    truth = problem.map(x)
    assert omt.metrics.l2_uvp(sampled, truth) < 0.1 * omt.metrics.l2_uvp(drawn, truth)


def test_converged_says_what_the_plan_reaches(plan):
    refined = plan.refine(200)
    W = refined.plan()
    assert refined.converged
    np.testing.assert_allclose(np.abs(W.sum(axis=1) - refined.source_weights).sum(), refined.marginal_error, atol=1e-8)
    np.testing.assert_allclose(W.sum(axis=0), refined.target_weights, rtol=1e-9)


def test_unconverged_plan_is_not_returned_in_silence(plan):
    with pytest.warns(
        ConvergenceWarning, match=r"refine stopped after 5 sweeps and 50 Newton steps at a marginal error"
    ):
        refined = plan.refine(60, max_iter=5, tol=1e-300)
    assert not refined.converged


def test_seed_decides_the_points(plan):
    first, again, other = (plan.refine(100, seed=s) for s in (0, 0, 1))
    np.testing.assert_array_equal(first.source_points, again.source_points)
    assert not np.array_equal(first.source_points, other.source_points)


def test_unbalanced_plan_moves_the_mass_it_transports(random_mixture):
    P, Q = random_mixture(0, 3, 2, spread=300.0), random_mixture(1, 3, 2, spread=300.0)
    plan = omt.transport(P, Q, tau=0.7, reg=0.5)
    moved = plan.coupling.sum(axis=1) / plan.coupling.sum()
    assert np.abs(moved - P.weights).max() > 0.01
    X, Y = P.sample(4000, 0), Q.sample(4000, 1)
    for refined in (plan.refine(300), plan.refine(300, X=X, Y=Y)):
        weights = refined.source_weights @ P.responsibilities(refined.source_points)
        np.testing.assert_allclose(weights, moved, atol=0.02)


def test_lognormal_mixtures_are_refined_on_the_logarithm(gaussians):
    from omt.families import LogNormalComponents

    plan, _ = gaussians
    P, Q = (omt.Mixture(m.weights, LogNormalComponents(m.components)) for m in (plan.source, plan.target))
    refined = omt.transport(P, Q).refine(500)
    x = plan.source.sample(300, 1)
    np.testing.assert_allclose(np.log(refined.map(np.exp(x))), plan.refine(500).map(x), rtol=1e-9)
    with pytest.raises(ValueError, match=r"X is -1 at row 0, column 1; it must be positive"):
        refined.map([[1.0, -1.0]])


def test_count_mixtures_can_be_refined():
    P = omt.Mixture.from_params("poisson", [0.5, 0.5], rates=[[2.0, 20.0], [30.0, 5.0]])
    Q = omt.Mixture.from_params("poisson", [0.5, 0.5], rates=[[4.0, 20.0], [30.0, 8.0]])
    refined = omt.transport(P, Q).refine(400)
    image = refined.map(refined.source_points)
    np.testing.assert_allclose(refined.source_weights @ image, Q.mean(), atol=0.5)


def test_saving_and_loading_changes_nothing(plan, tmp_path):
    refined = plan.refine(100)
    refined.save(tmp_path / "refined")
    loaded = RefinedTransport.load(tmp_path / "refined")
    x = plan.source.sample(20, 0)
    np.testing.assert_array_equal(loaded.map(x), refined.map(x))
    assert repr(loaded) == repr(refined)


def test_repr_tells_points_temperature_and_convergence(plan):
    assert re.fullmatch(
        r"RefinedTransport\(points=\d+→\d+, d=2, epsilon=0\.\d+, converged=True, marginal_error=\S+, n_sweeps=\d+, "
        r"n_newton=0\)",
        repr(plan.refine(100)),
    )


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reg": 0.0}, r"reg is 0.0; it must be a finite number > 0"),
        ({"reg": np.nan}, r"reg is nan"),
        ({"n_points": 3}, r"n_points is 3; it must be at least the 4 components, one point for each"),
        ({"tol": 0.0}, r"tol is 0.0 and max_iter 500; they must be > 0 and ≥ 1"),
        ({"X": np.zeros((5, 3))}, r"X has shape \(5, 3\); its mixture has d=2 features, so it must be \[samples, 2\]"),
        ({"Y": [[0.0, np.nan]]}, r"Y has the value nan at row 0, column 1; it must be finite"),
    ],
)
def test_bad_options_are_refused(plan, options, message):
    with pytest.raises(ValueError, match=message):
        plan.refine(**options)


def test_a_number_of_points_that_is_not_whole_is_refused(plan):
    with pytest.raises(TypeError, match=r"n_points is 10.5; it must be a whole number"):
        plan.refine(10.5)


def test_samples_given_by_position_are_refused_with_how_to_give_them(plan):
    with pytest.raises(TypeError, match=r"n_points is an array; .* give samples by name, refine\(X=X, Y=Y\)"):
        plan.refine(np.zeros((5, 2)), np.zeros((5, 2)))


def test_forbidden_transitions_cannot_be_refined(plan):
    forbidden = np.zeros((4, 5), dtype=bool)
    forbidden[0, 0] = True
    barred = omt.transport(plan.source, plan.target, forbidden=forbidden)
    with pytest.raises(ValueError, match="has forbidden transitions between components, which points do not know"):
        barred.refine()


@pytest.mark.parametrize(
    ("X", "message"),
    [
        (np.zeros((3, 5)), r"X has shape \(3, 5\); the source has d=2 features, so X must be \[N, 2\]"),
        ([[0.0, np.inf]], r"X has the value inf at row 0, column 1"),
    ],
)
def test_samples_that_do_not_fit_are_refused(plan, X, message):
    with pytest.raises(ValueError, match=message):
        plan.refine(50).map(X)


def test_stored_arrays_that_do_not_fit_are_refused(plan):
    stored = plan.refine(50).to_dict()
    with pytest.raises(ValueError, match=r"f of this stored refined transport has shape \(3,\); it must be \(50,\)"):
        RefinedTransport.from_dict(stored | {"f": np.zeros(3)})
    with pytest.raises(ValueError, match="stored in format 9; this version of omt reads format 1"):
        RefinedTransport.from_dict(stored | {"format": 9})


def test_names_of_components_do_not_matter(plan):
    renamed = omt.transport(replace(plan.source, names=tuple("abcd")), plan.target)
    np.testing.assert_array_equal(renamed.refine(60).g, plan.refine(60).g)


@pytest.mark.parametrize("family", ["poisson", "exponential"])
def test_images_of_features_with_bounds_stay_inside_by_default(family):
    rates = np.array([[0.3, 2.0], [4.0, 0.5]])
    P, Q = (omt.Mixture.from_params(family, [0.5, 0.5], rates=r) for r in (rates, rates[::-1] * 2.0))
    refined = omt.transport(P, Q).refine(300)
    X = P.sample(200, 0)
    assert refined.map(X).min() >= 0.0
    np.testing.assert_array_equal(refined.map(X), refined.map(X, debias=False))
    assert type(refined).from_dict(refined.to_dict()).bounded
