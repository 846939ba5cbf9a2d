"""From samples to a map, fit included: omt against POT and ott-jax, N from 10³ to 10⁶, d from 2 to 50.

Run: ``python packages/omt/benchmarks/bench_end_to_end.py [--d 2 20 50] [--n 1000 ...] [--json FILE]``. Ten separated
components that each move by their own affine map. Every measurement is a process of its own on one thread: CPU seconds
after imports (and after a first call, which compiles, for ott-jax), peak memory beyond what imports took, error of the
map on 2000 new samples (L2-UVP, percent; lower is better), and mass that the plan moves between samples of the same
true component (in two dimensions surplus mass travels from neighbour to neighbour, so even the exact plan stays below
the bound). Peers are run up to the size given in ``PEERS``; where they stop, the table says what they would need.

A second table gives the time of the transport problem and its map alone, which must not depend on N.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from omt import datasets
from omt.fitting.em import fit_mixture
from omt.metrics import l2_uvp
from omt.problem import transport

K = 10
N_TEST = 2000
# Largest n of each peer: beyond, a run takes minutes or the n × n matrices do not fit.
PEERS = {
    "POT emd": 8000,
    "POT sinkhorn": 1000,
    "ott sinkhorn": 1000,
    "ott low rank": 1000,
    "ott low rank g=100": 1000,
}

Array = np.ndarray
Method = Callable[[Array, Array, Array], "tuple[Array, Callable[[Array, Array], float] | None]"]


def problem(d: int) -> datasets.KnownMap:
    """Ten components that stay apart; in two dimensions that takes larger distances and smaller moves."""
    return datasets.known_map(K, d) if d > 5 else datasets.known_map(K, d, separation=15.0, displacement=1.5)


def resident_mib(which: str) -> float:
    """Resident memory of this process now (``VmRSS``), or at its peak since :func:`forget_peak` (``VmHWM``)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{which}:"):
            return int(line.split()[1]) / 1024
    raise OSError("this system does not tell a process's memory")


