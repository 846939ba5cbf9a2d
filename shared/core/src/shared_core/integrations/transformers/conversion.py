"""A model's own router as one of this package, on the same weights.

Letters: R rows, H width, E experts, k slots.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shared_core.balancer import BiasBalancer
from shared_core.gates import LinearGate
from shared_core.router import Router, Score
from shared_core.selection import GroupLimitedTopK

__all__ = ["as_router"]

_ROWS = 64  # on which a candidate must agree with the router
_TOLERANCE = 1e-5
_INSTEAD = "write a function x -> Routing for it instead"


class _Rule(NamedTuple):
    """One way to turn logits into weights; which numbers go in is read off the router's attributes."""

    score: Score
    renormalize: bool
    scale: float
    selection: GroupLimitedTopK | None
    biased: bool


def as_router(router: nn.Module, *, correction_bias: Tensor | None = None) -> Router:
    """Build the :class:`shared_core.Router` that decides as a router of transformers does, on the same weights.

    Nothing is copied: the gate's weight *is* the router's parameter, and a bias for balance (the
    ``e_score_correction_bias`` of DeepSeek-V3, Ernie 4.5 and their relatives) *is* the ``expert_bias`` of the new
    router's :class:`shared_core.BiasBalancer`. Training the one trains the other. Which rule the family follows
    (softmax or sigmoid, renormalised, scaled, limited to groups, biased) is found out by trying: a copy of the router
    with random weights must choose the same experts with the same weights, for 64 random rows. So nothing that decides
    differently is ever returned.

    Parameters
    ----------
    router : nn.Module
        Maps rows ``[R, H]`` to logits, weights and indices, by a linear gate of its own; for example
        ``model.model.layers[0].mlp.gate``.
    correction_bias : Tensor, optional
        ``[E]``, for the few families (MiniMax-M2, HunYuan-V3, AFMoE) whose block keeps the bias for balance and hands
        it to its router.

    Returns
    -------
    Router
        In the router's training mode. Logits are computed in float32; a router of transformers in bfloat16 rounds
        them, so that close experts may come in another order there.

    Raises
    ------
    TypeError
        If ``router`` is no module.
    ValueError
        If it has no gate of that form, or decides by a rule that :class:`shared_core.Router` does not have.

    Examples
    --------
    >>> import torch
    >>> from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralTopKRouter
    >>> theirs = MixtralTopKRouter(MixtralConfig(hidden_size=16, num_local_experts=8, num_experts_per_tok=2))
    >>> _ = torch.nn.init.normal_(theirs.weight)
    >>> ours = as_router(theirs)
    >>> ours.gate.weight is theirs.weight
    True
    >>> x = torch.randn(5, 16)
    >>> torch.equal(ours(x).indices, theirs(x)[2])
    True
    """
    if not isinstance(router, nn.Module):
        raise TypeError(f"router must be a torch.nn.Module, got {type(router).__name__}")
    kind, top_k = type(router).__name__, getattr(router, "top_k", None)
    gate = _gate_of(router)
    if gate is None or not isinstance(top_k, int):
        raise ValueError(
            f"{kind} has no linear gate to share (a `weight` [E, H] or one nn.Linear, floating point) or no `top_k`; "
            f"{_INSTEAD}"
        )
    if gate.weight.device.type == "meta":
        raise ValueError(f"the weights of {kind} are on the meta device, without values to share; load the model first")
    device = gate.weight.device
    # Whatever mode the caller is in: autocast would round the trial, inference tensors could not be trained later.
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        trial = copy.deepcopy(router).float().eval()
        trial.__dict__.pop("forward", None)  # someone may stand in for the instance already; its class decides
        bias = correction_bias if correction_bias is not None else _correction_of(router)
        trial_bias = None if correction_bias is None else correction_bias.detach().float().clone()
        _draw([*trial.parameters(), *trial.buffers(), *([] if trial_bias is None else [trial_bias])])
        x = _normal((_ROWS, gate.weight.shape[1]), _generator(1)).to(device)
        theirs = _outputs(trial, x, () if trial_bias is None else (trial_bias,), kind)
        trial_gate: Any = _gate_of(trial)
        trial_bias = _correction_of(trial) if trial_bias is None else trial_bias
        for rule in _rules(router, top_k, bias is not None):
            if _agrees(_build(trial_gate, trial_bias, rule, top_k), x, *theirs):
                return _build(gate, bias, rule, top_k).train(router.training)
    raise ValueError(
        f"{kind} decides by a rule that Router does not have (tried: softmax and sigmoid, renormalised or not, scaled, "
        f"group-limited, with a correction bias); {_INSTEAD}"
    )


