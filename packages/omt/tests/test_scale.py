"""What a fit takes: memory of a fit from a file, whatever the number of samples, and command lines that were killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import anndata as ad
import h5py
import numpy as np
import pytest

from omt.io import load_model

LINUX = pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="this system does not tell peak memory")

MEASURE = """
    import json, sys, time
    import anndata as ad
    import h5py
    from omt.fitting.em import fit_mixture

    def resident(name):
        for line in open("/proc/self/status"):
            if line.startswith(name):
                return int(line.split()[1]) * 1024

    adata = ad.read_h5ad(sys.argv[1], backed="r")
    fit_mixture(adata.X[:2000], 2, n_init=1)  # what importing takes is not the fit's
    before = resident("VmRSS:")
    mixture = fit_mixture(adata.X, int(sys.argv[2]), n_init=1, dtype="float32", progress=False)
    print(json.dumps({"extra": resident("VmHWM:") - before, "components": mixture.K,
                      "log_likelihood": mixture.report.log_likelihood}))
"""


def write_cells(path: Path, N: int, d: int, centres: np.ndarray) -> None:
    """An h5ad of float32 cells around the centres, written in pieces."""
    ad.AnnData(np.zeros((0, d), dtype=np.float32)).write_h5ad(path)
    rng = np.random.default_rng(0)
    with h5py.File(path, "r+") as file:
        attributes = dict(file["X"].attrs)
        del file["X"]
        data = file.create_dataset("X", (N, d), dtype="float32")
        data.attrs.update(attributes)
        for start in range(0, N, 50_000):
            n = min(50_000, N - start)
            data[start : start + n] = rng.normal(size=(n, d)) + centres[rng.integers(len(centres), size=n)]
        del file["obs"]["_index"]
        file["obs"].create_dataset("_index", data=np.arange(N).astype("S8"))
        file["obs/_index"].attrs.update({"encoding-type": "string-array", "encoding-version": "0.2.0"})


def measured(folder: Path, N: int) -> dict[str, float]:
    """Extra memory and result of a fit of N × 50 float32 from a backed h5ad, in a process of its own."""
    centres = 4.0 * np.random.default_rng(1).normal(size=(10, 50))
    path = folder / "cells.h5ad"
    write_cells(path, N, 50, centres)
    command = [sys.executable, "-c", textwrap.dedent(MEASURE), str(path), "10"]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(found.stdout)


@LINUX
def test_two_hundred_thousand_backed_cells_fit_in_a_tenth_of_a_gibibyte(tmp_path):
    found = measured(tmp_path, 200_000)
    assert found["components"] == 10
    # The data are 38 MiB as float32; a hundred is far below the GiB that a million must fit into.
    assert found["extra"] < 100 * 2**20
    # Entropy of the mixture: a standard normal in 50 dimensions, one of ten well separated groups.
    expected = -0.5 * 50 * np.log(2 * np.pi * np.e) - np.log(10)
    assert found["log_likelihood"] == pytest.approx(expected, abs=0.1)


@LINUX
@pytest.mark.slow
def test_a_million_backed_cells_fit_in_a_gibibyte(tmp_path):
    found = measured(tmp_path, 1_000_000)
    assert found["components"] == 10
    assert found["extra"] < 2**30


def test_memory_does_not_grow_with_the_number_of_cells_but_for_one_number_each():
    import tracemalloc

    from omt.fitting.em import fit_mixture

    def blocks(N):
        def stream():
            rng = np.random.default_rng(0)
            for _ in range(0, N, 10_000):
                yield rng.normal(size=(10_000, 20)) + 6.0 * rng.integers(3, size=(10_000, 1))

        return stream

    fit_mixture(blocks(20_000), 3, n_init=1)  # what importing takes is not the fit's
    peaks = []
    for N in (60_000, 240_000):
        tracemalloc.start()
        fit_mixture(blocks(N), 3, n_init=1, epochs=1)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # 26 MB of 180 000 × 20 numbers would be 29; what grows is one number a sample and passing work on them.
    assert peaks[1] - peaks[0] < 180_000 * 8 * 4


# ------------------------------------------------------------------------------------------------------- interruption
KILLED = """
    import os, signal, sys
    import omt.fitting.checkpoint as checkpoint
    from omt.cli import app

    left = int(sys.argv[1])
    flush = checkpoint.Checkpoint.flush

    def dying(self):
        global left
        flush(self)
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint.Checkpoint.flush = dying
    app(sys.argv[2:])
"""


@pytest.fixture
def cells_file(tmp_path, random_mixture):
    X = np.concatenate([random_mixture(seed, 3, 4, spread=2.0).sample(3000, 1) for seed in range(3)])
    time = np.repeat(["0", "1", "2"], 3000)
    path = tmp_path / "cells.h5ad"
    ad.AnnData(obsm={"X_pca": X}, obs={"time": time}, shape=(9000, 0)).write_h5ad(path)
    return path


def arguments(file: Path, output: Path, checkpoint: Path | None) -> list[str]:
    plain = ["fit", str(file), "--groupby", "time", "--n-components", "3", "-o", str(output), "--quiet"]
    return plain if checkpoint is None else [*plain, "--checkpoint", str(checkpoint)]


@pytest.mark.parametrize(
    "writes", [pytest.param(1, id="in the first group", marks=pytest.mark.slow), pytest.param(4, id="in a later group")]
)
def test_a_killed_command_goes_on_to_the_bits_of_an_uninterrupted_one(tmp_path, cells_file, writes):
    folder = tmp_path / "state"
    command = [
        sys.executable,
        "-c",
        textwrap.dedent(KILLED),
        str(writes),
        *arguments(cells_file, tmp_path / "m", folder),
    ]
    killed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert list(folder.glob("*.npz"))
    code = "import sys; from omt.cli import app; app(sys.argv[1:])"
    for output, place in (("resumed", folder), ("whole", None)):
        again = [sys.executable, "-c", code, *arguments(cells_file, tmp_path / output, place)]
        subprocess.run(again, check=True, capture_output=True, text=True)
    assert not folder.exists()
    resumed, whole = (load_model(tmp_path / name).mixtures for name in ("resumed", "whole"))
    for a, b in zip(resumed, whole, strict=True):
        np.testing.assert_array_equal(a.weights, b.weights)
        np.testing.assert_array_equal(a.components.means, b.components.means)
        np.testing.assert_array_equal(a.components.covariances, b.components.covariances)
