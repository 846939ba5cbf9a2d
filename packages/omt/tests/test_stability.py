"""Bounds on how far plans move: that they always hold, are what the theory says, and say when they say nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import omt
from omt.experiments.stability import stability
from omt.stability import cost_perturbation_bound, movement_bound, stability_certificate

ROUNDING = 1e-7  # the solver's tolerance, times potentials of some tens


def mixture(rng, K, d=2, spread=3.0):
    G = rng.normal(size=(K, d, d)) / np.sqrt(d)
    covariances = G @ G.transpose(0, 2, 1) + 0.2 * np.eye(d)
    weights = rng.dirichlet(np.full(K, 2.0)) * 0.99 + 0.01 / K
    return omt.Mixture.from_gaussians(weights, spread * rng.normal(size=(K, d)), covariances)


def moved(rng, m, size, *, weights=True):
    """The same components, moved, reshaped and reweighted by a relative size."""
    g = m.components
    factor = np.exp(size * rng.normal(size=m.K))
    a = m.weights * factor if weights else m.weights
    means = g.means + 3.0 * size * rng.normal(size=g.means.shape)
    scale = np.exp(size * rng.normal(size=(m.K, 1, 1)))
    return omt.Mixture.from_gaussians(a / a.sum(), means, g.covariances * scale, names=m.names)


@st.composite
def perturbed(draw):
    """Two problems: shapes 1×1 … 8×8, perturbations from none to enormous, hot and cold, balanced and relaxed."""
    K, L = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    P, Q = mixture(rng, K), mixture(rng, L)
    size = draw(st.sampled_from([0.0, 1e-3, 0.03, 0.3, 2.0]))
    reg = draw(st.sampled_from([1.0, 0.1, 0.01]))
    return P, Q, size, reg, rng


# -- S1, S2 ----------------------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(perturbed())
def test_plans_of_perturbed_mixtures_differ_by_no_more_than_the_bound(problem):
    P, Q, size, reg, rng = problem
    first = omt.transport(P, Q, reg=reg)
    second = omt.transport(moved(rng, P, size), moved(rng, Q, size), reg=reg)
    certificate = stability_certificate(first, second)
    assert certificate.observed == pytest.approx(abs(second.coupling - first.coupling).sum())
    assert certificate.observed <= certificate.bound + ROUNDING


@settings(max_examples=100)
@given(perturbed(), st.sampled_from([(0.5, 0.5), (0.9, 0.9), (0.999, 0.99), (1.0, 0.9), (0.9, 1.0)]))
def test_relaxed_plans_differ_by_no_more_than_the_bound(problem, tau):
    P, Q, size, reg, rng = problem
    first = omt.transport(P, Q, reg=reg, tau=tau)
    second = omt.transport(moved(rng, P, size), moved(rng, Q, size), reg=reg, tau=tau)
    certificate = stability_certificate(first, second)
    assert certificate.observed <= certificate.bound + ROUNDING
    assert certificate.observed <= certificate.diameter + 1e-12


@settings(max_examples=60)
@given(perturbed(), st.sampled_from([1.0, 0.9]))
def test_with_equal_weights_the_largest_change_of_a_cost_over_the_temperature_is_enough(problem, tau):
    """S1: ``‖ΔW‖₁ ≤ M ‖ΔC‖_∞/λ``, of which the certificate is never looser."""
    P, Q, size, reg, rng = problem
    first = omt.transport(P, Q, reg=reg, tau=tau)
    C = first.cost_matrix + first.lam * size * rng.normal(size=first.cost_matrix.shape)
    second = omt.transport(P, Q, cost=C, lam=first.lam, tau=tau)
    certificate = stability_certificate(first, second)
    s1 = 0.5 * certificate.diameter * abs(C - first.cost_matrix).max() / first.lam
    assert certificate.observed <= certificate.bound + ROUNDING
    assert certificate.bound <= s1 * (1 + 1e-9) + 1e-12


def test_temperatures_may_differ():
    rng = np.random.default_rng(0)
    P, Q = mixture(rng, 5), mixture(rng, 6)
    certificate = stability_certificate(omt.transport(P, Q, lam=2.0), omt.transport(P, Q, lam=2.2))
    assert 0.0 < certificate.observed <= certificate.bound < certificate.diameter


def test_multiplying_costs_and_temperature_changes_nothing():
    rng = np.random.default_rng(1)
    P, Q = mixture(rng, 5), mixture(rng, 6)
    first = omt.transport(P, Q, reg=0.1)
    certificate = stability_certificate(first, omt.transport(P, Q, cost=7.0 * first.cost_matrix, lam=7.0 * first.lam))
    assert certificate.bound < 1e-6


def test_a_cost_that_rows_share_costs_the_bound_nothing():
    rng = np.random.default_rng(2)
    P, Q = mixture(rng, 5), mixture(rng, 6)
    first = omt.transport(P, Q, reg=0.1)
    shifted = omt.transport(P, Q, cost=first.cost_matrix + 50.0 * rng.normal(size=(5, 1)), lam=first.lam)
    assert stability_certificate(first, shifted).bound < 1e-6


def test_components_are_matched_by_name():
    rng = np.random.default_rng(3)
    P = replace(mixture(rng, 4), names=("a", "b", "c", "d"))
    Q = replace(mixture(rng, 5), names=("v", "w", "x", "y", "z"))
    first = omt.transport(P, Q, reg=0.1)
    turned = [
        omt.Mixture(m.weights[::-1], m.components.select(np.arange(m.K)[::-1]), names=m.names[::-1]) for m in (P, Q)
    ]
    certificate = stability_certificate(first, omt.transport(*turned, reg=0.1))
    assert certificate.observed < 1e-8
    assert certificate.bound < 1e-3
    assert stability_certificate(first, omt.transport(*turned, reg=0.1), match="order").observed > 0.1


def test_forbidden_transitions_are_left_out_of_the_bound():
    rng = np.random.default_rng(4)
    P, Q = mixture(rng, 6), mixture(rng, 6)
    forbidden = rng.random((6, 6)) < 0.3
    first = omt.transport(P, Q, reg=0.2, forbidden=forbidden)
    C = np.where(forbidden, 1e6 * rng.random((6, 6)), first.cost_matrix + 0.01)
    certificate = stability_certificate(first, omt.transport(P, Q, cost=C, lam=first.lam, forbidden=forbidden))
    assert certificate.bound < 1e-6
    second = omt.transport(moved(rng, P, 0.1), moved(rng, Q, 0.1), lam=first.lam, forbidden=forbidden)
    certificate = stability_certificate(first, second)
    assert 0.0 < certificate.observed <= certificate.bound


def test_a_bound_beyond_the_diameter_is_called_vacuous_in_words():
    rng = np.random.default_rng(5)
    P, Q = mixture(rng, 4), mixture(rng, 4)
    far = stability_certificate(omt.transport(P, Q, reg=0.01), omt.transport(moved(rng, P, 1.0), Q, reg=0.01))
    assert far.vacuous
    assert "vacuous here: read the sensitivity and the bootstrap" in str(far)
    near = stability_certificate(omt.transport(P, Q, reg=0.5), omt.transport(moved(rng, P, 0.01), Q, reg=0.5))
    assert not near.vacuous
    assert f"provably by no more than {near.bound:.3g}" in str(near)


# -- S3 --------------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(perturbed())
def test_costs_of_moved_components_change_by_no_more_than_their_bound(problem):
    P, Q, size, _, rng = problem
    P2, Q2 = moved(rng, P, size), moved(rng, Q, size)
    change = abs(omt.component_cost(P2, Q2) - omt.component_cost(P, Q))
    assert (change <= cost_perturbation_bound(P, Q, P2, Q2) * (1 + 1e-9) + 1e-6).all()


@settings(max_examples=60)
@given(perturbed())
def test_plans_of_moved_components_differ_by_no_more_than_the_composed_bound(problem):
    P, Q, size, reg, rng = problem
    first = omt.transport(P, Q, reg=reg)
    P2, Q2 = moved(rng, P, size, weights=False), moved(rng, Q, size, weights=False)
    second = omt.transport(P2, Q2, lam=first.lam)
    assert abs(second.coupling - first.coupling).sum() <= movement_bound(first, P2, Q2) + ROUNDING


def test_a_translation_of_one_component_is_bounded_by_its_length():
    P, Q = (omt.Mixture.from_gaussians([1.0], [[x, 0.0]], [np.eye(2)]) for x in (0.0, 3.0))
    P2 = omt.Mixture.from_gaussians([1.0], [[-4.0, 0.0]], [np.eye(2)])
    assert cost_perturbation_bound(P, Q, P2, Q)[0, 0] == pytest.approx((3 + 7) * 4)  # and 7² − 3² = 40


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.fixture
def pair():
    rng = np.random.default_rng(0)
    return replace(mixture(rng, 3), names=("a", "b", "c")), mixture(rng, 4)


def test_different_numbers_of_components_are_refused(pair):
    P, Q = pair
    with pytest.raises(ValueError, match="the targets have 4 and 3 components; the bound compares plans between the"):
        stability_certificate(omt.transport(P, Q), omt.transport(P, P))


def test_other_names_are_refused(pair):
    P, Q = pair
    other = replace(P, names=("a", "b", "d"))
    with pytest.raises(ValueError, match=r"source of the second transport has no component 'c'; it has a, b, d. Give"):
        stability_certificate(omt.transport(P, Q), omt.transport(other, Q))


def test_an_unknown_match_is_refused(pair):
    t = omt.transport(*pair)
    with pytest.raises(ValueError, match="match is 'nearest'; it must be 'name' or 'order'"):
        stability_certificate(t, t, match="nearest")


def test_the_linear_program_is_refused(pair):
    with pytest.raises(ValueError, match="lam is 0: the plan of a linear program may jump, no bound exists"):
        stability_certificate(omt.transport(*pair), omt.transport(*pair, reg=0.0))


def test_different_tau_are_refused(pair):
    with pytest.raises(ValueError, match=r"tau is \(1.0, 1.0\) in one transport and \(0.9, 0.9\) in the other"):
        stability_certificate(omt.transport(*pair), omt.transport(*pair, tau=0.9))


def test_different_forbidden_transitions_are_refused(pair):
    forbidden = np.zeros((3, 4), dtype=bool)
    forbidden[0, 0] = True
    with pytest.raises(ValueError, match="the two transports forbid different transitions"):
        stability_certificate(omt.transport(*pair), omt.transport(*pair, forbidden=forbidden))


def test_supports_that_weights_force_to_differ_are_refused(pair):
    """If 'a' may only go to 0 and weighs as much as it, nothing else may go there; if it weighs less, others must."""
    P = omt.Mixture.from_gaussians([0.5, 0.5], [[0.0], [1.0]], [[[1.0]], [[1.0]]])
    forbidden = np.array([[False, True], [False, False]])
    lighter = replace(P, weights=np.array([0.4, 0.6]))
    with pytest.raises(ValueError, match="the plans have different supports and no bound exists"):
        stability_certificate(
            omt.transport(P, P, reg=0.5, forbidden=forbidden), omt.transport(lighter, P, reg=0.5, forbidden=forbidden)
        )


def test_moved_mixtures_of_another_size_are_refused(pair):
    P, Q = pair
    with pytest.raises(ValueError, match="the source has 3 components and the moved one 4; they must correspond"):
        cost_perturbation_bound(P, Q, Q, Q)


def test_a_relaxed_plan_has_no_bound_before_it_is_solved(pair):
    with pytest.raises(ValueError, match="how much mass a relaxed plan will carry is not known before it is solved"):
        movement_bound(omt.transport(*pair, tau=0.9), *pair)


# -- the experiment --------------------------------------------------------------------------------------------------


def test_refits_on_stratified_halves_stay_close_and_within_the_certificate():
    refits = stability(seed=0, separation="separated", halves="stratified", n=2000, n_refits=8)
    assert (refits.observed <= refits.bounds).all()
    assert np.median(refits.observed) <= 0.03


def test_refits_of_overlapping_components_stay_within_the_certificate():
    refits = stability(seed=1, separation="overlapping", halves="random", n=1000, n_refits=4)
    assert refits.overlap > 0.1
    assert (refits.observed <= refits.bounds).all()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("separation", "halves", "most"),
    [
        ("separated", "random", 0.1),
        ("separated", "stratified", 0.03),
        ("overlapping", "random", None),
        ("overlapping", "stratified", None),
    ],
)
def test_twenty_refits_on_half_samples(seed, separation, halves, most):
    refits = stability(seed=seed, separation=separation, halves=halves)
    assert len(refits.certificates) == 20
    assert (refits.observed <= refits.bounds).all()
    if most is not None:
        assert np.median(refits.observed) <= most


def test_an_unknown_kind_of_halves_is_refused():
    with pytest.raises(ValueError, match="halves is 'odd'; it must be 'random' or 'stratified'"):
        stability(seed=0, halves="odd", n=200, n_components=2, n_refits=1)
