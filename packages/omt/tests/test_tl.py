"""The verbs on AnnData: what they write, what it equals, and how they answer to bad input."""

from __future__ import annotations

import hashlib
import re

import anndata
import numpy as np
import pandas as pd
import pytest
from scipy import sparse

import omt
from omt.io import read_uns


@pytest.fixture(scope="module")
def _course():
    adata, truth = omt.datasets.branching_process(150, random_state=2)
    omt.tl.fit_mixtures(adata, groupby="time", labels="cell_type", use_rep="X_state", progress=False)
    omt.tl.transport(adata, time_key="time")
    return adata, truth


@pytest.fixture
def course(_course):
    """A time course of five times, fitted by labels and transported."""
    return _course[0].copy()


@pytest.fixture
def raw():
    """The same kind of cells before any verb."""
    return omt.datasets.branching_process(60, random_state=1)[0]


# ------------------------------------------------------------------------------------------------------------
# fit_mixtures
def test_label_components_have_the_means_and_shares_of_their_cells(course):
    model = read_uns(course)
    late = (course.obs["time"] == 4).to_numpy()
    for k, name in enumerate(model.names(4)):
        cells = late & (course.obs["cell_type"] == name).to_numpy()
        assert model.mixtures[4].weights[k] == pytest.approx(cells.sum() / late.sum(), abs=1e-12)
        assert np.allclose(model.mixtures[4].components.means[k], course.obsm["X_state"][cells].mean(axis=0))


def test_a_known_label_is_certain(course):
    assert (course.obs["omt_component"].astype(str) == course.obs["cell_type"].astype(str)).all()
    assert np.array_equal(course.obsm["X_omt_responsibilities"].max(axis=1), np.ones(course.n_obs))


def test_an_unlabelled_cell_gets_its_responsibilities_by_bayes():
    raw = omt.datasets.branching_process(150, random_state=1)[0]
    raw.obs["cell_type"] = raw.obs["cell_type"].where(np.arange(raw.n_obs) % 20 != 0)
    omt.tl.fit_mixtures(raw, "time", labels="cell_type", use_rep="X_state")
    model = read_uns(raw)
    rows = np.flatnonzero((raw.obs["time"] == 3).to_numpy() & raw.obs["cell_type"].isna().to_numpy())
    mixture = model.mixtures[3]
    from scipy.stats import multivariate_normal

    density = np.stack(
        [
            w * multivariate_normal(m, c).pdf(raw.obsm["X_state"][rows])
            for w, m, c in zip(
                mixture.weights, mixture.components.means, mixture.components.covariance_matrices(), strict=True
            )
        ],
        axis=1,
    )
    expected = density / density.sum(axis=1, keepdims=True)
    assert np.allclose(raw.obsm["X_omt_responsibilities"][rows, : mixture.K], expected, atol=1e-6)


def test_found_components_are_named_after_their_group(raw):
    omt.tl.fit_mixtures(raw, "time", n_components=3, use_rep="X_state")
    assert read_uns(raw).names(2) == ("2:0", "2:1", "2:2")


def test_soft_labels_become_the_components(raw):
    soft = np.random.default_rng(0).dirichlet(np.ones(4), size=raw.n_obs)
    raw.obsm["soft"] = pd.DataFrame(soft, columns=["a", "b", "c", "d"], index=raw.obs_names)
    omt.tl.fit_mixtures(raw, "time", responsibilities="soft", use_rep="X_state")
    rows = (raw.obs["time"] == 0).to_numpy()
    mixture = read_uns(raw).mixtures[0]
    place = ["abcd".index(name) for name in mixture.names]
    assert np.allclose(mixture.weights, soft[rows].mean(axis=0)[place])
    assert np.allclose(raw.obsm["X_omt_responsibilities"][rows], soft[rows][:, place], atol=1e-6)


def test_the_same_seed_gives_the_same_mixtures(raw):
    other = raw.copy()
    for adata in (raw, other):
        omt.tl.fit_mixtures(adata, "time", n_components=4, use_rep="X_state", random_state=3)
    assert np.array_equal(read_uns(raw).mixtures[1].components.means, read_uns(other).mixtures[1].components.means)


