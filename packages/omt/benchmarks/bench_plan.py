"""Push and pull through a plan between samples, against the bandwidth of memory, one thread, CPU time.

Run: ``OMP_NUM_THREADS=1 python packages/omt/benchmarks/bench_plan.py [--samples 1000000] [--components 50] [--cells
4000] [--partners SEEDS] [--json FILE]``.

Coarse plan: both directions must read the two responsibility matrices once, so their limit is the rate of a copy in
the same run (bytes read plus bytes written, as STREAM counts). Fine plan: a pull between ``--cells`` cells on each
side, against one exponential for each two cells, which every pass of a cell-level Sinkhorn needs. ``--partners``
adds how near the partners of coarse, fine and cell-level plans are to the true images.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import ot
from scipy.spatial.distance import cdist

from omt.datasets import known_map
from omt.fitting.em import fit_mixture
from omt.mixture import Mixture
from omt.plans.cells import cell_laws
from omt.plans.sample import SamplePlan
from omt.problem import transport


def seconds(*calls: Callable[[], object], repetitions: int = 5) -> list[float]:
    """Least CPU seconds of each call, the calls taking turns."""
    best = [np.inf] * len(calls)
    for _ in range(repetitions):
        for i, call in enumerate(calls):
            before = time.thread_time()
            call()
            best[i] = min(best[i], time.thread_time() - before)
    return best


def coarse(N: int, K: int) -> list[dict[str, object]]:
    rng = np.random.default_rng(0)
    sides = []
    for _ in range(2):
        R = rng.random((N, K))
        R /= R.sum(axis=1, keepdims=True)
        sides.append(R)
    R, S = sides
    a, b = R.mean(axis=0), S.mean(axis=0)
    before = time.thread_time()
    plan = SamplePlan(R, S, np.outer(a, b))
    building = time.thread_time() - before
    v, V = rng.random(N), rng.random((N, 8))
    assert abs(plan.pull(np.ones(N)) * N - 1.0).max() < 1e-12
    out = np.empty_like(R)
    copying, pull, push, pull8 = seconds(
        lambda: np.copyto(out, R), lambda: plan.pull(v), lambda: plan.push(v), lambda: plan.pull(V)
    )
    copy_rate = 2 * R.nbytes / copying
    shape = f"N=M={N} K=L={K}"
    rows: list[dict[str, object]] = [{"what": "build", "shape": shape, "ours": building, "rate": 0.0, "share": 0.0}]
    for what, taken, vectors in (("pull", pull, v), ("push", push, v), ("pull 8 vectors", pull8, V)):
        rate = (2 * R.nbytes + 2 * vectors.nbytes) / taken
        rows.append({"what": what, "shape": shape, "ours": taken, "rate": rate / 1e9, "share": rate / copy_rate})
    return rows


def fine(n: int, K: int, d: int) -> list[dict[str, object]]:
    rng = np.random.default_rng(0)
    means = 8.0 * rng.normal(size=(K, d))
    P, Q = (
        Mixture.from_gaussians(np.full(K, 1 / K), means + shift, np.repeat(np.eye(d)[None], K, axis=0))
        for shift in (0.0, 0.5)
    )
    X, Y = P.sample(n, rng), Q.sample(n, rng)
    R, S = np.asarray(P.responsibilities(X)), np.asarray(Q.responsibilities(Y))
    W = transport(P, Q).plan(X, Y).coupling
    plan = SamplePlan(R, S, W, cells=cell_laws(X, Y, P, Q))
    v, block = rng.random(n), rng.random((n, n))
    pull, exponentials = seconds(lambda: plan.pull(v), lambda: np.exp(block), repetitions=3)
    return [
        {
            "what": "fine pull",
            "shape": f"N=M={n} K=L={K} d={d}",
            "ours": pull,
            "peer": exponentials,
            "ratio": pull / exponentials,
        }
    ]


def partners(n: int, seed: int) -> list[dict[str, object]]:
    """How near the partners of a plan are to the true images, on the generator with known maps.

    Mean squared distance, in units of a random partner inside the right component; and the column error ``‖Γᵀ1 − ν‖₁``.
    """
    truth = known_map(random_state=seed)
    rng = np.random.default_rng([seed, 5])
    X, k = truth.sample_source(n, rng)
    Y, l = truth.sample_target(n, rng)
    distance = cdist(truth.map(X, k), Y, "sqeuclidean")
    inside = k[:, None] == l
    unit = np.mean([row[mask].mean() for row, mask in zip(distance, inside, strict=True)])
    fitted = transport(fit_mixture(X, 10, random_state=seed), fit_mixture(Y, 10, random_state=seed))
    coarse_plan = fitted.plan(X, Y)
    R, S, W = coarse_plan.source_responsibilities, coarse_plan.target_responsibilities, coarse_plan.coupling
    plans = {"coarse": coarse_plan.to_dense()}
    for share in (0.03, 0.01, 0.003):
        for sweeps in (0, 5):
            epsilon = share * float(fitted.cost_matrix.mean())
            cells = cell_laws(X, Y, fitted.source, fitted.target, epsilon=epsilon, sweeps=sweeps)
            plans[f"fine ε={share} sweeps={sweeps}"] = SamplePlan(R, S, W, cells=cells).to_dense()
    costs = cdist(X, Y, "sqeuclidean")
    uniform = np.full(n, 1 / n)
    plans["ot.sinkhorn ε=0.02"] = ot.sinkhorn(uniform, uniform, costs, 0.02 * costs.mean())
    plans["ot.emd"] = ot.emd(uniform, uniform, costs)
    return [
        {
            "what": name,
            "seed": seed,
            "distance": float((dense * distance).sum() / unit),
            "column error": float(np.abs(dense.sum(axis=0) - 1 / n).sum()),
        }
        for name, dense in plans.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--components", type=int, default=50)
    parser.add_argument("--cells", type=int, default=4000)
    parser.add_argument("--partners", type=int, default=0, metavar="SEEDS", help="seeds of the partner experiment")
    parser.add_argument("--json", type=Path, help="append the rows to this file")
    arguments = parser.parse_args()
    rows = coarse(arguments.samples, arguments.components)
    print(f"{'what':16} {'shape':24} {'CPU s':>7} {'GB/s':>6} {'share of copy':>13}")
    for row in rows:
        print(f"{row['what']:16} {row['shape']:24} {row['ours']:7.3f} {row['rate']:6.1f} {row['share']:13.2f}")
    rows += fine(arguments.cells, 10, 20)
    row = rows[-1]
    print(f"\n{'what':16} {'shape':24} {'CPU s':>7} {'N M exp':>7} {'ratio':>6}")
    print(f"{row['what']:16} {row['shape']:24} {row['ours']:7.3f} {row['peer']:7.3f} {row['ratio']:6.2f}")
    if arguments.partners:
        print(f"\n{'what':26} {'seed':>4} {'distance':>8} {'column error':>12}")
        for seed in range(arguments.partners):
            for row in partners(1000, seed):
                rows.append(row)
                print(
                    f"{row['what']:26} {row['seed']:4} {row['distance']:8.3f} {row['column error']:12.4f}", flush=True
                )
    if arguments.json:
        with arguments.json.open("a", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps({**row, "machine": platform.processor() or platform.machine()}) + "\n")


if __name__ == "__main__":
    main()
