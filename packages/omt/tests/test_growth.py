"""Growth: rates from gene scores, components that multiply, plans that know it, and what cells get back."""

from __future__ import annotations

import json
from dataclasses import replace

import anndata
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse
from typer.testing import CliRunner

import omt
from omt.cli import app
from omt.growth import birth_death_rate, component_growth, mean_z_score
from omt.io import read_uns


@pytest.fixture
def course():
    """A time course of a branching process, its types as components, and each cell's true growth rate."""
    adata, truth = omt.datasets.branching_process(400, random_state=1)
    rates = dict(zip(truth.types, truth.growth, strict=True))
    adata.obs["rate"] = adata.obs["cell_type"].map(rates).astype(float)
    omt.tl.fit_mixtures(adata, "time", labels="cell_type", use_rep="X_state")
    return adata, truth


@pytest.fixture
def pair(random_mixture):
    P = replace(random_mixture(1, 4, 3), names=("a", "b", "c", "d"))
    return P, random_mixture(2, 5, 3)


# -- rates -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("proliferation", "apoptosis", "expected"),
    [
        (0.25, 0.1, 1.0),  # both half way: births and deaths balance
        (100.0, -100.0, np.exp(1.7 - 0.3)),
        (-100.0, 100.0, np.exp(0.3 - 1.7)),
        (0.25 + 0.5 / 4 * np.log(3), 0.1, np.exp(0.35)),  # a quarter of the width times log 3: three quarters up
    ],
)
def test_rates_follow_the_logistic_curves_of_waddington_ot(proliferation, apoptosis, expected):
    assert birth_death_rate(proliferation, apoptosis) == pytest.approx(expected, rel=1e-12)


@given(st.floats(0.1, 5.0), st.floats(0.1, 5.0), st.floats(-5, 5), st.floats(-5, 5))
def test_rates_stay_between_those_of_the_extremes(least, span, proliferation, apoptosis):
    rate = birth_death_rate(proliferation, apoptosis, beta_min=least, beta_max=least + span)
    assert np.exp(least - 1.7) * (1 - 1e-12) <= rate <= np.exp(least + span - 0.3) * (1 + 1e-12)


def test_growth_of_a_component_is_the_mean_over_its_cells_after_the_step():
    rng = np.random.default_rng(0)
    g, R, mu = rng.uniform(0.5, 2, size=50), rng.dirichlet(np.ones(3), size=50), rng.uniform(1, 2, size=50)
    expected = [sum(mu[i] * R[i, k] * g[i] ** 2.5 for i in range(50)) / (mu @ R)[k] for k in range(3)]
    np.testing.assert_allclose(component_growth(g, R, 2.5, sample_weight=mu), expected)


def test_weighting_cells_by_their_growth_gives_the_grown_weights_of_components():
    rng = np.random.default_rng(1)
    g, R = rng.uniform(0.5, 2, size=50), rng.dirichlet(np.ones(3), size=50)
    weighted = (g**2 / (g**2).sum()) @ R
    a = R.mean(axis=0)
    grown = a * component_growth(g, R, 2.0)
    np.testing.assert_allclose(grown / grown.sum(), weighted)


# -- scores ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def expression():
    rng = np.random.default_rng(2)
    X = rng.poisson(0.3, size=(300, 12)).astype(float) * rng.uniform(0.5, 3, size=12)
    X[5, 0] = 500.0  # beyond five standard deviations
    X[:, 3] = 2.0  # constant
    X[:, 4] = 0.0
    return X


def by_hand(X, genes):
    X = X[:, genes]
    spread = X.std(axis=0)
    z = np.divide(X - X.mean(axis=0), spread, out=np.zeros_like(X), where=spread > 0)
    return np.clip(z, -5, 5).mean(axis=1)


@pytest.mark.parametrize("kind", [np.asarray, sparse.csr_matrix, sparse.csr_array, sparse.csc_matrix])
def test_scores_are_mean_clipped_z_scores_whatever_holds_the_expression(monkeypatch, expression, kind):
    monkeypatch.setattr("omt.growth._CHUNK", 64)
    genes = np.array([7, 0, 3, 4, 11])
    np.testing.assert_allclose(mean_z_score(kind(expression), genes), by_hand(expression, genes), atol=1e-12)


