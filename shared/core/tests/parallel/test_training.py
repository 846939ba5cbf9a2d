"""Training on 2 processes, then resuming on 1 and on 3 from the sharded checkpoint, equals training in one process."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing import start_processes

from shared_core import BiasBalancer, GroupedExperts, MoE, Router, load_balance_loss
from shared_core.parallel import parallelize_experts

# What torch says when a single process saves or loads; with a process group it would not be a single process.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable:UserWarning")

E, H, I, ROWS = 6, 8, 4, 12
PARAMETERS = ("router.gate.weight", "experts.gate_up_proj", "experts.down_proj", "shared_expert.weight")


def make_layer(seed: int, device: str = "cpu") -> MoE:
    torch.manual_seed(seed)
    router = Router.linear(H, E, 2, renormalize=True, balancer=BiasBalancer(E, 0.1), dtype=torch.float64)
    experts = GroupedExperts(H, I, E, init_std=0.4, dtype=torch.float64, device=device)
    return MoE(router, experts, nn.Linear(H, H, bias=False, dtype=torch.float64))


def make_optimizer(layer: MoE) -> torch.optim.AdamW:
    shared = list(layer.experts.parameters())  # DTensors and plain tensors in groups of their own
    others = [*layer.router.parameters(), *layer.shared_expert.parameters()]
    return torch.optim.AdamW([{"params": others}, {"params": shared, "weight_decay": 0.1}], lr=0.01)


def batch(step: int) -> Tensor:
    return torch.randn(ROWS, H, generator=torch.Generator().manual_seed(step), dtype=torch.float64) + 0.5


def train_step(layer: MoE, optimizer: torch.optim.Optimizer, x: Tensor, group: dist.ProcessGroup | None) -> None:
    processes = 1 if group is None else dist.get_world_size(group)
    y, routing = layer(x)
    balance = load_balance_loss(routing, group=group)  # each process has the mean over its rows: 1/W of the joint one
    (y.square().sum() + 0.1 * balance / processes).backward()
    if group is not None:
        for parameter in layer.parameters():
            if not isinstance(parameter, DTensor):
                dist.all_reduce(parameter.grad, group=group)
    layer.router.balancer.update(group)
    optimizer.step()
    optimizer.zero_grad()


def whole(layer: MoE) -> dict[str, Tensor]:
    state = layer.state_dict()
    return {name: (v.full_tensor() if isinstance(v, DTensor) else v).clone() for name, v in state.items()}


def restore(layer: MoE, optimizer: torch.optim.Optimizer, path: Path, **settings: Any) -> None:
    model_state, optimizer_state = get_state_dict(layer, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path, **settings)
    set_state_dict(layer, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)


def compiled(rank: int) -> dict[str, Any]:
    """Forward and backward with torch.compile, as differences from eager, and how many graphs it made."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    results = []
    for compile_ in (lambda layer: layer, lambda layer: torch.compile(layer, backend=backend)):
        layer = parallelize_experts(make_layer(0), dist.group.WORLD)
        x = batch(0)[: 3 + rank].requires_grad_()
        y = compile_(layer)(x)[0]
        y.square().sum().backward()
        own = layer.experts.down_proj.grad.full_tensor()
        results.append({"y": y.detach(), "x": x.grad, "gate": layer.router.gate.weight.grad, "experts": own})
    eager, traced = results
    differences = {name: float((eager[name] - traced[name]).abs().max()) for name in eager}
    return {"differences": differences, "graphs": len(graphs)}


