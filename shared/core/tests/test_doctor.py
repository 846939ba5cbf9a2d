"""The doctor's report against the sources it describes."""

import dataclasses
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
from shared_core.kernels.triton import aot


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where there is no device")
@pytest.mark.parametrize(
    ("interpret", "run_here", "because"),
    [("1", True, "in Triton's interpreter"), ("", False, "there is no CUDA device; TRITON_INTERPRET=1 runs them")],
)
def test_it_says_whether_triton_kernels_run_here(monkeypatch, interpret, run_here, because):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    found = doctor.report()["triton"]
    assert (found["run_here"], found["interpreter"]) == (run_here, run_here)
    assert found["because"].startswith(because)


def test_it_says_that_an_old_device_runs_no_triton_kernels(monkeypatch):
    pytest.importorskip("triton")
    old = {"device": "cuda:0", "name": "old", "capability": "7.5", "memory_gib": 16.0}
    assert doctor._triton([old])["because"] == "needs compute capability 8.0 or higher, but this device has 7.5"


COMPILED = aot.Compiled(
    90, "up", "prefill", "64x64x32", 4, 1.5, cubin_bytes=10, shared_bytes=50 * 1024, instructions=("wgmma.mma_async",)
)


@pytest.fixture
def compiled_elsewhere(monkeypatch):
    """Let the ahead-of-time check find these programs without compiling."""
    programs = []
    monkeypatch.setattr(aot, "_compile_elsewhere", lambda *_: iter(programs))
    return programs


def test_kernels_compiled_ahead_of_time_are_summed_up_by_architecture(capsys, compiled_elsewhere):
    pytest.importorskip("triton")
    compiled_elsewhere += [COMPILED, COMPILED]
    code, streams = run(capsys, "doctor", "--aot")
    assert code == 0
    assert "sm_90 │ 2 │ wgmma.mma_async │ 50 KiB" in " ".join(streams.out.split())


def test_a_failed_ahead_of_time_check_ends_with_1_and_says_why(capsys, compiled_elsewhere):
    pytest.importorskip("triton")
    compiled_elsewhere += [COMPILED, dataclasses.replace(COMPILED, shared_bytes=300 * 1024)]
    code, streams = run(capsys, "doctor", "--aot", "--json")
    assert code == 1
    assert json.loads(streams.out)["ahead_of_time"]["failures"] == [
        "sm_90 up (prefill; 64x64x32): 300.0 KiB of shared memory exceed 227 KiB"
    ]
    assert streams.err.strip().endswith("shared-core: the ahead-of-time check failed")


def test_an_ahead_of_time_check_without_triton_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr("shared_core.kernels._HAS_TRITON", False)
    code, streams = run(capsys, "doctor", "--aot")
    assert code == 1
    assert "the ahead-of-time check needs Triton, which is not installed" in streams.err
    assert "Traceback" not in streams.err


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