def test_scores_from_a_file_on_disk_are_those_in_memory(expression, tmp_path):
    anndata.AnnData(sparse.csr_matrix(expression)).write_h5ad(tmp_path / "a.h5ad")
    backed = anndata.read_h5ad(tmp_path / "a.h5ad", backed="r")
    genes = np.array([0, 5, 6])
    np.testing.assert_allclose(mean_z_score(backed.X, genes), by_hand(expression, genes), atol=1e-12)
    backed.file.close()


def test_sparse_expression_is_never_densified(monkeypatch, expression):
    X = sparse.csr_matrix(expression)
    monkeypatch.setattr(sparse.csr_matrix, "toarray", lambda *_: pytest.fail("densified"))
    monkeypatch.setattr(sparse.csr_matrix, "todense", lambda *_: pytest.fail("densified"))
    mean_z_score(X, np.arange(12))


def test_score_growth_writes_the_rate_and_both_scores(expression):
    adata = anndata.AnnData(np.zeros_like(expression), layers={"log": expression})
    adata.var_names = [f"g{i}" for i in range(12)]
    omt.tl.score_growth(adata, ["g1", "g2", "g3"], ["g5", "g6"], layer="log", beta_max=1.9, key_added="rate")
    np.testing.assert_allclose(adata.obs["rate_proliferation"], by_hand(expression, [1, 2, 3]), atol=1e-12)
    np.testing.assert_allclose(adata.obs["rate_apoptosis"], by_hand(expression, [5, 6]), atol=1e-12)
    expected = birth_death_rate(adata.obs["rate_proliferation"], adata.obs["rate_apoptosis"], beta_max=1.9)
    np.testing.assert_array_equal(adata.obs["rate"], expected)


def test_missing_genes_are_counted(expression):
    adata = anndata.AnnData(expression)
    adata.var_names = [f"g{i}" for i in range(12)]
    with pytest.warns(UserWarning, match=r"2 of the 3 genes of proliferation are in adata.var_names; missing: G9$"):
        omt.tl.score_growth(adata, ["g1", "g2", "G9"], ["g5"])
    with pytest.raises(ValueError, match=r"none of the 2 genes of apoptosis is in adata.var_names \(CASP3, BAX, …\)"):
        omt.tl.score_growth(adata, ["g1"], ["CASP3", "BAX"])
    with pytest.raises(KeyError, match=r"layer='counts': adata.layers has no such key; it has: \(none\)"):
        omt.tl.score_growth(adata, ["g1"], ["g2"], layer="counts")


# -- plans between arrays --------------------------------------------------------------------------------------------


def test_growth_multiplies_the_weights_of_the_source(pair):
    P, Q = pair
    g = np.array([2.0, 0.5, 1.0, 3.0])
    grown = P.weights * g / (P.weights @ g)
    expected = omt.transport(replace(P, weights=grown), Q, reg=0.1)
    found = omt.transport(P, Q, reg=0.1, growth=g)
    np.testing.assert_allclose(found.coupling, expected.coupling, atol=1e-12)
    np.testing.assert_array_equal(found.source.weights, P.weights)
    np.testing.assert_allclose(found.solved_weights, grown)


def test_growth_of_a_balanced_plan_is_what_was_assumed(pair):
    g = np.array([2.0, 0.5, 1.0, 3.0])
    t = omt.transport(*pair, growth=g)
    np.testing.assert_array_equal(t.prior_growth, g)
    np.testing.assert_allclose(t.posterior_growth, g, rtol=1e-8)


def test_only_ratios_of_growth_matter_for_the_plan(pair):
    g = np.array([2.0, 0.5, 1.0, 3.0])
    first, second = omt.transport(*pair, growth=g), omt.transport(*pair, growth=1e200 * g)
    np.testing.assert_allclose(second.coupling, first.coupling, atol=1e-14)


