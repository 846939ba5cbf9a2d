"""The Bayesian bootstrap: against weighted estimates by hand, the Dirichlet law, known plans and donors that differ."""

from __future__ import annotations

import itertools
import json

import anndata
import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest

mpl.use("Agg")

from matplotlib import pyplot as plt
from typer.testing import CliRunner

import omt
from omt.cli import app
from omt.families import Gaussian
from omt.io import read_uns
from omt.stability import Summary, bootstrap
from omt.stability.resample import Sample, replicate_mixtures


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


def labelled(rng, n, *, K=3, d=2, spread=4.0):
    """Samples of K separated Gaussians with unequal shares, and their components."""
    label = rng.choice(K, size=n, p=np.arange(1, K + 1) / np.arange(1, K + 1).sum())
    X = spread * np.random.default_rng(5).normal(size=(K, d))[label] + rng.normal(size=(n, d))
    return X, label


def fitted(X, label, **options):
    options = {"family": Gaussian("full", shrinkage=0.0)} | options
    return omt.fit_mixture(X, labels=label, progress=False, **options)


# -- replicates ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["sums by unit", "single samples"])
@pytest.mark.parametrize("covariance", ["full", "diag", "tied", "spherical"])
def test_a_replicate_has_the_weighted_moments_of_the_samples(monkeypatch, path, covariance):
    if path == "single samples":
        monkeypatch.setattr("omt.stability.resample._UNIT_ENTRIES", 0)
    monkeypatch.setattr("omt.stability.resample._CHUNK", 64)
    rng = np.random.default_rng(0)
    X, label = labelled(rng, 300)
    unit = rng.integers(0, 7, size=300)
    weights = rng.standard_exponential((7, 4))
    mixture = fitted(X, label, family=Gaussian(covariance, shrinkage=0.0))
    found = replicate_mixtures(Sample(X, np.eye(3)[label], unit=unit), mixture, weights, 4, rng).mixtures
    for b, one in enumerate(found):
        w = weights[unit, b]
        share = np.bincount(label, w) / w.sum()
        np.testing.assert_allclose(one.weights, share, rtol=1e-12)
        parts = [np.cov(X[label == k].T, aweights=w[label == k], bias=True) for k in range(3)]
        for k in range(3):
            mean = np.average(X[label == k], axis=0, weights=w[label == k])
            np.testing.assert_allclose(one.components.means[k], mean, rtol=1e-10, atol=1e-12)
        expected = {
            "full": parts,
            "diag": [np.diag(np.diag(p)) for p in parts],
            "spherical": [np.eye(2) * np.trace(p) / 2 for p in parts],
            "tied": [sum(s * p for s, p in zip(share, parts, strict=True))] * 3,
        }[covariance]
        np.testing.assert_allclose(one.components.covariance_matrices(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("path", ["sums by unit", "single samples"])
def test_counts_are_resampled_through_their_sums(monkeypatch, path):
    if path == "single samples":
        monkeypatch.setattr("omt.stability.resample._UNIT_ENTRIES", 0)
    from scipy import sparse

    rng = np.random.default_rng(1)
    label = np.arange(200) % 2
    X = rng.poisson(np.array([[1.0, 8.0, 3.0], [6.0, 2.0, 3.0]])[label])
    mixture = omt.fit_mixture(X, labels=label, family="poisson", progress=False)
    unit, weights = rng.integers(0, 5, size=200), rng.standard_exponential((5, 3))
    sample = Sample(sparse.csr_array(X), np.eye(2)[label], unit=unit)
    for b, one in enumerate(replicate_mixtures(sample, mixture, weights, 3, rng).mixtures):
        w = weights[unit, b]
        means = [np.average(X[label == k], axis=0, weights=w[label == k]) for k in range(2)]
        np.testing.assert_allclose(one.components.mean(), means, rtol=2e-3)  # pseudo-samples of the prior


def test_positive_data_are_resampled_on_their_logarithm():
    rng = np.random.default_rng(2)
    label = np.arange(300) % 2
    Z = np.array([[0.0, 1.0], [2.0, 0.0]])[label] + 0.3 * rng.normal(size=(300, 2))
    mixture = omt.fit_mixture(np.exp(Z), labels=label, family="lognormal", progress=False)
    (one,) = replicate_mixtures(
        Sample(np.exp(Z), np.eye(2)[label]), mixture, None, 1, np.random.default_rng(7)
    ).mixtures
    w = np.random.default_rng(7).standard_exponential((300, 1))[:, 0]
    means = [np.average(Z[label == k], axis=0, weights=w[label == k]) for k in range(2)]
    np.testing.assert_allclose(one.components.gaussian.means, means, rtol=1e-10)


def test_weights_of_components_follow_the_dirichlet_law():
    """With a flat Dirichlet over n samples, a share p has the variance p (1 − p)/(n + 1)."""
    rng = np.random.default_rng(3)
    X, label = labelled(rng, 200)
    sample = Sample(X, np.eye(3)[label])
    found = replicate_mixtures(sample, fitted(X, label), None, 2000, rng).mixtures
    weights = np.stack([one.weights for one in found])
    p = np.bincount(label) / 200
    np.testing.assert_allclose(weights.mean(axis=0), p, atol=4 * np.sqrt(p * (1 - p) / 201 / 2000).max())
    np.testing.assert_allclose(weights.var(axis=0), p * (1 - p) / 201, rtol=0.15)


def test_growth_of_a_replicate_is_the_weighted_mean_of_its_samples():
    rng = np.random.default_rng(4)
    X, label = labelled(rng, 100)
    growth, unit, weights = rng.uniform(0.5, 2.0, size=100), rng.integers(0, 6, 100), rng.standard_exponential((6, 5))
    sample = Sample(X, np.eye(3)[label], unit=unit, growth=growth)
    found = replicate_mixtures(sample, fitted(X, label), weights, 5, rng).growth
    for b, k in itertools.product(range(5), range(3)):
        own = label == k
        assert found[b, k] == pytest.approx(np.average(growth[own], weights=weights[unit[own], b]))


def test_refitting_ends_where_the_likelihood_is_flat():
    """Overlapping components: one more step of EM with the replicate's own weights changes next to nothing."""
    from omt.fitting.em import em_step

    rng = np.random.default_rng(5)
    X, _ = labelled(rng, 400, spread=1.2)
    mixture = omt.fit_mixture(X, 3, progress=False)
    R = np.asarray(mixture.responsibilities(X))
    fixed, refitted = (
        replicate_mixtures(Sample(X, R), mixture, None, 2, np.random.default_rng(9), refit=refit).mixtures
        for refit in (False, True)
    )
    drawn = np.random.default_rng(9).standard_exponential((400, 2), dtype=np.float32)
    for b in range(2):
        moves = [
            abs(em_step(X, one, sample_weight=drawn[:, b]).components.means - one.components.means).max()
            for one in (fixed[b], refitted[b])
        ]
        assert moves[1] < 0.05
        assert moves[1] < moves[0]


def test_refitting_leaves_what_labels_say(donors):
    """With every cell labelled there is nothing to refit: the same intervals, from the same weights of donors."""
    found = [
        omt.tl.bootstrap(donors, n_boot=10, unit="donor", refit=refit, copy=True).uns["omt"]["bootstrap"]["pairs"][
            "0->1"
        ]
        for refit in (False, True)
    ]
    np.testing.assert_allclose(found[1]["forward"]["lower"], found[0]["forward"]["lower"], atol=1e-12)


def test_refitted_components_of_a_chain_keep_their_places():
    adata, _ = omt.datasets.branching_process(150, n_times=2)
    omt.tl.fit_mixtures(adata, "time", n_components=3, use_rep="X_state")
    omt.tl.transport(adata, time_key="time", reg=0.1)
    plan = read_uns(adata).transports[0].conditional()
    omt.tl.bootstrap(adata, n_boot=20, refit=True)
    table = adata.uns["omt"]["bootstrap"]["pairs"]["0->1"]["forward"]
    assert abs(table["mean"] - plan).max() < 0.25


# -- plans -----------------------------------------------------------------------------------------------------------


def test_intervals_cover_the_known_plan_as_often_as_they_say():
    """Ninety-percent intervals over samples, on 30 data sets, against the plan between the exact mixtures."""
    d = 2
    P = omt.Mixture.from_gaussians([0.5, 0.3, 0.2], [[0, 0], [3, 0], [0, 3]], [np.eye(d)] * 3, names="abc")
    Q = omt.Mixture.from_gaussians([0.25, 0.3, 0.45], [[0.5, 0], [3, 1], [0, 4]], [np.eye(d)] * 3, names="abc")
    truth = omt.transport(P, Q, reg=0.5).conditional()
    covered = []
    for seed in range(30):
        rng = np.random.default_rng(seed)
        (X, x), (Y, y) = (m.sample(300, rng, return_labels=True) for m in (P, Q))
        plan = omt.transport(*(omt.fit_mixture(Z, labels=z, progress=False) for Z, z in ((X, x), (Y, y))), reg=0.5)
        found = bootstrap(plan, X, Y, R=np.eye(3)[x], S=np.eye(3)[y], n_boot=100, rng=seed).forward
        covered.append((found.lower <= truth) & (truth <= found.upper))
    assert 0.80 <= np.mean(covered) <= 0.97


@pytest.fixture(scope="module")
def donors():
    """Two groups of twelve donors that differ in composition and position, one label a component."""
    rng = np.random.default_rng(0)
    X, label, donor, group = [], [], [], []
    for g, u in itertools.product(range(2), range(12)):
        share = rng.dirichlet([4.0, 4.0, 4.0])
        label += list(rng.choice(3, size=60, p=share))
        shift = 0.7 * rng.normal(size=2)
        X.append(np.array([[0, 0], [5, 0], [0, 5]])[label[-60:]] + shift + rng.normal(size=(60, 2)))
        donor += [f"donor {u}"] * 60
        group += [float(g)] * 60
    obs = pd.DataFrame({"time": group, "type": pd.Categorical([f"type {k}" for k in label]), "donor": donor})
    adata = anndata.AnnData(obs=obs.set_index(obs.index.astype(str)), obsm={"X_pca": np.concatenate(X)})
    omt.tl.fit_mixtures(adata, "time", labels="type")
    omt.tl.transport(adata, time_key="time", reg=0.1)
    return adata


def test_intervals_over_donors_are_wider_than_over_cells_where_donors_differ(donors):
    widths = {}
    for unit in ("cell", "donor"):
        adata = omt.tl.bootstrap(donors, n_boot=100, unit=unit, copy=True)
        table = adata.uns["omt"]["bootstrap"]["pairs"]["0->1"]["forward"]
        widths[unit] = (table["upper"] - table["lower"]).mean()
    assert widths["donor"] > 1.5 * widths["cell"]


def test_a_donor_at_both_times_has_one_weight(donors):
    """If both groups are the same cells, a donor's weight changes both compositions alike, and the plan stays put."""
    twice = anndata.concat([donors[donors.obs["time"] == 0].copy()] * 2, index_unique="-")
    twice.obs["time"] = np.repeat([0.0, 1.0], twice.n_obs // 2)
    omt.tl.fit_mixtures(twice, "time", labels="type")
    omt.tl.transport(twice, time_key="time", reg=0.01)
    spread = {}
    for unit in ("donor", "cell"):
        omt.tl.bootstrap(twice, n_boot=60, unit=unit)
        spread[unit] = twice.uns["omt"]["bootstrap"]["pairs"]["0->1"]["forward"]["sd"].max()
    assert spread["donor"] < 1e-6
    assert spread["cell"] > 1e-3


def test_two_halves_of_one_sample_have_no_off_diagonal_finding():
    for seed in range(2):
        adata = omt.datasets.pbmc68k_reduced()
        adata.obsm["X_20"] = np.asarray(adata.obsm["X_pca"][:, :20], dtype=np.float64)
        first = np.random.default_rng(seed).permutation(adata.n_obs) < adata.n_obs // 2
        adata.obs["half"] = np.where(first, "first", "second")
        omt.tl.fit_mixtures(adata, "half", labels="bulk_labels", use_rep="X_20")
        omt.tl.transport(adata, source="first", target="second")
        omt.tl.bootstrap(adata, n_boot=80, random_state=seed)
        pair = adata.uns["omt"]["bootstrap"]["pairs"]["first->second"]
        same = np.equal.outer(pair["source_names"], pair["target_names"])
        assert (pair["verdict"][~same] <= 0).all()
        assert (pair["verdict"][same] == 1).mean() >= 0.7


def test_verdict_and_sign_stability_agree_with_the_replicates_side_of_independence(donors):
    model = read_uns(omt.tl.bootstrap(donors, n_boot=80, copy=True))
    pair = omt.tl.bootstrap(donors, n_boot=80, copy=True).uns["omt"]["bootstrap"]["pairs"]["0->1"]
    W = model.transports[0].coupling
    above = np.outer(W.sum(axis=1), W.sum(axis=0)) < W
    certain = pair["verdict"] != 0
    assert ((pair["verdict"] == 1) == above)[certain].all()
    assert (pair["sign_stability"][certain] >= 0.95).all()
    assert np.array_equal(pair["verdict"] == 0, (pair["lift"]["lower"] <= 1) & (pair["lift"]["upper"] >= 1))


def test_pairs_far_apart_are_products_of_the_steps():
    """A chain of three times, of which the second step is deterministic: the far table is the first step's."""
    rng = np.random.default_rng(0)
    X, label = labelled(rng, 400, spread=8.0)
    Y, other = labelled(rng, 400, spread=8.0)
    obs = pd.DataFrame(
        {"time": np.repeat([0.0, 1.0, 2.0], 400), "type": np.concatenate([label, other, other]).astype(str)}
    )
    obs["donor"] = np.concatenate([np.arange(400), np.arange(400) + 400, np.arange(400) + 400])
    adata = anndata.AnnData(obs=obs.set_index(obs.index.astype(str)), obsm={"X_pca": np.concatenate([X, Y, Y])})
    omt.tl.fit_mixtures(adata, "time", labels="type")
    omt.tl.transport(adata, time_key="time")
    omt.tl.bootstrap(adata, n_boot=40, unit="donor")
    pairs = adata.uns["omt"]["bootstrap"]["pairs"]
    assert set(pairs) == {"0->1", "1->2", "0->2"}
    np.testing.assert_allclose(pairs["0->2"]["forward"]["lower"], pairs["0->1"]["forward"]["lower"], atol=1e-6)
    np.testing.assert_allclose(pairs["0->2"]["backward"]["upper"], pairs["0->1"]["backward"]["upper"], atol=1e-6)


def test_growth_widens_no_interval_that_it_does_not_concern(donors):
    """Equal growth of all cells changes no plan, in no replicate."""
    adata = donors.copy()
    adata.obs["rate"] = 2.0
    plain = omt.tl.bootstrap(adata, n_boot=20, copy=True).uns["omt"]["bootstrap"]["pairs"]["0->1"]
    omt.tl.transport(adata, time_key="time", reg=0.1, growth_key="rate")
    grown = omt.tl.bootstrap(adata, n_boot=20, copy=True).uns["omt"]["bootstrap"]["pairs"]["0->1"]
    np.testing.assert_allclose(grown["forward"]["sd"], plain["forward"]["sd"], atol=1e-9)


def test_the_bootstrap_knows_the_cost_of_the_plan(donors):
    adata = donors.copy()
    omt.tl.transport(adata, time_key="time", cost="euclidean", reg=0.1)
    omt.tl.bootstrap(adata, n_boot=40)
    table = adata.uns["omt"]["bootstrap"]["pairs"]["0->1"]["forward"]
    plan = read_uns(adata).transports[0].conditional()
    assert ((table["lower"] <= plan) & (plan <= table["upper"])).all()


def test_summary_is_that_of_numpy():
    tables = np.random.default_rng(0).normal(size=(50, 2, 3))
    one = Summary.of(tables, 0.8)
    np.testing.assert_allclose(one.sd, np.std(tables, axis=0, ddof=1))
    np.testing.assert_allclose([one.lower, one.upper], np.percentile(tables, [10, 90], axis=0))


# -- storage and pictures --------------------------------------------------------------------------------------------


def test_the_bootstrap_survives_h5ad_and_is_drawn_from_it(donors, tmp_path):
    adata = omt.tl.bootstrap(donors, n_boot=20, unit="donor", copy=True)
    adata.write_h5ad(tmp_path / "a.h5ad")
    read = anndata.read_h5ad(tmp_path / "a.h5ad")
    for name, value in adata.uns["omt"]["bootstrap"]["pairs"]["0->1"]["lift"].items():
        np.testing.assert_array_equal(read.uns["omt"]["bootstrap"]["pairs"]["0->1"]["lift"][name], value)
    assert omt.pl.transitions(read, 0, 1, show_ci=True).get_title().endswith("hatched: could be chance (90% interval)")


def test_new_plans_drop_the_bootstrap_of_the_old_ones(donors):
    adata = omt.tl.bootstrap(donors, n_boot=5, copy=True)
    omt.tl.transport(adata, time_key="time")
    assert "bootstrap" not in adata.uns["omt"]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_exactly_the_undecided_transitions_are_hatched(direction):
    adata, _ = omt.datasets.branching_process(100)
    omt.tl.fit_mixtures(adata, "time", labels="cell_type", use_rep="X_state")
    omt.tl.transport(adata, time_key="time")
    omt.tl.bootstrap(adata, n_boot=40)
    pair = adata.uns["omt"]["bootstrap"]["pairs"]["1->4"]
    ax = omt.pl.transitions(adata, 1, 4, show_ci=True, direction=direction)
    hatched = {(round(p.get_y() + 0.5), round(p.get_x() + 0.5)) for p in ax.patches if p.get_hatch()}
    undecided = pair["verdict"] == 0 if direction == "forward" else pair["verdict"].T == 0
    assert undecided.any()
    assert hatched == {tuple(place) for place in np.argwhere(undecided).tolist()}
    lower = pair[direction]["lower"]
    k, l = np.unravel_index(lower.argmax(), lower.shape)
    ends = f"{lower[k, l]:.2f}–{pair[direction]['upper'][k, l]:.2f}"
    assert ends in {text.get_text() for text in ax.texts}


@pytest.mark.parametrize("n_components", [5, 30])
def test_texts_of_a_table_with_intervals_do_not_overlap(n_components):
    rng = np.random.default_rng(0)
    kind = np.arange(1200) % n_components
    X = rng.normal(scale=6, size=(n_components, 2))[kind] + rng.normal(size=(1200, 2))
    obs = pd.DataFrame({"time": np.repeat([0.0, 1.0], 600), "type": [f"CD{k} type number {k}" for k in kind]})
    adata = anndata.AnnData(obs=obs.set_index(obs.index.astype(str)), obsm={"X_pca": X})
    omt.tl.fit_mixtures(adata, "time", labels="type")
    omt.tl.transport(adata, time_key="time", reg=1.0)
    omt.tl.bootstrap(adata, n_boot=10)
    figure = omt.pl.transitions(adata, 0, 1, show_ci=True).figure
    figure.canvas.draw()
    boxes = [
        mpl.text.Text.get_window_extent(artist)
        for artist in figure.findobj(mpl.text.Text)
        if artist.get_visible() and artist.get_text().strip()
    ]
    assert len(boxes) > 3 * n_components
    for a, b in itertools.combinations(boxes, 2):
        assert min(a.x1, b.x1) - max(a.x0, b.x0) <= 0.5 or min(a.y1, b.y1) - max(a.y0, b.y0) <= 0.5


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"n_boot": 1}, ValueError, "n_boot is 1; it must be an integer ≥ 2"),
        ({"level": 1.0}, ValueError, r"level is 1.0; it must be between 0 and 1"),
        ({"unit": "mouse"}, KeyError, "unit='mouse': adata.obs has no such column; columns are: time, type, donor"),
    ],
)
def test_bad_options_are_named(donors, options, error, message):
    with pytest.raises(error, match=message):
        omt.tl.bootstrap(donors, **options)


