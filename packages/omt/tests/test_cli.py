"""The command line end to end in a temporary folder: what it writes, prints, and how it ends."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import anndata
import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import omt
from omt.cli import app
from omt.io import read_uns

runner = CliRunner()
COMMANDS = ["fit", "transport", "transitions", "push", "map", "demo"]


def run(*arguments: object, status: int = 0):
    result = runner.invoke(app, [str(a) for a in arguments])
    assert result.exit_code == status, (result.output, result.exception)
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Cells, a model of their cell types, and the chain over their times."""
    base = tmp_path_factory.mktemp("cli")
    adata, _ = omt.datasets.branching_process(100, random_state=0)
    adata.write_h5ad(base / "cells.h5ad")
    run(
        "fit",
        base / "cells.h5ad",
        "--groupby",
        "time",
        "--use-rep",
        "X_state",
        "--labels",
        "cell_type",
        "-o",
        base / "model",
        "--quiet",
    )
    run("transport", base / "model", "--tau", 0.95, "-o", base / "chain", "--quiet")
    return base


@pytest.fixture(scope="module")
def python_course():
    """The same through the Python verbs."""
    adata, _ = omt.datasets.branching_process(100, random_state=0)
    omt.tl.fit_mixtures(adata, "time", labels="cell_type", use_rep="X_state")
    omt.tl.transport(adata, time_key="time", tau=0.95)
    return adata


def test_transitions_print_the_table_of_the_verb(folder, python_course, tmp_path):
    result = run("transitions", folder / "chain", "--source", 0, "--target", 4, "--csv", tmp_path / "t.csv", "--json")
    expected = omt.tl.transition_matrix(python_course, 0, 4)
    printed = json.loads(result.stdout)
    assert np.allclose(printed["table"], expected)
    assert printed["columns"] == list(expected.columns)
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "t.csv", index_col=0), expected)


def test_transitions_backward_are_those_of_the_verb(folder, python_course):
    result = run("transitions", folder / "chain", "--source", 0, "--target", 4, "--backward", "--json")
    expected = omt.tl.transition_matrix(python_course, 0, 4, direction="backward")
    assert np.allclose(json.loads(result.stdout)["table"], expected)


