"""A time left out: the comparison itself, the verb and the command, and the figures that are claimed."""

from __future__ import annotations

import json

import numpy as np
import ot
import pytest
from scipy.spatial.distance import cdist
from typer.testing import CliRunner

import omt
from omt.cli import app
from omt.experiments import held_out_emt, held_out_turning
from omt.holdout import METHODS, distances_to_held_out, entropic_interpolation, random_interpolation


@pytest.fixture(scope="module")
def course():
    """Three times of clusters that move on straight lines, and the transport between the outer ones."""
    first, middle, last = omt.datasets.moving_clusters(200)
    plan = omt.transport(*(omt.fit_mixture(X, 5, progress=False) for X in (first, last)))
    return plan, first, middle, last


# -- the comparison --------------------------------------------------------------------------------------------------


def test_a_perfect_interpolation_reaches_the_noise_floor(course):
    plan, first, middle, last = course
    table = distances_to_held_out(plan, first, middle, last, 0.5)
    assert list(table.index) == list(METHODS)
    assert table.loc["omt", "w2"] < 1.2 * table.loc["noise floor", "w2"]
    assert table.loc["noise floor", "explained"] == 1.0
    assert table.loc["random pairing", "explained"] == 0.0


def test_unmoved_samples_are_compared_by_the_linear_program(course):
    plan, first, middle, last = course
    table = distances_to_held_out(plan, first, middle, last, 0.5, n_repeats=1)
    weights = np.full(200, 1 / 200)
    for name, cells in (("first", first), ("last", last)):
        exact = np.sqrt(ot.emd2(weights, weights, cdist(cells, middle, "sqeuclidean")))
        assert table.loc[name, "w2"] == pytest.approx(exact, rel=1e-9)


def test_entropic_pairs_follow_the_plan_of_pot():
    rng = np.random.default_rng(0)
    x, y = np.array([[0.0], [1.0], [3.0]]), np.array([[0.0], [2.0]])
    C = cdist(x, y, "sqeuclidean")
    W = ot.sinkhorn(np.full(3, 1 / 3), np.full(2, 0.5), C, 0.3 * C.mean(), method="sinkhorn_log", stopThr=1e-12)
    n = 60_000
    drawn = entropic_interpolation(x, y, 0.25, n, rng, reg=0.3).ravel()
    places = (0.75 * x + 0.25 * y.T).ravel()
    found = np.array([np.isclose(drawn, place).mean() for place in np.unique(places)])
    expected = np.array([W.ravel()[np.isclose(places, place)].sum() for place in np.unique(places)])
    np.testing.assert_allclose(found, expected, atol=0.01)


def test_random_pairs_have_the_mean_of_a_straight_line_and_independent_spread():
    rng = np.random.default_rng(0)
    x, y = rng.normal(0, 1, (500, 2)), rng.normal(3, 2, (400, 2))
    drawn = random_interpolation(x, y, 0.25, 50_000, rng)
    np.testing.assert_allclose(drawn.mean(axis=0), 0.75 * x.mean(axis=0) + 0.25 * y.mean(axis=0), atol=0.03)
    np.testing.assert_allclose(drawn.var(axis=0), 0.75**2 * x.var(axis=0) + 0.25**2 * y.var(axis=0), rtol=0.03)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"t": 1.0}, r"t is 1.0; a held-out time lies between the others"),
        ({"n_repeats": 0}, r"n_repeats is 0 and n_cells 1000; they must be at least 1 and 2"),
        ({"held_out": np.zeros((1, 3))}, r"there is 1 held-out sample; a distance to them needs at least 2"),
    ],
)
def test_bad_comparisons_are_refused(course, change, message):
    plan, first, middle, last = course
    arguments = {"held_out": middle, "t": 0.5} | change
    with pytest.raises(ValueError, match=message):
        distances_to_held_out(plan, first, last=last, **arguments)


# -- the verb and the command ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adata():
    import anndata
    import pandas as pd

    times = omt.datasets.moving_clusters(120)
    cells = anndata.AnnData(
        obs=pd.DataFrame({"day": np.repeat([1.0, 2.0, 3.0], 120)}, index=[f"c{i}" for i in range(360)])
    )
    cells.obsm["X_pca"] = np.concatenate(times)
    return cells


def test_verb_fits_the_neighbours_and_compares_with_the_time_between(adata):
    table = omt.tl.evaluate_interpolation(adata, "day", hold_out=2, n_components=4, progress=False)
    X = adata.obsm["X_pca"].reshape(3, 120, 3)
    plan = omt.transport(*(omt.fit_mixture(X[i], 4, progress=False) for i in (0, 2)))
    np.testing.assert_allclose(table.loc[2.0], distances_to_held_out(plan, *X, 0.5), rtol=1e-9)