def test_a_relaxed_plan_finds_growth_between_the_assumed_and_the_needed(pair):
    """True growth makes Q's components exactly; assumed is none; relaxing moves towards the truth."""
    P, _ = pair
    far = omt.Mixture.from_gaussians(P.weights, 30.0 * np.eye(4, 3) + np.array([0, 0, 1.0]), P.components.cov())
    g = np.array([2.0, 0.5, 1.0, 3.0])
    grown = replace(far, weights=far.weights * g / (far.weights @ g))
    errors = [abs(np.log(omt.transport(far, grown, lam=30.0, tau=(t, 1.0)).posterior_growth) -
                  np.log(g / (far.weights @ g))).max() for t in (0.99, 0.9, 0.5)]  # fmt: skip
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.2 * abs(np.log(g)).max()


def test_the_plan_of_samples_gives_each_the_growth_of_its_component(pair):
    P, Q = pair
    rng = np.random.default_rng(0)
    X, Y = P.sample(200, rng), Q.sample(100, rng)
    g = np.array([2.0, 0.5, 1.0, 3.0])
    plan = omt.transport(P, Q, growth=g).plan(X, Y)
    R = np.asarray(P.responsibilities(X))
    np.testing.assert_allclose(plan.pull(np.ones(100)), R @ g / 200 / (R.mean(axis=0) @ g), rtol=1e-8)
    np.testing.assert_allclose(plan.push(np.ones(200)), np.full(100, 1 / 100), rtol=1e-8)


def test_the_inverse_leads_to_the_grown_source(pair):
    g = np.array([2.0, 0.5, 1.0, 3.0])
    back = omt.transport(*pair, growth=g).inverse()
    np.testing.assert_allclose(back.coupling.sum(axis=0), back.target.weights, atol=1e-9)
    np.testing.assert_allclose(back.posterior_growth, 1.0, rtol=1e-7)


def test_growth_is_stored_and_a_transport_stored_without_it_is_read(pair, tmp_path):
    t = omt.transport(*pair, growth=[2.0, 0.5, 1.0, 3.0])
    t.save(tmp_path / "t")
    loaded = omt.Transport.load(tmp_path / "t")
    np.testing.assert_array_equal(loaded.prior_growth, t.prior_growth)
    np.testing.assert_array_equal(loaded.posterior_growth, t.posterior_growth)
    stored = omt.transport(*pair).to_dict()
    assert "growth" not in stored
    assert stored["format"] == 1
    old = omt.Transport.from_dict(stored, source=pair[0], target=pair[1])
    np.testing.assert_array_equal(old.prior_growth, 1.0)


@pytest.mark.parametrize(
    ("growth", "message"),
    [
        ([1.0, 0.0, 1.0, 1.0], r"growth\[1\] \(component 'b'\) is 0; descendants per cell must be finite and > 0"),
        ([1.0, 1.0, -2.0, 1.0], r"growth\[2\] \(component 'c'\) is -2;"),
        ([1.0, 1.0, 1.0, np.inf], r"growth\[3\] \(component 'd'\) is inf;"),
        ([1.0, 1.0], r"growth has shape \(2,\); there are 4 source components, so it must be \[4\]"),
    ],
)
def test_bad_growth_names_the_component(pair, growth, message):
    with pytest.raises(ValueError, match=message):
        omt.transport(*pair, growth=growth)


def test_stored_growth_that_was_changed_is_refused(pair):
    stored = omt.transport(*pair, growth=[1.0, 2.0, 3.0, 4.0]).to_dict()
    with pytest.raises(ValueError, match=r"growth of this stored transport\[0\] is -1"):
        omt.Transport.from_dict(stored | {"growth": -stored["growth"]}, source=pair[0], target=pair[1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0, -1.0], np.eye(2), 1.0), r"rates\[1\] is -1; a growth rate must be > 0 \(1: no change\)"),
        (([1.0, 1.0], np.eye(2), 0.0), "dt is 0.0; it must be a finite number > 0"),
        (
            ([1.0, 1e9], np.eye(2), 60.0),
            r"rates\[1\] is 1e\+09, which over dt=60 is beyond float64; rates are per unit",
        ),
        (([1.0], np.eye(2), 1.0), r"rates has shape \(1,\) and responsibilities \(2, 2\)"),
    ],
)
def test_bad_rates_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        component_growth(*arguments)


# -- plans between groups of cells -----------------------------------------------------------------------------------


