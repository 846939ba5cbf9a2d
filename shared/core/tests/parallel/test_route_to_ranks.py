"""Which processes a row visits, against sets; and the example, started by torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared_core import Routing
from shared_core.parallel import route_to_ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "expert_parallel.py"


@st.composite
def routings(draw: st.DrawFn) -> tuple[Routing, int]:
    ranks, held = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    experts = ranks * held
    rows = draw(st.lists(st.lists(st.integers(0, experts), min_size=3, max_size=3), max_size=6))
    indices = torch.tensor(rows, dtype=torch.int64).reshape(-1, 3)
    return Routing.from_topk(indices, torch.ones(indices.shape), num_experts=experts), ranks


@given(routings())
def test_each_row_goes_once_to_every_process_with_one_of_its_experts(drawn: tuple[Routing, int]) -> None:
    routing, ranks = drawn
    held = routing.num_experts // ranks
    for row, visited in zip(routing.indices.tolist(), route_to_ranks(routing, ranks).indices.tolist(), strict=True):
        wanted = {expert // held for expert in row if expert < routing.num_experts}
        assert sorted(rank for rank in visited if rank < ranks) == sorted(wanted)


@given(routings())
def test_visits_weigh_one_and_absences_nothing(drawn: tuple[Routing, int]) -> None:
    visits = route_to_ranks(*drawn)
    assert torch.equal(visits.weights, (visits.indices < drawn[1]).float())


@pytest.mark.parametrize("num_ranks", [0, 4, 7])
def test_processes_that_cannot_share_equally_are_refused(num_ranks: int) -> None:
    routing = Routing.from_topk(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1), num_experts=6)
    with pytest.raises(ValueError, match=f"num_experts=6 cannot be shared equally among {num_ranks} processes"):
        route_to_ranks(routing, num_ranks)


def test_example_runs_under_torchrun_and_agrees_with_one_process() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(EXAMPLE)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        launcher, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        try:
            output, errors = process.communicate(timeout=100)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == 0, errors
    table = [line.split() for line in output.splitlines()[2:]]
    assert [row[0] for row in table] == ["0", "1"]
    assert all(float(row[3]) < float(row[4]) for row in table)  # fewer bytes than once a choice
    assert all(float(difference) < 1e-5 for row in table for difference in row[5:])
