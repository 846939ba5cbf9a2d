"""Optimal mixture transport: optimal transport between mixtures of subpopulations.

Both sides of a transport problem are mixtures of a few components; the plan is a small table between components
plus one closed-form plan inside each pair. Names are loaded on first use, so that ``import omt`` stays light.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version as _distribution_version
from typing import TYPE_CHECKING

# `transport` is a function and also the module that defines it. Importing the module here, first, binds the function
# for good: a later import of the module finds it loaded and leaves the attribute alone. The module needs numpy only.
from omt.problem import mw2, transport
from omt.transport import Transport

if TYPE_CHECKING:
    from omt import datasets, metrics, pl, tl
    from omt.chain import TransportChain
    from omt.fitting.em import fit_mixture
    from omt.mixture import Mixture
    from omt.pairs.cost import component_cost
    from omt.plans.sample import SamplePlan
    from omt.stability.certificate import stability_certificate

__all__ = [
    "Mixture",
    "SamplePlan",
    "Transport",
    "TransportChain",
    "component_cost",
    "datasets",
    "fit_mixture",
    "metrics",
    "mw2",
    "pl",
    "stability_certificate",
    "tl",
    "transport",
]

__version__ = _distribution_version("omt")

_HOME = {
    "Mixture": "omt.mixture",
    "SamplePlan": "omt.plans.sample",
    "TransportChain": "omt.chain",
    "component_cost": "omt.pairs.cost",
    "fit_mixture": "omt.fitting.em",
    "stability_certificate": "omt.stability.certificate",
}
_SUBMODULES = frozenset({"datasets", "metrics", "pl", "tl"})


def __getattr__(name: str) -> object:
    """Load a public name when it is first asked for."""
    if name in _SUBMODULES:
        return import_module(f"omt.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'omt' has no attribute {name!r}; public names are: {', '.join(__all__)}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
