"""The backends that run experts, and the only place that chooses among them.

=============  ==================================================================================================
``reference``  every expert on every row, with PyTorch's autograd; every device and dtype; the oracle of the tests
``cpu``        hand-written forward and backward on the fastest matrix products of the CPU
``grouped_mm``  ``torch.nn.functional.grouped_mm`` on rows sorted by expert; no synchronisation on an accelerator
``triton``     fused kernels for CUDA devices (bfloat16, float16, float32); no synchronisation
=============  ==================================================================================================

``auto`` is a pure function of device and dtype, never of a measurement: the same inputs on the same machine always take
the same path.

=====================================  ==========================================  ==========================
device                                 dtype                                       ``auto``
=====================================  ==========================================  ==========================
CPU                                    any                                         ``cpu``
CUDA 8.0 or higher, with Triton        bfloat16, float16, float32                  ``triton``
CUDA 8.0 or higher, without Triton     bfloat16                                    ``grouped_mm``
any other accelerator or dtype         any                                         ``grouped_mm`` as a loop
=====================================  ==========================================  ==========================

The last row is a loop of plain products, one for each expert with rows: the same memory as ``grouped_mm``, E / k times
less work than ``reference``, for one synchronisation.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.util import find_spec

import torch

__all__ = ["BACKENDS", "BackendChoice", "choose_backend", "use_backend"]

BACKENDS: tuple[str, ...] = ("reference", "cpu", "grouped_mm", "triton")
"""Names that ``backend=`` accepts besides ``auto``."""

_HAS_TRITON = find_spec("triton") is not None  # found, not imported
_TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_TRITON_CAPABILITY = (8, 0)
_TRITON_NEEDED = "pip install triton (on Linux it comes with PyTorch's CUDA builds)"

_log = logging.getLogger("shared_core")
_announced: set[str] = set()  # one line a process and reason
_override: ContextVar[str | None] = ContextVar("shared_core_backend", default=None)


@dataclass(frozen=True)
class BackendChoice:
    """What ``auto`` picked, and why.

    Attributes
    ----------
    name : str
        One of :data:`BACKENDS`.
    reason : str
        One sentence for people (``shared-core doctor`` prints it).
    fallback : bool
        Whether a better backend exists that this device or dtype rules out.
    """

    name: str
    reason: str
    fallback: bool = False


def check_backend(name: str) -> None:
    """Raise a ValueError that lists the valid names unless ``name`` is one of them or ``auto``."""
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}; valid are: auto, {', '.join(BACKENDS)}")


def choose_backend(device: torch.device | str, dtype: torch.dtype) -> BackendChoice:
    """Say which backend ``auto`` takes.

    Parameters
    ----------
    device : torch.device or str
        Where rows and weights are.
    dtype : torch.dtype
        Their floating dtype.

    Returns
    -------
    BackendChoice

    Examples
    --------
    >>> import torch
    >>> choose_backend("cpu", torch.float32).name
    'cpu'
    """
    device = torch.device(device)
    return _choose(device.type, _capability(device), dtype, has_triton=_HAS_TRITON)


def _choose(kind: str, capability: tuple[int, int], dtype: torch.dtype, *, has_triton: bool) -> BackendChoice:
    """Apply the table of this module to a device that need not be there."""
    if kind in {"cpu", "meta"}:
        return BackendChoice("cpu", "the device is a CPU")
    loop = "as a loop of products: "
    if kind != "cuda":
        return BackendChoice("grouped_mm", f"{loop}there is no grouped_mm for {kind}", fallback=True)
    if capability < _TRITON_CAPABILITY:
        return BackendChoice("grouped_mm", f"{loop}compute capability {capability} is below 8.0", fallback=True)
    if dtype not in _TRITON_DTYPES:
        return BackendChoice("grouped_mm", f"{loop}neither triton nor grouped_mm takes {dtype} on CUDA", fallback=True)
    if has_triton:
        return BackendChoice("triton", "CUDA with compute capability 8.0 or higher, and Triton is installed")
    missing = f"Triton is not installed: {_TRITON_NEEDED}"
    if dtype == torch.bfloat16:
        return BackendChoice("grouped_mm", missing, fallback=True)
    return BackendChoice("grouped_mm", f"{loop}{missing}; without it grouped_mm takes bfloat16 only", fallback=True)


def _capability(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda":
        return (0, 0)
    properties = torch.cuda.get_device_properties(device)  # unlike get_device_capability a constant to torch.compile
    return properties.major, properties.minor


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run every expert inside the ``with`` block on one backend, whatever its own setting is.

    The fused gate of :func:`shared_core.route` follows too: it runs inside ``use_backend("triton")``, and no other
    named backend uses it.

    Parameters
    ----------
    name : str
        One of :data:`BACKENDS`, or ``auto`` for the rule.

    Raises
    ------
    ValueError
        If there is no such backend, or nothing here could run it.

    Examples
    --------
    >>> from shared_core.kernels import use_backend
    >>> with use_backend("reference"):
    ...     pass
    """
    check_backend(name)
    if name == "triton":
        _check_triton("cuda" if torch.cuda.is_available() else "cpu", None, None)
    token = _override.set(name)
    try:
        yield
    finally:
        _override.reset(token)


