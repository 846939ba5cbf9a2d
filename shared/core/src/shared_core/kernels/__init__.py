"""The backends that run experts, and the only place that chooses among them.

=============  ==================================================================================================
``reference``  every expert on every row, with PyTorch's autograd; every device and dtype; the oracle of the tests
``cpu``        hand-written forward and backward on the fastest matrix products of the CPU
``grouped_mm``  ``torch.nn.functional.grouped_mm`` on rows sorted by expert; no synchronisation on an accelerator
=============  ==================================================================================================

``auto`` is a pure function of device and dtype, never of a measurement: the same inputs on the same machine always take
the same path.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

import torch

__all__ = ["BACKENDS", "BackendChoice", "choose_backend", "use_backend"]

BACKENDS: tuple[str, ...] = ("reference", "cpu", "grouped_mm")
"""Names that ``backend=`` accepts besides ``auto``."""

_log = logging.getLogger("shared_core")
_announced: set[BackendChoice] = set()  # one line a process and reason
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
    if device.type in {"cpu", "meta"}:
        return BackendChoice("cpu", "the device is a CPU")
    if device.type != "cuda":
        return BackendChoice(
            "grouped_mm", f"as a loop of products: there is no grouped_mm for {device.type}", fallback=True
        )
    if dtype != torch.bfloat16:
        return BackendChoice(
            "grouped_mm", f"as a loop of products: grouped_mm does not take {dtype} on CUDA", fallback=True
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return BackendChoice(
            "grouped_mm", f"as a loop of products: compute capability {capability} is below 8.0", fallback=True
        )
    return BackendChoice("grouped_mm", "CUDA with bfloat16 and compute capability 8.0 or higher")


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run every expert inside the ``with`` block on one backend, whatever its own setting is.

    Parameters
    ----------
    name : str
        One of :data:`BACKENDS`, or ``auto`` for the rule.

    Raises
    ------
    ValueError
        If there is no such backend.

    Examples
    --------
    >>> from shared_core.kernels import use_backend
    >>> with use_backend("reference"):
    ...     pass
    """
    check_backend(name)
    token = _override.set(name)
    try:
        yield
    finally:
        _override.reset(token)


def resolve_backend(requested: str, device: torch.device, dtype: torch.dtype) -> str:
    """Backend of one call: the enclosing :func:`use_backend`, else what was requested, else the rule."""
    check_backend(requested)
    name = _override.get() or requested
    if name != "auto":
        return name
    choice = choose_backend(device, dtype)
    if choice.fallback and choice not in _announced and not torch.compiler.is_compiling():
        _announced.add(choice)
        _log.info("experts run on backend %s: %s", choice.name, choice.reason)
    return choice.name