def forget_peak() -> None:
    """Let the peak begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


def same(x_true: Array, y_true: Array) -> Array:
    """One-hot components ``[n, K]``, ``[m, K]`` of both samples."""
    return np.eye(K)[x_true], np.eye(K)[y_true]


# ------------------------------------------------------------------------------------------------------- the methods
def run_omt(X: Array, Y: Array, x_test: Array) -> tuple[Array, Any]:
    """Two fits with the default settings, the plan and its map."""
    P, Q = (fit_mixture(Z, K, progress=False) for Z in (X, Y))
    plan = transport(P, Q)

    def mass(x_true: Array, y_true: Array) -> float:
        x, y = same(x_true, y_true)
        R, S = (np.asarray(m.responsibilities(Z)) for m, Z in ((P, X), (Q, Y)))
        shares = [(T.T @ one) / T.sum(axis=0)[:, None] for T, one in ((R, x), (S, y))]
        return float(np.sum(shares[0] * (plan.coupling @ shares[1])))

    return plan.map(x_test), mass


def run_emd(X: Array, Y: Array, x_test: Array) -> tuple[Array, Any]:
    """Exact transport between samples; new samples move like their nearest neighbour (``ot.da``)."""
    import ot

    model = ot.da.EMDTransport(max_iter=10_000_000, metric="sqeuclidean").fit(Xs=X, Xt=Y)
    return model.transform(Xs=x_test), lambda x, y: blockwise_mass(model.coupling_, x, y)


def run_sinkhorn(X: Array, Y: Array, x_test: Array) -> tuple[Array, Any]:
    """Entropic transport between samples at 0.01 of the mean cost, in the log domain (``exp(-C/reg)`` underflows)."""
    import ot

    C = ot.dist(X, Y)
    reg = 0.01 * float(C.mean())
    model = ot.da.SinkhornTransport(reg_e=reg, max_iter=1000, tol=1e-4, metric="sqeuclidean")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(Xs=X, Xt=Y)
    return model.transform(Xs=x_test), lambda x, y: blockwise_mass(model.coupling_, x, y)


def run_ott(X: Array, Y: Array, x_test: Array) -> tuple[Array, Any]:
    """Entropic transport between samples at 0.01 of the mean cost; the entropic map for new samples."""
    from ott.geometry import pointcloud
    from ott.solvers import linear

    geometry = pointcloud.PointCloud(X, Y, epsilon=0.01, scale_cost="mean", batch_size=None)
    out = linear.solve(geometry, max_iterations=2000)
    images = out.to_dual_potentials().transport(x_test)
    return np.asarray(images), lambda x, y: blockwise_mass(np.asarray(out.matrix), x, y)


def run_low_rank(gamma: float | None) -> Method:
    """Low-rank transport of rank K; it has no map, so new samples move like their nearest neighbour."""

    def run(X: Array, Y: Array, x_test: Array) -> tuple[Array, Any]:
        from ott.geometry import pointcloud
        from ott.problems.linear import linear_problem
        from ott.solvers.linear import sinkhorn_lr
        from scipy.spatial import cKDTree

        geometry = pointcloud.PointCloud(X, Y, scale_cost="mean")
        options = {} if gamma is None else {"gamma": gamma}
        out = sinkhorn_lr.LRSinkhorn(rank=K, **options)(linear_problem.LinearProblem(geometry))
        Q, R, g = (np.asarray(v) for v in (out.q, out.r, out.g))
        images = (Q / Q.sum(axis=1, keepdims=True)) @ ((R.T @ Y) / g[:, None])
        nearest = cKDTree(X).query(x_test)[1]

        def mass(x_true: Array, y_true: Array) -> float:
            x, y = same(x_true, y_true)
            return float(np.sum((Q.T @ x) / g[:, None] * (R.T @ y)) / Q.sum())

        return x_test + images[nearest] - X[nearest], mass

    return run


def blockwise_mass(coupling: Array, x_true: Array, y_true: Array) -> float:
    """Share of a dense plan between samples of the same true component."""
    x, y = same(x_true, y_true)
    return float(np.trace(x.T @ coupling @ y) / coupling.sum())


METHODS: dict[str, Method] = {
    "omt": run_omt,
    "POT emd": run_emd,
    "POT sinkhorn": run_sinkhorn,
    "ott sinkhorn": run_ott,
    "ott low rank": run_low_rank(None),
    "ott low rank g=100": run_low_rank(100.0),
}


def measure(method: str, n: int, d: int) -> dict[str, object]:
    """One method on one problem, in this process."""
    for backend in ("PYTORCH", "JAX", "CUPY", "TENSORFLOW"):  # POT would import each of them
        os.environ.setdefault(f"POT_BACKEND_DISABLE_{backend}", "1")
    if method.startswith("ott"):
        import jax

        jax.config.update("jax_enable_x64", val=True)
    truth = problem(d)
    rng = np.random.default_rng([n, d])
    X, x_true = truth.sample_source(n, rng)
    Y, y_true = truth.sample_target(n, rng)
    x_test, component = truth.sample_source(N_TEST, rng)
    run = METHODS[method]
    # First call: imports, and compilation where there is any; it does not count.
    small = slice(0, n if method.startswith("ott") else 200)
    run(X[small], Y[small], x_test[:200] if n <= 200 else x_test)
    forget_peak()
    before, start = resident_mib("VmRSS"), time.process_time()
    images, mass = run(X, Y, x_test)
    seconds = time.process_time() - start
    memory = resident_mib("VmHWM") - before
    return {
        "method": method, "n": n, "d": d, "seconds": seconds,
        "memory MiB": None if method.startswith("ott") else memory,  # the first call has used it already
        "error": l2_uvp(images, truth.map(x_test, component)),
        "mass": None if mass is None else mass(x_true, y_true),
        "bound": float(np.minimum(np.bincount(x_true, minlength=K), np.bincount(y_true, minlength=K)).sum() / n),
    }  # fmt: skip


def in_own_process(*arguments: object) -> dict[str, Any]:
    """Measure in a fresh process."""
    command = [sys.executable, __file__, "--one", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{arguments} failed: {done.stderr.strip().splitlines()[-1] if done.stderr else 'killed'}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def solve_and_map(sizes: list[int], d: int, rounds: int = 20) -> tuple[list[float], list[float]]:
    """CPU seconds of both fits at each size, and the least of ``rounds`` for the plan and its map of 2000 samples.

    Rounds go over the sizes in turn, so that what else the machine does hits all of them.
    """
    truth = problem(d)
    fits, fit_seconds = [], []
    for n in sizes:
        rng = np.random.default_rng([n, d])
        X, Y = truth.sample_source(n, rng)[0], truth.sample_target(n, rng)[0]
        start = time.process_time()
        fits.append([fit_mixture(Z, K, n_init=1, progress=False) for Z in (X, Y)])
        fit_seconds.append(time.process_time() - start)
    x_test = truth.sample_source(N_TEST, np.random.default_rng(d))[0]
    least = [np.inf] * len(sizes)
    for _ in range(rounds):
        for i, (P, Q) in enumerate(fits):
            start = time.process_time()
            transport(P, Q).map(x_test)
            least[i] = min(least[i], time.process_time() - start)
    return fit_seconds, least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, nargs="+", default=[1000, 4000, 8000, 50_000, 1_000_000])
    parser.add_argument("--d", type=int, nargs="+", default=[2, 20, 50])
    parser.add_argument("--one", nargs=3, metavar=("METHOD", "N", "D"), help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="append the rows to this file")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one[0], int(arguments.one[1]), int(arguments.one[2]))))
        return
    rows: list[dict[str, Any]] = []
    names = f"{'CPU s':>8} {'/ omt':>7} {'MiB':>7} {'error %':>8} {'mass':>6} {'bound':>6}"
    print(f"{'d':>3} {'n':>8} {'method':20} {names}")
    for d in arguments.d:
        for n in arguments.n:
            ours = in_own_process("omt", n, d)
            found = [ours] + [in_own_process(name, n, d) for name, most in PEERS.items() if n <= most]
            for row in found:
                ratio = row["seconds"] / ours["seconds"]
                memory = "-" if row["memory MiB"] is None else f"{row['memory MiB']:.0f}"
                print(
                    f"{d:3} {n:8} {row['method']:20} {row['seconds']:8.2f} {ratio:7.2f} {memory:>7} "
                    f"{row['error']:8.2f} {row['mass']:6.3f} {row['bound']:6.3f}",
                    flush=True,
                )
                rows.append({"what": "end to end", **row, "ratio": ratio})
    largest = max(arguments.n)
    print(f"peers at n = {largest}: a cost and a plan of n × n float64 would take {16 * largest**2 / 1e12:.3g} TB")
    print("\nplan and map of 2000 samples, without the fit (one start)")
    print(f"{'d':>3} {'n':>8} {'fit CPU s':>10} {'plan and map, CPU ms':>21}")
    for d in arguments.d:
        sizes = [n for n in (1000, 10_000, 100_000, 1_000_000) if n <= largest]
        fit_seconds, taken = solve_and_map(sizes, d)
        for n, fit, seconds in zip(sizes, fit_seconds, taken, strict=True):
            print(f"{d:3} {n:8} {fit:10.2f} {1e3 * seconds:21.2f}", flush=True)
            rows.append({"what": "plan and map", "n": n, "d": d, "fit": fit, "seconds": seconds})
        print(f"{d:3} spread: {max(taken) / min(taken):.2f}")
    if arguments.json:
        with arguments.json.open("a", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps({**row, "machine": platform.processor() or platform.machine()}) + "\n")


if __name__ == "__main__":
    with threadpool_limits(1):
        main()
