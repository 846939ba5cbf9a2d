"""Ahead-of-time check: every kernel compiled for devices that need not be here.

Triton's compiler and NVIDIA's assembler run on any machine. :func:`check` compiles whatever the launchers would launch
(:mod:`shared_core.kernels.triton.launches` records it) and looks at the result: a binary came out, its shared memory
fits the device, and matrix products use the tensor cores that the device has. What it cannot tell is how fast the
kernels are, or that a device computes what the interpreter computes.

``python -m shared_core.kernels.triton.aot [80 90 100]`` prints the table, with ``--thorough`` that of all tiles that
the tuner may try.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared_core.kernels import triton_obstacle
from shared_core.kernels.triton.aot_report import (
    ARCHITECTURES,
    TENSOR_CORES,
    AheadOfTimeError,
    Architecture,
    Compiled,
    Product,
    Report,
    failures,
)

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget

    from shared_core.kernels.triton.launches import Launch

__all__ = ["ARCHITECTURES", "AheadOfTimeError", "Architecture", "Compiled", "Product", "Report", "check", "failures"]


def check(
    architectures: Sequence[int] = (80, 90, 100),
    *,
    cases: str = "",
    thorough: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Compile every kernel for every architecture, in a process of its own, and look at what came out.

    Parameters
    ----------
    architectures : sequence of int
        Keys of :data:`ARCHITECTURES`.
    cases : str
        Only the calls whose name contains this; all by default.
    thorough : bool
        Every tile shape that the tuner may try, for every number of rows; by default each kernel with the tiles that
        run untuned, for the calls in :data:`shared_core.kernels.triton.launches.CASES`.
    progress : callable, optional
        Is given the name of every program as soon as it is compiled.

    Returns
    -------
    Report

    Raises
    ------
    ValueError
        For an unknown architecture, or ``cases`` that match nothing.
    RuntimeError
        If Triton is not installed.
    AheadOfTimeError
        A RuntimeError with one line for everything that is wrong.

    Notes
    -----
    No device is needed, ``TRITON_INTERPRET`` may be set (the other process runs without it), and nothing is kept in
    Triton's cache.

    Examples
    --------
    >>> from shared_core.kernels.triton import aot
    >>> report = aot.check((90,), cases="gate 16")  # doctest: +SKIP
    >>> print(report.table())  # doctest: +SKIP
    """
    for capability in architectures:
        if capability not in ARCHITECTURES:
            raise ValueError(f"unknown architecture {capability}; valid are: {', '.join(map(str, ARCHITECTURES))}")
    obstacle = triton_obstacle("cuda", None, None)
    if obstacle is not None:
        raise RuntimeError(f"the ahead-of-time check {obstacle}")
    compiled = []
    for each in _compile_elsewhere(architectures, cases, thorough):
        compiled.append(each)
        if progress is not None:
            progress(each.what)
    if not compiled:
        raise ValueError(f"no case contains {cases!r}")
    report = Report(version("triton"), tuple(compiled), tuple(failures(compiled)))
    if report.failures:
        raise AheadOfTimeError(report)
    return report


# ---------------------------------------------------------------------------------------------------------------------
# The other process.


def _compile_elsewhere(architectures: Sequence[int], cases: str, thorough: bool) -> Iterator[Compiled]:
    """Programs as they are compiled by a process without interpreter, whose cache is thrown away."""
    command = [sys.executable, "-m", __spec__.name, *map(str, architectures), "--compile", "--cases", cases]
    command += ["--thorough"] if thorough else []
    with tempfile.TemporaryDirectory(prefix="shared-core-aot-") as folder:
        environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": folder}
        environment["SHARED_CORE_AUTOTUNE"] = "1" if thorough else "0"
        errors = Path(folder) / "stderr"
        with (
            errors.open("w", encoding="utf-8") as stderr,
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True) as process,
        ):
            assert process.stdout is not None  # noqa: S101 - for the type checker
            try:
                yield from map(_from_json, process.stdout)
            finally:
                if process.poll() is None:
                    process.kill() if sys.exc_info()[0] else process.wait()
        if process.returncode:
            said = errors.read_text(encoding="utf-8").strip()
            raise RuntimeError(f"the ahead-of-time check ended with code {process.returncode}: {said}")


