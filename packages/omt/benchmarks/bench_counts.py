"""E-step and M-step of count families on sparse cells, against the sparse products alone.

Run: ``python packages/omt/benchmarks/bench_counts.py [--json FILE]``. The peer of an E-step is ``X W`` and that of the
statistics ``Xᵀ R``, both scipy's product of the same CSR chunks with K dense columns: what no method can do without.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from scipy import sparse
from threadpoolctl import threadpool_limits

from omt.families import (
    Bernoulli,
    BernoulliComponents,
    Multinomial,
    MultinomialComponents,
    NegativeBinomial,
    NegativeBinomialComponents,
    Poisson,
    PoissonComponents,
)

ROUNDS = 5
CHUNK = 4096


def cpu_seconds(work: Callable[[], object]) -> float:
    before = time.thread_time()
    work()
    return time.thread_time() - before


def cells(N: int, d: int, per_cell: int, rng: np.random.Generator) -> sparse.csr_matrix:
    """Random counts, mostly one and two, at ``per_cell`` places of each row."""
    step = d // per_cell
    indices = (rng.integers(step, size=(N, per_cell)) + step * np.arange(per_cell)).astype(np.int32)
    counts = 1.0 + rng.poisson(0.5, N * per_cell)
    return sparse.csr_matrix((counts, indices.ravel(), np.arange(0, N * per_cell + 1, per_cell)), shape=(N, d))


def measure(N: int, d: int, per_cell: int, K: int) -> list[dict[str, object]]:
    rng = np.random.default_rng(0)
    X = cells(N, d, per_cell, rng)
    chunks = [(slice(start, min(start + CHUNK, N)), X[start : start + CHUNK]) for start in range(0, N, CHUNK)]
    rates = rng.gamma(1.0, per_cell / d, (K, d)) + 1e-4
    W, R, size = np.ascontiguousarray(np.log(rates).T), rng.dirichlet(np.ones(K), N), rng.lognormal(0.0, 0.4, N)
    nb = NegativeBinomialComponents(rates, 0.3)
    plain = {
        "poisson": (PoissonComponents(rates), Poisson()),
        "multinomial": (MultinomialComponents(rates / rates.sum(axis=1, keepdims=True), per_cell), Multinomial()),
        "bernoulli": (BernoulliComponents(np.minimum(rates, 0.9)), Bernoulli()),
        "negative binomial": (nb, NegativeBinomial(dispersion=0.3)),
        "negative binomial, dispersion estimated": (nb, NegativeBinomial()),
    }
    sized = {
        "poisson, sizes": (PoissonComponents(rates), Poisson(size_factors=size)),
        "negative binomial, sizes": (nb, NegativeBinomial(dispersion=0.3, size_factors=size)),
    }

    def e_step(components: object, sizes: np.ndarray | None) -> Callable[[], object]:
        return lambda: [
            components.log_prob(block, **({} if sizes is None else {"size": sizes[rows]})) for rows, block in chunks
        ]

    def m_step(family: object, components: object, sizes: np.ndarray | None) -> Callable[[], object]:
        def work() -> None:
            statistics = family.empty(K, d, components.centre())
            for rows, block in chunks:
                family.accumulate(statistics, block, R[rows], **({} if sizes is None else {"size": sizes[rows]}))

        return work

    jobs: dict[str, Callable[[], object]] = {
        "X W": lambda: [block @ W for _, block in chunks],
        "Xᵀ R": lambda: [block.T @ R[rows] for rows, block in chunks],
    }
    for known, sizes in ((plain, None), (sized, size)):
        for name, (components, family) in known.items():
            jobs[f"{name}: E"] = e_step(components, sizes)
            jobs[f"{name}: M"] = m_step(family, components, sizes)
    best = dict.fromkeys(jobs, np.inf)
    for _ in range(ROUNDS):
        for name, job in jobs.items():
            best[name] = min(best[name], cpu_seconds(job))
    shape = f"N={N} d={d} non-zeros={per_cell} K={K}"
    peer = {"E": best["X W"], "M": best["Xᵀ R"]}
    return [
        {"what": name, "shape": shape, "ours": t, "peer": peer[name[-1]], "ratio": t / peer[name[-1]]}
        for name, t in best.items()
        if name[-1] in peer and ":" in name
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="append the rows to this file")
    arguments = parser.parse_args()
    rows = [row for shape in ((20_000, 20_000, 200, 10), (8_192, 2_000, 400, 30)) for row in measure(*shape)]
    print(f"{'shape':42} {'step':44} {'ours ms':>8} {'product ms':>10} {'ratio':>6}")
    for row in rows:
        ours, peer = 1e3 * float(row["ours"]), 1e3 * float(row["peer"])
        print(f"{row['shape']:42} {row['what']:44} {ours:8.1f} {peer:10.1f} {row['ratio']:6.2f}")
    if arguments.json:
        with arguments.json.open("a", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps({**row, "machine": platform.processor() or platform.machine()}) + "\n")


if __name__ == "__main__":
    with threadpool_limits(1):
        main()