def test_transitions_draw_a_picture(folder, tmp_path):
    run("transitions", folder / "chain", "--source", 0, "--target", 4, "--plot", tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_transitions_without_json_print_a_table_for_people(folder):
    out = run("transitions", folder / "chain", "--source", 0, "--target", 1).stdout
    assert out.splitlines()[0].split("  ")[-1].strip() == "stem"
    assert len(out.splitlines()) == 4


@pytest.mark.parametrize("backward", [False, True])
def test_push_writes_the_scores_of_the_verb(folder, python_course, tmp_path, backward):
    out = tmp_path / "scored.h5ad"
    where = "B1" if backward else "stem"
    options = ["--backward"] if backward else []
    result = run(
        "push",
        folder / "cells.h5ad",
        folder / "chain",
        "--source",
        0,
        "--target",
        4,
        "--obs",
        f"cell_type={where}",
        "-o",
        out,
        "--json",
        *options,
    )
    key = "omt_pull" if backward else "omt_push"
    adata = python_course.copy()
    (omt.tl.pull if backward else omt.tl.push)(adata, 0, 4, data="cell_type", subset=where)
    scored = anndata.read_h5ad(out)
    assert np.allclose(scored.obs[key], adata.obs[key], equal_nan=True)
    assert sum(row["mass"] for row in json.loads(result.stdout)["mass"]) == pytest.approx(1.0)


def test_a_scored_file_continues_in_python(folder, tmp_path):
    run(
        "push",
        folder / "cells.h5ad",
        folder / "chain",
        "--source",
        0,
        "--target",
        4,
        "-o",
        tmp_path / "scored.h5ad",
        "--quiet",
    )
    adata = anndata.read_h5ad(tmp_path / "scored.h5ad")
    omt.tl.fates(adata)
    assert np.allclose(adata.obsm["omt_fates"].sum(axis=1), 1.0)


def test_map_moves_new_cells_as_the_plan_does(folder, tmp_path):
    new, _ = omt.datasets.branching_process(30, random_state=9)
    new.write_h5ad(tmp_path / "new.h5ad")
    run(
        "map",
        folder / "model",
        "--source",
        0,
        "--target",
        1,
        "--input",
        tmp_path / "new.h5ad",
        "-o",
        tmp_path / "mapped.h5ad",
        "--quiet",
    )
    mapped = anndata.read_h5ad(tmp_path / "mapped.h5ad")
    model = omt.tl.fit_mixtures(
        anndata.read_h5ad(folder / "cells.h5ad"), "time", labels="cell_type", use_rep="X_state", copy=True
    )
    mixtures = read_uns(model).mixtures
    early = (new.obs["time"] == 0).to_numpy()
    expected = omt.transport(mixtures[0], mixtures[1]).map(new.obsm["X_state"][early])
    assert np.allclose(mapped.obsm["X_omt_map"][early], expected, atol=1e-8)
    assert np.isnan(mapped.obsm["X_omt_map"][~early]).all()


def test_map_moves_all_cells_of_a_file_without_groups(folder, tmp_path):
    new, _ = omt.datasets.branching_process(30, random_state=9)
    del new.obs["time"]
    new.write_h5ad(tmp_path / "new.h5ad")
    result = run(
        "map",
        folder / "chain",
        "--source",
        0,
        "--target",
        2,
        "--input",
        tmp_path / "new.h5ad",
        "-o",
        tmp_path / "mapped.h5ad",
        "--json",
    )
    assert json.loads(result.stdout)["cells"] == 150
    assert np.isfinite(anndata.read_h5ad(tmp_path / "mapped.h5ad").obsm["X_omt_map"]).all()


def test_fit_reports_each_group_as_json(folder, tmp_path):
    result = run(
        "fit",
        folder / "cells.h5ad",
        "--groupby",
        "time",
        "--use-rep",
        "X_state",
        "--n-components",
        3,
        "-o",
        tmp_path / "m",
        "--json",
    )
    groups = json.loads(result.stdout)["groups"]
    assert [(g["group"], g["cells"], g["components"]) for g in groups] == [(str(t), 100, 3) for t in range(5)]


def test_the_same_seed_gives_the_same_model(folder, tmp_path):
    for name in ("a", "b"):
        run(
            "fit",
            folder / "cells.h5ad",
            "--groupby",
            "time",
            "--use-rep",
            "X_state",
            "--n-components",
            3,
            "--seed",
            4,
            "-o",
            tmp_path / name,
            "--quiet",
        )
    assert (tmp_path / "a" / "meta.json").read_text() == (tmp_path / "b" / "meta.json").read_text()
    first, second = (np.load(tmp_path / name / "model.npz", allow_pickle=False) for name in "ab")
    assert all(np.array_equal(first[key], second[key]) for key in first.files)


def test_fit_does_not_change_its_input(folder, tmp_path):
    before = (folder / "cells.h5ad").read_bytes()
    run("fit", folder / "cells.h5ad", "--groupby", "time", "--use-rep", "X_state", "-o", tmp_path / "m", "--quiet")
    assert (folder / "cells.h5ad").read_bytes() == before


def test_transport_reports_its_plans(folder, tmp_path):
    result = run("transport", folder / "model", "--source", 0, "--target", 3, "-o", tmp_path / "plan", "--json")
    (plan,) = json.loads(result.stdout)["plans"]
    assert (plan["source"], plan["target"], plan["converged"]) == ("0", "3", True)
    assert plan["marginal_error"] <= 1e-9


def test_chain_of_text_groups_is_refused_with_what_to_give(folder, tmp_path):
    model = tmp_path / "m"
    run(
        "fit", folder / "cells.h5ad", "--groupby", "cell_type", "--use-rep", "X_state", "--n-components", 1, "-o", model
    )
    result = run("transport", model, "-o", tmp_path / "c", status=2)
    assert "'cell_type' are text without an order (stem, A progenitor, " in result.stderr
    assert "give --source and --target" in result.stderr


def test_transitions_are_printed_as_rows_of_three_decimals_that_sum_to_one(folder):
    _, *lines = run("transitions", folder / "chain", "--source", 0, "--target", 4).stdout.strip().splitlines()
    probabilities = [re.findall(r"(?<= )\d\.\d{3}(?= |$)", line) for line in lines]
    assert probabilities
    assert all(abs(sum(map(float, row)) - 1) < 0.004 for row in probabilities)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fit", "no.h5ad", "--groupby", "time", "-o", "m"], "no.h5ad does not exist"),
        (
            ["fit", "cells.h5ad", "--groupby", "day", "-o", "m"],
            "groupby='day': adata.obs has no such column; columns are: time, cell_type",
        ),
        (
            ["fit", "cells.h5ad", "--groupby", "time", "-o", "m"],
            "cells.h5ad has no 'X_pca' in obsm; it has: X_state, X_tree. Name one by --use-rep",
        ),
        (
            ["fit", "cells.h5ad", "--groupby", "time", "--use-rep", "X_state", "--covariance", "round", "-o", "m"],
            "covariance is 'round'",
        ),
        (["fit", "cells.h5ad", "--groupby", "time", "--use-rep", "X_state", "-o", "no/such/m"], "does not exist"),
        (["transport", "cells.h5ad", "-o", "c"], "holds no model"),
        (["transport", "model", "--tau", "2", "-o", "c"], "tau"),
        (["transport", "model", "--source", "0", "-o", "c"], "give both --source and --target"),
        (["transitions", "model", "--source", "0", "--target", "1"], "holds mixtures but no plans; run: omt transport"),
        (
            ["transitions", "chain", "--source", "0", "--target", "7"],
            "target='7' is not in the chain; time there is one of: 0, 1, 2, 3, 4",
        ),
        (
            ["push", "cells.h5ad", "chain", "--source", "0", "--target", "4", "--obs", "stem", "-o", "s.h5ad"],
            "--obs is 'stem', must be key=value",
        ),
        (
            ["push", "cells.h5ad", "chain", "--source", "0", "--target", "4", "--obs", "kind=stem", "-o", "s.h5ad"],
            "--obs kind=stem: cells.h5ad has no obs column 'kind'; columns are: time, cell_type",
        ),
        (
            ["push", "cells.h5ad", "chain", "--source", "0", "--target", "4", "-o", "no/s.h5ad"],
            "the folder no does not exist",
        ),
        (
            [
                "map",
                "chain",
                "--source",
                "0",
                "--target",
                "4",
                "--input",
                "cells.h5ad",
                "--kind",
                "best",
                "-o",
                "s.h5ad",
            ],
            "kind is 'best'",
        ),
    ],
)
def test_bad_input_is_one_sentence_and_status_two(folder, monkeypatch, arguments, message):
    monkeypatch.chdir(folder)
    before = sorted(p.name for p in folder.iterdir())
    result = run(*arguments, status=2)
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("omt: ")
    assert message in line
    assert result.stdout == ""
    assert sorted(p.name for p in folder.iterdir()) == before