def test_cells_without_a_group_are_left_out(raw):
    raw.obs["time"] = raw.obs["time"].where(raw.obs["time"] != 4)
    omt.tl.fit_mixtures(raw, "time", n_components=2, use_rep="X_state")
    assert read_uns(raw).groups == (0.0, 1.0, 2.0, 3.0)
    outside = raw.obs["time"].isna().to_numpy()
    assert raw.obs["omt_component"].isna().to_numpy()[outside].all()
    assert not raw.obsm["X_omt_responsibilities"][outside].any()


def test_copy_leaves_the_original_untouched(raw):
    copy = omt.tl.fit_mixtures(raw, "time", n_components=2, use_rep="X_state", copy=True)
    assert "omt" in copy.uns
    assert "omt" not in raw.uns
    assert "X_omt_responsibilities" not in raw.obsm


def test_a_file_opened_backed_is_fitted_and_not_written_to(raw, tmp_path):
    file = tmp_path / "cells.h5ad"
    raw.write_h5ad(file)
    before = hashlib.sha256(file.read_bytes()).hexdigest()
    backed = anndata.read_h5ad(file, backed="r")
    omt.tl.fit_mixtures(backed, "time", labels="cell_type", use_rep="X_state")
    omt.tl.transport(backed, time_key="time")
    omt.tl.push(backed, 0, 1)
    backed.file.close()
    assert hashlib.sha256(file.read_bytes()).hexdigest() == before


def test_x_on_disk_gives_the_mixtures_of_x_in_memory(raw, tmp_path):
    cells = anndata.AnnData(X=raw.obsm["X_state"], obs=raw.obs)
    cells.write_h5ad(tmp_path / "cells.h5ad")
    backed = anndata.read_h5ad(tmp_path / "cells.h5ad", backed="r")
    for adata in (cells, backed):
        omt.tl.fit_mixtures(adata, "time", labels="cell_type", use_rep="X")
    for ours, other in zip(read_uns(cells).mixtures, read_uns(backed).mixtures, strict=True):
        assert np.allclose(ours.components.means, other.components.means, atol=1e-8)
        assert np.allclose(ours.components.covariance_matrices(), other.components.covariance_matrices(), atol=1e-8)
    backed.file.close()


def test_a_label_with_one_cell_is_fitted_with_a_warning(raw):
    labels = raw.obs["cell_type"].astype(str).to_numpy()
    labels[np.flatnonzero(raw.obs["time"] == 0)[0]] = "rare"
    raw.obs["label"] = labels
    with pytest.warns(UserWarning, match="rare"):
        omt.tl.fit_mixtures(raw, "time", labels="label", use_rep="X_state")
    omt.tl.transport(raw, time_key="time")
    assert np.isfinite(omt.tl.transition_matrix(raw, 0, 1).to_numpy()).all()


def test_duplicated_cells_and_a_constant_feature_are_fitted(raw):
    X = raw.obsm["X_state"].copy()
    X[:, 0] = 3.0
    X[1] = X[0]
    raw.obsm["X_odd"] = X
    omt.tl.fit_mixtures(raw, "time", labels="cell_type", use_rep="X_odd")
    omt.tl.transport(raw, time_key="time")
    assert np.isfinite(omt.tl.transition_matrix(raw, 0, 4).to_numpy()).all()


