"""Chains: composition, marginals, push and pull, fates, storage, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import omt
from omt import TransportChain


@pytest.fixture
def mixtures(random_mixture):
    made = [random_mixture(seed, K, 2) for seed, K in enumerate((3, 4, 5, 3))]
    return [replace(m, names=tuple(f"{t}{k}" for k in range(m.K))) for t, m in zip("abcd", made, strict=True)]


@pytest.fixture
def chain(mixtures):
    return TransportChain.between(mixtures, [0, 1.5, 2, 7], reg=0.2)


@pytest.fixture
def relaxed(mixtures):
    return TransportChain.between(mixtures, [0, 1.5, 2, 7], reg=0.2, tau=0.8)


def test_composition_is_the_product_of_the_steps(chain):
    steps = [step.transition_matrix().to_numpy() for step in chain.transports]
    np.testing.assert_allclose(chain.transition_matrix(0, 7), steps[0] @ steps[1] @ steps[2], rtol=1e-12)
    np.testing.assert_allclose(chain.transition_matrix(1.5, 2), steps[1], rtol=1e-12)


@pytest.mark.parametrize("kind", ["chain", "relaxed"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_rows_sum_to_one(request, kind, direction):
    table = request.getfixturevalue(kind).transition_matrix(0, 7, direction=direction)
    np.testing.assert_allclose(table.sum(axis=1), 1.0, rtol=1e-12)


def test_backward_is_bayes_of_forward(chain, mixtures):
    forward, backward = chain.transition_matrix(0, 7), chain.transition_matrix(0, 7, direction="backward")
    joint = mixtures[0].weights[:, None] * forward.to_numpy()
    np.testing.assert_allclose(backward, (joint / joint.sum(axis=0)).T, rtol=1e-8)
    assert list(backward.index) == list(mixtures[3].names)


@pytest.mark.parametrize(("i", "j"), [(0, 3), (1, 3), (0, 1), (2, 2)])
def test_joint_has_the_weights_of_both_ends(chain, mixtures, i, j):
    joint = chain.joint(chain.times[i], chain.times[j])
    np.testing.assert_allclose(joint.sum(axis=1), mixtures[i].weights, atol=1e-12)
    np.testing.assert_allclose(joint.sum(axis=0), mixtures[j].weights, atol=1e-12)


def test_joint_of_neighbours_is_the_coupling(relaxed):
    np.testing.assert_array_equal(relaxed.joint(1.5, 2), relaxed.transports[1].coupling)


def test_joint_of_a_relaxed_chain_agrees_with_its_forward_table(relaxed):
    joint = relaxed.joint(0, 7)
    np.testing.assert_allclose(joint / joint.sum(axis=1, keepdims=True), relaxed.transition_matrix(0, 7), rtol=1e-12)
    np.testing.assert_allclose(joint.sum(axis=1), relaxed.transports[0].coupling.sum(axis=1), rtol=1e-12)


@pytest.mark.parametrize("kind", ["chain", "relaxed"])
def test_push_and_pull_compose_and_keep_the_mass(request, kind):
    chain = request.getfixturevalue(kind)
    start, end = np.random.default_rng(0).random((3, 2)), np.random.default_rng(1).random(3)
    np.testing.assert_allclose(chain.push(start, 0, 7), chain.push(chain.push(start, 0, 1.5), 1.5, 7), rtol=1e-12)
    np.testing.assert_allclose(chain.pull(end, 0, 7), chain.pull(chain.pull(end, 2, 7), 0, 2), rtol=1e-12)
    np.testing.assert_allclose(chain.push(start, 0, 7).sum(axis=0), start.sum(axis=0), rtol=1e-12)
    assert chain.pull(end, 0, 7).sum() == pytest.approx(end.sum())


def test_push_of_the_weights_gives_the_weights(chain, mixtures):
    np.testing.assert_allclose(chain.push(mixtures[0].weights, 0, 7), mixtures[3].weights, atol=1e-12)
    np.testing.assert_allclose(chain.pull(mixtures[3].weights, 0, 7), mixtures[0].weights, atol=1e-12)


def test_push_and_pull_are_adjoint_under_the_weights(chain, mixtures):
    rng = np.random.default_rng(0)
    u, v = rng.random(3), rng.random(3)
    a, b = mixtures[0].weights, mixtures[3].weights
    # Values per unit mass: ⟨push(a u), v⟩ = Σ joint u v = ⟨u, pull(b v)⟩.
    assert chain.push(a * u, 0, 7) @ v == pytest.approx(u @ chain.pull(b * v, 0, 7), rel=1e-9)


def test_zero_steps_change_nothing(chain):
    np.testing.assert_array_equal(chain.transition_matrix(2, 2), np.eye(5))
    np.testing.assert_array_equal(chain.push(np.arange(5.0), 2, 2), np.arange(5.0))


def test_coarse_plans_of_samples_compose_like_the_chain(chain, mixtures):
    # Sample plans applied one after the other, on samples that each belong to one component only.
    rng = np.random.default_rng(0)
    far = [omt.Mixture.from_gaussians(m.weights, 50 * m.components.mean(), m.components.cov()) for m in mixtures[:3]]
    chain = TransportChain.between(far, [0, 1, 2], reg=0.2)
    X = [m.components.sample(np.repeat(np.arange(m.K), 4), rng) for m in far]
    weights = [np.repeat(m.weights / 4, 4) for m in far]
    plans = [chain.transports[i].plan(X[i], X[i + 1], mu=weights[i], nu=weights[i + 1]) for i in range(2)]
    indicator = (np.arange(12) // 4 == 1) * 1.0  # all samples of component 1
    middle = plans[0].push(indicator)
    end = plans[1].push(middle / weights[1])
    expected = far[0].weights[1] * chain.transition_matrix(0, 2).to_numpy()[1]
    np.testing.assert_allclose(end.reshape(far[2].K, 4).sum(axis=1), expected, atol=1e-10)


# -- fates -----------------------------------------------------------------------------------------------------------


def test_fates_are_the_transitions_to_the_last_time(chain):
    np.testing.assert_array_equal(chain.fates(1.5), chain.transition_matrix(1.5, 7))


def test_fates_of_some_terminal_components_are_their_columns(chain):
    fates = chain.fates(0, terminal=["d2", "d0"])
    np.testing.assert_array_equal(fates, chain.transition_matrix(0, 7)[["d2", "d0"]])


def test_fates_of_groups_are_sums(chain):
    fates = chain.fates(0, terminal={"left": ["d0", "d1"], "right": ["d2"]})
    np.testing.assert_allclose(fates.sum(axis=1), 1.0)
    np.testing.assert_allclose(fates["left"], chain.transition_matrix(0, 7)[["d0", "d1"]].sum(axis=1))


def test_fates_of_a_branching_chain_with_known_lineage():
    def mixture(weights, means, names):
        return omt.Mixture.from_gaussians(
            weights, np.array(means)[:, None], np.full((len(weights), 1, 1), 0.01), names=names
        )

    chain = TransportChain.between(
        [
            mixture([1.0], [0.0], ["root"]),
            mixture([0.25, 0.75], [-1.0, 1.0], ["left", "right"]),
            mixture([0.25, 0.5, 0.25], [-2.0, 1.5, 3.0], ["l", "r1", "r2"]),
        ],
        [0, 1, 2],
        reg=1e-3,
    )
    np.testing.assert_allclose(chain.fates(0), [[0.25, 0.5, 0.25]], atol=1e-12)
    np.testing.assert_allclose(chain.fates(1), [[1, 0, 0], [0, 2 / 3, 1 / 3]], atol=1e-6)


def test_unknown_terminal_component_lists_those_that_exist(chain):
    with pytest.raises(ValueError, match=r"terminal has 'x', .* of the last time 7; components there: d0, d1, d2"):
        chain.fates(0, terminal=["d0", "x"])


# -- storage ---------------------------------------------------------------------------------------------------------


def test_saving_and_loading_changes_nothing(relaxed, tmp_path):
    relaxed.save(tmp_path / "chain")
    loaded = TransportChain.load(tmp_path / "chain")
    assert loaded.times == relaxed.times
    np.testing.assert_array_equal(loaded.transition_matrix(0, 7), relaxed.transition_matrix(0, 7))
    assert list(loaded.transition_matrix(0, 7).columns) == ["d0", "d1", "d2"]
    np.testing.assert_array_equal(loaded.joint(1.5, 7), relaxed.joint(1.5, 7))


def test_sources_with_other_weights_than_the_mixtures_are_kept(mixtures, tmp_path):
    grown = replace(mixtures[0], weights=np.array([0.6, 0.3, 0.1]))
    chain = TransportChain(mixtures[:2], [0, 1], [omt.transport(grown, mixtures[1])])
    chain.save(tmp_path / "chain")
    loaded = TransportChain.load(tmp_path / "chain")
    np.testing.assert_allclose(loaded.transports[0].source.weights, grown.weights, rtol=1e-15)
    np.testing.assert_allclose(loaded.mixtures[0].weights, mixtures[0].weights, rtol=1e-15)


def test_truncated_file_is_refused_with_a_sentence(chain, tmp_path):
    chain.save(tmp_path / "c")
    file = tmp_path / "c" / "chain.npz"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"chain.npz is not a readable npz file"):
        TransportChain.load(tmp_path / "c")


def test_missing_chain_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no chain"):
        TransportChain.load(tmp_path)


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["transition_matrix", "joint", "push", "pull"])
def test_time_that_is_not_in_the_chain_lists_the_times(chain, verb):
    first = (np.ones(3),) if verb in {"push", "pull"} else ()
    with pytest.raises(ValueError, match=r"t1=3 is not a time of the chain; its times are 0, 1\.5, 2, 7"):
        getattr(chain, verb)(*first, 0, 3)


def test_fates_from_a_time_that_is_not_in_the_chain_list_the_times(chain):
    with pytest.raises(ValueError, match=r"t0=9 is not a time of the chain; its times are 0, 1\.5, 2, 7"):
        chain.fates(9)


def test_times_in_the_wrong_order_are_refused(chain):
    with pytest.raises(ValueError, match="t0=7 is after t1=0; give the earlier time first"):
        chain.joint(7, 0)


def test_mass_of_another_length_is_refused(chain):
    with pytest.raises(
        ValueError, match=r"mass has shape \(4,\); time 0 has 3 components, so it must be \[3\] or \[3, c\]"
    ):
        chain.push(np.ones(4), 0, 7)


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ([0, 1, 1, 2], "times must increase, but 1 is followed by 1"),
        ([0, 1, np.nan, 2], "times must increase, but 1 is followed by nan"),
        (["a", "b", "c", "d"], "a chain needs at least two increasing numbers"),
        ([0], "a chain needs at least two increasing numbers"),
        ([0, 1, 2], "there are 4 mixtures and 3 times; each time needs its mixture"),
    ],
)
def test_bad_times_are_refused(mixtures, chain, times, message):
    with pytest.raises(ValueError, match=message):
        TransportChain(mixtures, times, chain.transports)


def test_missing_transport_is_refused(mixtures, chain):
    with pytest.raises(
        ValueError, match="there are 2 transports and 4 times; a chain needs one transport between each"
    ):
        TransportChain(mixtures, [0, 1, 2, 3], chain.transports[:2])


def test_transport_between_other_components_is_refused(mixtures, chain):
    with pytest.raises(
        ValueError, match=r"the source of transports\[0\] has components b0, b1, b2, b3; the mixture of time 0"
    ):
        TransportChain(mixtures, [0, 1, 2, 3], [chain.transports[1], *chain.transports[1:]])


def test_unknown_direction_is_refused(chain):
    for t1 in (0, 7):
        with pytest.raises(ValueError, match="direction is 'up'; it must be 'forward' or 'backward'"):
            chain.transition_matrix(0, t1, direction="up")