def test_what_fails_later_ends_with_one(folder, monkeypatch, tmp_path):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("omt.io.save_model", full)
    result = run("transport", folder / "model", "-o", tmp_path / "c", status=1)
    assert "No space left on device" in result.stderr


def test_cells_with_a_label_the_model_does_not_know_are_refused(folder, tmp_path):
    cells = anndata.read_h5ad(folder / "cells.h5ad")
    cells.obs["cell_type"] = cells.obs["cell_type"].astype(str).where(np.arange(cells.n_obs) != 3, "alien")
    cells.write_h5ad(tmp_path / "other.h5ad")
    result = run(
        "push",
        tmp_path / "other.h5ad",
        folder / "chain",
        "--source",
        0,
        "--target",
        1,
        "-o",
        tmp_path / "s.h5ad",
        status=2,
    )
    assert "adata.obs['cell_type'] is 'alien' in cell 'cell3'" in result.stderr


def test_cells_with_other_features_than_the_model_are_refused(folder, tmp_path):
    cells = anndata.read_h5ad(folder / "cells.h5ad")
    cells.obsm["X_state"] = cells.obsm["X_state"][:, :4]
    cells.write_h5ad(tmp_path / "other.h5ad")
    arguments = ("--source", 0, "--target", 1, "-o", tmp_path / "s.h5ad")
    result = run("push", tmp_path / "other.h5ad", folder / "chain", *arguments, status=2)
    assert "'X_state' has 4 features here and had 10 when the mixtures were fitted" in result.stderr