def _gate_of(router: nn.Module) -> Any:
    """The part of a router that holds ``weight`` ``[E, H]``: itself, or its only linear layer."""
    linear = [part for part in router.modules() if isinstance(part, nn.Linear)]
    for part in (router, *(linear if len(linear) == 1 else ())):
        weight, bias = getattr(part, "weight", None), getattr(part, "bias", None)
        if isinstance(weight, Tensor) and weight.ndim == 2 and weight.is_floating_point():
            return part if bias is None or isinstance(bias, Tensor) else None
    return None


def _correction_of(router: nn.Module) -> Tensor | None:
    """The bias that corrects scores for the choice, wherever the family keeps it."""
    for path, tensor in itertools.chain(router.named_buffers(), router.named_parameters()):
        if path.rpartition(".")[2] in {"e_score_correction_bias", "expert_bias"}:
            return tensor
    return None


def _draw(tensors: list[Tensor]) -> None:
    """Draw every number anew, so that rules that differ give results that differ."""
    generator = _generator(0)
    for tensor in tensors:
        if tensor.is_floating_point():
            # Logits of size about 1, biases of size about 0.3.
            std = 1.0 / math.sqrt(tensor.shape[-1]) if tensor.ndim == 2 and tensor.shape[0] > 1 else 0.3
            tensor.copy_(_normal(tensor.shape, generator) * std)


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """The same numbers whatever the default device and dtype are."""
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


def _outputs(trial: nn.Module, x: Tensor, extra: tuple[Tensor, ...], kind: str) -> tuple[Tensor, Tensor]:
    """Weights and indices of a router for rows ``[R, H]``, or ``[1, R, H]`` if it takes only those."""
    try:
        try:
            returned = trial(x, *extra)
        except (IndexError, ValueError):
            returned = trial(x.unsqueeze(0), *extra)
    except Exception as error:
        raise ValueError(f"{kind} does not run on rows [R, H] alone ({error}); {_INSTEAD}") from error
    if not (isinstance(returned, tuple) and len(returned) >= 3 and isinstance(returned[2], Tensor)):
        raise ValueError(f"{kind} does not return (logits, weights, indices): its block routes; {_INSTEAD}")
    return returned[1], returned[2]


def _rules(router: nn.Module, top_k: int, has_bias: bool) -> Iterator[_Rule]:
    """All rules that the router's attributes allow, plain ones first."""
    scales = [1.0, 1.0 / top_k]
    for name in ("routed_scaling_factor", "route_scale", "router_scaling_factor"):
        value = getattr(router, name, None)
        if isinstance(value, int | float):
            scales.insert(0, float(value))
    selections: list[GroupLimitedTopK | None] = [None]
    groups, kept = (
        next((v for v in (getattr(router, name, None) for name in names) if isinstance(v, int)), None)
        for names in (("num_group", "n_group"), ("topk_group",))
    )
    if groups is not None and kept is not None and 1 <= kept < groups:
        selections += [GroupLimitedTopK(groups, kept), GroupLimitedTopK(groups, kept, "max")]
    scores: tuple[Score, Score] = ("softmax", "sigmoid")
    biased = (False, True) if has_bias else (False,)
    for choice in itertools.product(scores, (True, False), dict.fromkeys(scales), selections, biased):
        yield _Rule(*choice)


def _build(gate: Any, correction: Tensor | None, rule: _Rule, top_k: int) -> Router:
    num_experts, hidden_size = gate.weight.shape
    bias = getattr(gate, "bias", None)
    shared = LinearGate(hidden_size, num_experts, bias=bias is not None, device="meta")
    _put(shared, "weight", gate.weight)
    if bias is not None:
        _put(shared, "bias", bias)
    balancer = None
    if rule.biased and correction is not None:
        balancer = BiasBalancer(num_experts).to(correction.device)
        # A float32 view of the same memory; a copy only where the model keeps the bias in another precision.
        balancer.expert_bias = correction.detach().view(-1).float()
    return Router(
        shared,
        num_experts,
        top_k,
        score=rule.score,
        selection=rule.selection,
        renormalize=rule.renormalize,
        scale=rule.scale,
        balancer=balancer,
    )


def _put(gate: nn.Module, name: str, tensor: Tensor) -> None:
    """Let a parameter of the gate be that very tensor (a parameter, or what a parametrisation computes)."""
    if isinstance(tensor, nn.Parameter):
        gate.register_parameter(name, tensor)
        return
    del gate._parameters[name]
    gate.register_buffer(name, tensor, persistent=False)


@torch.no_grad()
def _agrees(ours: Router, x: Tensor, weights: Tensor, indices: Tensor) -> bool:
    """Whether both choose the same experts with the same weights; order inside a row does not matter."""
    if indices.shape != (x.shape[0], ours.top_k) or weights.shape != indices.shape:
        return False
    try:
        dense = ours.eval()(x).dense()
    except ValueError:  # settings that do not go together, such as too few experts in the kept groups
        return False
    theirs = torch.zeros_like(dense).scatter(1, indices.long(), weights.float())
    return torch.allclose(dense, theirs, rtol=0.0, atol=_TOLERANCE)
