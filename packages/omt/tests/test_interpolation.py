"""Displacement interpolation against the closed form of McCann's geodesic, Monte Carlo, and a plan on a grid."""

from __future__ import annotations

import numpy as np
import ot
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import omt
from omt.interpolation import moved_samples, pair_masses, place_in_time
from omt.io import read_uns

TIMES = [0.25, 0.5, 0.9]


@pytest.fixture
def plan(random_mixture):
    return omt.transport(random_mixture(0, 3, 2), random_mixture(1, 4, 2), reg=0.05)


@pytest.fixture
def relaxed(random_mixture):
    return omt.transport(random_mixture(0, 3, 2), random_mixture(1, 4, 2), reg=0.2, tau=(0.6, 0.8))


def root(A):
    values, vectors = np.linalg.eigh(A)
    return vectors * np.sqrt(np.maximum(values, 0.0)) @ vectors.T


def mccann(A, B, t):
    """Covariance on the geodesic between two Gaussians, straight from the textbook."""
    inverse = np.linalg.inv(root(A))
    T = inverse @ root(root(A) @ B @ root(A)) @ inverse
    D = (1 - t) * np.eye(len(A)) + t * T
    return D @ A @ D


def bures(A, B):
    return np.trace(A) + np.trace(B) - 2 * np.trace(root(root(A) @ B @ root(A)))


# -- the mixture in between ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["full", "tied", "diag", "spherical", "lowrank"])
@pytest.mark.parametrize("t", TIMES)
def test_every_pair_is_on_the_geodesic_of_its_ends(kind, t):
    rng = np.random.default_rng(0)
    X, Y = rng.normal(size=(300, 3)) * [1, 2, 3], rng.normal(1.0, 2.0, size=(300, 3))
    P, Q = (omt.fit_mixture(Z, 2, covariance=kind, progress=False) for Z in (X, Y))
    middle = omt.transport(P, Q, reg=0.5).interpolate(t)
    assert middle.K == 4
    for name, mean, covariance in zip(middle.names, middle.components.mean(), middle.components.cov(), strict=True):
        k, l = (int(i) for i in name.split("→"))
        np.testing.assert_allclose(mean, (1 - t) * P.components.mean()[k] + t * Q.components.mean()[l], atol=1e-12)
        np.testing.assert_allclose(covariance, mccann(P.components.cov()[k], Q.components.cov()[l], t), atol=1e-8)


