"""What a shell hands to `omt` by mistake: one sentence on stderr, status 2, and no file harmed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import anndata
import numpy as np
import pytest
from typer.testing import CliRunner

import omt
from omt.cli import app

OMT = [sys.executable, "-c", "from omt.cli import main; main()"]
runner = CliRunner()
PAIR = ["--source", "0", "--target", "1"]


def run(*arguments: object, status: int = 0):
    result = runner.invoke(app, [str(a) for a in arguments])
    assert result.exit_code == status, (result.output, result.exception)
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Cells without a matrix X, a model of their types, and the chain over their three times."""
    base = tmp_path_factory.mktemp("bad")
    adata, _ = omt.datasets.branching_process(100, n_times=3, random_state=0)
    adata.write_h5ad(base / "cells.h5ad")
    (base / "empty.h5ad").write_bytes(b"")
    (base / "half.h5ad").write_bytes((base / "cells.h5ad").read_bytes()[:20000])
    (base / "text.h5ad").write_text("not an h5ad file")
    adata[:0].write_h5ad(base / "none.h5ad")
    options = ["--groupby", "time", "--use-rep", "X_state", "--labels", "cell_type", "--quiet"]
    run("fit", base / "cells.h5ad", *options, "-o", base / "model")
    run("transport", base / "model", "-o", base / "chain", "--quiet")
    return base


FIT = ["fit", "cells.h5ad", "--groupby", "time", "--use-rep", "X_state", "--n-components", "2", "-o", "m"]
BOOT = ["bootstrap", "cells.h5ad", "chain", *PAIR, "--n-boot", "3"]
PUSH = ["push", "cells.h5ad", "chain", *PAIR, "-o", "s.h5ad"]
MAP = ["map", "chain", *PAIR, "--input", "cells.h5ad", "-o", "s.h5ad"]
BETWEEN = ["interpolate", "chain", "-o", "s.h5ad"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*FIT, "--seed", "-1"], "random_state is -1; it must be an integer ≥ 0"),
        ([*FIT, "--seed", str(2**63)], "random_state is 9223372036854775808; it must be below 2⁶³"),
        ([*FIT, "--n-components", "0"], "n_components is 0; it must be an integer ≥ 1"),
        ([*FIT, "--n-components", "101"], "time 0 has 100 cells, fewer than n_components=101"),
        ([*FIT, "--bic", "5"], "--bic is '5'; it must be a range such as 5:40"),
        ([*FIT, "--bins", "a,b"], "bins='a,b' must be numbers separated by commas"),
        ([*FIT, "--bins", "2,1"], "bins='2,1' must be at least two rising, finite numbers"),
        ([*FIT, "--bins", "0,inf"], "bins='0,inf' must be at least two rising, finite numbers"),
        ([*FIT, "--bins", "50,60"], "no cell has time in bins='50,60'; its values go from 0 to 2"),
        ([*FIT, "--use-rep", "X"], "adata.X is empty; give layer= (adata.layers has: (none)) or use_rep="),
        ([*FIT, "--checkpoint", "cells.h5ad"], "checkpoint: cells.h5ad is a file; give the name of a folder"),
        (["transport", "model", "--tau", "0", "-o", "c"], "tau is 0.0; it must be a number in (0, 1]"),
        (["transport", "model", "--reg", "-1", "-o", "c"], "reg is -1.0; it must be a finite number ≥ 0"),
        (
            ["transport", "model", *PAIR[:3], "9", "-o", "c"],
            "target='9' is not in the fitted groups; time there is one",
        ),
        ([*BETWEEN, "--time", "0.5", "-n", "0"], "n is 0; it must be a whole number of at least 1"),
        ([*BETWEEN, "--time", "7"], "time=7.0 is not between the first and the last time; the times are 0, 1, 2"),
        ([*BETWEEN, "--time", "0.5", "--seed", "-1"], "random_state is -1; it must be an integer ≥ 0"),
        ([*BETWEEN, *PAIR, "--at", "2"], "t is 2.0; it must be between 0 (the source) and 1 (the target)"),
        ([*BOOT, "--seed", "-1"], "random_state is -1; it must be an integer ≥ 0"),
        ([*BOOT, "--n-boot", "0"], "n_boot is 0; it must be an integer ≥ 2"),
        ([*BOOT, "--level", "nan"], "level is nan; it must be between 0 and 1"),
        ([*BOOT, "--unit", "time"], "time 0 (unit='time') has 1 unit(s)"),
        ([*BOOT, "--csv", "cells.h5ad"], "cells.h5ad is given twice; writing there would replace the other"),
        ([*BOOT, "--csv", "t", "--plot", "t"], "t is given twice; writing there would replace the other"),
        (["transitions", "chain", *PAIR, "--csv", "t", "--plot", "./t"], "t is given twice"),
        ([*MAP, "--seed", "-1", "--kind", "sample"], "random_state is -1; it must be an integer ≥ 0"),
        ([*MAP, "--seed", "-1", "--refine"], "seed is -1; it must be an integer ≥ 0"),
        ([*MAP, "--tau", "0.5"], "chain has its plans, solved by omt transport; --tau and --reg go there"),
        ([*PUSH, "--obs", "time=5"], "no cell of time 0 has time 5; there it is one of: 0"),
        (["push", "empty.h5ad", *PUSH[2:]], "empty.h5ad is empty; it should be an h5ad file"),
        (["push", "half.h5ad", *PUSH[2:]], "half.h5ad cannot be read as an h5ad file"),
        (["push", "text.h5ad", *PUSH[2:]], "text.h5ad cannot be read as an h5ad file"),
        (["fit", "none.h5ad", *FIT[2:]], "none.h5ad holds no cells"),
        (["evaluate", "cells.h5ad", "--groupby", "cell_type", "--use-rep", "X_state"], "its values must be numbers"),
    ],
)
def test_bad_input_is_one_sentence_and_harms_no_file(folder, monkeypatch, arguments, message):
    monkeypatch.chdir(folder)
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    result = run(*arguments, "--quiet", status=2)
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("omt: ")
    assert message in line
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before


