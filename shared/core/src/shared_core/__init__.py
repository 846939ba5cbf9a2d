"""Routers, balance, experts and budgeted selection for mixtures of experts.

Four concepts: *routing* (which experts serve which row), *balance* (how evenly), *experts* (running them fast) and
*budget* (one choice per group under a common cost). Names are imported when first used, so ``import shared_core`` is
cheap, and everything of :mod:`shared_core.budget`, :mod:`shared_core.load`, :mod:`shared_core.traces` and
:mod:`shared_core.assignment` works with numpy alone. The other names need the extra ``shared-core[torch]``.

Examples
--------
>>> import shared_core
>>> shared_core.load_stats([5, 3, 4, 4]).max_violation
0.25
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shared_core.assignment import soft_assign
    from shared_core.balance import importance_loss, load_balance_loss, noisy_load_loss, z_loss
    from shared_core.balancer import BiasBalancer
    from shared_core.budget import Allocation, InfeasibleBudgetError, solve_mckp
    from shared_core.dispatch import DispatchPlan, combine, permute
    from shared_core.experts import GroupedExperts, experts_forward
    from shared_core.gates import NoisyGate
    from shared_core.layer import MoE
    from shared_core.load import LoadStats, load_stats
    from shared_core.lora import LoRAExperts
    from shared_core.priors import mix_prior, prior_kl
    from shared_core.router import Router, route
    from shared_core.routing import Routing
    from shared_core.routing_ops import capacity, routing_overlap
    from shared_core.selection import ExpertChoice, GroupCappedTopK, GroupLimitedTopK, TopK
    from shared_core.traces import RoutingTrace

__version__ = version("shared-core")

__all__ = [
    "Allocation",
    "BiasBalancer",
    "DispatchPlan",
    "ExpertChoice",
    "GroupCappedTopK",
    "GroupLimitedTopK",
    "GroupedExperts",
    "InfeasibleBudgetError",
    "LoRAExperts",
    "LoadStats",
    "MoE",
    "NoisyGate",
    "Router",
    "Routing",
    "RoutingTrace",
    "TopK",
    "capacity",
    "combine",
    "experts_forward",
    "importance_loss",
    "load_balance_loss",
    "load_stats",
    "mix_prior",
    "noisy_load_loss",
    "permute",
    "prior_kl",
    "route",
    "routing_overlap",
    "soft_assign",
    "solve_mckp",
    "z_loss",
]

# The table that the lazy import follows: where each name lives. A test compares it with __all__ and the imports above.
_NAMES_OF: dict[str, tuple[str, ...]] = {
    "assignment": ("soft_assign",),
    "balance": ("importance_loss", "load_balance_loss", "noisy_load_loss", "z_loss"),
    "balancer": ("BiasBalancer",),
    "budget": ("Allocation", "InfeasibleBudgetError", "solve_mckp"),
    "dispatch": ("DispatchPlan", "combine", "permute"),
    "experts": ("GroupedExperts", "experts_forward"),
    "gates": ("NoisyGate",),
    "layer": ("MoE",),
    "load": ("LoadStats", "load_stats"),
    "lora": ("LoRAExperts",),
    "priors": ("mix_prior", "prior_kl"),
    "router": ("Router", "route"),
    "routing": ("Routing",),
    "routing_ops": ("capacity", "routing_overlap"),
    "selection": ("ExpertChoice", "GroupCappedTopK", "GroupLimitedTopK", "TopK"),
    "traces": ("RoutingTrace",),
}
_HOME = {name: module for module, names in _NAMES_OF.items() for name in names}
# Reached as attributes, e.g. shared_core.plot.expert_load, without an import statement of their own.
_SUBMODULES = frozenset(_NAMES_OF) | {"integrations", "kernels", "parallel", "plot"}


def __getattr__(name: str) -> Any:
    """Import a public name from its module when it is first used."""
    module = _HOME.get(name, name if name in _SUBMODULES else None)
    if module is None:
        raise AttributeError(f"module 'shared_core' has no attribute {name!r}")
    try:
        loaded = import_module(f"shared_core.{module}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "torch":
            raise
        raise ImportError(f"shared_core.{name} needs PyTorch: pip install 'shared-core[torch]'") from error
    value = getattr(loaded, name) if name in _HOME else loaded
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, imported yet or not."""
    return sorted({*globals(), *__all__, *_SUBMODULES})
