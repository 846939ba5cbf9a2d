"""Experts shared in one dimension of a 2 x 2 mesh and sharded by FSDP2 in the other train as one process does."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.multiprocessing import start_processes

from shared_core import GroupedExperts, MoE, Router
from shared_core.parallel import parallelize_experts

E, H, I, PROCESSES = 4, 8, 6, 4
PARAMETERS = ("router.gate.weight", "experts.gate_up_proj", "experts.down_proj", "shared_expert.weight")


def make_layer() -> MoE:
    torch.manual_seed(0)
    router = Router.linear(H, E, 2, renormalize=True, dtype=torch.float64)
    experts = GroupedExperts(H, I, E, init_std=0.4, dtype=torch.float64)
    return MoE(router, experts, nn.Linear(H, H, bias=False, dtype=torch.float64))


def batch() -> Tensor:
    return torch.randn(5 * PROCESSES, H, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def two_steps(layer: MoE, x: Tensor) -> dict[str, Tensor]:
    """Gradients of the first step (of the mean loss over all rows), then parameters after the second."""
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    results = {}
    for step in range(2):
        layer(x)[0].square().mean().backward()
        if step == 0:
            results |= {"grad." + name: parameter.grad for name, parameter in layer.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    results |= dict(layer.named_parameters())
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach() for name, value in results.items()
    }


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES, timeout=timedelta(seconds=80)
    )
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        x = batch().chunk(PROCESSES)[rank]
        results: dict[str, Any] = {}
        for name, inner_dim in (("experts", 0), ("width", 1)):  # which dimension of [E, ...] FSDP cuts
            layer = parallelize_experts(make_layer(), mesh["ep"])
            fully_shard(layer.experts, mesh=mesh["dp"], shard_placement_fn=lambda _, dim=inner_dim: Shard(dim))
            # Every process holds one fourth of the rows of a mean loss, and the experts' gradients are summed over ep.
            layer.experts.set_gradient_divide_factor(PROCESSES)
            fully_shard(layer, mesh=mesh["dp", "ep"]._flatten("all") if inner_dim == 0 else mesh["all"])
            local = layer.experts.down_proj.to_local().numel()
            results[name] = two_steps(layer, x) | {"local": local}
            torch.manual_seed(2)
            layer.experts.reset_parameters()
            results[name]["drawn"] = layer.experts.down_proj.full_tensor().detach()
            layer.load_state_dict({k: v for k, v in layer.state_dict().items() if "experts" not in k}, strict=False)
            layer.experts.load_state_dict(make_layer().experts.state_dict())
            results[name]["loaded"] = layer.experts.down_proj.full_tensor().detach()
        torch.save(results, Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(run_ranks: Any) -> list[dict[str, Any]]:
    return run_ranks(__file__, PROCESSES)


@pytest.fixture(params=["experts", "width"])
def cut(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("name", PARAMETERS)
def test_gradients_are_those_of_the_mean_loss(ranks: list[dict[str, Any]], cut: str, name: str) -> None:
    expected = two_steps(make_layer(), batch())["grad." + name]
    for rank in ranks:
        torch.testing.assert_close(rank[cut]["grad." + name], expected, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("name", PARAMETERS)
def test_two_steps_are_those_of_one_process(ranks: list[dict[str, Any]], cut: str, name: str) -> None:
    expected = two_steps(make_layer(), batch())[name]
    for rank in ranks:
        torch.testing.assert_close(rank[cut][name], expected, atol=1e-10, rtol=1e-8)


def test_every_process_stores_a_quarter(ranks: list[dict[str, Any]], cut: str) -> None:
    assert [rank[cut]["local"] for rank in ranks] == [E * H * I // PROCESSES] * PROCESSES


def test_drawing_and_loading_reach_nested_shards(ranks: list[dict[str, Any]], cut: str) -> None:
    assert torch.equal(ranks[0]["experts"]["drawn"], ranks[0]["width"]["drawn"])
    for rank in ranks:
        assert torch.equal(rank[cut]["loaded"], make_layer().experts.down_proj)
        assert torch.unique(rank[cut]["drawn"]).numel() == E * H * I


if __name__ == "__main__":
    start_processes(work, (sys.argv[2],), nprocs=PROCESSES, start_method="fork")