@pytest.mark.parametrize(
    ("change", "options", "error", "message"),
    [
        (
            None,
            {"groupby": "day"},
            KeyError,
            "groupby='day': adata.obs has no such column; columns are: time, cell_type",
        ),
        (None, {"use_rep": "X_pca"}, KeyError, "use_rep='X_pca': adata.obsm has no such key; it has: X_state, X_tree"),
        (None, {"labels": "celltype"}, KeyError, "labels='celltype': adata.obs has no such column; columns are: time"),
        (None, {"responsibilities": "soft"}, KeyError, "responsibilities='soft': adata.obsm has no such key; it has: "),
        (None, {"labels": "cell_type", "responsibilities": "X_tree"}, ValueError, "both define the components"),
        (None, {"n_components": 61}, ValueError, "time 0 has 60 cells, fewer than n_components=61"),
        (
            None,
            {"sample_weight": "zero"},
            ValueError,
            "adata.obs['zero'] is 0 in cell 'cell0'; weights must be positive",
        ),
        ("nan", {}, ValueError, "adata.obsm['X_state'] has nan in cell 'cell5' (row 5, column 3)"),
        ("lonely", {}, ValueError, "time 9 has 1 cell; a mixture needs at least 2"),
        ("unlabelled", {"labels": "cell_type"}, ValueError, "no cell of time 2 has a value in adata.obs['cell_type']"),
        ("no groups", {}, ValueError, "adata.obs['time'] has no values"),
        ("dates", {}, TypeError, "has dtype datetime64[ns]; it must be numeric or categorical"),
    ],
)
def test_bad_input_of_fit_mixtures_is_named(raw, change, options, error, message):
    raw.obs["zero"] = 0.0
    if change == "nan":
        raw.obsm["X_state"][5, 3] = np.nan
    elif change == "lonely":
        raw.obs.loc[raw.obs_names[0], "time"] = 9.0
    elif change == "unlabelled":
        raw.obs["cell_type"] = raw.obs["cell_type"].where(raw.obs["time"] != 2)
    elif change == "no groups":
        raw.obs["time"] = np.nan
    elif change == "dates":
        raw.obs["time"] = pd.to_datetime(raw.obs["time"], unit="D").astype("datetime64[ns]")
    with pytest.raises(error) as caught:
        omt.tl.fit_mixtures(raw, **{"groupby": "time", "use_rep": "X_state", "n_components": 2, **options})
    assert message in str(caught.value.args[0])
    assert "omt" not in raw.uns


def test_sparse_x_with_full_covariances_says_use_rep(raw):
    cells = anndata.AnnData(X=sparse.csr_matrix(np.abs(raw.obsm["X_state"])), obs=raw.obs)
    with pytest.raises(TypeError, match=r"adata.X is sparse and covariance='full' needs dense features; give use_rep"):
        omt.tl.fit_mixtures(cells, "time", use_rep="X")


# ---------------------------------------------------------------------------------------------------------------
# transport
def test_the_chain_is_that_of_the_array_level(course):
    model = read_uns(course)
    for (i, j), plan in zip(model.steps(), model.transports, strict=True):
        direct = omt.transport(model.mixtures[i], model.mixtures[j])
        assert np.allclose(plan.coupling, direct.coupling, atol=1e-12)


def test_two_groups_without_order_are_connected_by_name(raw):
    raw.obs["condition"] = pd.Categorical(np.where(raw.obs["time"] < 2, "ctrl", "stim"))
    omt.tl.fit_mixtures(raw, "condition", labels="cell_type", use_rep="X_state")
    omt.tl.transport(raw, source="stim", target="ctrl")
    assert list(omt.tl.transition_matrix(raw, "stim", "ctrl").index) == list(read_uns(raw).names(1))


def test_tau_below_one_lets_mass_grow_and_die(course):
    omt.tl.transport(course, time_key="time", tau=0.9)
    assert np.abs(read_uns(course).transports[0].posterior_growth - 1).max() > 0.1


def test_tau_a_and_tau_b_are_the_sides_of_tau(course):
    other = course.copy()
    omt.tl.transport(course, time_key="time", tau=(0.9, 1.0))
    omt.tl.transport(other, time_key="time", tau_a=0.9)
    assert np.array_equal(read_uns(course).transports[0].coupling, read_uns(other).transports[0].coupling)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "say what to connect: time_key="),
        ({"time_key": "time", "source": 0}, "not both"),
        ({"time_key": "stage"}, "time_key='stage', but the mixtures are those of 'time'"),
        ({"source": 0}, "say what to connect"),
        ({"source": 0, "target": 7}, "target=7 is not in the fitted groups; time there is one of: 0, 1, 2, 3, 4"),
        ({"source": 1, "target": 1}, "source and target are both 1"),
        ({"time_key": "time", "tau": 0.0}, "tau"),
        ({"time_key": "time", "tau": 1.5}, "tau"),
        ({"time_key": "time", "reg": -1.0}, "reg is -1.0"),
    ],
)
def test_bad_input_of_transport_is_named_and_leaves_the_old_plans(course, options, message):
    before = read_uns(course).transports[0].coupling
    with pytest.raises(ValueError, match=re.escape(message)):
        omt.tl.transport(course, **options)
    assert np.array_equal(read_uns(course).transports[0].coupling, before)


