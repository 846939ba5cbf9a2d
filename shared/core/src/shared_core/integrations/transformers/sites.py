"""Where a model routes: its experts modules, the routers that belong to them, and how one instance gets a new forward.

An experts module is what transformers' ``use_experts_implementation`` decorates: it takes rows, indices and weights.
Its router is a sibling. Both are found by structure, not by a list of models.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Site", "find_sites", "in_backward", "is_experts", "num_experts_of", "with_forward"]

_ROUTER_NAMES = frozenset({"gate", "router"})
_ROUTER_CLASSES = re.compile(r"(Router|Gating|Gate)$")


@dataclass(frozen=True)
class Site:
    """One place where tokens choose experts.

    Attributes
    ----------
    name : str
        Qualified name of the router; of the block around the experts where no router is a module of its own.
    router : nn.Module or None
        What turns rows into logits, or into logits, weights and indices.
    experts : nn.Module
        What takes rows, indices and weights.
    """

    name: str
    router: nn.Module | None
    experts: nn.Module


def is_experts(module: nn.Module) -> bool:
    """Whether transformers dispatches this module's forward through its experts interface."""
    return hasattr(module, "has_gate") and hasattr(module, "is_transposed") and hasattr(module, "config")


def num_experts_of(experts: nn.Module) -> int:
    """E: how many experts the router chooses among.

    Under expert parallelism a module holds only its rank's share, while the indices that reach it are global.
    """
    weight = getattr(experts, "down_proj", None)
    # A DTensor's shape is the global one.
    return int(weight.shape[0]) if isinstance(weight, Tensor) else int(experts.num_experts)  # type: ignore[arg-type]


def find_sites(model: nn.Module) -> list[Site]:
    """Find every place where a model routes, in the order of its modules.

    Raises
    ------
    TypeError
        If ``model`` is no module.
    ValueError
        If it has no experts that transformers knows, naming its class.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps; it has the same modules, under longer names
    modules = dict(model.named_modules())
    sites = []
    for path, module in modules.items():
        if not is_experts(module):
            continue
        around = path.rpartition(".")[0]
        router_path = _router_path(modules, path)
        router = None if router_path is None else modules[router_path]
        sites.append(Site(around if router_path is None else router_path, router, module))
    if not sites:
        raise ValueError(
            f"{type(model).__name__} has no mixture-of-experts layer: none of its modules is an experts module of "
            "transformers (a class decorated with use_experts_implementation)"
        )
    return sites


def _router_path(modules: dict[str, nn.Module], experts_path: str) -> str | None:
    """The router nearest to the experts: a sibling, or a sibling of what wraps them (as adapters do)."""
    inside = experts_path
    for _ in range(3):
        around = inside.rpartition(".")[0]
        for name, child in modules[around].named_children():
            path = f"{around}.{name}" if around else name
            if path != inside and (name in _ROUTER_NAMES or _ROUTER_CLASSES.search(type(child).__name__)):
                return path
        if not around:
            return None
        inside = around
    return None


@contextlib.contextmanager
def with_forward(module: nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Give one instance another ``forward``, made from its present one, and take it back at the end.

    Unlike a hook, this is something that ``torch.compile`` watches: a compiled model notices and compiles anew. Hooks
    that are on the module already (transformers records router logits by one) see what the new forward returns.
    """
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = wrap(module.forward)
    try:
        yield
    finally:
        if before is None:
            module.__dict__.pop("forward", None)
        else:
            module.__dict__["forward"] = before


def in_backward() -> bool:
    """Whether this thread runs a backward pass: a forward inside of it is activation checkpointing's second one."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
