"""Cost table and maps between components, Gaussian and of counts: omt against POT and SciPy, one thread, CPU time.

Run: ``OMP_NUM_THREADS=1 python packages/omt/benchmarks/bench_pairs.py [--components 20 40 200] [--d 50]
[--pot-pairs 1600] [--json FILE]``.

Two peers, each checked to give the same table. *POT* is ``ot.gmm.dist_bures_squared`` as it is; most of its time
goes into one contraction over four indices, so it is run only up to ``--pot-pairs`` pairs (its time grows with the
number of pairs). *eigh* is the same formula with that contraction as matrix products: one eigendecomposition of
every pair, the fastest that the formula allows in NumPy. Maps are built for a coupling with ``K + L − 1`` pairs, as
an unregularised plan has.

Families of counts (``--genes``): *POT pmf* is ``ot.emd2_1d``, one gene and pair of components at a time, between
probabilities of SciPy whose own time is not counted. It is timed on ``--peer-calls`` genes of one pair, checked to give
the same cost, and its time is scaled up to all. What no method can do without is to read the rates: *table* is one pass
over all pairs of rates, the squared distances of their means.
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
from typing import Any

import numpy as np
import ot
from scipy import stats

from omt.families import NegativeBinomialComponents, PoissonComponents
from omt.mixture import Mixture
from omt.pairs.cost import component_cost
from omt.pairs.maps import folded_maps


def mixture(K: int, d: int, seed: int) -> Mixture:
    rng = np.random.default_rng([seed, K, d])
    G = rng.normal(size=(K, d, d))
    covariances = G @ G.swapaxes(1, 2) / d + 0.1 * np.eye(d)
    return Mixture.from_gaussians(np.full(K, 1.0 / K), rng.normal(size=(K, d)), covariances)


def eigh_of_every_pair(P: Mixture, Q: Mixture) -> np.ndarray:
    """Squared Bures distances as POT computes them, contracted by matrix products, one source component at a time."""
    m, A, m2, B = P.components.mean(), P.components.cov(), Q.components.mean(), Q.components.cov()
    values, vectors = np.linalg.eigh(A)
    roots = (vectors * np.sqrt(values)[:, None]) @ vectors.swapaxes(1, 2)
    out = ((m[:, None] - m2[None]) ** 2).sum(-1)
    out += np.trace(A, axis1=1, axis2=2)[:, None] + np.trace(B, axis1=1, axis2=2)
    for k, root in enumerate(roots):
        values, vectors = np.linalg.eigh(root @ B @ root)
        square_root = (vectors * np.sqrt(np.maximum(values, 0.0))[:, None]) @ vectors.swapaxes(1, 2)
        out[k] -= 2.0 * np.trace(square_root, axis1=1, axis2=2)
    return np.maximum(out, 0.0)


def staircase(K: int) -> np.ndarray:
    """A coupling of ``K`` and ``K`` equal weights with ``2K − 1`` pairs."""
    W = np.diag(np.full(K, 0.5 / K))
    W[np.arange(K - 1), np.arange(1, K)] = 0.5 / K
    W[0, 0] += 0.5 / K - W[:, 0].sum() + 0.5 / K
    W[-1, -1] += 1.0 / K - W[-1].sum()
    return W


def take_turns(calls: dict[str, Callable[[], Any]], repetitions: int) -> tuple[dict[str, float], dict[str, Any]]:
    """Least CPU seconds and result of each call, the calls taking turns."""
    best, results = dict.fromkeys(calls, np.inf), {}
    for _ in range(repetitions):
        for name, call in calls.items():
            before = time.thread_time()
            results[name] = call()
            best[name] = min(best[name], time.thread_time() - before)
    return best, results


def compare(K: int, d: int, pot_pairs: int, repetitions: int) -> list[dict[str, Any]]:
    P, Q = mixture(K, d, 0), mixture(K, d, 1)
    p, q = P.components, Q.components
    W = staircase(K)
    calls: dict[str, Callable[[], Any]] = {
        "cost": lambda: component_cost(P, Q),
        "eigh": lambda: eigh_of_every_pair(P, Q),
        "entropic cost": lambda: component_cost(P, Q, cost="entropic", epsilon=0.1),
        "maps": lambda: folded_maps(P, Q, W),
    }
    if pot_pairs >= K * K:
        calls["POT"] = lambda: ot.gmm.dist_bures_squared(p.mean(), q.mean(), p.cov(), q.cov())
    taken, results = take_turns(calls, 1 if K > 100 else repetitions)
    comparisons = [("cost", "eigh"), ("entropic cost", "cost"), ("maps", "cost")]
    for peer in {"eigh", "POT"} & set(calls):
        np.testing.assert_allclose(results["cost"], results[peer], rtol=1e-9)
    if "POT" in calls:
        comparisons.insert(0, ("cost", "POT"))
    return [
        {
            "what": what,
            "shape": f"K=L={K} d={d}",
            "peer name": "our cost" if peer == "cost" else peer,
            "ours": taken[what],
            "peer": taken[peer],
            "ratio": taken[what] / taken[peer],
        }
        for what, peer in comparisons
    ]


def counts(family: str, K: int, genes: int, seed: int) -> Mixture:
    """Components with the rates of single-cell data: most genes far below one count a cell, some far above."""
    rng = np.random.default_rng([seed, K, genes])
    base = np.random.default_rng(genes).lognormal(-2.0, 1.5, genes)
    rates = base * rng.lognormal(0.0, 0.5, (K, genes))
    return with_rates(family, rates)


def probabilities(family: str, means: np.ndarray) -> list[np.ndarray]:
    """Support and exact probabilities of one gene's laws, by SciPy."""
    laws = [stats.poisson(m) if family == "poisson" else stats.nbinom(1 / 0.3, 1 / (1 + 0.3 * m)) for m in means]
    x = np.arange(2.0 + max(law.isf(1e-13) for law in laws))
    return [x, *(law.pmf(x) / law.pmf(x).sum() for law in laws)]