def _from_json(line: str) -> Compiled:
    fields: dict[str, Any] = json.loads(line)
    fields["products"] = tuple(Product(**product) for product in fields["products"])
    fields["instructions"] = tuple(fields["instructions"])
    return Compiled(**fields)


def _compile_here(architectures: Sequence[int], cases: str, thorough: bool) -> Iterator[Compiled]:
    from triton.backends.compiler import GPUTarget

    from shared_core.kernels.triton.launches import CASES, MORE_CASES, record

    known = CASES | MORE_CASES if thorough else CASES
    wanted = {name: call for name, call in known.items() if cases in name}
    for capability in architectures:
        target = GPUTarget("cuda", capability, 32)
        for launch in record(target, wanted):
            yield _compile(launch, target)


def _compile(launch: Launch, target: GPUTarget) -> Compiled:
    import triton
    from triton.compiler import ASTSource

    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    start = time.perf_counter()
    try:
        kernel = triton.compile(source, target=target, options=launch.options)
    except Exception as error:  # whatever the compiler says belongs into the report
        kernel, message = None, f"{type(error).__name__}: {error}"
    what = Compiled(
        capability=target.arch,
        kernel=launch.name,
        case=launch.case,
        tile=launch.tile,
        num_warps=launch.options["num_warps"],
        seconds=time.perf_counter() - start,
    )
    if kernel is None:
        return dataclasses.replace(what, error=message)
    registers, spilled = _resources(kernel.asm["cubin"], triton.knobs.nvidia.cuobjdump.path)
    return dataclasses.replace(
        what,
        cubin_bytes=len(kernel.asm["cubin"]),
        shared_bytes=kernel.metadata.shared,
        registers=registers,
        spilled_bytes=spilled,
        products=_products(kernel.asm["ttir"]),
        instructions=tuple(name for name in TENSOR_CORES if _uses(kernel.asm["ptx"], name)),
    )


_PRODUCT = re.compile(r"tt\.dot .*: tensor<(\d+)x(\d+)x(\w+)> \* tensor<\d+x(\d+)x\w+> ->")
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+)")  # what does not fit the registers is on the stack


def _products(ttir: str) -> tuple[Product, ...]:
    """Products that stand in Triton's own intermediate form, before any device is considered."""
    found = (Product(int(m), int(k), int(n), dtype) for m, k, dtype, n in _PRODUCT.findall(ttir))
    return tuple(dict.fromkeys(found))


def _uses(ptx: str, instruction: str) -> bool:
    return re.search(rf"^\s*(@%?!?\w+ )?{re.escape(instruction)}\b", ptx, re.MULTILINE) is not None


def _resources(cubin: bytes, cuobjdump: str) -> tuple[int | None, int | None]:
    """Registers and spilled bytes of a thread, by the tool that comes with Triton."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        try:
            said = subprocess.run(
                [cuobjdump, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
            ).stdout
        except (OSError, subprocess.CalledProcessError):
            return None, None
    usage = _RESOURCES.search(said)
    return (int(usage[1]), int(usage[2])) if usage else (None, None)


def _main(arguments: list[str]) -> int:
    what = "Compile every Triton kernel for devices that need not be here, and print what came out."
    parser = argparse.ArgumentParser(prog="python -m shared_core.kernels.triton.aot", description=what)
    parser.add_argument("architectures", nargs="*", type=int, help="of 80, 90, 100; all by default")
    parser.add_argument("--cases", default="", help="only the calls whose name contains this")
    parser.add_argument(
        "--thorough", action="store_true", help="every tile shape that the tuner may try (a quarter of an hour)"
    )
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)  # in the other process
    given = parser.parse_args(arguments)
    architectures = given.architectures or list(ARCHITECTURES)
    if given.compile:
        for each in _compile_here(architectures, given.cases, given.thorough):
            print(json.dumps(dataclasses.asdict(each)), flush=True)
        return 0
    try:
        report = check(
            architectures,
            cases=given.cases,
            thorough=given.thorough,
            progress=lambda name: print(name, file=sys.stderr),
        )
    except (RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1 if isinstance(error, RuntimeError) else 2
    print(report.table())
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
