r"""Budgeted selection: one choice per group under a common budget (the multiple-choice knapsack). numpy only.

.. math:: \max \sum_i v_{i,j(i)} \quad\text{subject to}\quad \sum_i c_{i,j(i)} \le B .

Letters: ``n`` groups, ``m`` choices of a group, ``B`` budget.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shared_core.mckp import Choices, Floats, Ints, exact, greedy, undominated

# Sums of costs stay exact in int64, with room for one addition.
_MOST_COST = 2**62


class InfeasibleBudgetError(ValueError):
    """Even the cheapest choice of every group exceeds the budget.

    Attributes
    ----------
    required
        The least budget for which the problem has a solution.
    """

    def __init__(self, message: str, *, required: int) -> None:
        super().__init__(message)
        self.required = required

    def __reduce__(self) -> tuple[Any, ...]:
        # The default would call __init__ without `required`, in a process pool for example.
        return _rebuild_error, (str(self), self.required)


def _rebuild_error(message: str, required: int) -> InfeasibleBudgetError:
    return InfeasibleBudgetError(message, required=required)


@dataclass(frozen=True, eq=False)
class Allocation:
    """A choice for every group, and how good it can be at most.

    Attributes
    ----------
    choice
        int64 ``[n]``: the chosen index within each group, as the caller numbered it.
    value, cost
        Sums over the chosen.
    upper_bound
        No feasible selection has a larger value; equals `value` when `optimal`.
    multiplier
        The price of a unit of budget: how fast the bound grows with the budget. 0 when the budget does not bind.
    optimal
        Whether `value` is proven to be the maximum (up to the rounding of a sum of floats).
    frontier
        With ``pareto=True``: float64 ``[p, 2]``, the (cost, value) corners of the concave frontier over all budgets, in
        ascending order. Each corner is a feasible selection, and optimal for the budget that it costs.
    """

    choice: Ints
    value: float
    cost: int
    upper_bound: float
    multiplier: float
    optimal: bool
    frontier: Floats | None = None


def solve_mckp(
    costs: ArrayLike | Sequence[ArrayLike],
    values: ArrayLike | Sequence[ArrayLike],
    budget: float,
    *,
    mask: ArrayLike | None = None,
    method: Literal["exact", "greedy"] = "exact",
    memory_limit: int = 2**30,
    pareto: bool = False,
) -> Allocation:
    r"""Pick exactly one choice per group; maximise the sum of values with the sum of costs within `budget`.

    A 0-1 knapsack, or "at most one per group", is a problem whose groups contain a choice of cost 0 and value 0.

    Parameters
    ----------
    costs
        Integers >= 0: one array per group (of any length), or an array ``[n, m]``.
    values
        Finite real numbers of the same shape, also negative.
    budget
        The common budget, in units of cost.
    mask
        For ``[n, m]`` input: bool ``[n, m]``, True where a choice exists. What it hides is not looked at.
    method
        ``"greedy"``: increments of each group's upper concave hull in the order of their slope, as far as they fit;
        then single swaps [1]_. Always feasible, O(nm log nm), with an upper bound (the Lagrangian bound at the slope of
        the first increment that did not fit). ``"exact"``: the greedy solution if it meets its bound;
        otherwise choices that cannot be part of anything better are dropped (by their reduced cost against the same
        bound), and dynamic programming over undominated (cost, value) sums, cut by that bound, decides the rest [2]_.
    memory_limit
        Most bytes that the exact method may use. The problem is NP-hard: an instance whose greedy solution stays away
        from its bound, with very many different costs, may need more.
    pareto
        Also give the concave frontier over all budgets.

    Returns
    -------
    Allocation
        Where choices of a group have the same cost and value, the first is taken.

    Raises
    ------
    InfeasibleBudgetError
        If the cheapest choices together exceed `budget`; ``.required`` says what they cost. It is a ``ValueError``.
    ValueError
        If a group is empty, a value is not finite, a cost is negative or fractional, shapes differ, `method` is
        unknown, or the exact method would need more than `memory_limit`.

    References
    ----------
    .. [1] Sinha and Zoltners, "The multiple-choice knapsack problem", Operations Research 27 (1979).
    .. [2] Pisinger, "A minimal algorithm for the multiple-choice knapsack problem", EJOR 83 (1995).

    Examples
    --------
    >>> a = solve_mckp(costs=[[0, 2, 3], [0, 1, 4]], values=[[0.0, 5.0, 6.0], [0.0, 1.0, 7.0]], budget=6)
    >>> a.choice, a.value, a.cost, a.optimal
    (array([1, 2]), 12.0, 6, True)
    >>> solve_mckp([[2, 3], [4]], [[1.0, 2.0], [0.0]], budget=5)
    Traceback (most recent call last):
    ...
    shared_core.budget.InfeasibleBudgetError: budget 5 is less than 6, the cost of the cheapest choice of every group
    """
    if method not in ("exact", "greedy"):
        raise ValueError(f"method must be 'exact' or 'greedy', not {method!r}")
    everything = _parse(costs, values, mask)
    choices = undominated(everything)
    base = int(choices.cost[choices.starts()].sum())
    room = _parse_budget(budget, base, choices) - base

    start = greedy(choices, room)
    position, bound = start.position, start.bound
    # Sums of floats that differ by less cannot be told apart.
    tolerance = 4 * float(np.finfo(float).eps) * (float(np.abs(choices.value[position]).sum()) + abs(start.lam * room))
    optimal = bool(bound <= choices.value[position].sum() + tolerance)
    if method == "exact" and not optimal:
        position = exact(choices, room, start, tolerance, memory_limit)
        optimal = True
    value = float(choices.value[position].sum())
    return Allocation(
        choice=choices.number[position],
        value=value,
        cost=int(choices.cost[position].sum()),
        upper_bound=value if optimal else bound,
        multiplier=start.lam,
        optimal=optimal,
        frontier=start.frontier if pareto else None,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Input


def _parse(costs: Any, values: Any, mask: Any) -> Choices:
    """Check the input and lay all choices out flat."""
    cost_rows, value_rows = _rows(costs, "costs"), _rows(values, "values")
    if len(cost_rows) != len(value_rows):
        raise ValueError(f"costs has {len(cost_rows)} groups but values has {len(value_rows)}")
    sizes = np.array([row.size for row in cost_rows], dtype=np.int64)
    value_sizes = np.array([row.size for row in value_rows], dtype=np.int64)
    if (sizes != value_sizes).any():
        i = int(np.flatnonzero(sizes != value_sizes)[0])
        raise ValueError(f"group {i} has {sizes[i]} costs but {value_sizes[i]} values")
    group = np.repeat(np.arange(len(sizes)), sizes)
    index = np.arange(len(group)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    cost = np.concatenate(cost_rows) if len(cost_rows) else np.empty(0)
    whole = cost
    if cost.dtype.kind == "f" and any(row.dtype.kind in "iu" for row in cost_rows):
        # A group of floats made floats of all groups, which hold integers beyond 2**53 inexactly.
        with np.errstate(invalid="ignore"):
            whole = np.concatenate([row.astype(np.int64) for row in cost_rows])
    value = np.concatenate([*value_rows, np.empty(0)]) if len(value_rows) else np.empty(0)
    for name, column in (("costs", cost), ("values", value)):
        if column.dtype.kind not in "biuf":
            raise TypeError(f"{name} must hold real numbers, not {column.dtype}")

    if mask is not None:
        shown = np.asarray(mask)
        if shown.dtype != np.bool_:
            raise TypeError(f"mask must be bool, not {shown.dtype}")
        if shown.ndim != 2 or shown.shape[0] != len(sizes) or (sizes != shown.shape[1]).any():
            raise ValueError(f"mask {list(shown.shape)} must have the shape [n, m] of costs and values")
        keep = shown.ravel()
        group, index, cost, whole, value = group[keep], index[keep], cost[keep], whole[keep], value[keep]
        sizes = shown.sum(1)
    if (sizes == 0).any():
        raise ValueError(f"group {int(np.flatnonzero(sizes == 0)[0])} is empty: it has no choice to pick")
    for wrong, what in (
        (~np.isfinite(cost), "cost {c} is not finite"),
        (cost < 0, "cost {c} is negative"),
        (cost != np.floor(cost), "cost {c} is fractional: costs are integers, so scale them to whole units"),
        (~np.isfinite(value), "value {v} is not finite"),
    ):
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            raise ValueError(f"group {group[at]}, choice {index[at]}: " + what.format(c=cost[at], v=value[at]))
    if np.abs(value).max(initial=0.0) > np.finfo(np.float64).max / (4 * len(value) + 1):
        raise ValueError("values add up to more than a float can hold: divide them by a common unit")
    if float(np.sum(cost, dtype=np.float64)) >= _MOST_COST:
        raise ValueError("costs add up to more than 2**62: divide them and the budget by a common unit")
    return Choices(group, whole.astype(np.int64), value.astype(np.float64), index)


def _rows(table: Any, name: str) -> list[NDArray[Any]]:
    """Split `table` into one 1-D array per group."""
    if isinstance(table, np.ndarray) and table.dtype != object:
        if table.ndim != 2:
            raise ValueError(f"{name} must have shape [n, m] or be a list of arrays, not {list(table.shape)}")
        return list(table)
    if np.isscalar(table):
        raise ValueError(f"{name} must be one array per group, not {table!r}")
    rows = [np.asarray(row) for row in table]
    for i, row in enumerate(rows):
        if row.ndim != 1:
            raise ValueError(f"{name} of group {i} must be one-dimensional, not of shape {list(row.shape)}")
    # An empty list is float by numpy's default and says nothing about the dtype of the rest.
    return [row if row.size else row.astype(np.int64) for row in rows]


def _parse_budget(budget: float, base: int, choices: Choices) -> int:
    """Give the budget as an integer that leaves room for the cheapest choices and is not larger than ever needed."""
    try:
        nan = math.isnan(budget)
    except OverflowError:  # an int that no float can hold
        nan = False
    except TypeError:
        raise TypeError(f"budget must be a number, not {type(budget).__name__}") from None
    if nan:
        raise ValueError("budget is NaN")
    if budget < base:
        raise InfeasibleBudgetError(
            f"budget {budget} is less than {base}, the cost of the cheapest choice of every group", required=base
        )
    last = np.append(choices.starts()[1:], len(choices.group)) - 1
    most = int(choices.cost[last].sum()) if choices.group.size else 0
    return most if budget >= most else math.floor(budget)
