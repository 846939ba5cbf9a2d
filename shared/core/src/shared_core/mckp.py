r"""Methods for the multiple-choice knapsack: reductions, greedy with bound, exact.

:mod:`shared_core.budget` is the face. All groups' choices are kept in flat arrays sorted by group and cost, so that
groups of any size are handled at once.

Letters: ``n`` groups, ``m`` choices of a group, ``lam`` (:math:`\lambda`) the price of a unit of budget. `room` is the
budget less the cost of the cheapest choice of every group.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Choices(NamedTuple):
    """Choices of all groups, flat, sorted by (group, cost)."""

    group: Ints
    cost: Ints
    value: Floats
    number: Ints  # position within the group as the caller gave it

    def take(self, keep: NDArray[Any]) -> Self:
        """Keep these choices."""
        return type(self)(*(column[keep] for column in self))

    def starts(self) -> Ints:
        """Position of each group's first choice."""
        return np.flatnonzero(np.diff(self.group, prepend=-1))


class Greedy(NamedTuple):
    """A feasible selection with a bound; positions are into the flat choices."""

    position: Ints  # [n]
    base: Ints  # [n] the hull solution before the first increment that did not fit: the best of all groups at lam
    bound: float
    lam: float
    frontier: Floats


def undominated(choices: Choices) -> Choices:
    """Sort by (group, cost) and drop choices for which another one costs no more and is worth no less."""
    # The last key is the first criterion. At equal cost the most valuable comes first, then the lower index.
    choices = choices.take(np.lexsort((choices.number, -choices.value, choices.cost, choices.group)))
    if not choices.group.size:
        return choices
    # A running maximum within each group in one pass: ranks of the values, lifted so that a later group starts above
    # all earlier ones.
    rank = np.unique(choices.value, return_inverse=True)[1]
    lifted = choices.group * (int(rank.max()) + 1) + rank
    return choices.take(np.diff(np.maximum.accumulate(lifted), prepend=-1) > 0)


def _upper_hull(choices: Choices) -> Ints:
    """Positions of the corners of each group's upper concave hull (undominated choices in, slopes fall within a group).

    A point on or below the line between its two neighbours is no corner, so all such points can go at once.
    """
    keep = np.arange(len(choices.group))
    while True:
        group = choices.group[keep]
        # Quotients, not cross products: the greedy sorts by these very numbers, so they must fall strictly in a group.
        slope = np.diff(choices.value[keep]) / np.maximum(np.diff(choices.cost[keep]), 1)
        below = (group[:-2] == group[2:]) & (slope[:-1] <= slope[1:])
        if not below.any():
            return keep
        keep = np.delete(keep, np.flatnonzero(below) + 1)


def greedy(choices: Choices, room: int) -> Greedy:
    """Take hull increments by falling slope while they fit, then swap single groups upwards."""
    position = choices.starts()
    if not choices.group.size:
        return Greedy(position, position, 0.0, 0.0, np.zeros((1, 2)))
    hull = _upper_hull(choices)
    inner = np.flatnonzero(np.diff(choices.group[hull]) == 0)
    target = hull[inner + 1]  # an increment leads from one corner of the hull to the next
    extra = choices.cost[target] - choices.cost[hull[inner]]
    gain = choices.value[target] - choices.value[hull[inner]]
    slope = gain / extra
    # Stable, so that increments of a group stay in order.
    order = np.argsort(-slope, kind="stable")
    target, extra, gain, slope = target[order], extra[order], gain[order], slope[order]
    spent = np.cumsum(extra)
    frontier = np.zeros((len(target) + 1, 2))
    frontier[1:, 0], frontier[1:, 1] = spent, np.cumsum(gain)
    frontier += np.array([choices.cost[position].sum(), choices.value[position].sum()])

    fits = int(np.searchsorted(spent, room, side="right"))
    # Corners rise along the hull and the flat arrays, so the last increment of a group has the largest target.
    np.maximum.at(position, choices.group[target[:fits]], target[:fits])
    room -= int(spent[fits - 1]) if fits else 0
    value = float(choices.value[position].sum())
    if fits == len(target):
        return Greedy(position, position, value, 0.0, frontier)
    base, lam = position.copy(), float(slope[fits])
    bound = value + lam * room

    # The rest, one by one. Increments of a group build on each other: none is taken after one that did not fit.
    group = choices.group[target]
    small = extra[fits:] <= room
    first_too_large = np.full(len(position), len(target))
    np.minimum.at(first_too_large, group[fits:][~small], fits + np.flatnonzero(~small))
    tail = fits + np.flatnonzero(small)
    tail = tail[tail < first_too_large[group[tail]]]
    blocked: set[int] = set()
    for at, i, more in zip(target[tail].tolist(), group[tail].tolist(), extra[tail].tolist(), strict=True):
        if more > room:
            blocked.add(i)
        elif i not in blocked:
            position[i] = at
            room -= more
    _swap_up(choices, position, room)
    return Greedy(position, base, max(bound, float(choices.value[position].sum())), lam, frontier)


def _swap_up(choices: Choices, position: Ints, room: int) -> None:
    """Move single groups to better choices, hull corner or not, the largest gain first, while there is room."""
    while True:
        extra = choices.cost - choices.cost[position][choices.group]
        gain = choices.value - choices.value[position][choices.group]
        better = np.flatnonzero((extra <= room) & (gain > 0))
        if not better.size:
            return
        better = better[np.argsort(-gain[better], kind="stable")]
        moved: set[int] = set()
        for at, i, more in zip(better.tolist(), choices.group[better].tolist(), extra[better].tolist(), strict=True):
            if i not in moved and more <= room:
                position[i] = at
                room -= more
                moved.add(i)


