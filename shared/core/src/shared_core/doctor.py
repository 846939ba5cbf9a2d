"""What this machine offers and what "auto" makes of it: for bug reports, and for "why is it slow here?"."""

from __future__ import annotations

import dataclasses
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

_PACKAGES = ("shared-core", "numpy", "torch", "triton", "transformers", "safetensors", "typer", "rich", "matplotlib")
_DTYPES = ("float64", "float32", "bfloat16", "float16")


def report(*, ahead_of_time: bool = False, progress: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Collect versions, CPU, threads and the choice of backends.

    Parameters
    ----------
    ahead_of_time
        Also compile every Triton kernel for every supported generation of devices (a minute or two, no device needed;
        see :func:`shared_core.kernels.triton.aot.check`).
    progress
        Is given the name of every program compiled.

    Returns
    -------
    dict
        ``versions`` (None: not installed), ``cpu``, ``threads``, ``accelerators``, ``onednn``, ``triton`` (whether its
        kernels run here, why not, and whether interpreted) and ``backends`` (a list of ``device, dtype, backend,
        reason``). Without torch the last five are empty. With ``ahead_of_time`` also that: ``failures`` (a line each),
        ``architectures`` and ``programs``. JSON-serialisable.

    Raises
    ------
    RuntimeError
        With ``ahead_of_time``, if torch or Triton is not installed.

    Examples
    --------
    >>> from shared_core import doctor
    >>> sorted(doctor.report())
    ['accelerators', 'backends', 'cpu', 'onednn', 'threads', 'triton', 'versions']
    """
    found = {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}}
    facts: dict[str, Any] = {
        "versions": found,
        "cpu": {"model": cpu_model(), "architecture": platform.machine(), "usable_cores": usable_cores()},
        "threads": {},
        "accelerators": [],
        "onednn": {},
        "triton": {},
        "backends": [],
    }
    try:
        import torch  # noqa: F401 - this module works without torch
    except (ImportError, OSError) as error:
        if found["torch"] is not None:
            found["torch"] += f", but it cannot be imported: {error}"
        if ahead_of_time:
            raise RuntimeError("the ahead-of-time check needs PyTorch: pip install 'shared-core[torch]'") from error
        return facts
    facts["cpu"].update(_cpu_features())
    facts["threads"] = _threads()
    facts["accelerators"] = _accelerators()
    facts["onednn"] = _onednn()
    facts["triton"] = _triton(facts["accelerators"])
    facts["backends"] = _backends([a["device"] for a in facts["accelerators"]])
    if ahead_of_time:
        facts["ahead_of_time"] = _ahead_of_time(progress)
    return facts


def machine() -> dict[str, Any]:
    """Return what a benchmark must say about where it ran.

    Returns
    -------
    dict
        ``cpu``, ``cores``, ``system``, ``python``, ``torch``, ``transformers``, ``shared-core``.
    """
    return {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "transformers", "shared-core")},
    }


def cpu_model() -> str:
    """Name of the CPU as the operating system gives it, or its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    if sys.platform == "darwin":
        answer = subprocess.run(
            ["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False
        )
        if answer.stdout.strip():
            return answer.stdout.strip()
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def tables(facts: dict[str, Any]) -> list[Table]:
    """Lay a report out for a terminal.

    Parameters
    ----------
    facts : dict
        From :func:`report`.

    Returns
    -------
    list of rich.table.Table
    """
    from rich.table import Table

    laid_out = []
    for title, values in (
        ("versions", {name: found or "not installed" for name, found in facts["versions"].items()}),
        ("CPU", facts["cpu"]),
        ("threads", facts["threads"]),
        ("oneDNN product", facts["onednn"]),
        ("Triton kernels", facts["triton"]),
    ):
        if values:
            table = Table(title=title, title_justify="left", show_header=False)
            for name, value in values.items():
                table.add_row(name if name.isupper() else name.replace("_", " "), _shown(value))
            laid_out.append(table)
    if facts["accelerators"]:
        table = Table("device", "name", "compute capability", "memory", title="accelerators", title_justify="left")
        for a in facts["accelerators"]:
            table.add_row(a["device"], a["name"], a["capability"], f"{a['memory_gib']:.0f} GiB")
        laid_out.append(table)
    if facts["backends"]:
        table = Table("device", "dtype", "backend", "because", title='what "auto" takes', title_justify="left")
        for choice in facts["backends"]:
            table.add_row(choice["device"], choice["dtype"], choice["backend"], choice["reason"])
        laid_out.append(table)
    if "ahead_of_time" in facts:
        heads = ("arch", "programs", "products by", "shared", "registers", "spilled", "seconds")
        table = Table(*heads, title="Triton kernels compiled ahead of time (largest need)", title_justify="left")
        for each in facts["ahead_of_time"]["architectures"]:
            sizes = (f"{each['shared_kib']:.0f} KiB", str(each["registers"]), f"{each['spilled_bytes']} B")
            instructions = ", ".join(each["instructions"])
            table.add_row(each["architecture"], str(each["programs"]), instructions, *sizes, f"{each['seconds']:.0f}")
        laid_out.append(table)
        if facts["ahead_of_time"]["failures"]:
            table = Table("failure", title="what is wrong with them", title_justify="left")
            for line in facts["ahead_of_time"]["failures"]:
                table.add_row(line)
            laid_out.append(table)
    return laid_out


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_features() -> dict[str, Any]:
    import torch

    from shared_core.kernels.cpu_features import cpu_features

    read = getattr(torch.cpu, "get_capabilities", dict)
    features = sorted(name for name, value in dict(read()).items() if value is True)
    return {
        "vector_code": torch.backends.cpu.get_cpu_capability(),
        "features": features,
        "mkl": bool(torch._C.has_mkl),
        "onednn": bool(torch._C._has_mkldnn),
        "float32_products_by": "oneDNN" if cpu_features().onednn_fp32 else "MKL or PyTorch's default",
        "bfloat16_products": "widened to float32" if cpu_features().widen_bf16 else "in bfloat16",
    }


def _threads() -> dict[str, Any]:
    import torch

    return {
        "torch": torch.get_num_threads(),
        "torch_interop": torch.get_num_interop_threads(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        "MKL_NUM_THREADS": os.environ.get("MKL_NUM_THREADS"),
    }


def _accelerators() -> list[dict[str, Any]]:
    import torch

    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "device": f"cuda:{index}",
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory_gib": properties.total_memory / 2**30,
            }
        )
    return found


def _onednn() -> dict[str, Any]:
    import torch

    from shared_core.kernels.cpu import onednn_usable

    return {
        "operator": "torch.ops.mkldnn._linear_pointwise",
        "exists": hasattr(torch.ops.mkldnn, "_linear_pointwise"),
        "computes_correctly": onednn_usable(),
    }


def _triton(accelerators: list[dict[str, Any]]) -> dict[str, Any]:
    from shared_core.kernels import interpreted, triton_obstacle

    capability = None
    if accelerators:
        major, minor = accelerators[0]["capability"].split(".")
        capability = int(major), int(minor)
    # Of a CPU without interpreter only one thing is to be said, which is shorter here than at a tensor.
    obstacle = triton_obstacle("cuda", capability, None)
    by = f"on {accelerators[0]['device']}" if accelerators else "in Triton's interpreter"
    if obstacle is None and not accelerators and not interpreted():
        obstacle = "there is no CUDA device; TRITON_INTERPRET=1 runs them in Triton's interpreter (slow, for tests)"
    return {"run_here": obstacle is None, "because": obstacle or by, "interpreter": interpreted()}


def _ahead_of_time(progress: Callable[[str], None] | None) -> dict[str, Any]:
    from shared_core.kernels.triton import aot

    try:
        checked = aot.check(progress=progress)
    except aot.AheadOfTimeError as error:
        checked = error.report
    return {
        "failures": list(checked.failures),
        "architectures": checked.by_architecture(),
        "programs": [dataclasses.asdict(each) for each in checked.compiled],
    }


def _backends(accelerators: list[str]) -> list[dict[str, Any]]:
    import torch

    from shared_core.kernels import choose_backend

    rows = []
    for device in ("cpu", *accelerators):
        for name in _DTYPES:
            choice = choose_backend(device, getattr(torch, name))
            rows.append({"device": device, "dtype": name, "backend": choice.name, "reason": choice.reason})
    return rows


def _shown(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return " ".join(value) if isinstance(value, list) else str(value)
