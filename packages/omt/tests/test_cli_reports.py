"""What commands say beside their result: cells left out, mass that died, numbers at an end of their range."""

from __future__ import annotations

import json

import anndata
import numpy as np
import pytest
from typer.testing import CliRunner

import omt
from omt.cli import app

runner = CliRunner()


def run(*arguments: object, status: int = 0):
    result = runner.invoke(app, [str(a) for a in arguments])
    assert result.exit_code == status, (result.output, result.exception)
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Cells at five times, a model of found components, and the chains with and without death."""
    base = tmp_path_factory.mktemp("reports")
    adata, _ = omt.datasets.branching_process(100, random_state=0)
    adata.write_h5ad(base / "cells.h5ad")
    fit = ("fit", base / "cells.h5ad", "--groupby", "time", "--use-rep", "X_state", "--quiet")
    run(*fit, "--n-components", 3, "-o", base / "found")
    run("transport", base / "found", "-o", base / "chain", "--quiet")
    run(*fit, "--labels", "cell_type", "-o", base / "types")
    return base


def test_fit_says_how_many_cells_are_in_no_bin(folder, tmp_path):
    result = run(
        "fit", folder / "cells.h5ad", "--groupby", "time", "--bins", "0,2,4", "--use-rep", "X_state",
        "--n-components", 1, "-o", tmp_path / "m", "--json",
    )  # fmt: skip
    assert "100 of 500 cells have no time_stage and are left out" in result.stderr
    assert json.loads(result.stdout)["left_out"] == 100


def test_fit_without_cells_left_out_says_nothing(folder, tmp_path):
    result = run(
        "fit", folder / "cells.h5ad", "--groupby", "time", "--use-rep", "X_state", "--n-components", 1,
        "-o", tmp_path / "m",
    )  # fmt: skip
    assert "left out" not in result.stderr


def test_fit_names_groups_whose_number_is_an_end_of_the_range(folder, tmp_path):
    result = run(
        "fit", folder / "cells.h5ad", "--groupby", "time", "--use-rep", "X_state", "--bic", "5:6",
        "-o", tmp_path / "m", "--json",
    )  # fmt: skip
    least = [row["group"] for row in json.loads(result.stdout)["groups"] if row["components"] == 5]
    assert least
    assert f"{', '.join(least)}: 5 components are the fewest of the range" in result.stderr


def test_one_component_at_least_is_no_end_of_the_range(folder, tmp_path):
    result = run(
        "fit", folder / "cells.h5ad", "--groupby", "cell_type", "--use-rep", "X_state", "--bic", "1:2",
        "-o", tmp_path / "m", "--json",
    )  # fmt: skip
    assert 1 in {row["components"] for row in json.loads(result.stdout)["groups"]}
    assert "fewest" not in result.stderr


def test_a_balanced_chain_moves_all_mass(folder, tmp_path):
    result = run("transport", folder / "types", "-o", tmp_path / "c", "--json")
    assert [row["mass"] for row in json.loads(result.stdout)["plans"]] == pytest.approx([1.0] * 4)
    assert "of the mass" not in result.stderr


def test_a_chain_that_lets_most_mass_die_says_where(folder, tmp_path):
    result = run("transport", folder / "types", "--tau", 0.5, "-o", tmp_path / "c", "--json")
    adata = anndata.read_h5ad(folder / "cells.h5ad")
    omt.tl.fit_mixtures(adata, "time", labels="cell_type", use_rep="X_state")
    omt.tl.transport(adata, time_key="time", tau=0.5)
    plans = json.loads(result.stdout)["plans"]
    kept = [adata.uns["omt"]["transports"][str(i)]["coupling"].sum() for i in range(4)]
    assert [row["mass"] for row in plans] == pytest.approx(kept)
    worst = int(np.argmin(kept))
    assert f"only {kept[worst]:.1%} of the mass is moved from {worst} to {worst + 1}" in result.stderr


@pytest.mark.parametrize("backward", [False, True])
def test_transitions_between_labels_are_those_of_the_verb(folder, backward):
    result = run(
        "transitions", folder / "chain", "--source", 0, "--target", 4, "--cells", folder / "cells.h5ad",
        "--by", "cell_type", "--json", *(["--backward"] if backward else []),
    )  # fmt: skip
    adata = anndata.read_h5ad(folder / "cells.h5ad")
    omt.tl.fit_mixtures(adata, "time", n_components=3, use_rep="X_state", progress=False)
    omt.tl.transport(adata, time_key="time")
    expected = omt.tl.transition_matrix(adata, 0, 4, by="cell_type", direction="backward" if backward else "forward")
    printed = json.loads(result.stdout)
    assert (printed["rows"], printed["columns"]) == (list(expected.index), list(expected.columns))
    assert np.allclose(printed["table"], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--by", "cell_type"), "give --by together with --cells, the h5ad file whose column it is"),
        (("--by", "type", "--cells", "cells.h5ad"), "--by type: cells.h5ad has no such obs column; columns are: time"),
    ],
)
def test_labels_that_cannot_be_read_are_refused(folder, monkeypatch, options, message):
    monkeypatch.chdir(folder)
    result = run("transitions", "chain", "--source", 0, "--target", 4, *options, status=2)
    assert message in result.stderr


def test_evaluate_says_what_raw_counts_need(folder):
    result = run("evaluate", folder / "cells.h5ad", "--groupby", "time", status=2)
    assert "has no 'X_pca' in obsm; it has: X_state, X_tree." in result.stderr
    assert "give --prepare if X holds raw counts" in result.stderr


def test_evaluate_prepares_raw_counts_as_fit_does(tmp_path):
    pytest.importorskip("scanpy")
    rng = np.random.default_rng(0)
    time = np.repeat([0.0, 1.0, 2.0], 40)
    rate = 2.0 + 3.0 * np.abs(np.sin(np.arange(60) + time[:, None]))
    adata = anndata.AnnData(rng.poisson(rate).astype(np.float32))
    adata.obs["time"] = time
    adata.write_h5ad(tmp_path / "raw.h5ad")
    options = ("--groupby", "time", "--prepare", "--n-pcs", 3, "--n-components", 2)
    printed = json.loads(run("evaluate", tmp_path / "raw.h5ad", *options, "--repeats", 1, "--json").stdout)
    adata.obsm["X_pca"], _ = omt.prepare.prepare(adata, n_pcs=3)
    expected = omt.tl.evaluate_interpolation(adata, "time", n_components=2, n_repeats=1, progress=False)
    assert [row["w2"] for row in printed["rows"]] == pytest.approx(list(expected["w2"]))