@pytest.mark.parametrize(("place", "message"), [("nowhere/s.h5ad", "does not exist"), (".", "is a folder")])
def test_an_output_that_cannot_be_written_is_refused_before_the_input_is_read(folder, tmp_path, place, message):
    (tmp_path / "empty.h5ad").write_bytes(b"")
    result = run(
        *("push", tmp_path / "empty.h5ad", folder / "chain", "--source", 0, "--target", 1, "-o", tmp_path / place),
        status=2,
    )
    assert "cannot write" in result.stderr
    assert message in result.stderr


def test_version_is_that_of_the_distribution():
    assert run("--version").stdout.strip() == f"omt {version('omt')}"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example_of_the_command(command):
    out = run(command, "--help").stdout
    (example,) = [line for line in out.splitlines() if "Example:" in line]
    assert example.split("Example: ")[1].startswith(f"omt {command} ")


def test_the_examples_of_the_help_work(folder, tmp_path, monkeypatch):
    """Fit, transport, transitions, push, map as printed, on a file that has what they name."""
    adata, _ = omt.datasets.branching_process(200)
    adata.obs["stage"] = adata.obs["time"].map({0.0: 240, 1.0: 330, 2.0: 420, 3.0: 480, 4.0: 540})
    adata.obs["cell_type"] = adata.obs["cell_type"].cat.rename_categories({"stem": "AWA"})
    adata.obsm["X_pca"] = adata.obsm["X_state"]
    monkeypatch.chdir(tmp_path)
    adata.write_h5ad("embryo.h5ad")
    for command in ("fit", "transport", "transitions", "push"):
        (line,) = [text for text in run(command, "--help").stdout.splitlines() if "Example:" in text]
        run(*line.split("Example: omt ")[1].split())
    adata.obs["condition"] = np.where(adata.obs["stage"] < 400, "ctrl", "stim")
    adata.write_h5ad("new.h5ad")
    run("fit", "new.h5ad", "--groupby", "condition", "-o", "model/", "--n-components", 3, "--quiet")
    (line,) = [text for text in run("map", "--help").stdout.splitlines() if "Example:" in text]
    run(*line.split("Example: omt ")[1].split())
    assert {"t.csv", "t.png", "scored.h5ad", "mapped.h5ad"} <= {p.name for p in Path().iterdir()}


def test_help_takes_less_than_a_second_and_loads_nothing_heavy():
    heavy = ["anndata", "scanpy", "matplotlib", "sklearn", "ot", "torch", "pandas"]
    code = (
        "import sys, time; start = time.process_time()\n"
        "from omt.cli import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        f"print([name for name in {heavy} if name in sys.modules], time.process_time() - start)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded, seconds = done.stdout.strip().splitlines()[-1].rsplit(" ", 1)
    assert loaded == "[]"
    assert float(seconds) < 1.0


def test_no_progress_reaches_stdout(folder, tmp_path):
    start = time.monotonic()
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from omt.cli import main; main()",
            "transport",
            str(folder / "model"),
            "-o",
            str(tmp_path / "c"),
            "--json",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(json.loads(done.stdout)) == {"chain", "plans"}
    assert time.monotonic() - start < 60
