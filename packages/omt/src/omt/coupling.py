"""Tables between components that follow from a transport: conditional laws, and couplings of other weights.

Letters: ``K`` source components, ``L`` target components.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from omt.growth import grown_weights
from omt.solver import solve

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from omt.transport import Transport

__all__ = ["conditional_table", "coupling_for"]

_EMPTY = 1e-16  # share of the mass below which a component has no samples: it would not change a float64 sum
_FAINT = 1e-250  # row mass below which a row of the coupling has lost its digits


def conditional_table(transport: Transport, direction: Literal["forward", "backward"]) -> NDArray[np.float64]:
    """Coupling with rows scaled to sum 1: ``[K, L]`` forward, ``[L, K]`` backward.

    Raises
    ------
    ValueError
        If the direction is another word.
    """
    if direction not in {"forward", "backward"}:
        raise ValueError(f"direction is {direction!r}; it must be 'forward' or 'backward'")
    there = transport if direction == "forward" else transport.inverse()
    table = np.array(there.coupling)
    mass = table.sum(axis=1)
    faint = mass < _FAINT
    if faint.any() and there.lam > 0.0:  # died out: the law of what little is left follows from the potentials
        cost = there.cost_matrix if there.forbidden is None else np.where(there.forbidden, np.inf, there.cost_matrix)
        exponent = np.log(there.target.weights) + (there.g - cost[faint]) / there.lam
        table[faint] = np.exp(exponent - exponent.max(axis=1, keepdims=True))
        mass[faint] = table[faint].sum(axis=1)
    conditional: NDArray[np.float64] = table / mass[:, None]
    return conditional


def coupling_for(transport: Transport, a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Coupling ``[K, L]`` of other weights at the same cost and temperature; components without weight get no mass.

    Parameters
    ----------
    transport : Transport
        Where cost, temperature, ``tau`` and what is forbidden come from.
    a, b : arrays [K], [L]
        Weights ≥ 0, of equal sum where the transport is balanced; the source's before growth.

    Raises
    ------
    ValueError
        If what is forbidden leaves no plan between these weights.
    """
    mass = float(a.sum())
    a, b = a / mass, b / mass
    source, target = transport.source, transport.target
    if max(np.abs(a - source.weights).max(), np.abs(b - target.weights).max()) < _EMPTY:
        return mass * transport.coupling
    a = grown_weights(a, transport.growth)
    rows, columns = np.flatnonzero(a > _EMPTY), np.flatnonzero(b > _EMPTY)
    part = np.ix_(rows, columns)
    W = np.zeros((source.K, target.K))
    W[part] = solve(
        transport.cost_matrix[part],
        a[rows],
        b[columns],
        lam=transport.lam,
        tau=transport.tau,
        tol=transport.tol,
        max_iter=transport.max_iter,
        forbidden=None if transport.forbidden is None else transport.forbidden[part],
        source_names=[source.names[k] for k in rows],
        target_names=[target.names[l] for l in columns],
    ).coupling
    return mass * W