def test_a_device_without_memory_is_refused(folder, tmp_path):
    pytest.importorskip("torch")
    options = [
        "--groupby",
        "time",
        "--use-rep",
        "X_state",
        "--n-components",
        2,
        "--device",
        "meta",
        "-o",
        tmp_path / "m",
    ]
    result = run("fit", folder / "cells.h5ad", *options, status=2)
    assert "omt: device is 'meta', which PyTorch cannot use here" in result.stderr


@pytest.mark.parametrize("option", [["--seed", "x"], ["--n-components", "x"]])
def test_text_for_a_number_names_the_option(folder, option):
    result = run("fit", folder / "cells.h5ad", "--groupby", "time", "-o", folder / "m", *option, status=2)
    assert f"Invalid value for '{option[0]}'" in result.stderr
    assert "Traceback" not in result.stderr


def edited(folder: Path, place: Path, change) -> Path:
    """A copy of the chain's folder whose arrays and meta data `change` has been at."""
    shutil.copytree(folder / "chain", place)
    with np.load(place / "model.npz", allow_pickle=False) as stored:
        arrays = {name: stored[name] for name in stored.files}
    meta = json.loads(str(arrays["meta"]))
    change(arrays, meta)
    arrays["meta"] = np.array(json.dumps(meta))
    np.savez(place / "model.npz", **arrays)
    return place


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, m: m.update(format=7), "is stored in format 7; this version of omt reads format 1"),
        (lambda a, m: m["transports"]["0"].update(format="x"), "this transport is stored in format x; this version"),
        (lambda a, m: m["mixtures"]["0"].update(format=2), "this mixture is stored in format 2; this version of omt"),
        (lambda a, m: a.pop("groups"), "the stored omt results have no 'groups'"),
        (lambda a, m: a.update(groups=np.zeros(3)), "have the groups 0, 0, 0; each must occur once"),
        (
            lambda a, m: a.update(order=np.array([0, 1, -1])),
            "have the order (0, 1, -1) of 3 groups; each may occur once",
        ),
        (lambda a, m: a.update(order=np.array([1, 0, 2])), "of this stored transport has shape"),
        (
            lambda a, m: a.update({"transports/0/coupling": np.zeros((2, 2))}),
            "coupling of this stored transport has shape (2, 2); its mixtures need",
        ),
        (
            lambda a, m: a.update({"transports/0/coupling": 0.0 * a["transports/0/coupling"]}),
            "coupling of this stored transport is zero everywhere",
        ),
        (
            lambda a, m: m["transports"]["0"].update(tol=-1.0),
            "tol of this stored transport is -1.0; it must be a finite",
        ),
        (lambda a, m: a.update({"mixtures/0/weights": np.ones(7)}), "weights has shape (7,); there are 3 components"),
        (lambda a, m: a.update({"mixtures/0/names": np.array(["a"])}), "has 1 names and 3 components"),
    ],
)
def test_an_edited_model_is_refused_by_what_was_edited(folder, tmp_path, change, message):
    place = edited(folder, tmp_path / "edited", change)
    result = run("transitions", place, *PAIR, status=2)
    assert message in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "holds no model: there is no file"),
        (b"", "is not a readable npz file (truncated or damaged)"),
        (b"\x80\x04}\x94.", "is not a readable npz file (truncated or damaged)"),  # a pickle
    ],
    ids=["missing", "empty", "pickle"],
)
def test_a_folder_without_a_readable_npz_is_no_model(folder, tmp_path, content, message):
    place = tmp_path / "broken"
    shutil.copytree(folder / "chain", place)
    if content is None:
        (place / "model.npz").unlink()
    else:
        (place / "model.npz").write_bytes(content)
    assert message in run("transitions", place, *PAIR, status=2).stderr


