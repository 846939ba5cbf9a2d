"""Who runs a case: this package's backends, and the experts functions of the installed transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from shared_core.bench.cases import Batch, Case, Weights
from shared_core.experts import experts_forward
from shared_core.routing import Routing

Bound = Callable[[], Tensor]
Implementation = Callable[[Batch], Bound]
"""Takes a batch, does what the router before it would have done, and returns the call to be measured."""

PEERS = ("eager", "grouped_mm", "batched_mm")
# What a peer may copy or clear in a step; beyond, the step takes many seconds, and the case is left out for that peer.
_MAX_PEER_BYTES = 3e9


def ours(weights: Weights, backend: str) -> Implementation:
    """Run the experts of this package with one backend."""

    def implementation(batch: Batch) -> Bound:
        # A routing plans itself on first use; a fresh one for each turn keeps that cost inside the measurement.
        routing = Routing.from_topk(batch.indices, batch.weights, num_experts=weights.up.shape[0])
        return lambda: experts_forward(batch.x, routing, weights.up, weights.down, backend=backend)

    return implementation


def peer(weights: Weights, name: str) -> Implementation:
    """Run the experts of transformers' Qwen3-MoE on the same weights.

    Parameters
    ----------
    weights : Weights
        Shared, not copied.
    name : str
        An experts implementation of transformers: one of ``PEERS``.
    """
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    num_experts, hidden_size, intermediate_size = weights.down.shape
    config = Qwen3MoeConfig(
        num_experts=num_experts, hidden_size=hidden_size, moe_intermediate_size=intermediate_size, hidden_act="silu"
    )
    config._experts_implementation = name
    with torch.device("meta"):
        module: Any = Qwen3MoeExperts(config)  # type: ignore[no-untyped-call]
    module.gate_up_proj, module.down_proj = weights.up, weights.down

    def implementation(batch: Batch) -> Bound:
        # Its routers hand over weights in the dtype of the activations.
        routing_weights = batch.weights.to(batch.x.dtype)
        return lambda: module(batch.x, batch.indices, routing_weights)

    return implementation


def why_left_out(case: Case, name: str) -> str | None:
    """Say why a peer cannot reasonably run a case, or None when it can."""
    shape = case.shape
    expert_bytes = 3 * shape.hidden_size * shape.intermediate_size * case.torch_dtype.itemsize
    touched = 0.0
    if name == "batched_mm":
        touched = case.rows * shape.top_k * expert_bytes * (2 if case.backward else 1)
    elif name == "eager" and case.backward:
        touched = shape.num_experts**2 * expert_bytes
    if touched <= _MAX_PEER_BYTES:
        return None
    act = "copies" if name == "batched_mm" else "clears and adds"
    return f"{name} {act} {touched / 1e9:.0f} GB of weights"


def missing_peers_note() -> str | None:
    """Return the sentence to print when transformers is not there, or None when it is."""
    if find_spec("transformers") is not None:
        return None
    return "transformers is not installed, so there is nothing to compare with: pip install 'transformers>=5.10'"


def implementations(case: Case, weights: Weights, backends: Sequence[str]) -> dict[str, Implementation]:
    """Collect who takes part in a case, ours first."""
    found = {backend: ours(weights, backend) for backend in backends}
    if missing_peers_note() is None:
        found |= {f"transformers {name}": peer(weights, name) for name in PEERS if why_left_out(case, name) is None}
    return found
