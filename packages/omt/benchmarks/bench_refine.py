"""Maps of the Wasserstein-2 benchmark Mix3toMix10: `Transport.refine` against the entropic map on samples, by POT.

Run: ``python packages/omt/benchmarks/bench_refine.py [DATA] [--seeds 3] [--json FILE]``, with ``DATA`` the folder
that holds ``mix3to10_d2.npz`` and ``mix3to10_d8.npz``. One thread; CPU seconds to learn the map (after imports), and
error on 4096 new samples (L2-UVP, percent; lower is better), means over the seeds with the smallest and the largest.
The peer takes a random part of the 8192 samples of each side, as many as points of ours, at the same temperature
relative to its mean cost; 4000 is where it takes ten times as long.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path

import numpy as np
import ot
from scipy.spatial.distance import cdist
from threadpoolctl import threadpool_limits

from omt.fitting.em import fit_mixture
from omt.metrics import l2_uvp
from omt.problem import transport

REG = 0.02
SHARED = Path(__file__).resolve().parents[4] / "shared" / "data" / "omt"  # beside a checkout of the workspace


def entropic_map(X: np.ndarray, Y: np.ndarray, n: int, seed: int, *, debias: bool = False):
    """POT's plan between ``n`` samples of each side, and the map it extends to; debiased by the map of x to itself."""
    rng = np.random.default_rng(seed)
    x, y = (Z[rng.choice(len(Z), n, replace=False)] for Z in (X, Y))
    epsilon = REG * cdist(x, y, "sqeuclidean").mean()
    there = _extended_map(x, y, epsilon)
    if not debias:
        return there
    back = _extended_map(x, x, epsilon)
    return lambda points: points + there(points) - back(points)


def _extended_map(x: np.ndarray, y: np.ndarray, epsilon: float):
    C = cdist(x, y, "sqeuclidean")
    weights = np.full(len(x), 1.0 / len(x))
    _, log = ot.sinkhorn(weights, weights, C, epsilon, numItermax=10000, log=True)
    g = epsilon * np.log(log["v"])

    def image(points: np.ndarray) -> np.ndarray:
        exponent = (g - cdist(points, y, "sqeuclidean")) / epsilon
        exponent = np.exp(exponent - exponent.max(axis=1, keepdims=True))
        return exponent @ y / exponent.sum(axis=1, keepdims=True)

    return image


def measure(learn, x_test: np.ndarray, truth: np.ndarray) -> tuple[float, float]:
    """CPU seconds to learn a map, and its error."""
    start = time.process_time()
    image = learn()
    seconds = time.process_time() - start
    return seconds, l2_uvp(image(x_test), truth)


def rows_of(d: int, folder: Path, seeds: int) -> list[dict[str, object]]:
    """All methods in one dimension, interleaved over the seeds."""
    with np.load(folder / f"mix3to10_d{d}.npz", allow_pickle=False) as stored:
        X, Y, x_test, truth = (stored[k].astype(float) for k in ("x_train", "y_train", "x_test", "tx_test"))

    def fitted(K: int, n_init: int, seed: int):
        return transport(*(fit_mixture(Z, K, n_init=n_init, random_state=seed, progress=False) for Z in (X, Y)))

    results: dict[str, list[tuple[float, float]]] = {}
    for seed in range(seeds):
        plan = fitted(20, 3, seed)
        small = fitted(5, 1, seed)
        methods = {
            "POT entropic map, 2000 samples": lambda s=seed: entropic_map(X, Y, 2000, s),
            "same, debiased": lambda s=seed: entropic_map(X, Y, 2000, s, debias=True),
            "omt fit, 20 components": lambda s=seed: fitted(20, 3, s).map,
            "omt refine (plan given)": lambda s=seed, p=plan: p.refine(seed=s).map,
            "omt fit and refine": lambda s=seed: fitted(20, 3, s).refine(seed=s).map,
            "omt refine X, Y (plan given)": lambda s=seed, p=plan: p.refine(X=X, Y=Y, seed=s).map,
            "omt fit of 5 and refine X, Y": lambda s=seed: fitted(5, 1, s).refine(X=X, Y=Y, seed=s).map,
            "omt refine X, Y, 3500 points (plan given)": lambda s=seed, p=small: p.refine(3500, X=X, Y=Y, seed=s).map,
        }
        if seed == 0:
            methods["POT entropic map, 4000 samples"] = lambda s=seed: entropic_map(X, Y, 4000, s)
        for name, learn in methods.items():
            results.setdefault(name, []).append(measure(learn, x_test, truth))
    rows = []
    for name, values in results.items():
        seconds, errors = zip(*values, strict=True)
        rows.append(
            {
                "d": d,
                "method": name,
                "cpu_seconds": float(np.mean(seconds)),
                "uvp": float(np.mean(errors)),
                "uvp_min": min(errors),
                "uvp_max": max(errors),
                "machine": platform.machine(),
            }
        )
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, nargs="?", default=SHARED)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not (arguments.data / "mix3to10_d2.npz").is_file():
        parser.error(f"{arguments.data} has no mix3to10_d2.npz")  # ends with 2: not a failure of the benchmark
    fit_mixture(np.random.default_rng(0).normal(size=(200, 2)), 2, progress=False)  # imports
    with threadpool_limits(1):
        rows = [row for d in (2, 8) for row in rows_of(d, arguments.data, arguments.seeds)]
    print(f"{'d':>2}  {'method':<32} {'CPU s':>7}  {'UVP %':>6}  {'min':>6}  {'max':>6}")
    for row in rows:
        print(
            f"{row['d']:>2}  {row['method']:<32} {row['cpu_seconds']:7.2f}  {row['uvp']:6.2f}  "
            f"{row['uvp_min']:6.2f}  {row['uvp_max']:6.2f}"
        )
    if arguments.json:
        with arguments.json.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
