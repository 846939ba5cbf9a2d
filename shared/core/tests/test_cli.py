"""The command line: results, files, and one line for every bad input."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from shared_core import RoutingTrace, load_stats, solve_mckp
from shared_core.cli import main

PROBLEM = "group,choice,cost,value\na,x,1,2.5\na,y,3,4\nb,x,0,0\nb,y,2,3\n"


@pytest.fixture
def run(capsys):
    """Run the command line in this process; gives (exit code, stdout, stderr)."""

    def run(*arguments):
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return caught.value.code, out, err

    return run


@pytest.fixture
def problem(tmp_path):
    (tmp_path / "problem.csv").write_text(PROBLEM)
    return tmp_path / "problem.csv"


@pytest.fixture
def states(tmp_path):
    """Token states with a strong common direction, as real ones have."""
    rng = np.random.default_rng(0)
    hidden = 2 * rng.standard_normal(32) + rng.standard_normal((1024, 32))
    np.savez(tmp_path / "states.npz", hidden=hidden.astype(np.float16))
    return tmp_path / "states.npz"


def save_trace(path, indices, num_experts=4):
    RoutingTrace(np.array(indices), np.ones(np.shape(indices)), num_experts).save(path)
    return path


def one_line(err):
    assert err.count("\n") == 1, err
    return err


# ---------------------------------------------------------------------------------------------------------------------


def test_version_is_printed(run):
    code, out, _ = run("--version")
    assert code == 0
    assert out.startswith("shared-core 0.")


def test_no_arguments_show_the_help(run):
    code, out, _ = run()
    assert code == 0
    assert "budget" in out


@pytest.mark.parametrize("command", ["budget", "load", "bench", "doctor"])
def test_help_of_every_command_shows_an_example(run, command):
    code, out, _ = run(command, "--help")
    assert code == 0
    assert f"Example: shared-core {command}" in out


def test_unknown_command_is_one_line_and_exit_code_2(run):
    code, _, err = run("bugdet")
    assert code == 2
    assert "No such command 'bugdet'" in one_line(err)


def test_missing_option_is_one_line_and_exit_code_2(run, problem):
    code, _, err = run("budget", problem)
    assert code == 2
    assert one_line(err) == "shared-core: Missing option '--budget'.\n"


def test_without_typer_the_extra_is_named():
    code = "import sys; sys.modules['typer'] = None\nfrom shared_core.cli import main\nmain(['--help'])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 2
    assert result.stderr == "shared-core needs its command-line extra: pip install 'shared-core[cli]'\n"


# ---------------------------------------------------------------------------------------------------------------------
# budget


def test_budget_json_agrees_with_solve_mckp(run, problem):
    code, out, _ = run("budget", problem, "--budget", 4, "--json")
    expected = solve_mckp([[1, 3], [0, 2]], [[2.5, 4.0], [0.0, 3.0]], 4)
    answer = json.loads(out)
    assert code == 0
    assert (answer["value"], answer["cost"], answer["optimal"]) == (expected.value, expected.cost, True)
    assert [row["choice"] for row in answer["choice"]] == ["x", "y"]


def test_budget_out_holds_the_chosen_rows(run, problem, tmp_path):
    code, _, _ = run("budget", problem, "--budget", 4, "--out", tmp_path / "choice.csv")
    assert code == 0
    assert (tmp_path / "choice.csv").read_text() == "group,choice,cost,value\na,x,1,2.5\nb,y,2,3.0\n"


def test_budget_table_shows_value_and_choices(run, problem):
    _, out, _ = run("budget", problem, "--budget", 4)
    assert "5.5" in out
    assert "optimal" in out


def test_budget_greedy_shows_its_bound(run, problem):
    _, out, _ = run("budget", problem, "--budget", 4, "--method", "greedy")
    assert "upper bound" in out
    assert "6.25" in out


def test_budget_reads_other_column_orders_extra_columns_blank_lines_and_a_byte_order_mark(run, tmp_path):
    text = "\ufeffvalue,note,group,cost,choice\n1,hello,g,2,p\n\n5,,g,3,q\n"
    (tmp_path / "p.csv").write_text(text, encoding="utf-8")
    _, out, _ = run("budget", tmp_path / "p.csv", "--budget", 3, "--json")
    assert json.loads(out)["choice"] == [{"group": "g", "choice": "q", "cost": 3, "value": 5.0}]


def test_budget_keeps_names_that_look_like_markup(run, tmp_path):
    (tmp_path / "p.csv").write_text("group,choice,cost,value\n[red]g[/red],[/b],0,1\n")
    code, out, _ = run("budget", tmp_path / "p.csv", "--budget", 3)
    assert code == 0
    assert "[red]g[/red]" in out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no column 'group', 'choice', 'cost', 'value'; its columns are: none"),
        ("group,choice,cost\na,x,1\n", "has no column 'value'; its columns are: group, choice, cost"),
        ("group,choice,cost,value\n", "has a header but no choices"),
        ("group,choice,cost,value\na,x,1,2\na,y,1.5,2\n", "line 3, column cost: '1.5' is not a whole number >= 0"),
        ("group,choice,cost,value\na,x,-1,2\n", "line 2, column cost: '-1' is not a whole number >= 0"),
        ("group,choice,cost,cost,value\na,x,1,7,2\n", "has more than one column 'cost'"),
        ("group,choice,cost,value\na,x,1_0,2\n", "line 2, column cost: '1_0' is not a whole number >= 0"),
        ("group,choice,cost,value\na,x,1,2_0\n", "line 2, column value: '2_0' is not a finite number"),
        ("group,choice,cost,value\na,x,,2\n", "line 2, column cost: '' is not a whole number >= 0"),
        ("group,choice,cost,value\na,x,1,nan\n", "line 2, column value: 'nan' is not a finite number"),
        ("group,choice,cost,value\na,x,1,lots\n", "line 2, column value: 'lots' is not a finite number"),
        ("group,choice,cost,value\na,x,1\n", "line 2: 3 fields, but the header has 4"),
        ("group,choice,cost,value\na,x,1,2\na,x,2,3\n", "line 3: group 'a' has choice 'x' already (line 2)"),
        ('group,choice,cost,value\na,"x,1,2\n', "line 2: unexpected end of data"),
        ("group,choice,cost,value\na,x,9,2\n", "budget 4 is less than 9, the cost of the cheapest choice"),
    ],
)
def test_bad_problem_is_one_line_that_names_the_place_and_writes_nothing(run, tmp_path, text, message):
    (tmp_path / "p.csv").write_text(text)
    code, out, err = run("budget", tmp_path / "p.csv", "--budget", 4, "--out", tmp_path / "choice.csv")
    assert code == 2
    assert not out
    assert message in one_line(err)
    assert not (tmp_path / "choice.csv").exists()


def test_problem_that_is_not_text_is_refused(run, tmp_path):
    (tmp_path / "p.csv").write_bytes(b"group,choice,cost,value\n\xff\xfe,x,1,2\n")
    code, _, err = run("budget", tmp_path / "p.csv", "--budget", 4)
    assert code == 2
    assert "is not UTF-8 text: invalid start byte" in one_line(err)


def test_missing_problem_is_named(run, tmp_path):
    code, _, err = run("budget", tmp_path / "p.csv", "--budget", 4)
    assert code == 2
    assert "no such file" in one_line(err)


def test_missing_output_folder_is_named_before_anything_is_solved(run, problem, tmp_path):
    code, out, err = run("budget", problem, "--budget", 4, "--out", tmp_path / "nowhere" / "c.csv")
    assert code == 2
    assert not out
    assert "nowhere does not exist" in one_line(err)


def test_failed_writing_is_exit_code_1_and_leaves_the_old_file(run, problem, tmp_path, monkeypatch):
    def full_disk(*_, **__):
        raise OSError("no space left on device")

    (tmp_path / "c.csv").write_text("old")
    monkeypatch.setattr(csv, "writer", full_disk)
    code, _, err = run("budget", problem, "--budget", 4, "--out", tmp_path / "c.csv")
    assert code == 1
    assert one_line(err) == "shared-core: no space left on device\n"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["c.csv", "problem.csv"]
    assert (tmp_path / "c.csv").read_text() == "old"


# ---------------------------------------------------------------------------------------------------------------------
# load


def test_load_of_traces_reports_one_layer_a_file(run, tmp_path):
    first = save_trace(tmp_path / "layer0.npz", [[0, 1], [2, 3]])
    second = save_trace(tmp_path / "layer1.npz", [[0, 1], [0, 4]])
    code, out, _ = run("load", first, second, "--json")
    assert code == 0
    assert [(record["source"], record["counts"]) for record in json.loads(out)] == [
        ("layer0", [1, 1, 1, 1]),
        ("layer1", [2, 1, 0, 0]),
    ]


def test_load_json_agrees_with_load_stats(run, tmp_path):
    trace = save_trace(tmp_path / "t.npz", [[0, 1], [0, 2], [0, 1]])
    record = json.loads(run("load", trace, "--json")[1])[0]
    assert record["max_violation"] == load_stats([3, 2, 1, 0]).max_violation


def test_load_of_a_trace_without_assignments_is_valid_json(run, tmp_path):
    trace = save_trace(tmp_path / "t.npz", [[4, 4]])
    record = json.loads(run("load", trace, "--json")[1])[0]
    assert record["cv"] is None
    assert record["dead_fraction"] == 1


def test_load_of_traces_needs_no_torch(tmp_path):
    trace = save_trace(tmp_path / "t.npz", [[0, 1]])
    code = f"import sys; sys.modules['torch'] = None\nfrom shared_core.cli import main\nmain(['load', {str(trace)!r}])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "MaxVio" in result.stdout


def test_load_of_states_routes_every_token_to_top_k_experts(run, states):
    _, out, _ = run("load", states, "--experts", 16, "--top-k", 2, "--json")
    assert sum(json.loads(out)[0]["counts"]) == 2 * 1024


def test_load_of_states_depends_on_the_seed_alone(run, states):
    once, again, other = (
        run("load", states, "--experts", 16, "--top-k", 2, "--json", "--seed", seed)[1] for seed in (1, 1, 2)
    )
    assert once == again
    assert once != other


def test_balancing_lowers_the_violation(run, states):
    pytest.importorskip("torch")
    _, out, _ = run("load", states, "--experts", 16, "--top-k", 2, "--balance", "--json")
    before, after = json.loads(out)
    assert before["max_violation"] > 1
    assert after["max_violation"] < 0.25


@pytest.mark.data
def test_load_of_real_token_states_before_and_after_balancing(run, shared_data):
    pytest.importorskip("torch")
    states = shared_data / "core" / "minilm_token_states.npz"
    _, out, _ = run("load", states, "--experts", 16, "--top-k", 2, "--balance", "--json")
    before, after = json.loads(out)
    assert before["max_violation"] >= 1.0
    assert after["max_violation"] <= 0.20


def test_balance_without_torch_names_the_extra(states):
    code = (
        "import sys, importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'torch' else find(name, *a)\n"
        "sys.modules['torch'] = None\n"
        "from shared_core.cli import main\n"
        f"main(['load', {str(states)!r}, '--experts', '4', '--top-k', '1', '--balance'])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 2
    assert result.stderr == "shared-core: --balance needs PyTorch: pip install 'shared-core[torch]'\n"


def test_load_plot_is_a_picture(run, states, tmp_path):
    pytest.importorskip("matplotlib")
    code, _, err = run("load", states, "--experts", 16, "--top-k", 2, "--plot", tmp_path / "load.png")
    assert code == 0, err
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")


def test_load_plot_of_an_unknown_format_lists_the_known_ones(run, states, tmp_path):
    pytest.importorskip("matplotlib")
    code, _, err = run("load", states, "--experts", 16, "--top-k", 2, "--plot", tmp_path / "load.xyz")
    assert code == 2
    assert "its suffix must be one of" in one_line(err)
    assert [file.name for file in tmp_path.iterdir()] == ["states.npz"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "token states need --experts and --top-k"),
        (("--experts", 4, "--top-k", 5), "top_k=5 exceeds num_experts=4"),
        (("--experts", 4, "--top-k", 0), "--experts and --top-k must be at least 1, got 4 and 0"),
    ],
)
def test_bad_options_for_states_are_one_line(run, states, options, message):
    code, _, err = run("load", states, *options)
    assert code == 2
    assert message in one_line(err)


def test_options_for_states_are_refused_for_traces(run, tmp_path):
    code, _, err = run("load", save_trace(tmp_path / "t.npz", [[0, 1]]), "--balance")
    assert code == 2
    assert "are for token states; these files are routing traces" in one_line(err)


def test_states_that_are_not_finite_are_named_by_place(run, tmp_path):
    hidden = np.zeros((5, 3), np.float32)
    hidden[2, 1] = np.nan
    np.savez(tmp_path / "s.npz", hidden=hidden)
    code, _, err = run("load", tmp_path / "s.npz", "--experts", 4, "--top-k", 1)
    assert code == 2
    assert "is not finite in row 2, column 1" in one_line(err)


def test_pickled_states_are_refused(run, tmp_path):
    np.savez(tmp_path / "s.npz", hidden=np.array([[object()]]))
    code, _, err = run("load", tmp_path / "s.npz", "--experts", 4, "--top-k", 1)
    assert code == 2
    assert "array hidden has dtype object" in one_line(err)


@pytest.mark.parametrize("content", [None, b"", b"hello"])
def test_files_that_cannot_be_read_are_one_line(run, tmp_path, content):
    if content is not None:
        (tmp_path / "t.npz").write_bytes(content)
    code, _, err = run("load", tmp_path / "t.npz")
    assert code == 2
    assert "t.npz" in one_line(err)


def test_traces_with_different_numbers_of_experts_cannot_be_plotted_together(run, tmp_path):
    pytest.importorskip("matplotlib")
    traces = [save_trace(tmp_path / f"{n}.npz", [[0, 1]], n) for n in (4, 5)]
    code, _, err = run("load", *traces, "--plot", tmp_path / "load.png")
    assert code == 2
    assert "same number of experts" in one_line(err)


def test_place_of_a_byte_that_is_no_text_counts_from_the_start_of_the_file(run, tmp_path):
    (tmp_path / "p.csv").write_bytes(b"group,choice,cost,value\n" + b"\n" * 20_000 + b"\xfc,1,2,3\n")
    code, _, err = run("budget", tmp_path / "p.csv", "--budget", 1)
    assert code == 2
    assert "not UTF-8 text: invalid start byte at byte 20024" in one_line(err)


def test_names_that_the_encoding_of_stdout_lacks_are_replaced(tmp_path):
    (tmp_path / "p.csv").write_text("group,choice,cost,value\nü,x,1,2\n", encoding="utf-8")
    command = [sys.executable, "-m", "shared_core.cli", "budget", str(tmp_path / "p.csv"), "--budget", "1"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, check=False, timeout=60, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"? " in done.stdout


def test_an_out_of_range_seed_is_one_line(run, states):
    code, _, err = run("load", states, "--experts", 4, "--top-k", 1, "--seed", 2**63)
    assert code == 2
    assert "--seed" in one_line(err)
