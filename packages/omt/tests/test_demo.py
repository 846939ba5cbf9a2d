"""The demo: its table says what was measured, and it runs with what is installed."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from omt import datasets, demo, experiments
from omt.demo import Row


def test_a_row_judges_the_worst_seed_or_the_mean():
    assert not Row("data", "error", (0.1, 0.3), "≤ 0.25", every=True).ok
    assert Row("data", "error", (0.1, 0.3), "≤ 0.25").ok
    assert not Row("data", "share", (0.9, 1.0), "≥ 0.95", every=True).ok
    assert Row("data", "share", (0.9, 1.0), "≥ 0.95").ok


def test_consistency_of_two_halves_is_counted_by_hand():
    found, plan = experiments.halves(seed=0)
    W, same = plan.coupling, 0.0
    for k, name in enumerate(plan.source.names):
        same += sum(W[k, l] for l, other in enumerate(plan.target.names) if other == name)
    bound = 0.0
    for name, weight in zip(plan.source.names, plan.source.weights, strict=True):
        bound += sum(
            min(weight, w) for other, w in zip(plan.target.names, plan.target.weights, strict=True) if other == name
        )
    assert found.share == pytest.approx(same)
    assert found.bound == pytest.approx(bound)
    assert found.share <= found.bound + 1e-9


def test_known_map_beats_the_best_linear_map():
    found = experiments.known_map(20_000, seed=0)
    problem = datasets.known_map(random_state=0)
    rng = np.random.default_rng([0, 1])
    X, k = problem.sample_source(4000, rng)
    truth = problem.map(X, k)
    design = np.column_stack([X, np.ones(len(X))])
    fitted = design @ np.linalg.lstsq(design, truth, rcond=None)[0]  # knows the pairs, which ours does not
    linear = 100 * ((fitted - truth) ** 2).sum(axis=1).mean() / truth.var(axis=0).sum()
    assert found.uvp < 0.1 * linear


def test_fates_are_better_when_growth_is_known():
    assert experiments.branching(seed=0, growth_known=True).fate_error < experiments.branching(seed=0).fate_error


def test_relaxed_marginals_explain_branching_as_growth():
    """The weakness that the README names: with tau below one and far types, nobody differentiates, types only grow
    and die."""
    relaxed = experiments.branching(seed=0, tau=0.9)
    assert relaxed.share == pytest.approx(1.0, abs=1e-6)
    assert relaxed.fate_error > 0.5


def test_digit_pictures_are_images_of_the_target_digits():
    result = experiments.digit_images(n=1)
    assert result.source.shape == result.mapped.shape == result.drawn.shape == result.target.shape == (5, 64)
    assert set(result.plan.source.names) == {"0", "1", "2", "3", "4"}
    assert set(result.plan.target.names) == {"5", "6", "7", "8", "9"}


@pytest.mark.timeout(600)
def test_demo_with_one_seed_reaches_its_targets_and_writes_its_pictures(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from omt.cli import main; main()",
            "demo",
            "--out",
            str(tmp_path / "out"),
            "--seeds",
            "1",
            "--json",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert all(row["ok"] for row in printed["rows"])
    assert len(printed["rows"]) >= len(demo.WITHOUT_FILES)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "sankey.png",
        "flow.png",
        "solver.png",
        "interpolation.png",
        "transitions.png",
        "digits.png",
    }
    assert sorted(printed["pictures"]) == sorted(path.name for path in (tmp_path / "out").iterdir())


@pytest.mark.parametrize(("module", "extra"), [("scanpy", "omt[scanpy]"), ("matplotlib", "omt[plot]")])
def test_without_an_extra_the_demo_runs_the_rest_and_names_it(module, extra, tmp_path, monkeypatch):
    def quick(name):
        return lambda seeds: [Row(name, "nothing", (1.0,), "≥ 0")]

    monkeypatch.setitem(sys.modules, module, None)
    # The experiments themselves are tested above: only the one that needs scanpy runs here.
    needs_scanpy = module == "scanpy"
    jobs = [(name, job if needs_scanpy and "pbmc" in name else quick(name)) for name, job in demo.WITHOUT_FILES]
    monkeypatch.setattr(demo, "WITHOUT_FILES", jobs)
    if module == "scanpy":
        monkeypatch.setattr(demo, "_draw", lambda out, with_cells: ["sankey.png"])
    else:
        for loaded in [name for name in sys.modules if name.startswith("matplotlib.")]:
            monkeypatch.setitem(sys.modules, loaded, None)
    result = demo.run(tmp_path, seeds=1)
    assert len(result.rows) == len(demo.WITHOUT_FILES) - needs_scanpy
    assert any(f"pip install '{extra}'" in note for note in result.notes)


def test_a_folder_that_cannot_be_made_is_refused_before_any_work(tmp_path):
    with pytest.raises(FileNotFoundError, match="cannot make the folder"):
        demo.run(tmp_path / "no" / "out")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="is a file, must be a folder"):
        demo.run(tmp_path / "file")