def test_fewer_than_three_units_are_refused(donors):
    adata = donors.copy()
    adata.obs["mouse"] = np.where(np.arange(adata.n_obs) % 2, "left", "right")
    with pytest.raises(ValueError, match=r"time 0 \(unit='mouse'\) has 2 unit\(s\), and the variation between fewer"):
        omt.tl.bootstrap(adata, unit="mouse")


def test_cells_without_a_unit_are_refused(donors):
    adata = donors.copy()
    adata.obs["donor"] = adata.obs["donor"].where(np.arange(adata.n_obs) != 3)
    with pytest.raises(ValueError, match=r"1 sample\(s\) of time 0 \(unit='donor'\) have no unit"):
        omt.tl.bootstrap(adata, unit="donor")


def test_intervals_need_a_bootstrap_and_components(donors):
    with pytest.raises(KeyError, match=r"adata.uns\['omt'\] has no 'bootstrap'; run omt.tl.bootstrap first"):
        omt.pl.transitions(donors, 0, 1, show_ci=True)
    adata = omt.tl.bootstrap(donors, n_boot=5, copy=True)
    with pytest.raises(ValueError, match="show_ci=True needs the table between components"):
        omt.pl.transitions(adata, 0, 1, show_ci=True, by="donor")


def test_responsibilities_of_the_wrong_shape_and_half_given_units_are_refused():
    rng = np.random.default_rng(0)
    X, label = labelled(rng, 50)
    plan = omt.transport(*[omt.fit_mixture(X, labels=label, progress=False)] * 2)
    with pytest.raises(ValueError, match=r"S has shape \(50, 2\); the mixture has 3 components, so it must be"):
        bootstrap(plan, X, X, S=np.eye(2)[np.zeros(50, dtype=int)])
    with pytest.raises(ValueError, match="give unit_x and unit_y, or neither"):
        bootstrap(plan, X, X, unit_x=np.arange(50))


