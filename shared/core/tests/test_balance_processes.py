"""Balance over a process group: two processes agree with one process that sees the joint batch."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shared_core import BiasBalancer, Router, load_balance_loss, route

E, K, ROWS = 6, 2, 20


def logits_of_rank(rank: int) -> torch.Tensor:
    return torch.randn(ROWS, E, generator=torch.Generator().manual_seed(rank)) + 2.0 * torch.eye(E)[rank]


def balancer_after_one_step(logits: list[torch.Tensor], group: dist.ProcessGroup | None) -> torch.Tensor:
    router = Router(torch.nn.Identity(), E, K, balancer=BiasBalancer(E, 0.5))
    for part in logits:
        router(part)
    router.balancer.update(group)
    return router.balancer.expert_bias


def work(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world_size=2, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    try:
        z = logits_of_rank(rank).requires_grad_()
        loss = load_balance_loss(route(z, K), group=dist.group.WORLD)
        loss.backward()
        bias = balancer_after_one_step([logits_of_rank(rank)], dist.group.WORLD)
        torch.save({"loss": loss.detach(), "grad": z.grad, "bias": bias}, Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # This file as a script: a module that pytest imported need not be importable by name in another process.
    commands = [[sys.executable, __file__, str(rank), str(port), str(folder)] for rank in range(2)]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    try:
        errors = [process.communicate(timeout=100)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def test_mean_of_the_ranks_losses_is_the_loss_of_the_joint_batch(ranks: list[dict[str, torch.Tensor]]) -> None:
    joint = load_balance_loss(route(torch.cat([logits_of_rank(0), logits_of_rank(1)]), K))
    torch.testing.assert_close((ranks[0]["loss"] + ranks[1]["loss"]) / 2, joint)


def test_global_loss_differs_from_the_mean_of_local_losses(ranks: list[dict[str, torch.Tensor]]) -> None:
    local = sum(load_balance_loss(route(logits_of_rank(rank), K)) for rank in range(2)) / 2
    assert ((ranks[0]["loss"] + ranks[1]["loss"]) / 2 - local).abs() > 0.05


def test_averaged_gradients_are_those_of_the_joint_batch(ranks: list[dict[str, torch.Tensor]]) -> None:
    z = torch.cat([logits_of_rank(0), logits_of_rank(1)]).requires_grad_()
    load_balance_loss(route(z, K)).backward()
    torch.testing.assert_close(torch.cat([ranks[0]["grad"], ranks[1]["grad"]]) / 2, z.grad)


def test_all_ranks_move_their_bias_by_the_joint_load(ranks: list[dict[str, torch.Tensor]]) -> None:
    expected = balancer_after_one_step([logits_of_rank(0), logits_of_rank(1)], None)
    assert torch.equal(ranks[0]["bias"], expected)
    assert torch.equal(ranks[1]["bias"], expected)


if __name__ == "__main__":
    work(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
