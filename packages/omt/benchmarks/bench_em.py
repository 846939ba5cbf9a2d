"""Fitting Gaussian mixtures: omt against scikit-learn, the same number of starts, one thread, CPU time.

Run: ``python packages/omt/benchmarks/bench_em.py [--n 100000 1000000] [--d D ...] [--starts 1] [--seeds 1]
[--peer-iterations 100] [--json FILE]``. What counts first is the held-out log-likelihood (nats a sample); the time
ratio means something only where that is equal or better. From 10⁶ samples on, scikit-learn's EM is stopped after
``--peer-iterations`` divided by ten iterations, because it takes minutes: its time is then a lower bound, and its
likelihood that of an unfinished fit, whereas omt runs to its end. ``--memory`` measures what a fit of ``--n`` samples
from a backed HDF5 file takes, in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from omt.fitting.em import fit_mixture
from omt.mixture import Mixture

K = 30


def truth(d: int, seed: int) -> Mixture:
    """Thirty overlapping Gaussians of unequal weights with random covariances of condition number about 100."""
    rng = np.random.default_rng([seed, d])
    rotation = np.linalg.qr(rng.normal(size=(K, d, d)))[0]
    spectrum = np.exp(rng.uniform(np.log(0.1), np.log(10.0), size=(K, 1, d)))
    covariances = (rotation * spectrum) @ rotation.swapaxes(1, 2)
    return Mixture.from_gaussians(rng.dirichlet(np.full(K, 5.0)), rng.normal(0.0, 2.5, size=(K, d)), covariances)


def compare(N: int, d: int, starts: int, seed: int, peer_iterations: int) -> dict[str, object]:
    """Fit both to the same samples."""
    from sklearn.mixture import GaussianMixture

    generator = truth(d, seed)
    X, held_out = generator.sample(N, [seed, 1]), generator.sample(20_000, [seed, 2])
    before = time.process_time()
    ours = fit_mixture(X, K, n_init=starts, random_state=seed, progress=False)
    our_seconds = time.process_time() - before
    before = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer = GaussianMixture(K, n_init=starts, max_iter=peer_iterations, random_state=seed).fit(X)
    peer_seconds = time.process_time() - before
    return {
        "what": "fit_mixture",
        "shape": f"N={N} d={d} K={K} starts={starts} seed={seed}",
        "peer stopped": not peer.converged_,
        "truth": float(generator.log_prob(held_out).mean()),
        "our log-likelihood": float(ours.log_prob(held_out).mean()),
        "peer log-likelihood": float(peer.score(held_out)),
        "ours": our_seconds,
        "peer": peer_seconds,
        "ratio": our_seconds / peer_seconds,
    }


def peak_mib() -> float:
    """Peak resident memory of this process image; ``ru_maxrss`` would count that of the parent before ``exec``."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise OSError("this system does not tell a process's peak memory")


def fit_backed(path: str) -> None:
    """Fit from a file and print resident MiB before and at the peak, and CPU seconds; for a process of its own."""
    import h5py

    with h5py.File(path, "r") as file:
        start, before = time.process_time(), peak_mib()
        fit_mixture(file["X"], K, n_init=1, progress=False)
        print(json.dumps({"before": before, "peak": peak_mib(), "seconds": time.process_time() - start}))


def memory(N: int, d: int) -> dict[str, object]:
    """Peak resident memory of a fit from a float32 file, written in pieces."""
    import h5py

    generator = truth(d, 0)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "data.h5")
        with h5py.File(path, "w") as file:
            data = file.create_dataset("X", (N, d), dtype="float32")
            for start in range(0, N, 50_000):
                data[start : start + 50_000] = generator.sample(min(50_000, N - start), start)
        out = subprocess.run([sys.executable, __file__, "--backed", path], check=True, capture_output=True, text=True)
    found = json.loads(out.stdout)
    return {"what": "fit_mixture, backed", "shape": f"N={N} d={d} K={K} float32", **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--d", type=int, nargs="+", help="20 and 50; 20 alone from 10⁶ samples on")
    parser.add_argument("--starts", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--peer-iterations", type=int, default=100, help="a tenth of it from 10⁶ samples on")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--backed", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="append the rows to this file")
    arguments = parser.parse_args()
    if arguments.backed:
        fit_backed(arguments.backed)
        return
    rows = []

    def dimensions(N: int) -> list[int]:
        return arguments.d or ([20] if N >= 1_000_000 and not arguments.memory else [20, 50])

    if arguments.memory:
        print(f"{'shape':34} {'MiB before':>10} {'MiB peak':>9} {'CPU s':>7}")
        for N in arguments.n:
            for d in dimensions(N):
                rows.append(row := memory(N, d))
                print(f"{row['shape']:34} {row['before']:10.0f} {row['peak']:9.0f} {row['seconds']:7.1f}", flush=True)
    else:
        print(f"{'shape':40} {'truth':>9} {'ours':>9} {'sklearn':>9} {'ours s':>7} {'peer s':>7} {'ratio':>6}")
        for N in arguments.n:
            limit = arguments.peer_iterations if N < 1_000_000 else max(1, arguments.peer_iterations // 10)
            for d in dimensions(N):
                for seed in range(arguments.seeds):
                    rows.append(row := compare(N, d, arguments.starts, seed, limit))
                    likelihood = " ".join(
                        f"{row[key]:9.3f}" for key in ("truth", "our log-likelihood", "peer log-likelihood")
                    )
                    print(
                        f"{row['shape']:40} {likelihood} {row['ours']:7.1f} {row['peer']:7.1f} {row['ratio']:6.2f}"
                        + (f"  (peer stopped after {limit} iterations)" if row["peer stopped"] else ""),
                        flush=True,
                    )
    if arguments.json:
        with arguments.json.open("a", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps({**row, "machine": platform.processor() or platform.machine()}) + "\n")


if __name__ == "__main__":
    with threadpool_limits(1):
        main()
