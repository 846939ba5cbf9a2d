"""Derivatives of the plan: against finite differences, closed forms and what must hold of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import omt
from omt.solver import solve
from omt.solver.network import IsolatedError, Network
from omt.stability import Sensitivity

TAUS = [(1.0, 1.0), (0.8, 0.9), (1.0, 0.7), (0.6, 1.0)]


@pytest.fixture
def transported(random_mixture):
    def make(K, L, **options):
        return omt.transport(random_mixture(1, K, 3), random_mixture(2, L, 3), **options)

    return make


def differences(t, step, *, dC=0.0, da=0.0, db=0.0):
    """Central differences of the plan, solved to rounding."""
    plans = [
        solve(
            t.cost_matrix + sign * step * dC,
            t.source.weights + sign * step * da,
            t.target.weights + sign * step * db,
            lam=t.lam,
            tau=t.tau,
            tol=1e-13,
            forbidden=t.forbidden,
        ).coupling
        for sign in (1, -1)
    ]
    return (plans[0] - plans[1]) / (2 * step)


def directions(rng, t):
    """Directions of costs and of weights (of sum 0) of the size of what they change."""
    dC = t.lam * rng.normal(size=t.cost_matrix.shape)
    shifts = [w * rng.normal(size=w.size) for w in (t.source.weights, t.target.weights)]
    return dC, *(s - w * s.sum() for s, w in zip(shifts, (t.source.weights, t.target.weights), strict=True))


# -- finite differences ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize(("K", "L"), [(5, 7), (7, 4), (6, 6)])
def test_directional_derivatives_are_those_of_finite_differences(transported, K, L, tau):
    t = transported(K, L, tau=tau, reg=0.1)
    dC, da, db = directions(np.random.default_rng(0), t)
    s = t.sensitivity()
    np.testing.assert_allclose(s.dC(dC), differences(t, 1e-4, dC=dC), atol=1e-8)
    np.testing.assert_allclose(s.da(da), differences(t, 1e-4, da=da), atol=1e-8)
    np.testing.assert_allclose(s.db(db), differences(t, 1e-4, db=db), atol=1e-8)


@pytest.mark.parametrize("reg", [0.1, 0.03, 0.01])
def test_relative_error_to_finite_differences_is_below_1e_5(transported, reg):
    t = transported(9, 12, reg=reg)
    dC, _, _ = directions(np.random.default_rng(1), t)
    expected = differences(t, 1e-4, dC=dC)
    assert abs(t.sensitivity().dC(dC) - expected).sum() <= 1e-5 * abs(expected).sum()


def test_weights_of_a_relaxed_side_may_change_their_sum(transported):
    t = transported(4, 5, tau=0.9, reg=0.1)
    da = 0.1 * t.source.weights
    np.testing.assert_allclose(t.sensitivity().da(da), differences(t, 1e-4, da=da), atol=1e-8)


def test_directions_of_grown_weights_are_those_of_the_source(transported, random_mixture):
    g = np.array([2.0, 1.0, 0.5, 1.5])
    t = transported(4, 5, reg=0.1, growth=g)
    da = t.source.weights * np.array([0.1, -0.2, 0.1, 0.05])
    da -= t.source.weights * da.sum()
    h = 1e-4
    plans = [
        omt.transport(replace(t.source, weights=t.source.weights + s * h * da), t.target, lam=t.lam, growth=g).coupling
        for s in (1, -1)
    ]
    np.testing.assert_allclose(t.sensitivity().da(da), (plans[0] - plans[1]) / (2 * h), atol=1e-7)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("reg", [0.1, 0.01])
def test_first_order_prediction_is_within_ten_percent_at_a_twentieth_of_the_temperature(transported, seed, reg):
    t = transported(10, 10, reg=reg)
    dC = np.random.default_rng(seed).uniform(-0.05, 0.05, size=(10, 10)) * t.lam
    moved = solve(t.cost_matrix + dC, t.source.weights, t.target.weights, lam=t.lam).coupling - t.coupling
    assert abs(t.sensitivity().dC(dC) - moved).sum() <= 0.1 * abs(moved).sum()


def test_derivative_with_respect_to_the_temperature_follows_from_the_costs(transported):
    t = transported(6, 5, reg=0.1)
    h = 1e-4 * t.lam
    ends = [solve(t.cost_matrix, t.source.weights, t.target.weights, lam=t.lam + s * h).coupling for s in (1, -1)]
    np.testing.assert_allclose(
        t.sensitivity().dC(-t.cost_matrix / t.lam), (ends[0] - ends[1]) / (2 * h), rtol=1e-5, atol=1e-10
    )


# -- what must hold --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tau", TAUS)
def test_the_derivative_by_costs_is_symmetric_and_negative(transported, tau):
    t = transported(4, 6, tau=tau, reg=0.05)
    s = t.sensitivity()
    table = np.stack([s.dC(e.reshape(4, 6)).ravel() for e in np.eye(24)])
    np.testing.assert_allclose(table, table.T, atol=1e-13 * abs(table).max())
    assert np.linalg.eigvalsh(table).max() <= 1e-13 * abs(table).max()


def test_balanced_changes_keep_the_marginals(transported):
    t = transported(6, 9, reg=0.02)
    dC, da, db = directions(np.random.default_rng(2), t)
    s = t.sensitivity()
    assert abs(s.dC(dC).sum(axis=0)).max() < 1e-14
    assert abs(s.dC(dC).sum(axis=1)).max() < 1e-14
    change = s.along(da=da, db=db)
    np.testing.assert_allclose(change.sum(axis=1), da, atol=1e-14)
    np.testing.assert_allclose(change.sum(axis=0), db, atol=1e-14)


def test_costs_that_a_row_or_a_column_shares_move_nothing(transported):
    t = transported(6, 9, reg=0.02)
    rng = np.random.default_rng(3)
    shared = t.lam * (rng.normal(size=(6, 1)) + rng.normal(size=9))
    assert abs(t.sensitivity().dC(shared)).max() < 1e-15


def test_forbidden_entries_do_not_move_and_their_costs_do_not_count(transported):
    forbidden = np.random.default_rng(0).random((6, 7)) < 0.3
    t = transported(6, 7, reg=0.1, forbidden=forbidden)
    dC, _, _ = directions(np.random.default_rng(4), t)
    change = t.sensitivity().dC(dC)
    assert abs(change[forbidden]).max() == 0.0
    np.testing.assert_allclose(change, differences(t, 1e-4, dC=dC), atol=1e-8)
    np.testing.assert_array_equal(change, t.sensitivity().dC(np.where(forbidden, np.inf, dC)))


def test_one_component_on_a_side_cannot_move(transported):
    s = transported(1, 5).sensitivity()
    assert abs(s.dC(np.arange(5.0)[None])).max() < 1e-16
    assert s.operator_norm == 0.0


@pytest.mark.parametrize("tau", [(1.0, 1.0), (0.9, 0.8)])
@pytest.mark.parametrize(("K", "L"), [(5, 8), (8, 3)])
def test_operator_norm_is_the_largest_singular_value(transported, K, L, tau):
    t = transported(K, L, tau=tau, reg=0.05)
    s = t.sensitivity()
    table = np.stack([s.dC(e.reshape(K, L)).ravel() for e in np.eye(K * L)])
    assert s.operator_norm == pytest.approx(np.linalg.norm(table, 2), rel=1e-5)
    assert s.operator_norm <= t.coupling.max() / t.lam
    expected = s.operator_norm * np.linalg.norm(t.cost_matrix) / np.linalg.norm(t.coupling)
    assert s.condition_number == pytest.approx(expected)


# -- plans that are nearly permutations ------------------------------------------------------------------------------


@pytest.mark.parametrize("gap", [1.0, 30.0, 100.0, 200.0])
@pytest.mark.parametrize("a", [0.5, 0.3])
def test_two_components_have_their_closed_form_down_to_1e_80(a, gap):
    """With marginals held, one number ``w = W_00`` is free, and ``dw/dC_00 = −(1/λ) / Σ 1/W_kl``."""
    P = omt.Mixture.from_gaussians([a, 1 - a], [[0.0], [1.0]], [[[1.0]], [[1.0]]])
    t = omt.transport(P, P, cost=np.array([[0.0, gap], [gap, 0.0]]), lam=1.0)
    expected = -1.0 / (1.0 / t.coupling).sum()
    change = t.sensitivity().dC([[1.0, 0.0], [0.0, 0.0]])
    np.testing.assert_allclose(change, expected * np.array([[1, -1], [-1, 1]]), rtol=1e-9)


def test_weight_that_moves_between_two_nearly_separate_components_takes_the_only_way():
    """The derivative is exact although the entry that opens is 1e-87 of its row."""
    P = omt.Mixture.from_gaussians([0.5, 0.5], [[0.0], [1.0]], [[[1.0]], [[1.0]]])
    t = omt.transport(P, P, cost=np.array([[0.0, 200.0], [200.0, 0.0]]), lam=1.0)
    np.testing.assert_allclose(t.sensitivity().da([-1.0, 1.0]), [[-0.5, -0.5], [0.5, 0.5]], rtol=1e-9)


def test_a_group_of_components_answers_as_if_the_distant_group_were_not_there(random_mixture):
    """Two groups of four that share 1e-60 of their mass: no digit of one may drown in the link to the other."""
    rng = np.random.default_rng(0)
    near = [rng.uniform(0, 3, size=(4, 4)) for _ in range(2)]
    C = np.full((8, 8), 140.0)
    C[:4, :4], C[4:, 4:] = near
    w = np.full(8, 1 / 8)
    t = omt.transport(*(replace(random_mixture(0, 8, 1), weights=w) for _ in range(2)), cost=C, lam=1.0)
    assert 0.0 < t.coupling[:4, 4:].max() < 1e-55
    dC = np.zeros((8, 8))
    dC[:4, :4] = rng.normal(size=(4, 4))
    alone = omt.transport(*(replace(random_mixture(0, 4, 1), weights=w[:4] * 2) for _ in range(2)), cost=near[0], lam=1)
    change = t.sensitivity().dC(dC)
    np.testing.assert_allclose(change[:4, :4], 0.5 * alone.sensitivity().dC(dC[:4, :4]), rtol=1e-10)
    assert abs(change[4:]).max() < 1e-55
    da = np.array([1.0, 0, 0, -1.0, 0, 0, 0, 0])
    moved = t.sensitivity().da(da)
    np.testing.assert_allclose(moved[:4, :4], 0.5 * alone.sensitivity().da(2 * da[:4]), rtol=1e-9)


@st.composite
def cold_problems(draw):
    """Costs of points that may coincide, equal or random weights, temperatures at which plans are near vertices."""
    K, L = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    X, Y = rng.normal(size=(K, 2)), rng.normal(size=(L, 2))
    if draw(st.booleans()):
        X, Y = X.round(), Y.round()
    weights = [np.full(n, 1 / n) if draw(st.booleans()) else rng.dirichlet(np.ones(n)) + 1e-6 for n in (K, L)]
    C = ((X[:, None] - Y) ** 2).sum(axis=2)
    tau = draw(st.sampled_from([(1.0, 1.0), (0.9, 1.0), (0.5, 0.99)]))
    return C, *(w / w.sum() for w in weights), draw(st.sampled_from([1e-1, 1e-2, 1e-3, 1e-4])), tau, rng


@settings(max_examples=100)
@given(cold_problems())
def test_at_any_temperature_changes_keep_marginals_and_obey_the_stability_bound(problem):
    """S1 for a small step: ``‖dW‖₁ ≤ M ‖dC‖_∞/λ``."""
    C, a, b, reg, tau, rng = problem
    P, Q = (omt.Mixture.from_gaussians(w, np.arange(w.size)[:, None], np.ones((w.size, 1, 1))) for w in (a, b))
    t = omt.transport(P, Q, cost=C, lam=reg * max(C.mean(), 0.1), tau=tau)
    dC = t.lam * rng.uniform(-1, 1, size=C.shape)
    change = t.sensitivity().dC(dC)
    assert np.isfinite(change).all()
    assert abs(change).sum() <= t.coupling.sum() * (1 + 1e-9)
    for axis, side in ((1, tau[0]), (0, tau[1])):
        if side == 1.0:
            assert abs(change.sum(axis=axis)).max() <= 1e-12


def test_the_plan_of_many_components_is_differentiated_in_little_memory(transported):
    """The derivative as a matrix would have 150⁴ numbers, 4 GB."""
    import tracemalloc

    s = transported(150, 150, reg=0.01).sensitivity()
    tracemalloc.start()
    s.dC(np.ones((150, 150)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 30 * 150**2 * 8


@st.composite
def networks(draw):
    """Conductances over sixty orders of magnitude, with and without leaks."""
    K = draw(st.integers(2, 7))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    edges = 10.0 ** rng.uniform(-60, 0, size=(K, K))
    leaks = 10.0 ** rng.uniform(-60, 0, size=K) if draw(st.booleans()) else np.zeros(K)
    return edges + edges.T, leaks, rng


@settings(max_examples=50)
@given(networks())
def test_potentials_solve_the_network_in_exact_arithmetic(problem):
    """Against Gaussian elimination in rational numbers."""
    from fractions import Fraction

    edges, leaks, rng = problem
    K = leaks.size
    driving = rng.normal(size=(K, K))
    driving = driving - driving.T
    currents = edges * driving
    found = Network.of(edges, leaks).potential_differences(currents, np.zeros(K))
    E = [[Fraction(float(x)) for x in row] for row in edges]
    I = [[Fraction(float(x)) for x in row] for row in currents]
    A = [
        [Fraction(float(leaks[k])) + sum(E[k][j] for j in range(K) if j != k) if k == i else -E[k][i] for i in range(K)]
        for k in range(K)
    ]
    b = [sum(I[k]) for k in range(K)]
    n = K if leaks.any() else K - 1  # without leaks the last node is the reference
    x = [Fraction(0)] * K
    for k in range(n):
        for i in range(k + 1, n):
            f = A[i][k] / A[k][k]
            A[i] = [p - f * q for p, q in zip(A[i], A[k], strict=True)]
            b[i] -= f * b[k]
    for k in range(n - 1, -1, -1):
        x[k] = (b[k] - sum(A[k][i] * x[i] for i in range(k + 1, n))) / A[k][k]
    expected = np.array([[float(x[i] - x[j]) for j in range(K)] for i in range(K)])
    np.testing.assert_allclose(found[:K, :K], expected, rtol=1e-9, atol=1e-9 * abs(driving).max())


def test_current_without_a_way_out_is_refused():
    edges = np.zeros((3, 3))
    edges[0, 1] = edges[1, 0] = 1.0
    with pytest.raises(IsolatedError):
        Network.of(edges, np.zeros(3)).potential_differences(np.zeros((3, 3)), np.array([1.0, 0.0, -1.0]))


# -- bad input -------------------------------------------------------------------------------------------------------


def test_the_linear_program_has_no_sensitivity(transported):
    with pytest.raises(ValueError, match=r"lam is 0: the plan of a linear program jumps .* solve with reg > 0"):
        transported(3, 3, reg=0.0).sensitivity()


@pytest.mark.parametrize(
    ("directions", "message"),
    [
        ({"dC": np.zeros((2, 2))}, r"dC has shape \(2, 2\); it must be \[3, 4\]"),
        ({"da": np.zeros(4)}, r"da has shape \(4,\); it must be \[3\]"),
        ({"db": np.array([0, np.nan, 0, 0])}, r"db\[1\] is nan; a direction must be finite"),
        ({"da": np.array([1.0, 0, 0])}, "da sums to 1 and db to 0: the masses of a balanced plan stay equal"),
    ],
)
def test_bad_directions_are_named(transported, directions, message):
    with pytest.raises(ValueError, match=message):
        transported(3, 4).sensitivity().along(**directions)


def test_weight_cannot_move_across_what_is_forbidden(random_mixture):
    P = replace(random_mixture(0, 2, 1), weights=np.array([0.5, 0.5]), names=("a", "b"))
    t = omt.transport(P, P, reg=0.1, forbidden=np.array([[False, True], [True, False]]))
    with pytest.raises(ValueError, match=r"weight cannot move between the components around '[ab]' and the others"):
        t.sensitivity().da([0.1, -0.1])


def test_the_method_gives_the_public_class(transported):
    assert isinstance(transported(3, 3).sensitivity(), Sensitivity)
