"""How a transport is kept as arrays, strings and numbers; its two mixtures are stored by themselves.

Letters: ``K`` source components, ``L`` target components.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from omt.archive import rebuilding
from omt.growth import checked_growth
from omt.scalars import positive, whole
from omt.solver import Solution, checked_tau

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from omt.transport import Transport

FORMAT = 1
"""Version of the layout below; readers refuse any other by its number."""

_SETTINGS = ("epsilon", "tau", "tol", "max_iter")
_TABLES = ("cost_matrix", "coupling", "f", "g")
_NUMBERS = ("lam", "objective", "transport_cost", "marginal_error", "converged", "n_newton", "n_sinkhorn")


def transport_to_dict(transport: Transport) -> dict[str, Any]:
    """Everything but the mixtures, as values that h5ad and npz can hold; what is None is left out."""
    stored: dict[str, Any] = {
        "format": FORMAT,
        "epsilon": transport.epsilon,
        "tau": np.array(transport.tau),
        "tol": transport.tol,
        "max_iter": transport.max_iter,
    }
    stored |= {name: getattr(transport, name) for name in _TABLES}
    stored |= {name: getattr(transport.solution, name) for name in _NUMBERS}
    optional = {
        "forbidden": transport.forbidden,
        "growth": transport.growth,
        "strictly_complementary": transport.solution.strictly_complementary,
        "errors": transport.solution.errors,
        "newton": transport.solution.newton,
    }
    return stored | {name: value for name, value in optional.items() if value is not None}


@rebuilding("this stored transport")
def transport_fields(stored: Mapping[str, Any], shape: tuple[int, int]) -> dict[str, Any]:
    """Fields of a :class:`omt.Transport` between mixtures of ``shape = (K, L)`` components, from what was stored.

    Raises
    ------
    ValueError
        If the format version is unknown, an entry is missing or malformed, or a table does not fit the mixtures.
    """
    version = stored.get("format")
    if str(version) != str(FORMAT):
        raise ValueError(f"this transport is stored in format {version}; this version of omt reads format {FORMAT}")
    missing = [name for name in (*_SETTINGS, *_TABLES, *_NUMBERS) if name not in stored]
    if missing:
        raise ValueError(f"this stored transport has no {missing[0]}")
    K, L = shape
    tables: dict[str, NDArray[np.float64]] = {}
    for name, expected in zip(_TABLES, ((K, L), (K, L), (K,), (L,)), strict=True):
        tables[name] = np.asarray(stored[name], dtype=np.float64)
        if tables[name].shape != expected:
            raise ValueError(
                f"{name} of this stored transport has shape {tables[name].shape}; its mixtures need {expected}"
            )
        if not np.isfinite(tables[name]).all():
            raise ValueError(f"{name} of this stored transport has entries that are not finite")
    if (tables["coupling"] < 0.0).any():
        raise ValueError("coupling of this stored transport has negative entries")
    if not tables["coupling"].sum() > 0.0:
        raise ValueError("coupling of this stored transport is zero everywhere")
    for name in ("lam", "epsilon"):
        if not (np.isfinite(float(stored[name])) and float(stored[name]) >= 0.0):
            raise ValueError(f"{name} of this stored transport is {stored[name]}; it must be a finite number ≥ 0")
    proven, forbidden = stored.get("strictly_complementary"), stored.get("forbidden")
    growth = stored.get("growth")
    solution = Solution(
        coupling=tables["coupling"],
        f=tables["f"],
        g=tables["g"],
        lam=float(stored["lam"]),
        objective=float(stored["objective"]),
        transport_cost=float(stored["transport_cost"]),
        converged=bool(stored["converged"]),
        marginal_error=float(stored["marginal_error"]),
        n_newton=int(stored["n_newton"]),
        n_sinkhorn=int(stored["n_sinkhorn"]),
        strictly_complementary=None if proven is None else bool(proven),
        **_history(stored),
    )
    return {
        "cost_matrix": tables["cost_matrix"],
        "solution": solution,
        "epsilon": float(stored["epsilon"]),
        "tau": checked_tau(np.asarray(stored["tau"], dtype=np.float64)),
        "forbidden": None if forbidden is None else np.asarray(forbidden, dtype=bool),
        "tol": positive(float(stored["tol"]), "tol of this stored transport"),
        "max_iter": whole(int(stored["max_iter"]), "max_iter of this stored transport"),
        "growth": None if growth is None else checked_growth(growth, K, "growth of this stored transport"),
    }


def _history(stored: Mapping[str, Any]) -> dict[str, Any]:
    """What the solver recorded of its steps, if it is there."""
    if "errors" not in stored or "newton" not in stored:
        return {}
    errors, newton = np.asarray(stored["errors"], dtype=np.float64), np.asarray(stored["newton"], dtype=bool)
    if errors.ndim != 1 or errors.shape != newton.shape:
        raise ValueError(f"errors and newton of this stored transport have shapes {errors.shape} and {newton.shape}")
    return {"errors": errors, "newton": newton}