# -- the other picture and the command line --------------------------------------------------------------------------


def test_the_picture_of_stability_shows_the_largest_transitions_with_their_intervals(donors):
    adata = omt.tl.bootstrap(donors, n_boot=20, unit="donor", copy=True)
    ax = omt.pl.stability(adata, 0, 1, n_top=4)
    W = read_uns(adata).transports[0].coupling
    largest = np.unravel_index(np.argsort(-W, axis=None)[:4], W.shape)
    names = read_uns(adata).names(0), read_uns(adata).names(1)
    assert [t.get_text() for t in ax.get_yticklabels()] == [
        f"{names[0][k]} → {names[1][l]}" for k, l in zip(*largest, strict=True)
    ]
    pair = adata.uns["omt"]["bootstrap"]["pairs"]["0->1"]["forward"]
    drawn = [path.vertices[:, 0] for path in ax.collections[0].get_paths()]
    np.testing.assert_allclose(drawn, np.stack([pair["lower"][largest], pair["upper"][largest]], axis=1))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"direction": "up"}, "direction is 'up'; it must be 'forward' or 'backward'"), ({"n_top": 0}, "n_top is 0; it")],
)
def test_bad_options_of_the_picture_are_named(donors, options, message):
    with pytest.raises(ValueError, match=message):
        omt.pl.stability(donors, 0, 1, **options)