def resolve_backend(requested: str, device: torch.device, dtype: torch.dtype) -> str:
    """Backend of one call: the enclosing :func:`use_backend`, else what was requested, else the rule.

    Raises
    ------
    ValueError
        If there is no such backend, or it is ``triton`` and cannot run on this device or in this dtype.
    """
    check_backend(requested)
    name = _override.get() or requested
    if name == "triton":
        _check_triton(device.type, _capability(device), dtype)
    if name != "auto":
        return name
    choice = choose_backend(device, dtype)
    if choice.fallback:
        announce(f"experts run on backend {choice.name}: {choice.reason}")
    return choice.name


def prefers_triton(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether what has no ``backend=`` of its own (the gate) runs on Triton: the enclosing choice, else the rule.

    Unlike :func:`resolve_backend` it refuses nothing: where Triton cannot run, PyTorch's operators do.
    """
    name = _override.get() or "auto"
    if name == "auto":
        return device.type == "cuda" and choose_backend(device, dtype).name == "triton"
    return name == "triton" and triton_obstacle(device.type, _capability(device), dtype) is None


def interpreted() -> bool:
    """Whether Triton kernels run in Triton's interpreter, as its own rule for ``TRITON_INTERPRET`` says."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in {"1", "y", "yes", "t", "true", "on"}


def triton_obstacle(kind: str, capability: tuple[int, int] | None, dtype: torch.dtype | None) -> str | None:
    """Why the kernels cannot run on such a device and dtype (None: not asked), as a sentence; None if they can."""
    if not _HAS_TRITON:
        return f"needs Triton, which is not installed: {_TRITON_NEEDED}"
    if dtype is not None and dtype not in _TRITON_DTYPES:
        taken = ", ".join(str(each) for each in _TRITON_DTYPES)
        return f"does not take {dtype}, only {taken}; backend='auto' finds one that does"
    if kind == "cuda":
        if capability is not None and capability < _TRITON_CAPABILITY:
            return f"needs compute capability 8.0 or higher, but this device has {capability[0]}.{capability[1]}"
        return None
    if kind in {"cpu", "meta"} and interpreted():
        return None
    return (
        f"needs a CUDA device, but the tensors are on {kind}; to run the kernels there in Triton's interpreter "
        "(slow, for tests), set the environment variable TRITON_INTERPRET=1 before the program starts"
    )


def announce(message: str) -> None:
    """Log one INFO line, once a process, and none while tracing."""
    if not torch.compiler.is_compiling() and message not in _announced:
        _announced.add(message)
        _log.info("%s", message)


def _check_triton(kind: str, capability: tuple[int, int] | None, dtype: torch.dtype | None) -> None:
    obstacle = triton_obstacle(kind, capability, dtype)
    if obstacle is not None:
        raise ValueError(f"backend 'triton' {obstacle}")
