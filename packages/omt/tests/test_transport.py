"""Transport between mixtures: its tables, growth, plans for samples, storage, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import ot
import pandas as pd
import pytest

import omt
from omt.transport import Transport


@pytest.fixture
def pair(random_mixture):
    P, Q = random_mixture(0, 4, 3), random_mixture(1, 5, 3)
    return replace(P, names=("a", "b", "c", "d")), replace(Q, names=("v", "w", "x", "y", "z"))


def test_coupling_agrees_with_pot_on_the_same_cost(pair):
    P, Q = pair
    result = omt.transport(P, Q, reg=0.2)
    C = ot.gmm.dist_bures_squared(P.components.mean(), Q.components.mean(), P.components.cov(), Q.components.cov())
    peer = ot.sinkhorn(P.weights, Q.weights, C, 0.2 * C.mean(), method="sinkhorn_log", stopThr=1e-13, numItermax=20000)
    assert abs(result.coupling - peer).sum() < 1e-9


def test_lam_in_units_of_cost_replaces_reg(pair):
    first = omt.transport(*pair, reg=0.05)
    second = omt.transport(*pair, lam=0.05 * first.cost_matrix.mean())
    np.testing.assert_array_equal(first.coupling, second.coupling)
    assert second.lam == pytest.approx(0.05 * first.cost_matrix.mean())


def test_zero_reg_is_the_linear_program_and_not_called_unique(pair):
    result = omt.transport(*pair, reg=0.0)
    assert np.sqrt(result.transport_cost) == pytest.approx(omt.mw2(*pair))
    assert result.unique is None
    assert result.strictly_complementary is True
    assert omt.transport(*pair).unique is True


def test_attributes_are_consistent(pair):
    P, Q = pair
    result = omt.transport(P, Q, reg=0.05)
    assert result.converged
    assert result.marginal_error <= 1e-9
    gibbs = np.outer(P.weights, Q.weights) * np.exp((result.f[:, None] + result.g - result.cost_matrix) / result.lam)
    np.testing.assert_allclose(result.coupling, gibbs, rtol=1e-9)
    assert result.transport_cost == pytest.approx((result.cost_matrix * result.coupling).sum())
    assert result.objective >= result.transport_cost


def test_entropic_inner_plans_enter_cost_and_maps(pair):
    result = omt.transport(*pair, cost="entropic", inner_reg=0.1)
    plain = omt.transport(*pair)
    assert result.epsilon == pytest.approx(0.1 * plain.cost_matrix.mean())
    assert (result.cost_matrix > plain.cost_matrix).all()
    assert plain.epsilon == 0.0


def test_one_component_on_a_side_gives_the_only_plan(random_mixture):
    P, Q = random_mixture(0, 1, 2), random_mixture(1, 4, 2)
    for reg in (0.0, 0.01):
        np.testing.assert_allclose(omt.transport(P, Q, reg=reg).coupling, Q.weights[None], rtol=1e-12)
        np.testing.assert_allclose(omt.transport(Q, P, reg=reg).coupling, Q.weights[:, None], rtol=1e-12)


def test_equal_mixtures_of_one_component_cost_nothing(random_mixture):
    P = random_mixture(0, 1, 2)
    result = omt.transport(P, P)
    assert result.transport_cost == pytest.approx(0.0, abs=1e-12)
    assert result.converged


# -- tables ----------------------------------------------------------------------------------------------------------


def test_transition_matrix_is_bayes_of_the_coupling(pair):
    result = omt.transport(*pair, reg=0.1)
    forward, backward = result.transition_matrix(), result.transition_matrix("backward")
    W = pd.DataFrame(result.coupling, index=list("abcd"), columns=list("vwxyz"))
    pd.testing.assert_frame_equal(forward, W.div(W.sum(axis=1), axis=0))
    pd.testing.assert_frame_equal(backward, W.T.div(W.sum(axis=0), axis=0))


def test_transition_matrix_without_names_has_numbers(pair):
    table = omt.transport(*pair).transition_matrix(names=False)
    assert list(table.index) == [0, 1, 2, 3]
    assert list(table.columns) == [0, 1, 2, 3, 4]


def test_unknown_direction_is_refused(pair):
    with pytest.raises(ValueError, match="direction is 'sideways'; it must be 'forward' or 'backward'"):
        omt.transport(*pair).transition_matrix("sideways")


def test_a_component_that_dies_out_entirely_still_has_transitions(random_mixture):
    P = omt.Mixture.from_gaussians([0.5, 0.5], [[0.0], [200.0]], [[[1.0]], [[1.0]]])
    Q = omt.Mixture.from_gaussians([0.5, 0.5], [[0.0], [1.0]], [[[1.0]], [[1.0]]])
    result = omt.transport(P, Q, lam=1.0, tau=0.5)
    assert result.coupling[1].sum() < 1e-250
    table = result.transition_matrix()
    np.testing.assert_allclose(table.sum(axis=1), 1.0)
    assert table.iloc[1, 1] == pytest.approx(1.0)  # the nearer one


def test_growth_is_one_in_a_balanced_plan_and_the_row_mass_otherwise(pair):
    P, Q = pair
    np.testing.assert_allclose(omt.transport(P, Q).posterior_growth, 1.0, rtol=1e-9)
    relaxed = omt.transport(P, Q, tau=0.9)
    np.testing.assert_allclose(relaxed.posterior_growth, relaxed.coupling.sum(axis=1) / P.weights)
    assert np.ptp(relaxed.posterior_growth) > 0.01
    np.testing.assert_array_equal(relaxed.prior_growth, 1.0)


def test_inverse_reads_the_same_plan_backwards(pair):
    P, Q = pair
    result = omt.transport(P, Q, reg=0.05, tau=(1.0, 0.9))
    inverse = result.inverse()
    direct = omt.transport(Q, P, reg=0.05, tau=(0.9, 1.0))
    np.testing.assert_allclose(inverse.coupling, direct.coupling, atol=1e-10)
    np.testing.assert_allclose(inverse.cost_matrix, direct.cost_matrix, rtol=1e-9)
    assert inverse.source is Q
    pd.testing.assert_frame_equal(inverse.transition_matrix(), result.transition_matrix("backward"))
    np.testing.assert_array_equal(inverse.inverse().coupling, result.coupling)


def test_forbidden_transitions_carry_no_mass(pair):
    forbidden = np.zeros((4, 5), dtype=bool)
    forbidden[0, :2] = True
    result = omt.transport(*pair, forbidden=forbidden, reg=0.3)
    assert result.coupling[0, :2].tolist() == [0.0, 0.0]
    assert result.inverse().coupling[:2, 0].tolist() == [0.0, 0.0]


# -- samples ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["barycentric", "mode"])
def test_map_is_that_of_the_coupling(pair, kind):
    from omt.pairs import maps

    P, Q = pair
    X = P.sample(50, np.random.default_rng(0))
    result = omt.transport(P, Q)
    expected = getattr(maps, f"{kind}_map")(X, P, Q, result.coupling, result.epsilon)
    np.testing.assert_array_equal(result.map(X, kind), expected)


def test_sampled_maps_of_the_source_have_the_moments_of_the_target(pair):
    P, Q = pair
    X = P.sample(40_000, np.random.default_rng(0))
    Y = omt.transport(P, Q, reg=0.1).map(X, kind="sample", rng=1)
    error = np.sqrt(np.diag(Q.cov()) / len(Y))
    assert (abs(Y.mean(axis=0) - Q.mean()) < 4 * error).all()


def test_sampled_map_repeats_with_its_seed(pair):
    X = pair[0].sample(20, np.random.default_rng(0))
    result = omt.transport(*pair)
    np.testing.assert_array_equal(result.map(X, kind="sample", rng=3), result.map(X, kind="sample", rng=3))


def test_unknown_kind_of_map_is_refused(pair):
    with pytest.raises(ValueError, match="kind is 'linear'; it must be 'barycentric', 'sample' or 'mode'"):
        omt.transport(*pair).map(np.zeros((1, 3)), kind="linear")


def test_plan_has_the_marginals_of_samples_whose_composition_differs(pair):
    P, Q = pair
    rng = np.random.default_rng(0)
    X, Y = P.sample(300, rng), Q.sample(200, rng)
    mu = np.where(np.asarray(P.responsibilities(X))[:, 0] > 0.5, 5.0, 1.0)  # one component is far over-represented
    mu /= mu.sum()
    result = omt.transport(P, Q)
    plan = result.plan(X, Y, mu=mu)
    np.testing.assert_allclose(plan.pull(np.ones(200)), mu, atol=1e-14)
    np.testing.assert_allclose(plan.push(np.ones(300)), np.full(200, 1 / 200), atol=1e-14)
    assert abs(plan.coupling - result.coupling).sum() > 0.05


def test_plan_of_samples_without_some_component_leaves_it_empty(pair):
    P, Q = pair
    rng = np.random.default_rng(0)
    far = omt.Mixture.from_gaussians(P.weights, 100 * P.components.mean(), P.components.cov())  # hard responsibilities
    X, labels = far.sample(300, rng, return_labels=True)
    plan = omt.transport(far, Q).plan(X[labels != 1], Q.sample(50, rng))
    assert plan.coupling[1].sum() == 0.0
    assert sum(plan.marginal_error()) < 1e-12


def test_cell_plan_has_exact_rows(pair):
    P, Q = pair
    rng = np.random.default_rng(0)
    plan = omt.transport(P, Q).plan(P.sample(60, rng), Q.sample(50, rng), "cell")
    assert plan.resolution == "cell"
    assert plan.marginal_error().source < 1e-12


def test_relaxed_plan_shows_the_mass_that_is_created_and_lost(pair):
    P, Q = pair
    rng = np.random.default_rng(0)
    X, Y = P.sample(300, rng), Q.sample(200, rng)
    plan = omt.transport(P, Q, tau=0.8).plan(X, Y)
    assert plan.push(np.ones(300)).sum() == pytest.approx(plan.coupling.sum())
    assert plan.marginal_error().source > 1e-3


def test_plan_refuses_unequal_masses_and_unknown_resolutions(pair):
    P, Q = pair
    rng = np.random.default_rng(0)
    X, Y = P.sample(20, rng), Q.sample(30, rng)
    result = omt.transport(P, Q)
    with pytest.raises(ValueError, match="mu sums to 20 and nu to 1; a balanced plan needs equal masses"):
        result.plan(X, Y, mu=np.ones(20))
    with pytest.raises(ValueError, match="resolution is 'gene'; it must be 'component' or 'cell'"):
        result.plan(X, Y, "gene")


# -- storage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"reg": 0.0}, {"tau": (0.9, 1.0), "inner_reg": 0.1}, {"forbidden": np.eye(4, 5, dtype=bool)}]
)
def test_saving_and_loading_changes_nothing(pair, tmp_path, options):
    result = omt.transport(*pair, **options)
    result.save(tmp_path / "t")
    loaded = Transport.load(tmp_path / "t")
    for name in ("coupling", "cost_matrix", "f", "g"):
        np.testing.assert_array_equal(getattr(loaded, name), getattr(result, name))
    for name in (
        "lam",
        "epsilon",
        "tau",
        "objective",
        "transport_cost",
        "converged",
        "unique",
        "strictly_complementary",
        "tol",
    ):
        assert getattr(loaded, name) == getattr(result, name)
    if result.forbidden is None:
        assert loaded.forbidden is None
    else:
        np.testing.assert_array_equal(loaded.forbidden, result.forbidden)
    assert loaded.source.names == pair[0].names
    X = pair[0].sample(10, np.random.default_rng(0))
    np.testing.assert_array_equal(loaded.map(X), result.map(X))


def test_stored_values_survive_h5ad(pair, tmp_path):
    import anndata

    result = omt.transport(*pair, forbidden=np.eye(4, 5, dtype=bool), tau=0.9)
    adata = anndata.AnnData(np.zeros((1, 1)))
    adata.uns["t"] = result.to_dict()
    adata.write_h5ad(tmp_path / "a.h5ad")
    stored = anndata.read_h5ad(tmp_path / "a.h5ad").uns["t"]
    loaded = Transport.from_dict(stored, source=pair[0], target=pair[1])
    np.testing.assert_array_equal(loaded.coupling, result.coupling)
    np.testing.assert_array_equal(loaded.forbidden, result.forbidden)
    assert loaded.solution.converged is True
    assert loaded.tau == (0.9, 0.9)


def test_unknown_format_is_refused_by_its_number(pair, tmp_path):
    result = omt.transport(*pair)
    with pytest.raises(ValueError, match="stored in format 7; this version of omt reads format 1"):
        Transport.from_dict({**result.to_dict(), "format": 7}, source=pair[0], target=pair[1])


def test_truncated_file_is_refused_with_a_sentence(pair, tmp_path):
    omt.transport(*pair).save(tmp_path / "t")
    file = tmp_path / "t" / "transport.npz"
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(ValueError, match=r"transport.npz is not a readable npz file \(truncated or damaged\)"):
        Transport.load(tmp_path / "t")


def test_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere holds no transport"):
        Transport.load(tmp_path / "nowhere")


def test_stored_tables_that_do_not_fit_are_refused(pair):
    stored = omt.transport(*pair).to_dict()
    with pytest.raises(
        ValueError, match=r"coupling of this stored transport has shape \(5, 4\); its mixtures need \(4, 5\)"
    ):
        Transport.from_dict({**stored, "coupling": stored["coupling"].T}, source=pair[0], target=pair[1])
    del stored["lam"]
    with pytest.raises(ValueError, match="this stored transport has no lam"):
        Transport.from_dict(stored, source=pair[0], target=pair[1])


def test_meta_of_a_saved_transport_is_readable_by_people(pair, tmp_path):
    omt.transport(*pair).save(tmp_path / "t")
    meta = json.loads((tmp_path / "t" / "meta.json").read_text())
    assert meta["format"] == 1
    assert meta["converged"] is True


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reg": -0.1}, r"reg is -0\.1; it must be a finite number ≥ 0"),
        ({"reg": np.nan}, "reg is nan; it must be a finite number ≥ 0"),
        ({"lam": -1.0}, r"lam is -1\.0; it must be a finite number ≥ 0"),
        ({"tau": 0.0}, r"tau is 0\.0; it must be a number in \(0, 1\]"),
        ({"tau": 1.1}, r"tau is 1\.1; it must be a number in \(0, 1\]"),
        ({"tau": 0.9, "reg": 0.0}, r"which needs lam \(or reg\) > 0"),
        ({"cost": "manhattan"}, "cost is 'manhattan'; it must be one of w2"),
        ({"cost": -np.ones((4, 5))}, r"reg scales with the mean cost, which is -1 here; give lam"),
        ({"forbidden": np.ones((4, 5), dtype=bool)}, "source component 'a' has no allowed target component"),
        ({"max_iter": 0}, "max_iter is 0; it must be a whole number of at least 1"),
    ],
)
def test_bad_options_are_named(pair, options, message):
    with pytest.raises(ValueError, match=message):
        omt.transport(*pair, **options)


def test_different_dimensions_are_refused(random_mixture):
    with pytest.raises(ValueError, match="source has d=2 features and target d=3; fit both on the same features"):
        omt.transport(random_mixture(0, 2, 2), random_mixture(0, 2, 3))


def test_different_families_are_refused(pair):
    from types import SimpleNamespace

    other = SimpleNamespace(family="poisson", d=3, K=5, components=pair[1].components, names=pair[1].names)
    with pytest.raises(ValueError, match="source is a mixture of family 'gaussian' and target of 'poisson'"):
        omt.transport(pair[0], other)


def test_what_is_no_mixture_is_refused_by_side(pair):
    with pytest.raises(TypeError, match=r"the target is of type ndarray; it must be a Mixture \(omt.fit_mixture\)"):
        omt.transport(pair[0], np.zeros((3, 2)))


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("coupling", lambda table: table * np.nan, "coupling of this stored transport has entries that are not finite"),
        ("coupling", lambda table: -table, "coupling of this stored transport has negative entries"),
        ("epsilon", lambda _: -1.0, "epsilon of this stored transport is -1.0; it must be a finite number ≥ 0"),
        ("lam", lambda _: np.inf, "lam of this stored transport is inf; it must be a finite number ≥ 0"),
        ("lam", lambda _: None, r"this stored transport was not written by omt, or is damaged \(TypeError"),
    ],
)
def test_a_stored_transport_that_was_changed_is_refused(pair, entry, value, message):
    stored = omt.transport(*pair).to_dict()
    with pytest.raises(ValueError, match=message):
        omt.Transport.from_dict(stored | {entry: value(stored[entry])}, source=pair[0], target=pair[1])


def test_infeasible_lineage_names_the_component(pair):
    forbidden = np.zeros((4, 5), dtype=bool)
    forbidden[2, 1:] = True  # 'c' may only become 'v'
    P = replace(pair[0], weights=np.array([0.1, 0.1, 0.7, 0.1]))
    with pytest.raises(ValueError, match=r"source component 'c' of weight 0\.7 may only go to 'v' of weight"):
        omt.transport(P, pair[1], forbidden=forbidden)