@pytest.fixture
def on_disk(donors, tmp_path):
    from omt.io import save_model

    donors.write_h5ad(tmp_path / "cells.h5ad")
    save_model(read_uns(donors), tmp_path / "chain")
    return tmp_path


def test_the_command_gives_the_numbers_of_the_verb(donors, on_disk):
    run = ["bootstrap", str(on_disk / "cells.h5ad"), str(on_disk / "chain"), "--source", "0", "--target", "1"]
    files = ["-o", str(on_disk / "out.h5ad"), "--csv", str(on_disk / "t.csv"), "--plot", str(on_disk / "t.png")]
    done = CliRunner().invoke(app, [*run, "--unit", "donor", "--n-boot", "20", *files, "--json"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["transitions"]
    assert [row["probability"] for row in rows] == pytest.approx(pd.read_csv(on_disk / "t.csv")["probability"])
    assert (on_disk / "t.png").stat().st_size > 1000
    expected = omt.tl.bootstrap(donors, n_boot=20, unit="donor", copy=True).uns["omt"]["bootstrap"]["pairs"]["0->1"]
    stored = anndata.read_h5ad(on_disk / "out.h5ad").uns["omt"]["bootstrap"]["pairs"]["0->1"]
    np.testing.assert_allclose(stored["forward"]["lower"], expected["forward"]["lower"], atol=1e-12)
    assert {row["lower"] for row in rows} <= set(stored["forward"]["lower"].ravel().tolist())


def test_the_command_answers_bad_input_in_one_sentence(on_disk):
    run = ["bootstrap", str(on_disk / "cells.h5ad"), str(on_disk / "chain"), "--source", "0", "--target", "1"]
    done = CliRunner().invoke(app, [*run, "--unit", "mouse"])
    assert done.exit_code == 2
    assert "unit='mouse': adata.obs has no such column" in " ".join(done.stderr.split())