def test_a_truncated_npz_is_no_model(folder, tmp_path):
    place = tmp_path / "broken"
    shutil.copytree(folder / "chain", place)
    whole = (place / "model.npz").read_bytes()
    (place / "model.npz").write_bytes(whole[: len(whole) // 2])
    assert "is not a readable npz file (truncated or damaged)" in run("transitions", place, *PAIR, status=2).stderr


def test_an_npz_of_objects_is_not_unpickled(folder, tmp_path):
    place = tmp_path / "broken"
    shutil.copytree(folder / "chain", place)
    np.savez(place / "model.npz", meta=np.array({"format": 1}, dtype=object))
    assert "holds Python objects, which are never unpickled" in run("transitions", place, *PAIR, status=2).stderr


def test_a_result_written_over_its_input_keeps_the_cells(folder, tmp_path):
    place = tmp_path / "cells.h5ad"
    shutil.copy(folder / "cells.h5ad", place)
    run("push", place, folder / "chain", *PAIR, "-o", place, "--quiet")
    before, after = anndata.read_h5ad(folder / "cells.h5ad"), anndata.read_h5ad(place)
    np.testing.assert_array_equal(after.obsm["X_state"], before.obsm["X_state"])
    assert after.obs["omt_push"].notna().sum() == 200


def test_a_model_folder_is_written_beside_what_is_there(folder, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    run("transport", folder / "model", "-o", tmp_path, "--quiet")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["meta.json", "model.npz", "notes.txt"]


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_ends_with_one(folder, tmp_path):
    tmp_path.chmod(0o500)
    try:
        result = run("transport", folder / "model", "-o", tmp_path, "--quiet", status=1)
        assert "Permission denied" in result.stderr
    finally:
        tmp_path.chmod(0o700)


def test_numbers_of_obs_are_found_however_they_are_written(folder, tmp_path):
    for spelled in ("0", "0.0"):
        run(
            "push",
            folder / "cells.h5ad",
            folder / "chain",
            *PAIR,
            "--obs",
            f"time={spelled}",
            "-o",
            tmp_path / "s.h5ad",
        )


def test_a_reader_that_leaves_early_is_no_error(folder):
    process = subprocess.Popen(
        [*OMT, "transitions", str(folder / "chain"), *PAIR],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    process.wait()
    assert "Traceback" not in errors


def test_quiet_prints_nothing(folder, tmp_path):
    for arguments in (["transport", folder / "model", "-o", tmp_path / "c"], ["transitions", folder / "chain", *PAIR]):
        result = run(*arguments, "--quiet")
        assert result.stdout == ""
        assert result.stderr == ""
