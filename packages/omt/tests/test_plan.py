"""Plans between samples: exact marginals, the dense definition written out, operators, exports and refusals."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import cdist
from scipy.stats import multivariate_normal

from omt.datasets import known_map
from omt.families import GaussianComponents
from omt.mixture import Mixture
from omt.plans import cells as cellplan
from omt.plans import sample as plan
from omt.plans.cells import cell_laws
from omt.plans.marginals import fit_marginals
from omt.plans.sample import SamplePlan
from omt.problem import transport


def responsibilities(rng: np.random.Generator, n: int, K: int) -> np.ndarray:
    return rng.dirichlet(np.full(K, 0.4), size=n)


def scaled_to(W: np.ndarray, a: np.ndarray, b: np.ndarray, sweeps: int = 3000) -> np.ndarray:
    W = W.copy()
    for _ in range(sweeps):
        W *= (a / W.sum(axis=1))[:, None]
        W *= b / W.sum(axis=0)
    return W


def random_problem(seed: int, N: int = 30, M: int = 25, K: int = 4, L: int = 3):
    """Responsibilities, sample weights and a balanced coupling of their empirical component weights."""
    rng = np.random.default_rng(seed)
    R, S = responsibilities(rng, N, K), responsibilities(rng, M, L)
    mu, nu = rng.dirichlet(np.ones(N)), rng.dirichlet(np.ones(M))
    W = scaled_to(rng.uniform(0.01, 1.0, (K, L)) ** 2, mu @ R, nu @ S)
    return R, S, W, mu, nu


def dense_coarse(R, S, W, mu, nu) -> np.ndarray:
    """The definition, entry by entry."""
    a, b = mu @ R, nu @ S
    out = np.zeros((len(R), len(S)))
    for i in range(len(R)):
        for j in range(len(S)):
            out[i, j] = (
                mu[i]
                * nu[j]
                * sum(R[i, k] / a[k] * W[k, l] * S[j, l] / b[l] for k in range(len(a)) for l in range(len(b)))
            )
    return out


def mixtures(covariance_type: str = "full") -> tuple[Mixture, Mixture]:
    rng = np.random.default_rng(0)
    sides = []
    for K in (2, 3):
        G = rng.normal(size=(K, 2, 2))
        if covariance_type == "full":
            parameters = {"covariances": G @ G.transpose(0, 2, 1) + 0.3 * np.eye(2)}
        else:
            parameters = {"variances": rng.uniform(0.3, 2.0, (K, 2))}
        components = GaussianComponents(2.0 * rng.normal(size=(K, 2)), covariance_type, **parameters)
        sides.append(Mixture(rng.dirichlet(np.full(K, 5.0)), components))
    return sides[0], sides[1]


def fine_problem(covariance_type: str = "full", N: int = 12, M: int = 15, epsilon: float = 1.5, sweeps: int = 5):
    P, Q = mixtures(covariance_type)
    rng = np.random.default_rng(1)
    X, Y = P.sample(N, rng), Q.sample(M, rng)
    R, S = np.asarray(P.responsibilities(X)), np.asarray(Q.responsibilities(Y))
    mu, nu = rng.dirichlet(np.ones(N)), rng.dirichlet(np.ones(M))
    W = scaled_to(rng.uniform(0.05, 1.0, (2, 3)), mu @ R, nu @ S)
    return R, S, W, mu, nu, cell_laws(X, Y, P, Q, epsilon=epsilon, sweeps=sweeps)


def dense_fine(R, S, W, mu, nu, cells) -> np.ndarray:
    """The definition, with joint Gaussian densities from scipy."""
    p, q = cells.source.components, cells.target.components
    a = mu @ R
    out = np.zeros((len(R), len(S)))
    for k in range(p.K):
        for l in range(q.K):
            A, B = p.covariance_matrices()[k], q.covariance_matrices()[l]
            # Cross-covariance of the entropic plan from its optimality condition, by the joint law's closed form.
            root = np.linalg.cholesky(A)
            values, vectors = np.linalg.eigh(root.T @ B @ root)
            gamma = -cells.epsilon / 4 + np.sqrt(cells.epsilon**2 / 16 + values)
            cross = root @ (vectors * gamma) @ vectors.T @ np.linalg.inv(root)
            joint = multivariate_normal(np.r_[p.means[k], q.means[l]], np.block([[A, cross], [cross.T, B]]))
            density_q = multivariate_normal(q.means[l], B).pdf(cells.Y)
            for i, x in enumerate(cells.X):
                row = nu * S[:, l] * joint.pdf(np.hstack([np.tile(x, (len(S), 1)), cells.Y])) / density_q
                out[i] += mu[i] * R[i, k] / a[k] * W[k, l] * row / row.sum()
    return out


# --------------------------------------------------------------------------------------------------------- coarse plan
@given(st.integers(0, 10**6))
def test_coarse_plan_equals_its_definition(seed):
    problem = random_problem(seed, 9, 7)
    np.testing.assert_allclose(SamplePlan(*problem).to_dense(), dense_coarse(*problem), atol=1e-15)


@given(st.integers(0, 10**6))
def test_marginals_of_a_balanced_coarse_plan_are_exact(seed):
    problem = random_problem(seed)
    ours = SamplePlan(*problem)
    np.testing.assert_allclose(ours.pull(np.ones(25)), problem[3], atol=1e-15)
    np.testing.assert_allclose(ours.push(np.ones(30)), problem[4], atol=1e-15)
    assert max(ours.marginal_error()) < 1e-14


@pytest.mark.parametrize("size", [1e-9, 1e-7])
def test_marginals_are_exact_for_a_coupling_that_a_solver_left_open(size):
    R, S, W, mu, nu = random_problem(3)
    W = W * (1 + size * np.random.default_rng(0).normal(size=W.shape))
    assert max(SamplePlan(R, S, W, mu, nu).marginal_error()) < 1e-14


@given(st.integers(0, 10**6), st.sampled_from(["component", "cell"]))
def test_push_and_pull_are_adjoint(seed, resolution):
    rng = np.random.default_rng(seed)
    if resolution == "cell":
        *problem, cells = fine_problem()
    else:
        problem, cells = random_problem(seed), None
    ours = SamplePlan(*problem, cells=cells)
    u, v = rng.normal(size=ours.shape[0]), rng.normal(size=ours.shape[1])
    assert ours.push(u) @ v == pytest.approx(u @ ours.pull(v), abs=1e-13)


def test_factors_multiply_to_the_plan_on_both_sides_of_square():
    for K, L in ((4, 3), (3, 4)):
        problem = random_problem(5, K=K, L=L)
        Q, R, g = SamplePlan(*problem).to_factors()
        assert g.shape == (3,)
        np.testing.assert_allclose(Q / g @ R.T, dense_coarse(*problem), atol=1e-15)


def test_factors_have_the_marginals_of_low_rank_transport():
    problem = random_problem(6)
    Q, R, g = SamplePlan(*problem).to_factors()
    for ours, expected in (
        (Q.sum(axis=1), problem[3]),
        (R.sum(axis=1), problem[4]),
        (Q.sum(axis=0), g),
        (R.sum(axis=0), g),
    ):
        np.testing.assert_allclose(ours, expected, atol=1e-14)


def test_rows_of_an_unbalanced_plan_sum_to_weight_times_growth():
    R, S, W, mu, nu = random_problem(7)
    W = W * np.array([[2.0], [0.5], [1.0], [1.3]])
    ours = SamplePlan(R, S, W, mu, nu, balanced=False)
    growth = W.sum(axis=1) / (mu @ R)
    np.testing.assert_allclose(ours.pull(np.ones(25)), mu * (R @ growth), rtol=1e-12)
    assert ours.to_dense().sum() == pytest.approx(W.sum(), rel=1e-12)


def test_marginal_error_of_an_unbalanced_plan_shows_the_mass_created():
    R, S, W, mu, nu = random_problem(8)
    assert SamplePlan(R, S, 1.25 * W, mu, nu, balanced=False).marginal_error() == pytest.approx((0.25, 0.25), rel=1e-9)


@pytest.mark.parametrize("balanced", [True, False])
def test_conditional_pull_is_the_mean_over_destinations(balanced):
    R, S, W, mu, nu = random_problem(9)
    W = W if balanced else W * np.array([[2.0], [0.5], [1.0], [1.3]])
    v = np.random.default_rng(0).normal(size=(25, 2))
    dense = dense_coarse(R, S, W, mu, nu)
    ours = SamplePlan(R, S, W, mu, nu, balanced=balanced).pull(v, conditional=True)
    np.testing.assert_allclose(ours, dense @ v / dense.sum(axis=1, keepdims=True), rtol=1e-10)


def test_conditional_push_is_the_mean_over_origins_and_nan_where_nothing_arrives():
    R, S, W, mu, nu = random_problem(10)
    nu[4] = 0.0
    W = scaled_to(W, mu @ R, nu @ S / nu.sum())
    nu /= nu.sum()
    v = np.random.default_rng(0).normal(size=30)
    dense = dense_coarse(R, S, W, mu, nu)
    ours = SamplePlan(R, S, W, mu, nu).push(v, conditional=True)
    assert np.isnan(ours[4])
    others = np.arange(25) != 4
    np.testing.assert_allclose(ours[others], (dense.T @ v)[others] / dense.sum(axis=0)[others], rtol=1e-10)


def test_component_without_samples_is_left_out():
    R, S, W, mu, nu = random_problem(11)
    R = np.hstack([R, np.zeros((30, 1))])
    W = np.vstack([W, np.zeros((1, 3))])
    assert max(SamplePlan(R, S, W, mu, nu).marginal_error()) < 1e-14


# ----------------------------------------------------------------------------------------------------------- fine plan
@pytest.mark.parametrize("covariance_type", ["full", "diag"])
@pytest.mark.parametrize("epsilon", [0.2, 1.5, 20.0])
def test_fine_plan_without_sweeps_equals_its_definition(covariance_type, epsilon):
    *problem, cells = fine_problem(covariance_type, epsilon=epsilon, sweeps=0)
    ours = SamplePlan(*problem, cells=cells).to_dense()
    np.testing.assert_allclose(ours, dense_fine(*problem, cells), atol=1e-11)


def test_rows_of_a_balanced_fine_plan_are_exact():
    *problem, cells = fine_problem(N=60, M=50)
    assert SamplePlan(*problem, cells=cells).marginal_error().source < 1e-14


@pytest.mark.parametrize("epsilon", [0.3, 3.0])
def test_fine_plan_of_one_component_tends_to_entropic_transport_of_the_samples(epsilon):
    ot = pytest.importorskip("ot")
    P, Q = (Mixture.from_gaussians([1.0], [[m, 0.0]], [np.diag([1.0, v])]) for m, v in ((0.0, 1.0), (1.0, 2.0)))
    rng = np.random.default_rng(0)
    X, Y = P.sample(20, rng), Q.sample(25, rng)
    mu, nu = rng.dirichlet(np.ones(20)), rng.dirichlet(np.ones(25))
    expected = ot.sinkhorn(
        mu, nu, cdist(X, Y, "sqeuclidean"), epsilon, method="sinkhorn_log", stopThr=1e-13, numItermax=20_000
    )
    cells = cell_laws(X, Y, P, Q, epsilon=epsilon, sweeps=2000)
    ours = SamplePlan(np.ones((20, 1)), np.ones((25, 1)), np.ones((1, 1)), mu, nu, cells=cells).to_dense()
    np.testing.assert_allclose(ours, expected, atol=1e-10)


def test_sweeps_bring_the_columns_of_a_fine_plan_to_the_sample_weights():
    errors = []
    for sweeps in (0, 5, 50):
        *problem, cells = fine_problem(N=60, M=50, epsilon=0.5, sweeps=sweeps)
        error = SamplePlan(*problem, cells=cells).marginal_error()
        assert error.source < 1e-14
        errors.append(error.target)
    assert errors[1] < 0.3 * errors[0]
    assert errors[2] < 0.1 * errors[1]


def test_default_fine_plan_finds_partners_within_fifteen_percent_of_cell_level_transport():
    ot = pytest.importorskip("ot")
    truth, rng, n = known_map(10, 20, random_state=0), np.random.default_rng(0), 500
    X, k = truth.sample_source(n, rng)
    Y, _ = truth.sample_target(n, rng)
    push_forward = truth.linear @ truth.covariances @ truth.linear
    P = Mixture.from_gaussians(truth.weights, truth.means, truth.covariances)
    Q = Mixture.from_gaussians(truth.weights, truth.target_means, push_forward)
    fitted = transport(P, Q)
    distance = cdist(truth.map(X, k), Y, "sqeuclidean")
    costs = cdist(X, Y, "sqeuclidean")
    cell_level = ot.sinkhorn(np.full(n, 1 / n), np.full(n, 1 / n), costs, 0.02 * costs.mean(), numItermax=20_000)
    coarse, fine = fitted.plan(X, Y), fitted.plan(X, Y, "cell")
    assert (fine.to_dense() * distance).sum() < 0.8 * (coarse.to_dense() * distance).sum()
    assert (fine.to_dense() * distance).sum() < 1.15 * (cell_level * distance).sum()
    assert fine.marginal_error().target < 0.05


def test_column_error_without_sweeps_falls_with_the_number_of_samples():
    errors = []
    for n in (50, 5000):
        *problem, cells = fine_problem(N=n, M=n, sweeps=0)
        errors.append(SamplePlan(*problem, cells=cells).marginal_error().target)
    assert errors[1] < 0.3 * errors[0]


def test_fine_plan_tends_to_the_coarse_one_as_the_temperature_rises():
    *problem, cells = fine_problem(epsilon=1e8)
    np.testing.assert_allclose(SamplePlan(*problem, cells=cells).to_dense(), dense_coarse(*problem), atol=1e-8)


def test_fine_plan_keeps_its_rows_where_every_density_ratio_underflows():
    P, Q = (Mixture.from_gaussians([0.5, 0.5], [[0.0], [shift]], [[[1.0]], [[1.0]]]) for shift in (1e4, -1e4))
    rng = np.random.default_rng(0)
    X, Y = P.sample(40, rng), Q.sample(40, rng)
    R, S = np.asarray(P.responsibilities(X)), np.asarray(Q.responsibilities(Y))
    a, b = R.mean(axis=0), S.mean(axis=0)
    ours = SamplePlan(R, S, np.outer(a, b), cells=cell_laws(X, Y, P, Q, epsilon=1e-3))
    assert ours.marginal_error().source < 1e-13


@pytest.mark.parametrize("resolution", ["component", "cell"])
def test_block_size_does_not_change_a_plan(monkeypatch, resolution):
    *problem, cells = fine_problem()
    cells = cells if resolution == "cell" else None
    whole = SamplePlan(*problem, cells=cells)
    expected = whole.to_dense(), whole.push(np.arange(12.0)), whole.to_sparse(4).matrix.toarray()
    monkeypatch.setattr(plan, "_BLOCK_ENTRIES", 20)
    monkeypatch.setattr(cellplan, "_TILE_ENTRIES", 9)
    blocks = SamplePlan(*problem, cells=cells)
    actual = blocks.to_dense(), blocks.push(np.arange(12.0)), blocks.to_sparse(4).matrix.toarray()
    for ours, before in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, before, atol=1e-15)


def test_fine_plan_has_no_factors():
    *problem, cells = fine_problem()
    with pytest.raises(ValueError, match="resolution='cell' has no low-rank factors; use resolution='component'"):
        SamplePlan(*problem, cells=cells).to_factors()


# -------------------------------------------------------------------------------------------------------------- export
@pytest.mark.parametrize("resolution", ["component", "cell"])
def test_linear_operator_multiplies_like_the_dense_plan(resolution):
    *problem, cells = fine_problem()
    ours = SamplePlan(*problem, cells=cells if resolution == "cell" else None)
    operator, dense = ours.as_linear_operator(), ours.to_dense()
    rng = np.random.default_rng(0)
    v, V, U = rng.normal(size=15), rng.normal(size=(15, 3)), rng.normal(size=(12, 3))
    np.testing.assert_allclose(operator @ v, dense @ v, atol=1e-15)
    np.testing.assert_allclose(operator @ V, dense @ V, atol=1e-15)
    np.testing.assert_allclose(operator.H @ U, dense.T @ U, atol=1e-15)


@pytest.mark.parametrize("resolution", ["component", "cell"])
def test_sparse_plan_holds_the_largest_entries_of_each_row(resolution):
    *problem, cells = fine_problem()
    ours = SamplePlan(*problem, cells=cells if resolution == "cell" else None)
    dense, (matrix, kept) = ours.to_dense(), ours.to_sparse(4)
    expected = np.where(dense >= np.sort(dense, axis=1)[:, -4:][:, :1], dense, 0.0)
    np.testing.assert_allclose(matrix.toarray(), expected, atol=1e-16)
    assert kept == pytest.approx(expected.sum() / dense.sum())
    assert matrix.has_sorted_indices


def test_rescaled_sparse_plan_has_the_row_marginals_of_the_plan():
    *problem, cells = fine_problem()
    ours = SamplePlan(*problem, cells=cells)
    matrix, kept = ours.to_sparse(2, rescale=True)
    np.testing.assert_allclose(matrix.sum(axis=1), problem[3], rtol=1e-12)
    assert kept == ours.to_sparse(2).kept_mass


def test_sparse_plan_with_all_entries_is_the_plan():
    problem = random_problem(12)
    matrix, kept = SamplePlan(*problem).to_sparse(1000)
    np.testing.assert_allclose(matrix.toarray(), dense_coarse(*problem), atol=1e-15)
    assert kept == 1.0


def test_dense_plan_of_too_many_entries_is_refused_with_the_way_out():
    ours = SamplePlan(np.ones((20_000, 1)), np.ones((6_000, 1)), np.ones((1, 1)))
    with pytest.raises(
        ValueError, match=r"20000 × 6000 samples .* use push, pull, as_linear_operator\(\) or to_sparse"
    ):
        ours.to_dense()


# --------------------------------------------------------------------------------------------------- transition tables
def test_joint_transitions_are_sums_over_groups():
    problem = random_problem(13)
    labels_x, labels_y = np.array(list("abc") * 10), np.array(list("uv") * 12 + ["u"])
    dense = dense_coarse(*problem)
    table = SamplePlan(*problem).cell_transition(labels_x, labels_y, direction="joint")
    for x in "abc":
        for y in "uv":
            assert table.loc[x, y] == pytest.approx(dense[np.ix_(labels_x == x, labels_y == y)].sum(), rel=1e-12)


@pytest.mark.parametrize(("direction", "axis"), [("forward", 1), ("backward", 0)])
def test_transitions_are_normalised_in_their_direction(direction, axis):
    problem = random_problem(14)
    labels_x, labels_y = np.array(list("abc") * 10), np.array(list("uv") * 12 + ["u"])
    joint = SamplePlan(*problem).cell_transition(labels_x, labels_y, direction="joint")
    table = SamplePlan(*problem).cell_transition(labels_x, labels_y, direction=direction)
    pd.testing.assert_frame_equal(table, joint.div(joint.sum(axis=axis), axis=1 - axis))


def test_transitions_keep_the_order_of_categories_and_leave_out_samples_without_label():
    problem = random_problem(15)
    labels_x = pd.Series(["late", "early", None] * 10, dtype=pd.CategoricalDtype(["late", "early"]))
    table = SamplePlan(*problem).cell_transition(labels_x, ["y"] * 25, direction="joint")
    assert table.index.tolist() == ["late", "early"]
    assert table.to_numpy().sum() == pytest.approx(problem[3][labels_x.notna()].sum(), rel=1e-12)


# ----------------------------------------------------------------------------------------------------------- marginals
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 12))
def test_fitted_marginals_are_exact_to_rounding(seed, K, L):
    rng = np.random.default_rng(seed)
    a, b = rng.dirichlet(np.ones(K)), rng.dirichlet(np.ones(L))
    W = np.outer(a, b) * rng.uniform(0.5, 2.0, (K, L))
    W = scaled_to(W, a, b, 200) * (1 + 1e-8 * rng.normal(size=(K, L)))
    fitted = fit_marginals(W, a, b)
    assert np.abs(fitted.sum(axis=1) - a).sum() + np.abs(fitted.sum(axis=0) - b).sum() < 1e-14


def test_fitting_marginals_keeps_zeros():
    W = np.array([[0.3, 0.0, 0.1], [0.1, 0.3, 0.2]]) + np.array([[1e-9, 0, 0], [0, 0, 0]])
    fitted = fit_marginals(W, np.array([0.4, 0.6]), np.array([0.4, 0.3, 0.3]))
    assert fitted[0, 1] == 0.0
    np.testing.assert_allclose(fitted.sum(axis=1), [0.4, 0.6], atol=1e-15)


def test_marginals_that_a_pattern_of_zeros_cannot_have_leave_the_coupling_as_close_as_it_was():
    W = np.diag([0.5 + 1e-9, 0.5 - 1e-9])
    np.testing.assert_allclose(fit_marginals(W, np.array([0.5, 0.5]), np.array([0.5 + 1e-9, 0.5 - 1e-9])), W, atol=1e-8)


# ----------------------------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"R": np.ones(3)}, "R has shape (3,); responsibilities are [samples, components]"),
        ({"S": np.full((25, 3), 0.5)}, "row 0 of S sums to 1.5; responsibilities are ≥ 0 and sum to 1 in each row"),
        ({"W": np.ones((3, 4))}, "W has shape (3, 4); with these responsibilities it must be [4, 3]"),
        ({"W": np.full((4, 3), -1.0)}, "W has entries that are negative or not finite"),
        ({"W": np.full((4, 3), 1 / 12)}, "solve the coupling for those weights, or give balanced=False"),
        ({"mu": np.ones(7)}, "mu has shape (7,); it must hold one weight for each of the 30 samples"),
        ({"nu": np.full(25, -1.0)}, "nu must hold finite weights ≥ 0 with a positive sum"),
        ({"mu": np.ones(30)}, "mu sums to 30 and nu to 1; a balanced plan needs equal masses"),
    ],
)
def test_bad_problem_is_refused_by_name(change, message):
    arguments = dict(zip(("R", "S", "W", "mu", "nu"), random_problem(16), strict=True)) | change
    with pytest.raises(ValueError, match=re.escape(message)):
        SamplePlan(**arguments)


def test_mass_on_a_component_without_samples_is_refused_by_index():
    R, S, W, mu, nu = random_problem(17)
    R = np.hstack([R, np.zeros((30, 1))])
    W = np.vstack([W, np.full((1, 3), 0.1)])
    with pytest.raises(ValueError, match="W has mass on source component 4, to which no sample belongs"):
        SamplePlan(R, S, W, mu, nu, balanced=False)


def test_vectors_of_the_wrong_length_are_refused():
    ours = SamplePlan(*random_problem(18))
    with pytest.raises(
        ValueError, match=re.escape("v has shape (25,); there are 30 source samples, so it must be [30]")
    ):
        ours.push(np.ones(25))
    with pytest.raises(
        ValueError, match=re.escape("v has shape (30,); there are 25 target samples, so it must be [25]")
    ):
        ours.pull(np.ones(30))


def test_bad_export_arguments_are_refused():
    ours = SamplePlan(*random_problem(19))
    with pytest.raises(ValueError, match="top_k is 0; it must be an integer and at least 1"):
        ours.to_sparse(0)
    with pytest.raises(ValueError, match="direction is 'up'; it must be 'forward', 'backward' or 'joint'"):
        ours.cell_transition(["a"] * 30, ["b"] * 25, direction="up")
    with pytest.raises(ValueError, match="labels_x has 3 entries; there are 30 samples"):
        ours.cell_transition(["a"] * 3, ["b"] * 25)


def test_cells_of_other_samples_are_refused():
    *_, cells = fine_problem()
    with pytest.raises(ValueError, match="cells has 12 and 15 samples, but R and S have 30 and 25 rows"):
        SamplePlan(*random_problem(20), cells=cells)


def test_cell_laws_refuse_bad_samples_and_temperature():
    P, Q = mixtures()
    X, Y = np.zeros((3, 2)), np.zeros((4, 2))
    with pytest.raises(ValueError, match="epsilon is 0; a cell-level plan needs a temperature > 0"):
        cell_laws(X, Y, P, Q, epsilon=0.0)
    with pytest.raises(ValueError, match="sweeps is -1; it must be at least 0"):
        cell_laws(X, Y, P, Q, sweeps=-1)
    with pytest.raises(ValueError, match=r"Y has shape \(4, 5\); its mixture has d=2"):
        cell_laws(X, np.zeros((4, 5)), P, Q)
    with pytest.raises(ValueError, match="Y has nan in row 2, column 1"):
        cell_laws(X, np.where(np.arange(8).reshape(4, 2) == 5, np.nan, Y), P, Q)
