"""MW₂: against POT, Gelbrich's bound, W₂ on samples, and the axioms of a metric."""

from __future__ import annotations

import numpy as np
import ot
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import omt


@pytest.mark.parametrize(("K", "L", "d"), [(1, 1, 1), (3, 5, 2), (6, 4, 8)])
def test_square_agrees_with_pot(random_mixture, K, L, d):
    P, Q = random_mixture(0, K, d), random_mixture(1, L, d)
    parameters = [getattr(m.components, name)() for name in ("mean", "cov") for m in (P, Q)]
    peer = ot.gmm.gmm_ot_loss(*parameters, P.weights, Q.weights)
    assert omt.mw2(P, Q) ** 2 == pytest.approx(peer, rel=1e-9)


def test_is_zero_for_equal_mixtures(random_mixture):
    P = random_mixture(2, 5, 3)
    permuted = omt.Mixture.from_gaussians(P.weights[::-1], P.components.mean()[::-1], P.components.cov()[::-1])
    assert omt.mw2(P, permuted) < 1e-6  # root of rounding


@settings(max_examples=20)
@given(st.integers(0, 10**6))
def test_triangle_inequality(seed):
    rng = np.random.default_rng(seed)
    mixtures = []
    for K in rng.integers(1, 6, size=3):
        G = rng.normal(size=(K, 2, 2))
        mixtures.append(
            omt.Mixture.from_gaussians(
                rng.dirichlet(np.ones(K)), rng.normal(size=(K, 2)), G @ G.transpose(0, 2, 1) + 0.1 * np.eye(2)
            )
        )
    P, Q, R = mixtures
    assert omt.mw2(P, R) <= omt.mw2(P, Q) + omt.mw2(Q, R) + 1e-9


@pytest.mark.parametrize("seed", range(5))
def test_is_at_least_the_bound_of_gelbrich(random_mixture, seed):
    P, Q = random_mixture(seed, 4, 3), random_mixture(seed + 100, 6, 3)
    bures = ot.gaussian.bures_wasserstein_distance(P.mean(), Q.mean(), P.cov(), Q.cov())
    assert omt.mw2(P, Q) >= bures - 1e-9
    assert omt.transport(P, Q, reg=0.1).transport_cost >= bures**2 - 1e-9


def test_is_at_least_w2_of_samples(random_mixture):
    P, Q = random_mixture(7, 4, 2), random_mixture(8, 5, 2)
    rng = np.random.default_rng(0)
    distances = []
    for _ in range(2):
        X, Y = P.sample(2000, rng), Q.sample(2000, rng)
        distances.append(np.sqrt(ot.emd2([], [], ot.dist(X, Y), numItermax=10**7)))
    assert omt.mw2(P, Q) >= np.mean(distances) - 3 * abs(np.diff(distances)[0])


def test_different_dimensions_are_refused(random_mixture):
    with pytest.raises(ValueError, match=r"source has d=2 features and target d=3"):
        omt.mw2(random_mixture(0, 2, 2), random_mixture(0, 2, 3))
