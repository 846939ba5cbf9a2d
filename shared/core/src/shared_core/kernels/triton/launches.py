"""What the launchers of this package start, recorded without a device.

Triton is given a driver for a device that is not there and a hook that stops every launch just before it compiles.
The launchers then run as they would, on meta tensors, and what arrives at the hook (kernel, types, constants, alignment
of pointers, warps and stages, every configuration that the tuner would try) is exactly what they would have compiled.

Letters: R rows, k slots, E experts, H width, I intermediate width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from shared_core.kernels.formula import Formula, Parameters
from shared_core.kernels.gating_ops import GateSettings
from shared_core.kernels.triton import experts, gating

__all__ = ["CASES", "MORE_CASES", "Launch", "record"]


@dataclass(frozen=True)
class Launch:
    """One program that a launcher would compile.

    Attributes
    ----------
    case : str
        Which of :data:`CASES` starts it (the first that does).
    kernel : triton.JITFunction
    signature, constants, attributes : dict
        Types, compile-time values and alignment of its arguments.
    options : dict
        ``num_warps``, ``num_stages``, ``enable_fp_fusion``.
    """

    case: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the kernel without its suffix."""
        return str(self.kernel.__name__).removesuffix("_kernel")

    @property
    def tile(self) -> str:
        """What tells this program from others of the same kernel: blocks, warps, stages."""
        names = self.kernel.arg_names
        blocks = {names[path[0]]: value for path, value in self.constants.items() if len(path) == 1}
        sizes = [f"{value}" for name, value in blocks.items() if name.startswith("BLOCK") or name == "ROWS"]
        return f"{'x'.join(sizes)}, {self.options['num_warps']} warps, {self.options['num_stages']} stages"