def compare_counts(family: str, K: int, genes: int, peer_calls: int, repetitions: int) -> list[dict[str, Any]]:
    P, Q = counts(family, K, genes, 0), counts(family, K, genes, 1)
    p, q = P.components.mean(), Q.components.mean()
    columns = np.random.default_rng(0).permutation(genes)[:peer_calls]
    first = [with_rates(family, side[:1, columns]) for side in (p, q)]
    tables = [probabilities(family, np.array([p[0, g], q[0, g]])) for g in columns]
    calls: dict[str, Callable[[], Any]] = {
        "cost": lambda: component_cost(P, Q),
        "table": lambda: ((p[:, None] - q[None]) ** 2).sum(-1),
        "POT pmf": lambda: sum(float(ot.emd2_1d(x, x, a, b)) for x, a, b in tables),
    }
    taken, results = take_turns(calls, repetitions)
    np.testing.assert_allclose(component_cost(*first)[0, 0], results["POT pmf"], rtol=1e-8)
    taken["POT pmf"] *= K * K * genes / columns.size
    return [
        {
            "what": f"{family} cost",
            "shape": f"K=L={K} d={genes}",
            "peer name": peer,
            "ours": taken["cost"],
            "peer": taken[peer],
            "ratio": taken["cost"] / taken[peer],
        }
        for peer in ("POT pmf", "table")
    ]


def with_rates(family: str, rates: np.ndarray) -> Mixture:
    components = PoissonComponents(rates) if family == "poisson" else NegativeBinomialComponents(rates, 0.3)
    return Mixture(np.full(len(rates), 1.0 / len(rates)), components)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--components", type=int, nargs="+", default=[20, 40, 200])
    parser.add_argument("--d", type=int, nargs="+", default=[50])
    parser.add_argument("--pot-pairs", type=int, default=1600, help="time POT up to this many pairs")
    parser.add_argument("--genes", type=int, nargs="*", default=[2000], help="widths of the families of counts")
    parser.add_argument("--peer-calls", type=int, default=200, help="genes on which POT is timed")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--json", type=Path, help="append the rows to this file")
    arguments = parser.parse_args()
    print(f"{'what':22} {'shape':16} {'peer':9} {'ours s':>8} {'peer s':>9} {'ratio':>8}")
    rows: list[dict[str, Any]] = []

    def show(found: list[dict[str, Any]]) -> None:
        rows.extend(found)
        for row in found:
            print(
                f"{row['what']:22} {row['shape']:16} {row['peer name']:9} {row['ours']:8.3f} {row['peer']:9.3f} "
                f"{row['ratio']:8.4f}",
                flush=True,
            )

    for K in arguments.components:
        for d in arguments.d:
            show(compare(K, d, arguments.pot_pairs, arguments.repetitions))
    for genes in arguments.genes:
        for family in ("poisson", "negative_binomial"):
            show(compare_counts(family, 20, genes, arguments.peer_calls, arguments.repetitions))
    if arguments.json:
        with arguments.json.open("a", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps({**row, "machine": platform.processor() or platform.machine()}) + "\n")


if __name__ == "__main__":
    main()