def test_a_time_key_without_order_is_refused(raw):
    raw.obs["condition"] = pd.Categorical(np.where(raw.obs["time"] < 2, "ctrl", "stim"))
    omt.tl.fit_mixtures(raw, "condition", n_components=2, use_rep="X_state")
    with pytest.raises(ValueError, match="'condition' is neither numeric nor an ordered categorical"):
        omt.tl.transport(raw, time_key="condition")


def test_an_ordered_categorical_is_a_time(raw):
    names = np.array(["egg", "larva", "pupa"])[np.minimum(raw.obs["time"], 2).astype(int)]
    raw.obs["stage"] = pd.Categorical(names, categories=["egg", "larva", "pupa"], ordered=True)
    omt.tl.fit_mixtures(raw, "stage", n_components=2, use_rep="X_state")
    omt.tl.transport(raw, time_key="stage")
    assert omt.tl.transition_matrix(raw, "egg", "pupa").shape == (2, 2)


def test_one_component_on_each_side_has_the_trivial_plan(raw):
    omt.tl.fit_mixtures(raw, "time", n_components=1, use_rep="X_state")
    omt.tl.transport(raw, time_key="time")
    assert omt.tl.transition_matrix(raw, 0, 4).to_numpy() == pytest.approx(1.0)


# -------------------------------------------------------------------------------------------------------
# transition_matrix
def test_the_table_over_several_steps_is_the_product_of_the_steps(course):
    steps = [omt.tl.transition_matrix(course, t, t + 1).to_numpy() for t in range(4)]
    assert np.allclose(omt.tl.transition_matrix(course, 0, 4), np.linalg.multi_dot(steps))


def test_backward_is_bayes_rule_on_forward_for_a_balanced_step(course):
    model = read_uns(course)
    joint = model.mixtures[1].weights[:, None] * omt.tl.transition_matrix(course, 1, 2).to_numpy()
    backward = (joint / joint.sum(axis=0)).T
    assert np.allclose(omt.tl.transition_matrix(course, 1, 2, direction="backward"), backward, atol=1e-7)


def test_the_table_is_kept_in_uns(course):
    table = omt.tl.transition_matrix(course, 0, 4)
    stored = course.uns["omt"]["transitions"]["0->4"]
    assert np.array_equal(stored["table"], table.to_numpy())
    assert list(stored["rows"]) == list(table.index)


def test_by_a_label_equals_the_components_when_they_are_the_labels(course):
    components = omt.tl.transition_matrix(course, 1, 3)
    labels = omt.tl.transition_matrix(course, 1, 3, by="cell_type")
    assert np.allclose(labels.loc[components.index, components.columns], components)