def fate_error(adata, truth):
    """Mean total-variation distance of the found to the true fates of the first time's types."""
    model = read_uns(adata)
    first, last = ([truth.types.index(name) for name in model.names(i)] for i in (0, len(model.groups) - 1))
    true = np.linalg.matrix_power(truth.transition, len(model.groups) - 1)[np.ix_(first, last)]
    return float(np.mean(0.5 * np.abs(model.table(0, len(model.groups) - 1) - true).sum(axis=1)))


def test_known_growth_rates_find_the_fates_that_ignoring_growth_misses(course):
    adata, truth = course
    omt.tl.transport(adata, time_key="time")
    ignoring = fate_error(adata, truth)
    omt.tl.transport(adata, time_key="time", growth_key="rate")
    assert fate_error(adata, truth) <= 0.06
    assert fate_error(adata, truth) <= 0.5 * ignoring


def test_rates_count_for_the_length_of_the_step(course):
    adata, _ = course
    adata.obs["time"] *= 3.0  # three times the time at a third of the rate
    adata.obs["rate"] **= 1 / 3
    omt.tl.fit_mixtures(adata, "time", labels="cell_type", use_rep="X_state")
    omt.tl.transport(adata, time_key="time", growth_key="rate")
    model, known = read_uns(adata), {"stem": 1.6, "A progenitor": 1.3, "B progenitor": 1.1}
    np.testing.assert_allclose(model.transports[0].prior_growth, [known[name] for name in model.names(0)])


def test_growth_found_becomes_growth_assumed(course):
    adata, _ = course
    options = {"time_key": "time", "reg": 0.05, "tau": (0.9, 0.99)}
    omt.tl.transport(adata, **options, growth_key="rate")
    first = read_uns(adata).transports[1]
    omt.tl.transport(adata, **options, growth_key="rate", growth_iters=2)
    second = read_uns(adata).transports[1]
    np.testing.assert_allclose(second.prior_growth, first.posterior_growth, rtol=1e-9)
    by_hand = omt.transport(first.source, first.target, reg=0.05, tau=(0.9, 0.99), growth=first.posterior_growth)
    np.testing.assert_allclose(second.coupling, by_hand.coupling, atol=1e-10)


def test_iterating_growth_changes_nothing_in_a_balanced_plan(course):
    adata, _ = course
    omt.tl.transport(adata, time_key="time", growth_key="rate")
    first = read_uns(adata).transports[2].coupling
    omt.tl.transport(adata, time_key="time", growth_key="rate", growth_iters=4)
    np.testing.assert_allclose(read_uns(adata).transports[2].coupling, first, atol=1e-9)


def test_cells_get_the_growth_of_their_components(course):
    adata, _ = course
    omt.tl.transport(adata, time_key="time", growth_key="rate", tau=(0.95, 1.0), reg=0.05)
    omt.tl.growth(adata, key_added="g")
    model = read_uns(adata)
    for name in ("prior", "posterior"):
        expected = dict(zip(model.names(0), getattr(model.transports[0], f"{name}_growth"), strict=True))
        first = adata.obs[adata.obs["time"] == 0]
        np.testing.assert_allclose(first[f"g_{name}"], first["cell_type"].map(expected).astype(float))
    assert adata.obs.loc[adata.obs["time"] == 4, ["g_prior", "g_posterior", "g_rate"]].isna().all(axis=None)


def test_growth_of_a_chain_is_a_table_with_rates_per_unit_of_time(random_mixture):
    mixtures = [random_mixture(seed, 3, 2) for seed in range(3)]
    chain = omt.TransportChain.between(mixtures, [0, 2, 5], reg=0.2, tau=(0.8, 1.0))
    table = chain.growth()
    assert list(table["time"]) == [0.0] * 3 + [2.0] * 3
    np.testing.assert_allclose(table["posterior"][3:], chain.transports[1].posterior_growth)
    np.testing.assert_allclose(table["posterior_rate"] ** (table["next_time"] - table["time"]), table["posterior"])


def test_growth_survives_h5ad(course, tmp_path):
    adata, _ = course
    omt.tl.transport(adata, time_key="time", growth_key="rate")
    before = read_uns(adata).transports[0]
    adata.write_h5ad(tmp_path / "a.h5ad")
    after = read_uns(anndata.read_h5ad(tmp_path / "a.h5ad")).transports[0]
    np.testing.assert_array_equal(after.prior_growth, before.prior_growth)


