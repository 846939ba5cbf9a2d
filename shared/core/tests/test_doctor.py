"""The doctor's report against the sources it describes."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from shared_core import cli, doctor
from shared_core.kernels import choose_backend


@pytest.fixture(scope="module")
def facts():
    return doctor.report()


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    return stop.value.code, capsys.readouterr()


def test_versions_are_those_installed_and_missing_ones_are_none(facts, monkeypatch):
    assert facts["versions"]["torch"] == version("torch")
    assert facts["versions"]["python"] == sys.version.split()[0]
    monkeypatch.setattr(doctor, "_PACKAGES", ("torch", "no-such-distribution"))
    assert doctor.report()["versions"]["no-such-distribution"] is None


def test_every_backend_named_is_what_the_rule_takes(facts):
    assert {row["dtype"] for row in facts["backends"]} == {"float64", "float32", "bfloat16", "float16"}
    for row in facts["backends"]:
        choice = choose_backend(torch.device(row["device"]), getattr(torch, row["dtype"]))
        assert (row["backend"], row["reason"]) == (choice.name, choice.reason)


@pytest.mark.skipif(not Path("/proc/cpuinfo").is_file(), reason="no /proc/cpuinfo on this system")
def test_cpu_is_named_as_the_system_names_it(facts):
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    assert not names or names[0].endswith(facts["cpu"]["model"])


def test_thread_counts_are_those_of_this_process(facts):
    assert facts["threads"]["torch"] == torch.get_num_threads()
    assert 1 <= facts["cpu"]["usable_cores"] <= (os.cpu_count() or 1)


def test_onednn_operator_is_trusted_only_where_it_multiplies_correctly(facts):
    if not facts["onednn"]["exists"]:
        assert not facts["onednn"]["computes_correctly"]
        return
    x, weight = torch.randn(6, 8), torch.randn(5, 8)
    y = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    correct = torch.allclose(y.double(), x.double() @ weight.double().T, atol=1e-5)
    assert facts["onednn"]["computes_correctly"] == correct


def test_command_prints_the_report_as_json(capsys, facts):
    code, streams = run(capsys, "doctor", "--json")
    assert code == 0
    assert json.loads(streams.out) == facts


def test_command_prints_the_choice_and_its_reason_for_people(capsys, facts):
    code, streams = run(capsys, "doctor")
    assert code == 0
    words = " ".join(streams.out.split())
    for expected in ("bfloat16", facts["versions"]["torch"], facts["backends"][0]["backend"], 'what "auto" takes'):
        assert expected in words


def test_torch_that_cannot_be_imported_is_reported_and_not_fatal():
    script = (
        "import sys, json; sys.modules['torch'] = None\n"
        "from shared_core import doctor\n"
        "print(json.dumps(doctor.report()))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    facts = json.loads(done.stdout)
    assert facts["versions"]["torch"].startswith(version("torch") + ", but it cannot be imported: ")
    assert facts["backends"] == []
    assert facts["cpu"]["model"]
