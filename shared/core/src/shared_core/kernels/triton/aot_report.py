"""What kernels became on devices that need not be here, what is demanded of them, and how both are shown.

The data of :mod:`shared_core.kernels.triton.aot`, which does the compiling. Neither needs Triton to be imported.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

__all__ = [
    "ARCHITECTURES",
    "TENSOR_CORES",
    "AheadOfTimeError",
    "Architecture",
    "Compiled",
    "Product",
    "Report",
    "failures",
]

_KIB = 1024
_MOST_SPILLED = 1024  # bytes of a thread; beyond, tiles too large for the registers turn a product into memory traffic


@dataclass(frozen=True)
class Architecture:
    """What a generation of devices offers.

    Attributes
    ----------
    capability : int
        Compute capability times ten: 80, 90, 100.
    instruction : str
        Start of the PTX instruction that multiplies large tiles on its tensor cores.
    shared_limit : int
        Bytes of shared memory that a program may use.
    """

    capability: int
    instruction: str
    shared_limit: int


ARCHITECTURES: dict[int, Architecture] = {
    # 163 KiB on an A100, but 99 on the other devices of this generation, which run the same programs.
    80: Architecture(80, "mma.sync", 99 * _KIB),
    90: Architecture(90, "wgmma.mma_async", 227 * _KIB),
    100: Architecture(100, "tcgen05.mma", 227 * _KIB),
}
"""The generations that are checked, by :attr:`Architecture.capability`."""

_SMALL_TILES = "mma.sync"  # on every generation
_LARGE_ROWS, _LARGE_WARPS = 64, 4  # the newer instructions multiply 64 rows or more by four warps together
TENSOR_CORES = ("tcgen05.mma", "wgmma.mma_async", "mma.sync")
"""Instructions that are looked for, newest first."""


@dataclass(frozen=True)
class Product:
    """A matrix product inside a kernel: ``[rows, inner] × [inner, columns]`` in ``dtype`` (of MLIR: bf16, f16, f32)."""

    rows: int
    inner: int
    columns: int
    dtype: str


@dataclass(frozen=True)
class Compiled:
    """What one program became on one architecture.

    Attributes
    ----------
    capability : int
    kernel, case, tile : str
        Which program: the kernel, the call that launches it, its blocks, warps and stages.
    num_warps : int
    seconds : float
        Of compilation, wall clock.
    error : str
        Why there is no binary; empty if there is one.
    cubin_bytes, shared_bytes : int
        Size of the binary, and shared memory of a program.
    registers, spilled_bytes : int or None
        Of a thread, and what does not fit them and lies on its stack; None if the tool that reads them is missing.
    products : tuple of Product
        Matrix products of the kernel.
    instructions : tuple of str
        Tensor-core instructions found in its PTX.
    """

    capability: int
    kernel: str
    case: str
    tile: str
    num_warps: int
    seconds: float
    error: str = ""
    cubin_bytes: int = 0
    shared_bytes: int = 0
    registers: int | None = None
    spilled_bytes: int | None = None
    products: tuple[Product, ...] = ()
    instructions: tuple[str, ...] = ()

    @property
    def what(self) -> str:
        """The program in words, for messages."""
        return f"sm_{self.capability} {self.kernel} ({self.case}; {self.tile})"


@dataclass(frozen=True)
class Report:
    """Everything that was compiled.

    Attributes
    ----------
    triton : str
        Version.
    compiled : tuple of Compiled
    failures : tuple of str
        What is wrong, a line each; empty in what :func:`check` returns.
    """

    triton: str
    compiled: tuple[Compiled, ...]
    failures: tuple[str, ...] = ()

    def table(self) -> str:
        """One line a program, aligned for a terminal."""
        heads = ("arch", "kernel", "case", "tile", "products", "by", "shared", "registers", "spilled", "seconds")
        rows = [heads, *(_cells(each) for each in self.compiled)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        total = sum(each.seconds for each in self.compiled)
        return "\n".join([*lines, f"{len(self.compiled)} programs, {total:.0f} s, Triton {self.triton}"])

    def by_architecture(self) -> list[dict[str, Any]]:
        """One record an architecture: ``architecture, programs, instructions``, and the largest of what they need."""
        records = []
        for capability in dict.fromkeys(each.capability for each in self.compiled):
            mine = [each for each in self.compiled if each.capability == capability]
            records.append(
                {
                    "architecture": f"sm_{capability}",
                    "programs": len(mine),
                    "instructions": sorted({name for each in mine for name in each.instructions}),
                    "shared_kib": max(each.shared_bytes for each in mine) / _KIB,
                    "registers": max(each.registers or 0 for each in mine),
                    "spilled_bytes": max(each.spilled_bytes or 0 for each in mine),
                    "seconds": round(sum(each.seconds for each in mine), 1),
                }
            )
        return records


class AheadOfTimeError(RuntimeError):
    """The check failed; ``report`` holds what was compiled and every failure."""

    def __init__(self, report: Report) -> None:
        super().__init__("the ahead-of-time check failed:\n" + "\n".join(report.failures))
        self.report = report


def _cells(each: Compiled) -> tuple[str, ...]:
    products = {f"{p.rows}x{p.inner}x{p.columns} {p.dtype}" for p in each.products}
    return (
        f"sm_{each.capability}",
        each.kernel,
        each.case,
        each.tile,
        ", ".join(sorted(products)) or "-",
        ", ".join(each.instructions) or ("fma" if each.products else "-"),
        f"{each.shared_bytes / _KIB:.1f} KiB",
        "?" if each.registers is None else str(each.registers),
        "?" if each.spilled_bytes is None else f"{each.spilled_bytes} B",
        f"{each.seconds:.1f}",
    )


def failures(compiled: Iterable[Compiled], architectures: dict[int, Architecture] = ARCHITECTURES) -> list[str]:
    """Say what is wrong with compiled programs.

    Parameters
    ----------
    compiled : iterable of Compiled
    architectures : dict
        What is demanded of each.

    Returns
    -------
    list of str
        One line for each failure.

    Examples
    --------
    >>> program = Compiled(80, "up", "prefill", "128x128x64", 4, 1.0, cubin_bytes=9, shared_bytes=200 * 1024)
    >>> failures([program])
    ['sm_80 up (prefill; 128x128x64): 200.0 KiB of shared memory exceed 99 KiB']
    """
    found = []
    for each in compiled:
        demanded = architectures[each.capability]
        if each.error:
            found.append(f"{each.what}: {each.error}")
            continue
        if not each.cubin_bytes:
            found.append(f"{each.what}: the binary is empty")
        if each.shared_bytes > demanded.shared_limit:
            used, limit = each.shared_bytes / _KIB, demanded.shared_limit // _KIB
            found.append(f"{each.what}: {used:.1f} KiB of shared memory exceed {limit} KiB")
        if (each.spilled_bytes or 0) > _MOST_SPILLED:
            found.append(f"{each.what}: {each.spilled_bytes} bytes of a thread do not fit its registers")
        wanted = {_instruction(product, each.num_warps, demanded) for product in each.products} - {""}
        missing = sorted(wanted - set(each.instructions))
        if missing:
            got = ", ".join(each.instructions) or "no tensor-core instruction"
            found.append(f"{each.what}: {', '.join(missing)} expected in the PTX, found {got}")
    return found


def _instruction(product: Product, num_warps: int, architecture: Architecture) -> str:
    """Instruction that a product should use; none for float32, whose products are exact unless TF32 is allowed."""
    if product.dtype not in {"bf16", "f16"}:
        return ""
    large = product.rows >= _LARGE_ROWS and num_warps >= _LARGE_WARPS
    return architecture.instruction if large else _SMALL_TILES