@pytest.mark.parametrize(
    ("change", "options", "error", "message"),
    [
        (
            None,
            {"growth_key": "birth"},
            KeyError,
            "growth_key='birth': adata.obs has no such column; columns are: time",
        ),
        (None, {"growth_key": "cell_type"}, ValueError, "has dtype category; it must hold growth rates, numbers > 0"),
        (0.0, {"growth_key": "rate"}, ValueError, r"adata.obs\['rate'\] is 0 in cell 'cell3'; a growth rate is the"),
        (-1.0, {"growth_key": "rate"}, ValueError, r"adata.obs\['rate'\] is -1 in cell 'cell3'"),
        (np.nan, {"growth_key": "rate"}, ValueError, r"adata.obs\['rate'\] is nan in cell 'cell3'"),
        (None, {"growth_iters": 0}, ValueError, "growth_iters is 0; it must be an integer ≥ 1"),
    ],
)
def test_bad_growth_of_cells_is_named_before_anything_is_written(course, change, options, error, message):
    adata, _ = course
    if change is not None:
        adata.obs.iloc[3, adata.obs.columns.get_loc("rate")] = change
    with pytest.raises(error, match=message):
        omt.tl.transport(adata, time_key="time", **options)
    assert not read_uns(adata).transports


def test_growth_does_not_run_backward_in_time(course):
    adata, _ = course
    with pytest.raises(
        ValueError, match="growth leads from earlier to later cells, but source=3 is not before target=1"
    ):
        omt.tl.transport(adata, source=3, target=1, growth_key="rate")


def test_growth_before_transport_says_what_to_run(course):
    with pytest.raises(KeyError, match=r"run omt.tl.transport first"):
        omt.tl.growth(course[0])


# -- command line ----------------------------------------------------------------------------------------------------


def test_the_command_takes_growth_from_the_cells(course, tmp_path):
    adata, _ = course
    adata.write_h5ad(tmp_path / "cells.h5ad")
    run = CliRunner()
    model, chain = str(tmp_path / "model"), str(tmp_path / "chain")
    fit = ["fit", str(tmp_path / "cells.h5ad"), "--groupby", "time", "--use-rep", "X_state", "--labels", "cell_type"]
    assert run.invoke(app, [*fit, "-o", model, "--quiet"]).exit_code == 0
    options = ["--cells", str(tmp_path / "cells.h5ad"), "--growth-key", "rate", "-o", chain, "--json"]
    done = run.invoke(app, ["transport", model, *options])
    assert done.exit_code == 0, done.output
    assert all(plan["converged"] for plan in json.loads(done.stdout)["plans"])
    omt.tl.transport(adata, time_key="time", growth_key="rate")
    from omt.io import load_model

    for ours, other in zip(load_model(chain).transports, read_uns(adata).transports, strict=True):
        np.testing.assert_allclose(ours.prior_growth, other.prior_growth)
        np.testing.assert_allclose(ours.coupling, other.coupling, atol=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--growth-key", "rate"], "give --growth-key together with --cells, the h5ad file whose column it is"),
        (["--growth-iters", "0"], "growth_iters is 0; it must be an integer ≥ 1"),
    ],
)
def test_the_command_says_what_growth_lacks(course, tmp_path, options, message):
    from omt.io import save_model

    save_model(read_uns(course[0]), tmp_path / "model")
    done = CliRunner().invoke(app, ["transport", str(tmp_path / "model"), *options, "-o", str(tmp_path / "chain")])
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())


def test_the_command_lists_the_columns_it_could_take_growth_from(course, tmp_path):
    from omt.io import save_model

    adata, _ = course
    save_model(read_uns(adata), tmp_path / "model")
    adata.write_h5ad(tmp_path / "cells.h5ad")
    options = ["--cells", str(tmp_path / "cells.h5ad"), "--growth-key", "birth", "-o", str(tmp_path / "chain")]
    done = CliRunner().invoke(app, ["transport", str(tmp_path / "model"), *options])
    assert done.exit_code == 2
    assert "has no such obs column; columns are: time, cell_type, rate" in " ".join(done.stderr.split())