def begin(rank: int, path: Path, single: Path) -> dict[str, Any]:
    """First step on two processes, and what two processes make of files of one."""
    mesh = init_device_mesh("cpu", (2,))
    layer = parallelize_experts(make_layer(0), mesh)
    optimizer = make_optimizer(layer)
    train_step(layer, optimizer, batch(0).chunk(2)[rank], mesh.get_group())
    model_state, optimizer_state = get_state_dict(layer, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)

    from_file = parallelize_experts(make_layer(1), mesh)
    from_file.load_state_dict(torch.load(single / "single.pt", weights_only=True))
    assigned = parallelize_experts(make_layer(1), mesh)
    assigned.load_state_dict(torch.load(single / "single.pt", weights_only=True), assign=True)
    from_folder = parallelize_experts(make_layer(1), mesh)
    state = get_model_state_dict(from_folder)
    dcp.load({"model": state}, checkpoint_id=single / "single")
    from_folder.load_state_dict(state)
    different = parallelize_experts(make_layer(rank), mesh)
    own = parallelize_experts(make_layer(rank), mesh, src_data_rank=None)
    empty = parallelize_experts(make_layer(0, device="meta"), mesh)
    meta = all(parameter.is_meta for parameter in empty.experts.parameters())
    empty.experts.to_empty(device="cpu")
    torch.manual_seed(5)
    empty.experts.reset_parameters()
    twice = nn.ModuleList([layer_with := make_layer(0), MoE(make_layer(0).router, layer_with.experts)])
    parallelize_experts(twice, mesh)
    return {
        "trained": whole(layer),
        "file": whole(from_file),
        "folder": whole(from_folder),
        "of rank 0": different.experts.down_proj.full_tensor().detach(),
        "of each rank": own.experts.down_proj.full_tensor().detach(),
        "meta": meta,
        "drawn": empty.experts.down_proj.full_tensor().detach(),
        "assigned bytes": assigned.experts.down_proj.to_local().untyped_storage().nbytes(),
        "bytes": layer.experts.down_proj.to_local().untyped_storage().nbytes(),
        "tied": twice[0].experts is twice[1].experts,
        "keys": sorted(layer.state_dict()),
        "compiled": compiled(rank),
    }


def resume(rank: int, world_size: int, path: Path) -> dict[str, Any]:
    """Second step on any number of processes."""
    layer = parallelize_experts(make_layer(7), dist.group.WORLD)
    optimizer = make_optimizer(layer)
    restore(layer, optimizer, path)
    restored = whole(layer)
    train_step(layer, optimizer, batch(1).chunk(world_size)[rank], dist.group.WORLD)
    empty = parallelize_experts(make_layer(0, device="meta"), init_device_mesh("cpu", (world_size,)))
    empty.experts.to_empty(device="cpu")
    torch.manual_seed(5)
    empty.experts.reset_parameters()
    drawn = empty.experts.down_proj.full_tensor().detach()
    return {"restored": restored, "trained": whole(layer), "drawn": drawn}