def test_by_a_label_averages_the_cells_of_found_components(raw):
    omt.tl.fit_mixtures(raw, "time", n_components=4, use_rep="X_state")
    omt.tl.transport(raw, time_key="time")
    table = omt.tl.transition_matrix(raw, 0, 1, by="cell_type")
    for label in table.index:  # by hand: push equal mass from the cells of a label and add it up by label
        omt.tl.push(raw, 0, 1, data="cell_type", subset=label)
        late = raw.obs[raw.obs["time"] == 1]
        assert np.allclose(late.groupby("cell_type", observed=True)["omt_push"].sum()[table.columns], table.loc[label])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 5), "target=5 is not in the chain; time there is one of: 0, 1, 2, 3, 4"),
        (("early", 4), "source='early' is not in the chain"),
        ((3, 1), "source=3 must come before target=1 in the chain: 0 → 1 → 2 → 3 → 4"),
    ],
)
def test_a_time_outside_the_chain_is_named(course, arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        omt.tl.transition_matrix(course, *arguments)


def test_an_unknown_direction_is_refused(course):
    with pytest.raises(ValueError, match="direction is 'up', must be 'forward' or 'backward'"):
        omt.tl.transition_matrix(course, 0, 1, direction="up")


# ---------------------------------------------------------------------------------------------------------------
# push, pull
def test_pushing_one_step_is_the_coarse_plan_applied_to_the_mass(course):
    model = read_uns(course)
    early, late = ((course.obs["time"] == t).to_numpy() for t in (1, 2))
    R = course.obsm["X_omt_responsibilities"][early, : model.mixtures[1].K].astype(float)
    S = course.obsm["X_omt_responsibilities"][late, : model.mixtures[2].K].astype(float)
    a, b = R.mean(axis=0), S.mean(axis=0)
    gamma = (
        R / a @ model.transports[1].coupling / b @ S.T / len(R) / len(S)
    )  # §3.6: diag(μ) R diag(1/a) W diag(1/b) Sᵀ diag(ν)
    start = np.random.default_rng(0).random(len(R))
    omt.tl.push(course, 1, 2, data=start)
    expected = gamma.T @ (start / start.sum() * len(R))
    assert np.allclose(course.obs.loc[late, "omt_push"], expected, atol=1e-9)


def test_pushing_all_cells_gives_all_cells_of_the_target_equal_mass(course):
    omt.tl.push(course, 0, 4)
    late = course.obs.loc[course.obs["time"] == 4, "omt_push"]
    assert np.allclose(late, 1 / len(late), rtol=1e-6)


def test_push_and_pull_are_adjoint_on_densities(course):
    early, late = ((course.obs["time"] == t).to_numpy() for t in (0, 4))
    rng = np.random.default_rng(0)
    u, v = rng.random(early.sum()), rng.random(late.sum())
    omt.tl.push(course, 0, 4, data=u)
    omt.tl.pull(course, 0, 4, data=v)
    # ⟨push(u), v⟩ = ⟨u, pull(v)⟩ for densities with respect to equal cell weights
    assert course.obs.loc[late, "omt_push"] @ v / v.sum() * late.sum() == pytest.approx(
        course.obs.loc[early, "omt_pull"] @ u / u.sum() * early.sum(), rel=1e-6
    )


def test_pull_finds_the_branch_of_the_true_ancestors(course):
    omt.tl.pull(course, 0, 4, data="cell_type", subset="B1", key_added="origin")
    start = course.obs[course.obs["time"] == 0].groupby("cell_type", observed=True)["origin"].sum()
    assert start["A progenitor"] < 0.01
    assert start["B progenitor"] + start["stem"] > 0.99


def test_every_group_on_the_way_gets_a_distribution_and_others_nothing(course):
    omt.tl.push(course, 1, 3, data="cell_type", subset=["stem", "A progenitor"])
    sums = course.obs.groupby("time")["omt_push"].sum(min_count=1)
    assert np.allclose(sums[[1.0, 2.0, 3.0]], 1.0)
    assert sums[[0.0, 4.0]].isna().all()


def test_weighted_cells_share_mass_by_their_weights(raw):
    raw.obs["weight"] = np.random.default_rng(0).uniform(0.5, 2, raw.n_obs)
    omt.tl.fit_mixtures(raw, "time", labels="cell_type", use_rep="X_state", sample_weight="weight")
    omt.tl.transport(raw, time_key="time")
    omt.tl.push(raw, 0, 1)
    late = raw.obs[raw.obs["time"] == 1]
    assert np.allclose(late["omt_push"], late["weight"] / late["weight"].sum(), rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"data": "cell_type", "subset": "Stem"},
            ValueError,
            "no cell of time 0 has cell_type Stem; there it is one of: A progenitor, B progenitor, stem",
        ),
        ({"data": "celltype", "subset": "stem"}, KeyError, "data='celltype': adata.obs has no such column"),
        ({"data": "cell_type"}, ValueError, "give subset="),
        ({"subset": "stem"}, ValueError, "subset='stem' needs data="),
        (
            {"data": np.ones(7)},
            ValueError,
            "data has shape (7,), must be one number for each of the 150 cells of time 0",
        ),
        ({"data": -np.ones(150)}, ValueError, "finite and non-negative masses"),
    ],
)
def test_bad_input_of_push_is_named_and_writes_nothing(course, options, error, message):
    with pytest.raises(error) as caught:
        omt.tl.push(course, 0, 4, **options)
    assert message in str(caught.value.args[0])
    assert "omt_push" not in course.obs


