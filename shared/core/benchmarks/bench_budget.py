"""Budgeted selection against HiGHS: seconds, ratio and agreement, on problems of different hardness.

    python shared/core/benchmarks/bench_budget.py [--quick] [--json rows.json]

HiGHS (``scipy.optimize.milp``) solves the same problem to proven optimality in the same process, in turns with ours.
Times are CPU seconds of the process, the least of the repetitions; the ratio is HiGHS / exact.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from shared_core import solve_mckp
from shared_core.files import atomic_write


def problems(quick):
    """Name → (costs [n, m], values [n, m], budget)."""
    rng = np.random.default_rng(0)
    n = 300 if quick else 3072
    steps = np.tile(np.arange(5), (n, 1))
    costs = np.sort(rng.integers(1, 1000, (n, 5)), axis=1)
    large = np.sort(rng.integers(1, 10**9, (n, 5)), axis=1)
    sizes = rng.integers(1000, 10**6, (n, 1))  # bits per weight of matrices of different sizes, distortion 4^-bits
    bits = np.arange(2, 7)
    return {
        "unit steps, concave": (steps, np.cumsum(-np.sort(-rng.random((n, 5)), axis=1), axis=1), 2 * n),
        "unit steps, non-concave": (steps, np.sort(rng.random((n, 5)), axis=1), 2 * n),
        "random costs, non-concave": (costs, np.sort(rng.random((n, 5)), axis=1), int(costs.sum() / 5)),
        "value follows cost": (costs, costs + rng.integers(0, 10, (n, 5)) * 1.0, int(costs.sum() / 5)),
        "costs to 1e9": (large, np.sort(rng.random((n, 5)), axis=1), int(large.sum() / 5)),
        "bits per matrix": (sizes * bits, -sizes * rng.random((n, 1)) * 4.0**-bits, int(4.2 * sizes.sum())),
        f"{2 * n} x 6, random": (
            rng.integers(0, 1000, (2 * n, 6)),
            rng.random((2 * n, 6)),
            600 * n,
        ),
    }


def highs(costs, values, budget, limit):
    n, m = costs.shape
    one_each = csr_array((np.ones(n * m), (np.repeat(np.arange(n), m), np.arange(n * m))))
    with _quiet():
        return milp(
            -values.ravel(),
            constraints=[
                LinearConstraint(one_each, 1, 1),
                LinearConstraint(costs.reshape(1, -1) * 1.0, -np.inf, budget),
            ],
            integrality=np.ones(n * m),
            bounds=Bounds(0, 1),
            options={"mip_rel_gap": 0, "time_limit": limit},
        )


@contextmanager
def _quiet():
    """HiGHS prints some lines of its own straight to the terminal."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def seconds(work):
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the size")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=20, help="seconds that HiGHS gets per problem")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    rows = []
    for name, (costs, values, budget) in track(problems(args.quick).items(), "solving", console=Console(stderr=True)):
        times = {"greedy": [], "exact": [], "highs": []}
        for repeat in range(args.repeats):
            took, greedy = seconds(lambda: solve_mckp(costs, values, budget, method="greedy"))  # noqa: B023 - runs now
            times["greedy"].append(took)
            took, exact = seconds(lambda: solve_mckp(costs, values, budget))  # noqa: B023
            times["exact"].append(took)
            if repeat == 0 or times["highs"][0] < 2:
                took, peer = seconds(lambda: highs(costs, values, budget, args.limit))  # noqa: B023
                times["highs"].append(took)
        best = {who: min(taken) for who, taken in times.items()}
        solved = peer.status == 0
        rows.append(
            {
                "what": name,
                "shape": list(costs.shape),
                "ours": best["exact"],
                "greedy": best["greedy"],
                "peer": best["highs"],
                "ratio": best["highs"] / best["exact"],
                "peer_finished": solved,
                "agree": bool(abs(-peer.fun - exact.value) <= 1e-7 * abs(exact.value)) if solved else None,
                "greedy_gap": (greedy.upper_bound - greedy.value) / abs(greedy.value),
                "machine": platform.processor() or platform.machine(),
            }
        )

    table = Table(title="solve_mckp against HiGHS, CPU seconds")
    for column in ("problem", "n x m", "greedy", "exact", "HiGHS", "HiGHS / exact", "agree", "greedy gap"):
        table.add_column(column, justify="left" if column == "problem" else "right")
    for row in rows:
        more = "" if row["peer_finished"] else "> "
        table.add_row(
            row["what"],
            " x ".join(map(str, row["shape"])),
            f"{row['greedy']:.3f}",
            f"{row['ours']:.3f}",
            f"{more}{row['peer']:.2f}",
            f"{more}{row['ratio']:.0f}",
            {True: "yes", False: "NO", None: "not finished"}[row["agree"]],
            f"{row['greedy_gap']:.1e}",
        )
    Console(width=120).print(table)
    if args.json:
        held = json.loads(args.json.read_text()) if args.json.exists() else []
        with atomic_write(args.json) as temporary:
            temporary.write_text(json.dumps([*held, *rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
