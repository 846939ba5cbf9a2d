"""Taking time on a busy machine: candidates take turns, and of each the fastest turn counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Prepare = Callable[[], Callable[[], object]]
"""Does what is not to be measured and returns what is."""

_MIN_TURNS = 3
# Whoever is slower than this multiple of the fastest, and costs more than this many seconds a turn, is not run a third
# time: no precision is needed to see that it is not the best.
_HOPELESS = 1.6
_HOPELESS_SECONDS = 0.2


@dataclass(frozen=True)
class Timing:
    """Fastest turn of one candidate.

    Attributes
    ----------
    cpu, wall : float
        Seconds of CPU time of the calling thread, and seconds on the clock.
    turns : int
        How many turns it had.
    """

    cpu: float
    wall: float
    turns: int


def interleave(candidates: Mapping[str, Prepare], *, seconds: float = 2.0, max_turns: int = 25) -> dict[str, Timing]:
    """Give each candidate a turn after the other, round after round, and keep each one's minimum.

    A disturbance (another process, a change of clock rate) then hits all candidates alike, and the minimum is what the
    machine does when nothing disturbs.

    Parameters
    ----------
    candidates : mapping of str to callable
        ``prepare() -> run``; only ``run()`` is timed.
    seconds : float, default 2
        Stop after the round in which this much time has passed, but not before three rounds.
    max_turns : int, default 25
        Stop after this many rounds.

    Returns
    -------
    dict of str to Timing
        In the order of `candidates`.
    """
    cpu: dict[str, list[float]] = {name: [] for name in candidates}
    wall: dict[str, list[float]] = {name: [] for name in candidates}
    started = time.perf_counter()
    for turn in range(max_turns):
        if turn >= _MIN_TURNS and time.perf_counter() - started > seconds:
            break
        fastest = min((min(times) for times in cpu.values() if times), default=0.0)
        for name, prepare in candidates.items():
            best = min(cpu[name], default=0.0)
            if turn >= 2 and best > _HOPELESS_SECONDS and best > _HOPELESS * fastest:
                continue
            run = prepare()
            wall_before, cpu_before = time.perf_counter(), time.thread_time()
            run()
            cpu_after, wall_after = time.thread_time(), time.perf_counter()
            cpu[name].append(cpu_after - cpu_before)
            wall[name].append(wall_after - wall_before)
    return {name: Timing(min(cpu[name]), min(wall[name]), len(cpu[name])) for name in candidates}