# ----------------------------------------------------------------------------------------------------------- fates,
# map_to
def test_fates_are_the_rows_of_the_table_to_the_end(course):
    omt.tl.fates(course, terminal=["A1", "A2", "B1"])
    table = omt.tl.transition_matrix(course, 1, 4)[["A1", "A2", "B1"]]
    cells = (course.obs["time"] == 1).to_numpy()
    assert np.allclose(course.obsm["omt_fates"][cells], table.loc[course.obs.loc[cells, "cell_type"]], atol=1e-6)
    assert list(course.uns["omt"]["omt_fates"]["names"]) == ["A1", "A2", "B1"]


def test_fates_of_all_components_sum_to_one(course):
    omt.tl.fates(course)
    assert np.allclose(course.obsm["omt_fates"].sum(axis=1), 1.0)


def test_an_unknown_terminal_component_is_named(course):
    with pytest.raises(ValueError, match="terminal='C1' is no component of time 4; components are: A progenitor, A1"):
        omt.tl.fates(course, terminal=["C1"])


def test_mapped_cells_are_those_of_the_plan_and_others_are_nan(course):
    omt.tl.map_to(course, 1, 2)
    cells = (course.obs["time"] == 1).to_numpy()
    expected = read_uns(course).transports[1].map(course.obsm["X_state"][cells])
    assert np.allclose(course.obsm["X_omt_map"][cells], expected)
    assert np.isnan(course.obsm["X_omt_map"][~cells]).all()


def test_drawn_images_have_the_mean_of_the_target(course):
    omt.tl.map_to(course, 1, 4, kind="sample", random_state=0)
    drawn = course.obsm["X_omt_map"][(course.obs["time"] == 1).to_numpy()]
    late = course.obsm["X_state"][(course.obs["time"] == 4).to_numpy()]
    error = np.sqrt(drawn.var(axis=0) / len(drawn) + late.var(axis=0) / len(late))
    assert (np.abs(drawn.mean(axis=0) - late.mean(axis=0)) < 4 * error).all()


def test_an_unknown_kind_of_map_is_refused(course):
    with pytest.raises(ValueError, match="kind is 'nearest', must be 'barycentric', 'sample' or 'mode'"):
        omt.tl.map_to(course, 1, 2, kind="nearest")


# --------------------------------------------------------------------------------------------------------------- the
# order
@pytest.mark.parametrize("verb", ["push", "pull", "transition_matrix", "map_to"])
def test_a_verb_before_transport_says_what_to_run(raw, verb):
    with pytest.raises(KeyError, match=r"run omt.tl.fit_mixtures first"):
        getattr(omt.tl, verb)(raw, 0, 1)
    omt.tl.fit_mixtures(raw, "time", n_components=2, use_rep="X_state")
    with pytest.raises(KeyError, match=r"run omt.tl.transport first"):
        getattr(omt.tl, verb)(raw, 0, 1)


def test_a_warning_of_a_fit_names_its_group():
    adata, _ = omt.datasets.branching_process(50, random_state=0)
    types = adata.obs["cell_type"].astype(object)
    types.iloc[60] = "rare"  # of time 1
    adata.obs["types"] = types
    with pytest.warns(UserWarning, match=r"labels with one sample: rare; .* \(time 1\)$"):
        omt.tl.fit_mixtures(adata, "time", labels="types", use_rep="X_state")
