"""Do the kernels compute on this device what the readable backend computes? Errors, case by case.

Meant for a device that nobody has tried yet: run before anything is timed, and by ``benchmarks/bench_device.py``.
Letters: R rows, k slots, E experts, H width in, D width out, I intermediate width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shared_core.bench.cases import Shape, draw_routing
from shared_core.experts import experts_forward
from shared_core.kernels import use_backend
from shared_core.router import route
from shared_core.routing import Routing
from shared_core.selection import GroupCappedTopK, GroupLimitedTopK, TopK

__all__ = ["TOLERANCES", "Parity", "experts_parity", "gate_parity"]

TOLERANCES: dict[torch.dtype, float] = {torch.float32: 3e-5, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Relative errors (Frobenius norm) that rounding explains."""


@dataclass(frozen=True)
class Parity:
    """One comparison.

    Attributes
    ----------
    what : str
        The case and the result compared.
    error : float
        Norm of the difference over the norm of what it should be; of choices the share of rows that differ.
    tolerance : float
        Errors above it are wrong results.
    """

    what: str
    error: float
    tolerance: float

    @property
    def holds(self) -> bool:
        """Whether the error is within the tolerance (NaN is not)."""
        return self.error <= self.tolerance


def gate_parity(
    device: torch.device | str, *, rows: int = 4096, num_experts: int = 128, top_k: int = 8, seed: int = 0
) -> Iterator[Parity]:
    """Compare the fused gate with PyTorch's operators: choices, weights, scores, gradient of the logits.

    Parameters
    ----------
    device
        Where to run.
    rows, num_experts, top_k
        R, E (a multiple of 4, at least 8), k (at most E / 2).
    seed
        Of the logits.

    Yields
    ------
    Parity
    """
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, num_experts, generator=generator).to(device)
    bias = torch.randn(num_experts, generator=generator).div(10.0).to(device)
    upstream = [torch.randn(rows, width, generator=generator).to(device) for width in (top_k, num_experts)]
    groups = torch.arange(num_experts, device=device) % (num_experts // 2)
    cases: dict[str, dict[str, Any]] = {
        "softmax": {"renormalize": True},
        "sigmoid": {"score": "sigmoid", "renormalize": True, "scale": 2.5, "selection_bias": bias},
        "middle ranks": {"selection": TopK(offset=num_experts // 4)},
        "group limit": {"selection": GroupLimitedTopK(4, 2), "score": "sigmoid"},
        "group cap": {"selection": GroupCappedTopK(groups)},
        "masked": {"mask": (torch.arange(rows) % 3 != 0).to(device)},
        "unavailable": {"logit_bias": torch.where(torch.arange(num_experts) % 2 == 0, 0.0, -torch.inf).to(device)},
    }
    for name, kwargs in cases.items():
        results = []
        for backend in ("triton", "reference"):
            leaf = logits.clone().requires_grad_()
            with use_backend(backend):
                routing = route(leaf, top_k, **kwargs)
            torch.autograd.backward([routing.weights, _present(routing.scores)], upstream)
            results.append((routing, leaf.grad))
        (ours, our_grad), (theirs, their_grad) = results
        # Scores that differ in their last bit may swap two experts; the other results are compared in the other rows.
        same = (ours.indices == theirs.indices).all(1, keepdim=True)
        yield Parity(f"gate, {name}: rows that choose otherwise", 1.0 - float(same.float().mean()), 1e-3)
        for what, got, want in (
            ("weights", ours.weights * same, theirs.weights * same),
            ("scores", _present(ours.scores), _present(theirs.scores)),
            ("gradient", _present(our_grad) * same, _present(their_grad) * same),
        ):
            yield Parity(f"gate, {name}: {what}", _error(got, want), 1e-5)


# Activation, gated, biases, weight on the input, recompute.
_VARIANTS: dict[str, tuple[str, bool, bool, bool, bool]] = {
    "SwiGLU": ("silu", True, False, False, False),
    "GELU with biases": ("gelu", False, True, False, False),
    "GeGLU, tanh, recomputed": ("gelu_tanh", True, True, False, True),
    "weight on the input": ("relu2", True, False, True, False),
}


def experts_parity(
    device: torch.device | str,
    dtype: torch.dtype,
    shape: Shape,
    *,
    rows: int,
    variants: Sequence[str] = tuple(_VARIANTS),
    routing: str = "zipf",
    backend: str = "triton",
    seed: int = 0,
) -> Iterator[Parity]:
    """Compare a backend with ``reference`` in a wider dtype: output and every gradient.

    Parameters
    ----------
    device
        Where to run.
    dtype
        Of rows and weights; a key of :data:`TOLERANCES`.
    shape
        E, k, H, I; D is H.
    rows
        R; the last row is routed to nobody.
    variants
        Keys of the variants: activations, biases, where the weight goes, recomputation.
    routing
        ``"uniform"`` or ``"zipf"``, as in :class:`shared_core.bench.Case`.
    backend
        Which one is in question.
    seed
        Of everything drawn.

    Yields
    ------
    Parity
    """
    generator = torch.Generator().manual_seed(seed)
    experts, hidden, inner = shape.num_experts, shape.hidden_size, shape.intermediate_size
    indices, weights = draw_routing(rows, shape, routing, generator)
    indices[-1:] = experts
    grad = torch.randn(rows, hidden, generator=generator).to(device, dtype)
    for name in variants:
        activation, gated, bias, weight_input, recompute = _VARIANTS[name]
        width = 2 * inner if gated else inner
        sizes = {"x": (rows, hidden), "up": (experts, width, hidden), "down": (experts, hidden, inner)}
        if bias:
            sizes |= {"up_bias": (experts, width), "down_bias": (experts, hidden)}
        scales = {"x": 1.0, "up": hidden**-0.5, "down": inner**-0.5, "up_bias": 0.1, "down_bias": 0.1}
        drawn = {key: torch.randn(size, generator=generator).mul_(scales[key]) for key, size in sizes.items()}
        results = []
        for wide in (False, True):
            kind = _wider(dtype) if wide else dtype
            # Rounded first: both sides see the same numbers.
            leaves = {key: value.to(device, dtype).to(kind) for key, value in drawn.items()}
            leaves["weights"] = weights.to(device)
            leaves = {key: value.clone().requires_grad_() for key, value in leaves.items()}
            chosen = Routing.from_topk(indices.to(device), leaves["weights"], num_experts=experts)
            y = experts_forward(
                leaves["x"],
                chosen,
                leaves["up"],
                leaves["down"],
                up_bias=leaves.get("up_bias"),
                down_bias=leaves.get("down_bias"),
                activation=activation,
                gated=gated,
                weight_input=weight_input,
                recompute=recompute and not wide,
                backend="reference" if wide else backend,
            )
            torch.autograd.backward(y, grad.to(kind))
            results.append(
                {"output": y.detach()} | {f"gradient of {key}": _present(v.grad) for key, v in leaves.items()}
            )
        ours, theirs = results
        for what, want in theirs.items():
            yield Parity(f"experts {str(dtype)[6:]}, {name}: {what}", _error(ours[what], want), TOLERANCES[dtype])


def _wider(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float32 else torch.float32


def _present(result: Tensor | None) -> Tensor:
    if result is None:
        raise RuntimeError("a backend left a gradient out")
    return result


def _error(got: Tensor, want: Tensor) -> float:
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm().clamp_min(1e-30))
