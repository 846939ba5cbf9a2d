"""The ahead-of-time check: what it compiles, and that it sees what is wrong."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shared_core import kernels
from shared_core.kernels.triton import aot
from shared_core.kernels.triton.aot import Architecture, Compiled, Product

pytest.importorskip("triton")

GENERATIONS = (80, 90, 100)
FINE = Compiled(80, "up", "prefill", "64x64x32", 4, 1.0, cubin_bytes=10, shared_bytes=1024)
LARGE, SMALL = Product(64, 32, 64, "bf16"), Product(16, 32, 64, "bf16")


@pytest.fixture(scope="module")
def gate() -> aot.Report:
    """One case for every generation."""
    return aot.check(GENERATIONS, cases="gate 16 capped")


def test_every_generation_gets_a_binary_of_both_gate_kernels(gate: aot.Report) -> None:
    found = {(each.capability, each.kernel) for each in gate.compiled if each.cubin_bytes > 0}
    assert found == {(capability, kernel) for capability in GENERATIONS for kernel in ("gate_forward", "gate_backward")}


def test_gate_programs_need_no_spilled_registers_and_hardly_any_shared_memory(gate: aot.Report) -> None:
    for each in gate.compiled:
        assert each.shared_bytes <= 4096
        assert each.spilled_bytes in {0, None}


def test_the_check_compiles_although_this_process_interprets(gate: aot.Report) -> None:
    if not kernels.interpreted():
        pytest.skip("Triton's interpreter is off here")
    assert all(each.cubin_bytes > 0 for each in gate.compiled)


def test_the_table_has_a_line_for_every_program(gate: aot.Report) -> None:
    lines = gate.table().splitlines()
    assert len(lines) == len(gate.compiled) + 2
    assert len({line.index("gate 16 capped") for line in lines[1:-1]}) == 1  # aligned


def test_the_summary_counts_the_programs_of_each_generation(gate: aot.Report) -> None:
    assert [each["architecture"] for each in gate.by_architecture()] == ["sm_80", "sm_90", "sm_100"]
    assert sum(each["programs"] for each in gate.by_architecture()) == len(gate.compiled)


# ------------------------------------------------------------------------------------------------ what counts as wrong
@pytest.mark.parametrize(
    ("capability", "product", "num_warps", "instruction"),
    [
        (80, LARGE, 4, "mma.sync"),
        (90, LARGE, 4, "wgmma.mma_async"),
        (100, LARGE, 8, "tcgen05.mma"),
        (90, SMALL, 4, "mma.sync"),
        (90, LARGE, 2, "mma.sync"),
    ],
)
def test_products_of_16_bit_numbers_must_use_the_tensor_cores(
    capability: int, product: Product, num_warps: int, instruction: str
) -> None:
    program = dataclasses.replace(FINE, capability=capability, products=(product,), num_warps=num_warps)
    assert aot.failures([dataclasses.replace(program, instructions=(instruction,))]) == []
    (line,) = aot.failures([program])
    assert line.endswith(f"{instruction} expected in the PTX, found no tensor-core instruction")


def test_an_older_instruction_where_a_newer_one_is_expected_is_named() -> None:
    program = dataclasses.replace(FINE, products=(LARGE,), instructions=("mma.sync",))
    (line,) = aot.failures([program], {80: Architecture(80, "wgmma.mma_async", 99 * 1024)})
    assert line == "sm_80 up (prefill; 64x64x32): wgmma.mma_async expected in the PTX, found mma.sync"


def test_exact_float32_products_need_no_tensor_cores() -> None:
    assert aot.failures([dataclasses.replace(FINE, products=(Product(64, 32, 64, "f32"),))]) == []


@pytest.mark.parametrize(("capability", "limit"), [(80, 99), (90, 227), (100, 227)])
def test_shared_memory_is_limited(capability: int, limit: int) -> None:
    fits = dataclasses.replace(FINE, capability=capability, shared_bytes=limit * 1024)
    (line,) = aot.failures([fits, dataclasses.replace(fits, shared_bytes=limit * 1024 + 512)])
    assert line.endswith(f"{limit}.5 KiB of shared memory exceed {limit} KiB")


def test_tiles_that_overflow_the_registers_are_a_failure() -> None:
    few = dataclasses.replace(FINE, spilled_bytes=64)
    (line,) = aot.failures([few, dataclasses.replace(FINE, spilled_bytes=3808)])
    assert line.endswith("3808 bytes of a thread do not fit its registers")


def test_an_empty_binary_is_a_failure() -> None:
    (line,) = aot.failures([dataclasses.replace(FINE, cubin_bytes=0)])
    assert line == "sm_80 up (prefill; 64x64x32): the binary is empty"


def test_everything_wrong_is_listed_in_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = [dataclasses.replace(FINE, error="PTXASError: no"), FINE, dataclasses.replace(FINE, cubin_bytes=0)]
    monkeypatch.setattr(aot, "_compile_elsewhere", lambda *_: iter(broken))
    with pytest.raises(aot.AheadOfTimeError, match=r"(?s)failed:\n.*PTXASError: no\n.*binary is empty$") as failed:
        aot.check((80,))
    assert len(failed.value.report.failures) == 2
    assert len(failed.value.report.compiled) == 3


def test_programs_are_reported_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot, "_compile_elsewhere", lambda *_: iter([FINE, FINE]))
    seen: list[str] = []
    aot.check((80,), progress=seen.append)
    assert seen == ["sm_80 up (prefill; 64x64x32)"] * 2


# ----------------------------------------------------------------------------------------------------------- refusals
def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown architecture 75; valid are: 80, 90, 100"):
        aot.check((75,))


def test_a_case_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot, "_compile_elsewhere", lambda *_: iter([]))
    with pytest.raises(ValueError, match="no case contains 'gaet'"):
        aot.check((80,), cases="gaet")


def test_without_triton_the_check_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_HAS_TRITON", False)
    with pytest.raises(RuntimeError, match="the ahead-of-time check needs Triton, which is not installed: pip install"):
        aot.check()


def test_what_the_other_process_dies_of_is_passed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'out of memory' >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(RuntimeError, match="the ahead-of-time check ended with code 3: out of memory"):
        aot.check((80,))


# ------------------------------------------------------------------------------------------------- everything, slowly
@pytest.fixture(scope="module")
def everything() -> aot.Report:
    """All that can be launched, for every generation."""
    return aot.check(GENERATIONS)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_kernel_of_the_package_compiles_for_every_generation(everything: aot.Report) -> None:
    folder = Path(aot.__file__).parent
    written = {
        name for file in folder.glob("*.py") for name in re.findall(r"^def (\w+)_kernel\(", file.read_text(), re.M)
    }
    for capability in GENERATIONS:
        assert {each.kernel for each in everything.compiled if each.capability == capability} == written


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("capability", GENERATIONS)
def test_large_16_bit_products_use_the_instruction_of_their_generation(everything: aot.Report, capability: int) -> None:
    instruction = aot.ARCHITECTURES[capability].instruction
    with_products = {each.kernel for each in everything.compiled if any(p.dtype == "bf16" for p in each.products)}
    using = {
        each.kernel
        for each in everything.compiled
        if each.capability == capability and instruction in each.instructions
    }
    assert len(with_products) >= 4  # two forward, the gradients of rows and of weights
    assert using == with_products


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_demand_that_no_program_of_a_generation_meets_is_seen_to_fail(everything: aot.Report) -> None:
    programs = [each for each in everything.compiled if each.capability == 80]
    lines = aot.failures(programs, {80: Architecture(80, "wgmma.mma_async", 99 * 1024)})
    assert lines
    assert all("wgmma.mma_async expected in the PTX, found mma.sync" in line for line in lines)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_module_prints_the_table() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shared_core.kernels.triton.aot", "80"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert re.match(r"arch +kernel +case +tile +products +by +shared +registers +spilled +seconds", done.stdout)
    assert re.search(r"^\d+ programs, \d+ s, Triton \d+\.\d+", done.stdout, re.M)
