"""Where a model routes: its experts modules, the routers that belong to them, and how one instance gets a new forward.

An experts module is what transformers' ``use_experts_implementation`` decorates: it takes rows, indices and weights.
Its router is a sibling. Both are found by structure, not by a list of models.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

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
    that are on the module already (transformers records router logits by one) see what the new forward returns. Blocks
    may end in any order. Copies of the instance (``copy.deepcopy``, ``torch.save``) run their own forward.
    """
    with _lock:
        layers = _layers.get(module)
        if layers is None or module.__dict__.get("forward") is not layers.installed:
            layers = _layers[module] = _Layers(module, below=layers)
        layers.wraps.append(wrap)
        layers.install()
    try:
        yield
    finally:
        with _lock:
            layers.wraps = [other for other in layers.wraps if other is not wrap]
            layers.install()


class _Layers:
    """What stands in for one instance's forward at present, innermost first."""

    def __init__(self, module: nn.Module, below: _Layers | None) -> None:
        self.module = module
        self.before = module.__dict__.get("forward")
        self.original: Callable[..., Any] = module.forward
        self.below = below  # in place before somebody else put a forward of theirs on the instance
        self.wraps: list[Callable[[Callable[..., Any]], Callable[..., Any]]] = []
        self.composed: Callable[..., Any] | None = None
        self.installed: MethodType | None = None

    def install(self) -> None:
        """Compose the wraps anew; without any, leave the instance as it was."""
        module = self.module
        if self.wraps:
            self.composed = self.original
            for wrap in self.wraps:
                self.composed = wrap(self.composed)
            self.installed = module.__dict__["forward"] = _method(self, module)
            return
        if self.before is None:
            module.__dict__.pop("forward", None)
        else:
            module.__dict__["forward"] = self.before
        if self.below is None:
            _layers.pop(module, None)
        else:
            _layers[module] = self.below
        # Copies made meanwhile hold this object, and must not hold the instance by it.
        del self.module, self.original
        self.composed = self.installed = None


_lock = threading.Lock()
_layers: WeakKeyDictionary[nn.Module, _Layers] = WeakKeyDictionary()


def _method(layers: _Layers, module: nn.Module) -> MethodType:
    """The forward to install: a bound method, because copying one binds it to the copy.

    A closure would run on the weights of the copied instance. Its name is the class's, which unpickling looks up.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        composed = layers.composed
        if composed is not None and self is layers.module:
            return composed(*args, **kwargs)
        before = layers.before
        if before is None:
            return type(self).forward(self, *args, **kwargs)
        return getattr(before, "__func__", functools.partial(_drop_first, before))(self, *args, **kwargs)

    return MethodType(forward, module)


def _drop_first(function: Callable[..., Any], _: object, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def in_backward() -> bool:
    """Whether this thread runs a backward pass: a forward inside of it is activation checkpointing's second one."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