def test_verb_holds_out_every_time_between_if_none_is_named():
    adata, _ = omt.datasets.branching_process(40)
    table = omt.tl.evaluate_interpolation(adata, "time", use_rep="X_state", n_components=2, n_repeats=1, progress=False)
    assert list(table.index.get_level_values("time").unique()) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"hold_out": 3}, ValueError, r"hold_out=3 is not a time between others; day has 1, 2, 3, of which the first"),
        ({"hold_out": 7}, ValueError, r"hold_out=7 is not a time between others; day has 1, 2, 3"),
        ({"use_rep": "X_none"}, KeyError, r"adata.obsm has no such key; it has: X_pca"),
        ({"labels": "type"}, KeyError, r"labels='type': adata.obs has no such column"),
    ],
)
def test_verb_answers_to_bad_input(adata, options, error, message):
    with pytest.raises(error, match=message):
        omt.tl.evaluate_interpolation(adata, "day", **options)


def test_verb_needs_three_times_that_are_numbers(adata):
    two = adata[:240]
    with pytest.raises(ValueError, match=r"has the times 1, 2; holding one out needs at least three"):
        omt.tl.evaluate_interpolation(two, "day")
    named = adata.copy()
    named.obs["day"] = named.obs["day"].map({1.0: "early", 2.0: "mid", 3.0: "late"})
    with pytest.raises(ValueError, match=r"its values must be numbers, but they are early, late, mid"):
        omt.tl.evaluate_interpolation(named, "day")


def test_commands_evaluate_and_interpolate(adata, tmp_path):
    import anndata

    def run(*arguments, status=0):
        result = CliRunner().invoke(app, [str(a) for a in arguments])
        assert result.exit_code == status, result.output
        return result

    adata.write_h5ad(tmp_path / "cells.h5ad")
    common = (tmp_path / "cells.h5ad", "--groupby", "day", "--n-components", 4)
    printed = run("evaluate", *common, "--hold-out", 2, "--json").stdout
    table = omt.tl.evaluate_interpolation(adata, "day", hold_out=2, n_components=4, progress=False)
    rows = json.loads(printed)["rows"]
    assert [row["method"] for row in rows] == list(METHODS)
    np.testing.assert_allclose([row["w2"] for row in rows], table["w2"], rtol=1e-9)

    run("fit", *common, "-o", tmp_path / "model", "--quiet")
    run("transport", tmp_path / "model", "-o", tmp_path / "chain", "--quiet")
    shown = run("interpolate", tmp_path / "chain", "--time", 1.5, "-n", 50, "-o", tmp_path / "at.h5ad").stdout
    assert shown.splitlines()[0].split() == ["source", "target", "cells"]
    made = anndata.read_h5ad(tmp_path / "at.h5ad")
    assert made.obsm["X_pca"].shape == (50, 3)
    assert (made.obs["day"] == 1.5).all()
    refused = run("interpolate", tmp_path / "chain", "--time", 9, "-o", tmp_path / "x.h5ad", status=2).stderr
    assert refused == "omt: time=9.0 is not between the first and the last time; the times are 1, 2, 3\n"
    refused = run("evaluate", *common, "--hold-out", 1, status=2).stderr
    assert refused.startswith("omt: hold_out=1.0 is not a time between others; day has 1, 2, 3")

    run(
        "map", tmp_path / "model", "--source", 1, "--target", 3, "--input", tmp_path / "cells.h5ad",
        "--refine", "--n-points", 200, "-o", tmp_path / "mapped.h5ad", "--quiet",
    )  # fmt: skip
    moved = np.asarray(anndata.read_h5ad(tmp_path / "mapped.h5ad").obsm["X_omt_map"])
    last = adata.obsm["X_pca"][240:]
    np.testing.assert_allclose(moved[:120].mean(axis=0), last.mean(axis=0), atol=0.4)
    assert np.isnan(moved[120:]).all()
    chained = ("map", tmp_path / "chain", "--input", tmp_path / "cells.h5ad", "-o", tmp_path / "y.h5ad", "--refine")
    refused = run(*chained, "--source", 1, "--target", 3, status=2).stderr
    assert refused.startswith("omt: --refine needs neighbours in the chain; 1 and 3 are none")
    refused = run(*chained, "--source", 1, "--target", 2, "--kind", "sample", status=2).stderr
    assert refused.startswith("omt: --refine gives the mean image of each cell; it cannot go with --kind sample")


# -- what is claimed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_turning_clusters_are_interpolated_as_well_as_by_all_cells(seed):
    result = held_out_turning(seed=seed, seeds=range(2))
    assert result.to_entropic <= 1.03
    assert result.to_random <= 0.93


@pytest.mark.data
@pytest.mark.parametrize("time", [1, 2])
def test_held_out_times_of_a_real_course_are_met_as_by_entropic_transport_between_all_cells(shared_data, time):
    file = shared_data / "omt" / "emt_3d.csv.gz"
    if not file.is_file():
        pytest.skip(f"{file} is absent")
    result = held_out_emt(file, time, n_cells=600)
    assert result.to_entropic <= 1.03
    assert result.to_random <= 0.93