class _AbsentDevice:
    """As much of a driver as a launch asks before it compiles."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return -int(self.target.arch)  # kernels keep what they know of a device by its number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_benchmarker(self) -> Callable[..., list[float]]:
        """Let the tuner run every configuration once, and prefer none."""

        def benchmark(call: Callable[[], object], **_: object) -> list[float]:
            call()
            return [1.0, 1.0, 1.0]

        return benchmark


def record(target: GPUTarget, cases: dict[str, Callable[[], None]]) -> list[Launch]:
    """Run launchers as if on ``target``, and return what they would compile there.

    Parameters
    ----------
    target : triton.backends.compiler.GPUTarget
        The device that is not there.
    cases : dict
        Calls of launchers by name, as :data:`CASES`.

    Returns
    -------
    list of Launch
        Different ones only, in the order in which they first appear.
    """
    found: dict[str, Launch] = {}
    case = ""

    def stop(*, key: object, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        launch = Launch(
            case,
            fn.jit_function,
            compile["signature"],
            compile["constants"],
            compile["configs"][0],
            {name: compile[name] for name in ("num_warps", "num_stages", "enable_fp_fusion")},
        )
        found.setdefault(f"{fn.module}.{fn.name}{key}", launch)
        return True

    with _driver(_AbsentDevice(target)), _cache_hook(stop):
        for case, call in cases.items():  # noqa: B007 - read by the hook
            call()
    return list(found.values())


@contextlib.contextmanager
def _driver(driver: Any) -> Iterator[None]:
    config = triton.runtime.driver
    before = config._active
    config.set_active(driver)
    try:
        yield
    finally:
        config._active = before


@contextlib.contextmanager
def _cache_hook(hook: Callable[..., bool]) -> Iterator[None]:
    before = triton.knobs.runtime.jit_cache_hook
    triton.knobs.runtime.jit_cache_hook = hook
    try:
        yield
    finally:
        triton.knobs.runtime.jit_cache_hook = before


# ---------------------------------------------------------------------------------------------------------------------
# Calls that together start every kernel, in the sizes of real models and in sizes that divide into no tile.


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _gate(num_experts: int, settings: GateSettings, *, bias: bool = False, keep: bool = False) -> None:
    rows = 4096
    gating.forward(
        _empty(rows, num_experts),
        _empty(num_experts).expand(rows, -1) if bias else None,
        _empty(rows, dtype=torch.bool) if keep else None,
        _empty(num_experts, dtype=torch.int32) if settings.cap else None,
        settings,
    )
    scores, indices = _empty(rows, num_experts), _empty(rows, settings.top_k, dtype=torch.int64)
    gating.backward(scores, indices, _empty(rows, settings.top_k), _empty(rows, num_experts), settings)
    gating.backward(scores, indices, _empty(rows, settings.top_k), None, settings)


_SWIGLU = Formula("silu", gated=True, weight_input=False)


def _experts(
    rows: int,
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype = torch.bfloat16,
    formula: Formula = _SWIGLU,
    *,
    bias: bool = False,
    training: bool = True,
    recompute: bool = False,
) -> None:
    """Forward, and with ``training`` all gradients, of E, k, H, I."""
    num_experts, top_k, hidden, inner = sizes
    width = 2 * inner if formula.gated else inner
    x, grad = (_empty(rows, hidden, dtype=dtype) for _ in range(2))
    indices, weights = _empty(rows, top_k, dtype=torch.int64), _empty(rows, top_k)
    parameters = Parameters(
        _empty(num_experts, width, hidden, dtype=dtype),
        _empty(num_experts, hidden, inner, dtype=dtype),
        _empty(num_experts, width, dtype=dtype) if bias else None,
        _empty(num_experts, hidden, dtype=dtype) if bias else None,
    )
    keep_z = training and not recompute
    _, z, order, bounds = experts.forward(x, indices, weights, parameters, formula, keep_plan=training, keep_z=keep_z)
    if training:
        needs = (True, True, True, True, bias, bias)
        experts.backward(grad, x, weights, parameters, z, order, bounds, formula, needs=needs)


_QWEN3, _RAGGED = (128, 8, 2048, 768), (6, 2, 40, 28)

CASES: dict[str, Callable[[], None]] = {
    "gate 128 choose 8": partial(_gate, 128, GateSettings(8, 0, False, True, 1.0)),
    "gate 60 choose 4": partial(_gate, 60, GateSettings(4, 0, False, False, 1.0), keep=True),
    "gate DeepSeek-V3": partial(
        _gate, 256, GateSettings(8, 0, True, True, 2.5, num_groups=8, top_groups=4, two_best=True), bias=True
    ),
    "gate 16 capped": partial(_gate, 16, GateSettings(4, 0, False, True, 1.0, cap=1)),
    "gate 1024 choose 64": partial(_gate, 1024, GateSettings(64, 0, True, True, 1.0)),
    "experts Qwen3 training": partial(_experts, 4096, _QWEN3),
    "experts Qwen3 training, float32": partial(_experts, 4096, _QWEN3, torch.float32),
    "experts Qwen3 decoding": partial(_experts, 4, _QWEN3, training=False),
    "experts Llama 4 training": partial(
        _experts, 4096, (16, 1, 5120, 8192), formula=Formula("silu", gated=True, weight_input=True)
    ),
    "experts ragged, biases": partial(
        _experts, 23, _RAGGED, torch.float16, Formula("gelu", gated=False, weight_input=False), bias=True
    ),
    "experts ragged, recomputed": partial(
        _experts, 23, _RAGGED, formula=Formula("gelu_tanh", gated=True, weight_input=False), recompute=True
    ),
    "experts ragged, weight on the input, biases": partial(
        _experts, 23, _RAGGED, formula=Formula("relu2", gated=True, weight_input=True), bias=True
    ),
}
"""Calls of launchers by name; together they start every kernel, with every optional argument present and absent."""

MORE_CASES: dict[str, Callable[[], None]] = {
    f"experts Qwen3 training, {16 * rows} rows of {str(dtype).removeprefix('torch.')}": partial(
        _experts, 16 * rows, _QWEN3, dtype
    )
    for dtype in (torch.bfloat16, torch.float32)
    for rows in (16, 32, 64)  # an expert
}
"""The same kernels with the tiles of every other number of rows an expert."""