def test_diagonal_components_stay_diagonal():
    rng = np.random.default_rng(0)
    mixtures = [omt.fit_mixture(rng.normal(size=(200, 3)), 2, covariance="diag", progress=False) for _ in range(2)]
    assert omt.transport(*mixtures).interpolate(0.3).components.covariance_type == "diag"


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.02, 0.98))
def test_distance_grows_in_proportion_to_time(seed, t):
    rng = np.random.default_rng(seed)
    G, H = rng.normal(size=(2, 3, 3))
    P = omt.Mixture.from_gaussians([1.0], rng.normal(size=(1, 3)), (G @ G.T + 0.1 * np.eye(3))[None])
    Q = omt.Mixture.from_gaussians([1.0], rng.normal(size=(1, 3)), (H @ H.T + 0.1 * np.eye(3))[None])
    middle = omt.transport(P, Q).interpolate(t)
    whole = ((P.mean() - Q.mean()) ** 2).sum() + bures(P.cov(), Q.cov())
    part = ((P.mean() - middle.mean()) ** 2).sum() + bures(P.cov(), middle.cov())
    assert part == pytest.approx(t**2 * whole, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("bridge", [False, True])
def test_ends_are_returned_exactly(plan, bridge):
    assert plan.interpolate(0, bridge=bridge) is plan.source
    assert plan.interpolate(1.0, bridge=bridge) is plan.target


def test_weights_are_the_coupling_without_its_dust(plan):
    middle = plan.interpolate(0.5)
    kept = plan.coupling >= 1e-8
    np.testing.assert_allclose(middle.weights, plan.coupling[kept] / plan.coupling[kept].sum(), rtol=1e-6)
    assert middle.names[0] == "0→" + str(int(np.flatnonzero(kept[0])[0]))


def test_an_exact_plan_has_no_more_pairs_than_components(random_mixture):
    plan = omt.transport(random_mixture(0, 6, 2), random_mixture(1, 7, 2), reg=0.0)
    assert plan.interpolate(0.4).K <= 6 + 7 - 1


def test_mean_moves_on_a_straight_line(plan):
    for t in TIMES:
        expected = (1 - t) * plan.source.mean() + t * plan.target.mean()
        np.testing.assert_allclose(plan.interpolate(t).mean(), expected, atol=1e-6)


@pytest.mark.parametrize("bridge", [False, True])
@pytest.mark.parametrize("inner_reg", [0.0, 0.3])
def test_moved_samples_have_the_moments_of_the_mixture(random_mixture, inner_reg, bridge):
    plan = omt.transport(random_mixture(0, 3, 2), random_mixture(1, 4, 2), reg=0.05, inner_reg=inner_reg)
    n = 60_000
    for t in (0.4, 0.8):
        middle = plan.interpolate(t, bridge=bridge)
        drawn = plan.interpolate_samples(plan.source.sample(n, 1), t, n, 2, bridge=bridge)
        sd = np.sqrt(np.diag(middle.cov()))
        assert (np.abs(drawn.mean(axis=0) - middle.mean()) < 5 * sd / np.sqrt(n)).all()
        np.testing.assert_allclose(np.cov(drawn.T), middle.cov(), atol=0.04 * np.trace(middle.cov()))


def test_images_at_the_end_are_draws_of_the_target(random_mixture):
    plan = omt.transport(random_mixture(0, 3, 2), random_mixture(1, 4, 2), inner_reg=0.3)
    n = 60_000
    drawn = plan.interpolate_samples(plan.source.sample(n, 1), 1, n, 2)
    np.testing.assert_allclose(drawn.mean(axis=0), plan.target.mean(), atol=0.06)
    np.testing.assert_allclose(np.cov(drawn.T), plan.target.cov(), atol=0.03 * np.trace(plan.target.cov()))


@pytest.mark.parametrize("t", TIMES)
def test_bridge_has_the_marginal_of_the_schroedinger_bridge_on_a_grid(t):
    # Two Gaussians on a line; the plan of POT between grid points, and a Brownian bridge between its ends.
    epsilon = 1.5
    P = omt.Mixture.from_gaussians([1.0], [[-1.0]], [[[0.7]]])
    Q = omt.Mixture.from_gaussians([1.0], [[2.0]], [[[1.6]]])
    middle = omt.transport(P, Q, epsilon=epsilon).interpolate(t, bridge=True)
    x = np.linspace(-8, 9, 500)
    a, b = (np.exp(m.log_prob(x[:, None])) for m in (P, Q))
    W = ot.sinkhorn(a / a.sum(), b / b.sum(), (x[:, None] - x) ** 2, epsilon, method="sinkhorn_log", stopThr=1e-12)
    place = (1 - t) * x[:, None] + t * x
    mean = (W * place).sum()
    variance = (W * (place - mean) ** 2).sum() + t * (1 - t) * epsilon / 2
    assert middle.mean()[0] == pytest.approx(mean, abs=1e-6)
    assert middle.cov()[0, 0] == pytest.approx(variance, rel=1e-5)


def test_a_point_that_has_to_split_spreads_on_the_way():
    P = omt.Mixture.from_gaussians([1.0], [[0.0, 0.0]], [np.diag([1.0, 1e-34])])
    Q = omt.Mixture.from_gaussians([1.0], [[0.0, 0.0]], [np.diag([1.0, 4.0])])
    middle = omt.transport(P, Q).interpolate(0.5)
    np.testing.assert_allclose(middle.components.cov()[0], np.diag([1.0, 1.0]), atol=1e-12)


# -- unbalanced ------------------------------------------------------------------------------------------------------


def test_masses_grow_from_the_source_weights_to_the_target_weights_at_a_constant_rate(relaxed):
    np.testing.assert_allclose(pair_masses(relaxed, 0.0).sum(axis=1), relaxed.source.weights, atol=1e-12)
    np.testing.assert_allclose(pair_masses(relaxed, 1.0).sum(axis=0), relaxed.target.weights, atol=1e-12)
    start, middle, end = (pair_masses(relaxed, t) for t in (0.0, 0.5, 1.0))
    ratio = middle**2 / (start * end)
    np.testing.assert_allclose(ratio, ratio[0, 0], rtol=1e-9)
    assert np.abs(start - end).max() > 1e-3


def test_samples_of_growing_components_are_taken_more_often(random_mixture):
    P, Q = random_mixture(0, 3, 2, spread=300.0), random_mixture(1, 3, 2, spread=300.0)
    plan = omt.transport(P, Q, tau=0.7, reg=0.5)
    X, labels = P.sample(5000, 0, return_labels=True)
    moved = moved_samples(plan, X, 0.6, 20_000, 1)
    shares = np.bincount(labels[moved.origin], minlength=3) / 20_000
    expected = np.bincount(labels, minlength=3) / 5000 * pair_masses(plan, 0.6).sum(axis=1) / P.weights
    np.testing.assert_allclose(shares, expected / expected.sum(), atol=1e-3)


# -- samples ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "times"), [(40, {1}), (100, {2, 3}), (10, {0, 1})])
def test_every_sample_is_taken_equally_often(plan, n, times):
    X = plan.source.sample(40, 0)
    moved = moved_samples(plan, X, 0.3, n, 1)
    assert set(np.bincount(moved.origin, minlength=40)) == times
    assert moved.points.shape == (n, 2)


def test_at_the_start_samples_are_where_they_were(plan):
    X = plan.source.sample(30, 0)
    moved = moved_samples(plan, X, 0.0, None, 1)
    np.testing.assert_array_equal(moved.points, X[moved.origin])


def test_samples_move_on_straight_lines_to_their_images(plan):
    X = plan.source.sample(30, 0)
    half, end = (moved_samples(plan, X, t, None, 1) for t in (0.5, 1.0))
    np.testing.assert_array_equal(half.origin, end.origin)
    np.testing.assert_allclose(half.points, 0.5 * (X[half.origin] + end.points), atol=1e-12)


def test_a_pair_is_drawn_with_the_probability_of_the_plan(plan):
    n = 40_000
    moved = moved_samples(plan, plan.source.sample(n, 0), 0.5, n, 1)
    counts = np.zeros((3, 4))
    np.add.at(counts, (moved.source, moved.target), 1 / n)
    np.testing.assert_allclose(counts, plan.coupling, atol=5 * np.sqrt(0.25 / n))


def test_same_seed_gives_the_same_samples(plan):
    X = plan.source.sample(20, 0)
    np.testing.assert_array_equal(plan.interpolate_samples(X, 0.5, 9, 3), plan.interpolate_samples(X, 0.5, 9, 3))


def test_lognormal_components_move_on_the_logarithm(plan):
    from omt.families import LogNormalComponents

    P, Q = (omt.Mixture(m.weights, LogNormalComponents(m.components)) for m in (plan.source, plan.target))
    logs = omt.transport(P, Q, reg=0.05)
    inner = logs.interpolate(0.4).components.gaussian
    np.testing.assert_allclose(inner.means, plan.interpolate(0.4).components.means, atol=1e-12)
    X = plan.source.sample(20, 0)
    moved = np.log(logs.interpolate_samples(np.exp(X), 0.4, None, 1))
    np.testing.assert_allclose(moved, plan.interpolate_samples(X, 0.4, None, 1), atol=1e-9)


def test_counts_move_through_their_comonotone_plan():
    P = omt.Mixture.from_params("poisson", [1.0], rates=[[3.0, 10.0]])
    Q = omt.Mixture.from_params("poisson", [1.0], rates=[[6.0, 5.0]])
    plan = omt.transport(P, Q)
    X = P.sample(20_000, 0)
    np.testing.assert_allclose(plan.interpolate_samples(X, 0.25, None, 1).mean(axis=0), [3.75, 8.75], atol=0.1)
    end = plan.interpolate_samples(X, 1.0, None, 1)
    assert (end == np.round(end)).all()
    np.testing.assert_allclose(end.var(axis=0), [6.0, 5.0], rtol=0.06)


def test_count_mixtures_have_no_mixture_in_between():
    P = omt.Mixture.from_params("poisson", [1.0], rates=[[3.0]])
    message = r"half-way between two poisson components there is no poisson component.* interpolate_samples moves"
    with pytest.raises(ValueError, match=message):
        omt.transport(P, P).interpolate(0.5)


# -- chains ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def chain(random_mixture):
    return omt.TransportChain.between([random_mixture(s, 3, 2) for s in range(3)], [0, 1, 5])


@pytest.mark.parametrize(("t", "step", "share"), [(0.5, 0, 0.5), (2, 1, 0.25), (4.0, 1, 0.75)])
def test_chain_interpolates_in_the_step_that_holds_the_time(chain, t, step, share):
    expected = chain.transports[step].interpolate(share)
    np.testing.assert_allclose(chain.interpolate(t).components.means, expected.components.means, rtol=1e-12)
    X = chain.mixtures[step].sample(15, 0)
    np.testing.assert_allclose(
        chain.interpolate_samples(X, t, 8, 1), chain.transports[step].interpolate_samples(X, share, 8, 1), rtol=1e-12
    )


@pytest.mark.parametrize("i", [0, 1, 2])
def test_chain_gives_its_mixtures_at_its_times(chain, i):
    assert chain.interpolate(chain.times[i]) is chain.mixtures[i]


# -- the verb --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def course():
    adata, _ = omt.datasets.branching_process(150, random_state=2)
    omt.tl.fit_mixtures(adata, "time", labels="cell_type", use_rep="X_state", progress=False)
    omt.tl.transport(adata, time_key="time")
    return adata


def test_verb_moves_the_cells_before(course):
    between = omt.tl.interpolate(course, 2.25, n=200, random_state=1)
    assert (between.obs["time"] == 2.25).all()
    assert set(course.obs.loc[between.obs["omt_origin"], "time"]) == {2.0}
    origin = course.obs.loc[between.obs["omt_origin"], "cell_type"].astype(str).to_numpy()
    assert (between.obs["omt_source"].astype(str).to_numpy() == origin).mean() > 0.95
    model = read_uns(course)
    X = course.obsm["X_state"][(course.obs["time"] == 2).to_numpy()]
    expected = model.transports[2].interpolate_samples(X, 0.25, 200, 1)
    np.testing.assert_allclose(between.obsm["X_state"], expected, atol=1e-12)


def test_verb_generates_cells_without_cells(course):
    made = omt.tl.interpolate(course, 2.5, n=4000, kind="generate")
    middle = read_uns(course).transports[2].interpolate(0.5)
    np.testing.assert_allclose(made.obsm["X_state"].mean(axis=0), middle.mean(), atol=0.25)
    pairs = (made.obs["omt_source"].astype(str) + "→" + made.obs["omt_target"].astype(str)).value_counts(normalize=True)
    np.testing.assert_allclose([pairs.get(name, 0.0) for name in middle.names], middle.weights, atol=0.03)


@pytest.mark.parametrize("time", [0, 4])
def test_verb_generates_cells_at_an_end(course, time):
    made = omt.tl.interpolate(course, time, n=2000, kind="generate")
    mixture = read_uns(course).mixtures[time]
    np.testing.assert_allclose(made.obsm["X_state"].mean(axis=0), mixture.mean(), atol=0.3)


def test_verb_writes_a_file_that_opens(course, tmp_path):
    import anndata

    omt.tl.interpolate(course, source=1, target=2, t=0.5, n=5).write_h5ad(tmp_path / "between.h5ad")
    assert anndata.read_h5ad(tmp_path / "between.h5ad").obs["time"].tolist() == [1.5] * 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"time": 9}, r"time=9 is not between the first and the last time; the times are 0, 1, 2, 3, 4"),
        ({}, r"say when: time=, or source=, target= and t="),
        ({"time": 1, "t": 0.5}, r"give either time=, or source=, target= and t=, not both"),
        ({"source": 0, "target": 2, "t": 0.5}, r"must be neighbours in the chain: 0 → 1 → 2 → 3 → 4"),
        ({"source": 0, "target": 7, "t": 0.5}, r"target=7 is not in the chain; time there is one of: 0, 1, 2, 3, 4"),
        ({"source": 0, "target": 1, "t": 1.5}, r"t is 1.5; it must be between 0 \(the source\) and 1 \(the target\)"),
        ({"time": 1, "n": 0}, r"n is 0; it must be"),
        ({"time": 1, "n": 0, "kind": "generate"}, r"n is 0; it must be a whole number of at least 1"),
        ({"time": 1, "kind": "guess"}, r"kind is 'guess', must be 'move' or 'generate'"),
    ],
)
def test_verb_answers_to_bad_input(course, options, message):
    with pytest.raises(ValueError, match=message):
        omt.tl.interpolate(course, **options)


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("t", [-0.1, 1.01, np.nan, None])
def test_time_outside_of_zero_to_one_is_refused(plan, t):
    for call in (plan.interpolate, lambda t: plan.interpolate_samples(np.zeros((2, 2)), t)):
        with pytest.raises(ValueError, match=r"t is .*; it must be between 0 \(the source\) and 1 \(the target\)"):
            call(t)


@pytest.mark.parametrize("n", [0, -3, 1.5])
def test_fewer_than_one_sample_is_refused(plan, n):
    with pytest.raises(ValueError, match=r"n is .*; it must be a whole number of at least 1"):
        plan.interpolate_samples(np.zeros((2, 2)), 0.5, n)


@pytest.mark.parametrize("shape", [(3, 5), (3,), (0, 2)])
def test_samples_of_another_shape_are_refused(plan, shape):
    with pytest.raises(ValueError, match=r"X has shape .*; the source mixture has d=2 features, so X must be \[N, 2\]"):
        plan.interpolate_samples(np.zeros(shape), 0.5)


@pytest.mark.parametrize("t", [-1, 5.01, np.nan])
def test_time_outside_of_a_chain_lists_its_times(chain, t):
    with pytest.raises(ValueError, match="is not between the first and the last time; the times are 0, 1, 5"):
        chain.interpolate(t)


def test_place_in_time_names_the_argument():
    with pytest.raises(ValueError, match="when='x' is not between"):
        place_in_time([0, 1], "x", "when")
