"""Which backend "auto" takes on devices that need not be here, and what is said where Triton cannot run."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import pytest
import torch

from shared_core import GroupedExperts, Routing, experts_forward, kernels
from shared_core.kernels import choose_backend, use_backend

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Triton installed, its interpreter on."""
    monkeypatch.setattr(kernels, "_HAS_TRITON", True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return monkeypatch


@pytest.fixture
def no_interpreter(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Triton installed, no interpreter, no device."""
    monkeypatch.setattr(kernels, "_HAS_TRITON", True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return monkeypatch


# ------------------------------------------------------------------------------------------------------------- "auto"
@pytest.mark.parametrize(
    ("kind", "capability", "has_triton", "dtype", "name", "fallback"),
    [
        *(("cpu", (0, 0), True, dtype, "cpu", False) for dtype in (BF16, FP16, FP32, FP64)),
        ("meta", (0, 0), True, FP32, "cpu", False),
        *(("cuda", arch, True, dtype, "triton", False) for arch in ((8, 0), (9, 0), (10, 0)) for dtype in (BF16, FP16)),
        ("cuda", (8, 0), True, FP32, "triton", False),
        ("cuda", (9, 0), True, FP64, "grouped_mm", True),
        ("cuda", (7, 5), True, BF16, "grouped_mm", True),
        ("cuda", (9, 0), False, BF16, "grouped_mm", True),
        ("cuda", (9, 0), False, FP32, "grouped_mm", True),
        ("mps", (0, 0), False, FP32, "grouped_mm", True),
    ],
)
def test_auto_is_a_function_of_device_capability_triton_and_dtype(
    kind: str, capability: tuple[int, int], has_triton: bool, dtype: torch.dtype, name: str, fallback: bool
) -> None:
    choice = kernels._choose(kind, capability, dtype, has_triton=has_triton)
    assert (choice.name, choice.fallback) == (name, fallback)


@pytest.mark.parametrize(
    ("kind", "capability", "has_triton", "dtype", "reason"),
    [
        ("cuda", (9, 0), True, BF16, "CUDA with compute capability 8.0 or higher, and Triton is installed"),
        ("cuda", (7, 5), True, BF16, "as a loop of products: compute capability (7, 5) is below 8.0"),
        (
            "cuda",
            (9, 0),
            True,
            FP64,
            "as a loop of products: neither triton nor grouped_mm takes torch.float64 on CUDA",
        ),
        ("cuda", (9, 0), False, BF16, "Triton is not installed: pip install triton"),
        ("cuda", (9, 0), False, FP32, "as a loop of products: Triton is not installed"),
        ("xpu", (0, 0), True, FP32, "as a loop of products: there is no grouped_mm for xpu"),
    ],
)
def test_every_choice_has_its_reason(
    kind: str, capability: tuple[int, int], has_triton: bool, dtype: torch.dtype, reason: str
) -> None:
    assert kernels._choose(kind, capability, dtype, has_triton=has_triton).reason.startswith(reason)


def test_the_rule_asks_the_device_for_its_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        major, minor = 8, 6

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(kernels, "_HAS_TRITON", True)
    assert choose_backend("cuda", BF16).name == "triton"
    Properties.major = 7
    assert choose_backend("cuda", BF16).reason.endswith("compute capability (7, 6) is below 8.0")


def test_the_environment_does_not_change_what_auto_takes(interpreter: pytest.MonkeyPatch) -> None:
    assert choose_backend("cpu", FP32).name == "cpu"


def test_a_fallback_is_announced_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(kernels, "_announced", set())
    with caplog.at_level(logging.INFO, logger="shared_core"):
        for _ in range(3):
            kernels.resolve_backend("auto", torch.device("mps"), FP32)
    assert [record.getMessage() for record in caplog.records] == [
        "experts run on backend grouped_mm: as a loop of products: there is no grouped_mm for mps"
    ]


def test_a_backend_that_was_asked_for_is_not_announced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels, "_announced", set())
    with caplog.at_level(logging.INFO, logger="shared_core"):
        kernels.resolve_backend("grouped_mm", torch.device("mps"), FP32)
    assert caplog.records == []


# ----------------------------------------------------------------------------------------------- backend="triton"
def experts(device: str, dtype: torch.dtype) -> torch.Tensor:
    routing = Routing.from_topk(torch.tensor([[0]]), torch.ones(1, 1), num_experts=1)
    module = GroupedExperts(4, 4, 1, backend="triton", device=device, dtype=dtype)
    return module(torch.zeros(1, 4, device=device, dtype=dtype), routing)


def test_triton_on_a_cpu_says_that_it_needs_a_device_or_its_interpreter(no_interpreter: pytest.MonkeyPatch) -> None:
    message = "backend 'triton' needs a CUDA device, but the tensors are on cpu; .* TRITON_INTERPRET=1 before"
    with pytest.raises(ValueError, match=message):
        experts("cpu", FP32)


def test_triton_on_an_old_device_says_its_capability(interpreter: pytest.MonkeyPatch) -> None:
    interpreter.setattr(kernels, "_capability", lambda device: (7, 5))
    message = r"backend 'triton' needs compute capability 8.0 or higher, but this device has 7.5"
    with pytest.raises(ValueError, match=message):
        kernels.resolve_backend("triton", torch.device("cuda"), BF16)


def test_triton_that_is_not_installed_says_how_to_get_it(interpreter: pytest.MonkeyPatch) -> None:
    interpreter.setattr(kernels, "_HAS_TRITON", False)
    with pytest.raises(ValueError, match="backend 'triton' needs Triton, which is not installed: pip install triton"):
        experts("cpu", FP32)


def test_triton_in_float64_says_what_it_takes(interpreter: pytest.MonkeyPatch) -> None:
    message = r"does not take torch.float64, only torch.bfloat16, torch.float16, torch.float32; backend='auto'"
    with pytest.raises(ValueError, match=message):
        experts("cpu", FP64)


@pytest.mark.parametrize("missing", ["installation", "device"])
def test_use_backend_refuses_triton_where_nothing_could_run_it(
    no_interpreter: pytest.MonkeyPatch, missing: str
) -> None:
    no_interpreter.setattr(kernels, "_HAS_TRITON", missing == "device")
    message = {"installation": "needs Triton, which is not installed", "device": "needs a CUDA device"}[missing]
    with pytest.raises(ValueError, match=message), use_backend("triton"):
        raise AssertionError("entered")


def test_use_backend_accepts_triton_where_there_is_a_device(no_interpreter: pytest.MonkeyPatch) -> None:
    no_interpreter.setattr(torch.cuda, "is_available", lambda: True)
    with use_backend("triton"):
        assert kernels._override.get() == "triton"


def test_use_backend_triton_still_refuses_tensors_it_cannot_take(interpreter: pytest.MonkeyPatch) -> None:
    x, up = torch.zeros(1, 4, dtype=FP64), torch.zeros(1, 8, 4, dtype=FP64)
    routing = Routing.from_topk(torch.tensor([[0]]), torch.ones(1, 1), num_experts=1)
    with use_backend("triton"), pytest.raises(ValueError, match=r"'triton' does not take torch\.float64"):
        experts_forward(x, routing, up, torch.zeros(1, 4, 4, dtype=FP64))


@pytest.mark.parametrize("value", ["1", "true", "on", "yes", "y", "TRUE", "0", "false", "off", "", None])
def test_the_interpreter_is_on_where_triton_says_so(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    triton = pytest.importorskip("triton")
    if value is None:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    else:
        monkeypatch.setenv("TRITON_INTERPRET", value)
    assert kernels.interpreted() == triton.knobs.runtime.interpret


# ------------------------------------------------------------------------------------------------- no Triton at all
def run_without_triton(code: str) -> str:
    """What a process prints in which Triton cannot be found."""
    script = f"import sys; sys.modules['triton'] = None\nimport torch, shared_core\n{code}"
    done: Any = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=True)
    return done.stdout.strip()


def test_routing_and_experts_work_without_triton() -> None:
    out = run_without_triton(
        "from shared_core import GroupedExperts, Router\n"
        "x = torch.randn(5, 8)\n"
        "print(tuple(GroupedExperts(8, 4, 3)(x, Router.linear(8, 3, 2)(x)).shape))"
    )
    assert out == "(5, 8)"


def test_asking_for_triton_without_it_is_refused() -> None:
    out = run_without_triton(
        "from shared_core.kernels import use_backend\n"
        "try: use_backend('triton').__enter__()\n"
        "except ValueError as error: print(error)"
    )
    assert out.startswith("backend 'triton' needs Triton, which is not installed")