def exact(choices: Choices, room: int, start: Greedy, tolerance: float, memory_limit: int) -> Ints:
    """Give an optimal position per group, from the greedy solution and its Lagrangian bound.

    The hull solution of the greedy ("base") is the best of every group at the price `lam`. With cost and value counted
    from there, a deviating choice loses ``lam c - v``, and every unit of budget left over loses `lam`. To beat the
    incumbent, all losses together must stay below the gap between bound and incumbent, which drops most choices
    outright and most partial sums afterwards.

    Raises
    ------
    ValueError
        If more than `memory_limit` bytes would be needed.
    """
    lam, base, incumbent = start.lam, start.base, start.position
    cost = choices.cost - choices.cost[base][choices.group]
    value = choices.value - choices.value[base][choices.group]
    loss = lam * cost - value
    loss[loss < tolerance] = 0.0  # rounding
    slack = room - int((choices.cost[base] - choices.cost[choices.starts()]).sum())
    # Whole-numbered values improve by whole steps; others by more than rounding.
    step = int(np.gcd.reduce(value.astype(np.int64))) if _whole(value) else 0
    margin = max(tolerance, step - tolerance)
    to_beat = float(value[incumbent].sum()) + margin

    # Costs that remain are multiples of a unit; slack that is not cannot be used, which may settle more choices.
    while True:
        live = np.flatnonzero((loss < lam * slack - to_beat) & (cost != 0))
        unit = int(np.gcd.reduce(cost[live]))
        if unit == 0:
            return incumbent
        if slack % unit == 0:
            break
        slack -= slack % unit

    group, first = np.unique(choices.group[live], return_index=True)
    least = np.minimum.reduceat(loss[live], first)
    parts = np.split(live, first[1:])
    # By least loss, as the search expects. Of equals, small deviations first: few partial sums then fill the slack.
    order = np.lexsort((np.minimum.reduceat(np.abs(cost[live]), first), least))
    improved = _best_deviations(
        [cost[parts[i]] for i in order],
        [value[parts[i]] for i in order],
        least[order],
        lam,
        slack,
        to_beat,
        margin,
        memory_limit,
    )
    if improved is None:
        return incumbent
    position = base.copy()
    for i, choice in zip(order, improved, strict=False):
        if choice:
            position[group[i]] = parts[i][choice - 1]
    return position


def _whole(value: Floats) -> bool:
    """Whether all values are whole numbers, and floats add them up exactly."""
    return bool(np.abs(value).sum() < 2**53 and (value == np.round(value)).all())


def _best_deviations(
    costs: list[Ints],
    values: list[Floats],
    least: Floats,
    lam: float,
    slack: int,
    to_beat: float,
    margin: float,
    memory_limit: int,
) -> list[int] | None:
    """Choose a deviation (1, 2, …) or none (0) per group; None if nothing feasible is worth more than `to_beat`.

    Dynamic programming over partial sums (cost, value) of the deviations so far, over budget or not, by rising cost.
    The groups come in the order of their `least` loss. With no further deviation a partial sum is a whole selection,
    which is noted if it is feasible and better; to become better still it needs at least one more, which loses at least
    the next group's `least`. A partial sum is kept only if that can pay, and if no other costs at most as much and is
    worth at least as much.
    """
    # What the groups to come can add to the cost, and take away, at most.
    add = np.append(np.cumsum([max(0, int(c.max())) for c in costs][::-1])[::-1][1:], 0)
    cut = np.append(np.cumsum([max(0, -int(c.min())) for c in costs][::-1])[::-1][1:], 0)
    next_least = np.append(least[1:], np.inf)
    cost, value = np.zeros(1, dtype=np.int64), np.zeros(1)
    history: list[NDArray[Any]] = []  # per group: which deviation and former partial sum each partial sum came from
    best: tuple[int, int] | None = None  # group at which the best was completed, and where it came from
    used = 0
    for i, (c, v) in enumerate(zip(costs, values, strict=True)):
        states = len(cost)
        transient = 64 * states * (len(c) + 1)
        if used + transient > memory_limit:
            raise ValueError(
                f"the exact method needs {(used + transient) / 2**20:.0f} MiB or more ({states} partial sums after {i} "
                f"of {len(costs)} undecided groups) but memory_limit is {memory_limit / 2**20:.0f} MiB: "
                "raise memory_limit or use method='greedy', which gives a bound too"
            )
        sums = np.add.outer(np.append(0, c), cost).ravel()
        worth = np.add.outer(np.append(0.0, v), value).ravel()
        whole = np.where(sums <= slack, worth, -np.inf)
        top = int(whole.argmax())
        if whole[top] > to_beat:
            to_beat, best = float(whole[top]) + margin, (i, top)
        reach = worth + lam * np.minimum(slack - sums, add[i]) - next_least[i]
        keep = np.flatnonzero((reach > to_beat) & (sums <= slack + cut[i]))
        if not keep.size:
            break
        # Stable: the deviations give sorted runs, which merge in linear time.
        keep = keep[np.argsort(sums[keep], kind="stable")]
        keep = keep[np.diff(np.maximum.accumulate(worth[keep]), prepend=-np.inf) > 0]
        keep = keep[np.append(np.diff(sums[keep]) > 0, True)]  # of equal costs the last, which is worth most
        cost, value = sums[keep], worth[keep]
        history.append(keep.astype(np.min_scalar_type(len(sums))))
        used += history[-1].nbytes
    if best is None:
        return None
    i, came_from = best
    picked = []
    for before in reversed(history[:i]):
        choice, state = divmod(came_from, len(before))
        picked.append(choice)
        came_from = int(before[state])
    return [came_from, *reversed(picked)]  # before the first group there is one partial sum, the empty one
