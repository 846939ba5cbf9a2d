"""Starts the processes of the tests in this folder."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

TIMEOUT = 100.0  # seconds: a hang fails the tests that need the result, not the suite

RunRanks = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="session")
def run_ranks(tmp_path_factory: pytest.TempPathFactory) -> RunRanks:
    """``run_ranks(script, world_size, *arguments)``: what each rank saved as ``{rank}.pt``.

    The script is called as ``script world_size folder *arguments``, imports what it needs once and forks the ranks,
    which spares the seconds that importing torch costs each. They meet through a file in ``folder``, so that no port
    can be taken by somebody else.
    """

    def run(script: str, world_size: int, *arguments: str) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("ranks")
        log = folder / "log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, script, str(world_size), str(folder), *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
            try:
                process.wait(timeout=TIMEOUT)
            except subprocess.TimeoutExpired:
                pytest.fail(f"processes still ran after {TIMEOUT:.0f} s\n{log.read_text()}")
            finally:
                with contextlib.suppress(ProcessLookupError):  # the ranks, too, if any is left
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        assert process.returncode == 0, log.read_text()
        return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world_size)]

    return run
