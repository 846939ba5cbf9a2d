"""E-step and M-step of Gaussian mixtures against the bare matrix product with the same number of multiplications.

Run: ``python packages/omt/benchmarks/bench_scores.py [--json FILE]``. The rate counts ``2 N K
d²`` operations for either step, whatever is done around the product.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from omt.families import Gaussian, GaussianComponents
from shared_core import soft_assign

ROUNDS = 7


def cpu_seconds(work: Callable[[], object]) -> float:
    before = time.thread_time()
    work()
    return time.thread_time() - before


def measure(N: int, d: int, K: int, dtype: str) -> list[dict[str, object]]:
    rng = np.random.default_rng(0)
    means = 2.0 * rng.normal(size=(K, d))
    A = rng.normal(size=(K, d, d)) / np.sqrt(d)
    components = GaussianComponents(means, "full", covariances=A @ A.swapaxes(1, 2) + 0.5 * np.eye(d))
    X = components.sample(rng.integers(K, size=N), rng).astype(dtype)
    stacked = rng.normal(size=(d, K * d)).astype(dtype)
    product = np.empty((2048, K * d), dtype=dtype)
    scores = np.empty((N, K), dtype=dtype)
    family = Gaussian(shrinkage=0.0)
    dense = np.full((N, K), 1.0 / K, dtype=dtype)

    def gemm() -> None:
        for start in range(0, N, 2048):
            np.matmul(X[start : start + 2048], stacked, out=product[: min(2048, N - start)])

    def e_step() -> None:
        for start in range(0, N, 4096):
            block = components.log_prob(X[start : start + 4096], dtype=dtype, out=scores[start : start + 4096])
            soft_assign(block, out=block)

    def m_step(R: np.ndarray) -> None:
        statistics = family.empty(K, d, components.means)
        for start in range(0, N, 4096):
            family.accumulate(statistics, X[start : start + 4096], R[start : start + 4096])

    e_step()
    posterior = scores.copy()
    jobs: dict[str, Callable[[], object]] = {
        "gemm": gemm,
        "E-step": e_step,
        "M-step, its own responsibilities": lambda: m_step(posterior),
        "M-step, equal responsibilities": lambda: m_step(dense),
    }
    best = dict.fromkeys(jobs, np.inf)
    for _ in range(ROUNDS):
        for name, job in jobs.items():
            best[name] = min(best[name], cpu_seconds(job))
    rate = {name: 2.0 * N * K * d * d / seconds / 1e9 for name, seconds in best.items()}
    shape = f"N={N} d={d} K={K} {dtype}"
    return [
        {"what": name, "shape": shape, "ours": rate[name], "peer": rate["gemm"], "ratio": rate[name] / rate["gemm"]}
        for name in jobs
        if name != "gemm"
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="append the rows to this file")
    arguments = parser.parse_args()
    rows = [
        row
        for N, d, K, dtype in (
            (40_000, 20, 30, "float64"),
            (20_000, 50, 30, "float64"),
            (20_000, 50, 30, "float32"),
            (4_000, 200, 20, "float64"),
        )
        for row in measure(N, d, K, dtype)
    ]
    print(f"{'shape':34} {'step':34} {'GFLOP/s':>8} {'GEMM':>8} {'ratio':>6}")
    for row in rows:
        print(f"{row['shape']:34} {row['what']:34} {row['ours']:8.1f} {row['peer']:8.1f} {row['ratio']:6.2f}")
    if arguments.json:
        with arguments.json.open("a", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps({**row, "machine": platform.processor() or platform.machine()}) + "\n")


if __name__ == "__main__":
    with threadpool_limits(1):
        main()