def work(rank: int, world_size: int, folder: str, what: str, path: Path, single: Path = Path()) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size, timeout=timedelta(seconds=80)
    )
    try:
        result = begin(rank, path, single) if what == "begin" else resume(rank, world_size, path)
        torch.save(result, Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


# ---------------------------------------------------------------------------------------------------------------------


def single_process(steps: int) -> MoE:
    layer = make_layer(0)
    optimizer = make_optimizer(layer)
    for step in range(steps):
        train_step(layer, optimizer, batch(step), None)
    return layer


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layer saved by one process, as a file and as a folder of torch.distributed.checkpoint."""
    folder = tmp_path_factory.mktemp("single")
    layer = single_process(1)
    torch.save(layer.state_dict(), folder / "single.pt")
    dcp.save({"model": layer.state_dict()}, checkpoint_id=folder / "single", no_dist=True)
    return folder


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoint") / "step1"


@pytest.fixture(scope="module")
def two(run_ranks: Any, path: Path, single: Path) -> list[dict[str, Any]]:
    return run_ranks(__file__, 2, "begin", str(path), str(single))


@pytest.fixture(scope="module")
def three(run_ranks: Any, two: list[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    return run_ranks(__file__, 3, "resume", str(path))


@pytest.mark.parametrize("name", [*PARAMETERS, "router.balancer.expert_bias"])
def test_step_on_two_processes_is_the_step_of_one(two: list[dict[str, Any]], name: str) -> None:
    expected = single_process(1).state_dict()[name]
    for rank in two:
        torch.testing.assert_close(rank["trained"][name], expected, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("name", PARAMETERS)
def test_three_processes_restore_what_two_saved(
    two: list[dict[str, Any]], three: list[dict[str, Any]], name: str
) -> None:
    assert all(torch.equal(rank["restored"][name], two[0]["trained"][name]) for rank in three)


@pytest.mark.parametrize("name", [*PARAMETERS, "router.balancer.expert_bias"])
def test_three_processes_go_on_like_one(three: list[dict[str, Any]], name: str) -> None:
    expected = single_process(2).state_dict()[name]
    for rank in three:
        torch.testing.assert_close(rank["trained"][name], expected, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("name", [*PARAMETERS, "router.balancer.expert_bias"])
@pytest.mark.usefixtures("two")
def test_one_process_goes_on_from_what_two_saved(path: Path, name: str) -> None:
    layer = make_layer(7)
    optimizer = make_optimizer(layer)
    restore(layer, optimizer, path, no_dist=True)
    train_step(layer, optimizer, batch(1), None)
    expected = single_process(2).state_dict()[name]
    torch.testing.assert_close(layer.state_dict()[name], expected, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("kind", ["file", "folder"])
@pytest.mark.parametrize("name", PARAMETERS)
def test_two_processes_load_what_one_saved(two: list[dict[str, Any]], kind: str, name: str) -> None:
    expected = single_process(1).state_dict()[name]
    assert all(torch.equal(rank[kind][name], expected) for rank in two)


@pytest.mark.parametrize("name", ["y", "x", "gate", "experts"])
def test_compiled_layer_gives_the_same(two: list[dict[str, Any]], name: str) -> None:
    assert all(rank["compiled"]["differences"][name] < 1e-12 for rank in two)


def test_router_is_compiled_although_the_exchange_is_not(two: list[dict[str, Any]]) -> None:
    assert all(rank["compiled"]["graphs"] >= 1 for rank in two)


def test_names_in_the_state_dict_are_those_of_one_process(two: list[dict[str, Any]]) -> None:
    assert two[0]["keys"] == sorted([*PARAMETERS, "router.balancer.expert_bias"])


def test_only_the_own_share_stays_in_memory(two: list[dict[str, Any]]) -> None:
    assert [rank["bytes"] for rank in two] == [E // 2 * H * I * 8] * 2


def test_assigning_the_file_of_one_process_keeps_the_own_share_alone(two: list[dict[str, Any]]) -> None:
    assert [rank["assigned bytes"] for rank in two] == [E // 2 * H * I * 8] * 2


def test_values_of_rank_0_are_shared_out(two: list[dict[str, Any]]) -> None:
    assert all(torch.equal(rank["of rank 0"], make_layer(0).experts.down_proj) for rank in two)


def test_without_a_source_every_process_keeps_its_own_values(two: list[dict[str, Any]]) -> None:
    parts = [make_layer(seed).experts.down_proj.chunk(2)[seed] for seed in range(2)]
    assert all(torch.equal(rank["of each rank"], torch.cat(parts)) for rank in two)


def test_experts_on_the_meta_device_stay_there_until_they_are_filled(two: list[dict[str, Any]]) -> None:
    assert all(rank["meta"] for rank in two)


def test_drawn_values_do_not_depend_on_the_number_of_processes(
    two: list[dict[str, Any]], three: list[dict[str, Any]]
) -> None:
    assert torch.equal(two[0]["drawn"], three[0]["drawn"])


def test_experts_of_different_processes_are_drawn_differently(two: list[dict[str, Any]]) -> None:
    drawn = two[0]["drawn"]
    assert torch.unique(drawn.flatten()).numel() == drawn.numel()
    torch.testing.assert_close(drawn.std(), torch.tensor(0.4, dtype=torch.float64), atol=0.06, rtol=0)


def test_experts_in_two_places_stay_shared(two: list[dict[str, Any]]) -> None:
    assert all(rank["tied"] for rank in two)


if __name__ == "__main__":
    size, where, action, *places = sys.argv[1:]
    start_processes(work, (int(size), where, action, *map(Path, places)), nprocs=int(size), start_method="fork")
