"""The plan on which several fits agree, against brute force over permutations."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import omt
from omt.plans.consensus import consensus_plan
from omt.plans.sample import SamplePlan


def permutation_plan(order) -> SamplePlan:
    n = len(order)
    return SamplePlan(np.eye(n), np.eye(n), np.eye(n)[list(order)] / n)


def test_the_consensus_is_the_likeliest_permutation_under_the_mean_plan():
    rng = np.random.default_rng(0)
    orders = [rng.permutation(5) for _ in range(7)]
    mean = np.mean([np.eye(5)[order] for order in orders], axis=0)
    score = {
        order: np.log(5 * mean[np.arange(5), list(order)] + 1e-3).sum() for order in itertools.permutations(range(5))
    }
    found = consensus_plan([permutation_plan(order) for order in orders])
    assert np.sum(found * np.log(5 * mean + 1e-3)) == pytest.approx(max(score.values()) / 5)


def test_one_permutation_is_its_own_consensus():
    np.testing.assert_allclose(consensus_plan([permutation_plan([2, 0, 1])]), np.eye(3)[[2, 0, 1]] / 3, atol=1e-12)


def test_marginals_are_the_sample_weights(random_mixture):
    P, Q = random_mixture(0, 4, 2), random_mixture(1, 5, 2)
    X, Y = P.sample(60, 0), Q.sample(80, 1)
    mu = np.random.default_rng(0).dirichlet(np.ones(60))
    joint = consensus_plan([omt.transport(P, Q, reg=reg).plan(X, Y, mu=mu) for reg in (0.1, 0.01)])
    np.testing.assert_allclose(joint.sum(axis=1), mu, atol=1e-12)
    np.testing.assert_allclose(joint.sum(axis=0), np.full(80, 1 / 80), atol=1e-12)


@pytest.mark.parametrize(
    ("plans", "options", "message"),
    [
        ([], {}, "plans is empty"),
        ([permutation_plan([0, 1]), permutation_plan([0, 1, 2])], {}, r"plans\[1\] is between other samples"),
        ([SamplePlan(np.eye(2), np.eye(2), np.eye(2), balanced=False)], {}, r"plans\[0\] is unbalanced"),
        ([permutation_plan([0, 1])], {"floor": 0.0}, "floor is 0.0; it must be a finite number > 0"),
    ],
)
def test_plans_without_a_consensus_are_refused(plans, options, message):
    with pytest.raises(ValueError, match=message):
        consensus_plan(plans, **options)
