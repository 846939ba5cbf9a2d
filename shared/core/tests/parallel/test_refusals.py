"""What cannot work is refused with a sentence, on every process, instead of waiting for ever."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.multiprocessing import start_processes

from shared_core import GroupedExperts, MoE, Router, Routing
from shared_core.parallel import ExpertParallel, parallelize_experts

E, H, I = 6, 8, 4


class Clamped(GroupedExperts):
    def forward(self, x: torch.Tensor, routing: Routing, *, weight_input: bool = False) -> torch.Tensor:
        return super().forward(x, routing, weight_input=weight_input).clamp(-1, 1)


def whole(num_experts: int = E, **settings: Any) -> GroupedExperts:
    return GroupedExperts(H, I, num_experts, **settings)


def routing_of(rows: int, num_experts: int = E, dtype: torch.dtype = torch.float32) -> Routing:
    indices = torch.arange(rows * 2).view(rows, 2) % num_experts
    return Routing.from_topk(indices, torch.full((rows, 2), 0.5, dtype=dtype), num_experts=num_experts)


def told(call: Callable[[], object]) -> str:
    try:
        call()
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=80)
    )
    try:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "ep"))
        group = dist.group.WORLD
        alone = dist.new_group([0])
        x = torch.randn(3, H)
        experts = ExpertParallel(whole(), mesh["ep"])
        other = ExpertParallel(whole(), mesh["ep"])
        other.requires_grad_(rank == 1)
        sharded = whole()
        fully_shard(sharded, mesh=mesh["ep"])
        wide = torch.float64 if rank == 1 else torch.float32
        half = GroupedExperts(H, I, 2)
        layers = nn.ModuleDict(
            {"good": MoE(Router.linear(H, E, 2), whole()), "bad": MoE(Router.linear(H, 5, 2), whole(5))}
        )

        def without_gradient_on_one() -> None:
            with torch.set_grad_enabled(rank == 0):
                experts(x, routing_of(3))

        on_rank_0 = rank == 0
        replicated = DTensor.from_local(x, mesh["ep"], [Replicate()], run_check=False)
        normed = torch.nn.utils.parametrizations.weight_norm(whole(), "down_proj")
        messages = {
            # at construction
            "unequal shares": told(lambda: ExpertParallel(whole(5), group)),
            "two dimensions": told(lambda: ExpertParallel(whole(), mesh)),
            "twice": told(lambda: ExpertParallel(experts, mesh["ep"])),
            "after FSDP": told(lambda: ExpertParallel(sharded, mesh["ep"])),
            "no group": told(lambda: ExpertParallel(whole(), "cuda:0")),
            "not a member": told(lambda: ExpertParallel(whole(2), alone)) if rank == 1 else "",
            "other module": told(lambda: ExpertParallel(nn.Linear(H, H), group)),
            "other forward": told(lambda: parallelize_experts(MoE(Router.linear(H, E, 2), Clamped(H, I, E)), group)),
            "meta with a group": told(lambda: ExpertParallel(whole(device="meta"), group)),
            "no experts inside": told(lambda: parallelize_experts(nn.Linear(H, H), group)),
            "one bad layer": told(lambda: parallelize_experts(layers, group)),
            "parametrized": told(lambda: ExpertParallel(normed, mesh["ep"])),
            "other dtype held": told(lambda: ExpertParallel(whole(dtype=wide), mesh["ep"])),
            "bias on one": told(lambda: ExpertParallel(whole(bias=rank == 1), mesh["ep"])),
            "meta on one": told(lambda: ExpertParallel(whole(device="meta" if rank == 1 else "cpu"), mesh["ep"])),
            "another mesh": told(lambda: parallelize_experts(experts, mesh["dp"])),
            # in a call; both ranks must get out
            "dtype on one": told(lambda: experts(x.to(wide), routing_of(3))),
            "other E": told(lambda: experts(x, routing_of(3, num_experts=4))),
            "rows": told(lambda: experts(x, routing_of(4))),
            "no routing": told(lambda: experts(x, None)),
            "gradient mode": told(without_gradient_on_one),
            "trained on one": told(lambda: other(x, routing_of(3))),
            "weighted input on one": told(lambda: experts(x, routing_of(3), weight_input=rank == 1)),
            "weights on one": told(lambda: experts(x, routing_of(3, dtype=wide))),
            "distributed rows": told(lambda: experts(replicated if on_rank_0 else x, routing_of(3))),
            "rows elsewhere": told(lambda: experts(x.to("meta") if on_rank_0 else x, routing_of(3))),
            "sparse rows": told(lambda: experts(x.to_sparse() if on_rank_0 else x, routing_of(3))),
            "vmap": told(
                lambda: (
                    torch.vmap(lambda one: experts(one, routing_of(3)))(x[None])
                    if on_rank_0
                    else experts(x, routing_of(3))
                )
            ),
            "afterwards": told(lambda: experts(x, routing_of(3))),
        }
        kinds = {
            "unchanged": type(layers["good"].experts).__name__,
            "same mesh again": parallelize_experts(experts, mesh["ep"]) is experts,
            "alone": ExpertParallel(half, alone).local_experts == range(2) if rank == 0 else True,
        }
        torch.save(messages | kinds, Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(run_ranks: Any) -> list[dict[str, Any]]:
    return run_ranks(__file__, 2)


SHARED = {
    "unequal shares": "ValueError: num_experts=5 cannot be shared equally among 2 processes",
    "two dimensions": "ValueError: mesh has 2 dimensions ('dp', 'ep'); pass one of them, as mesh['ep']",
    "twice": "ValueError: the experts are already distributed, over 2 processes",
    "after FSDP": "ValueError: gate_up_proj is already distributed, as (Shard(dim=0),); share the experts first",
    "no group": "TypeError: mesh must be a DeviceMesh or a ProcessGroup, got str",
    "other module": "TypeError: experts must be GroupedExperts with their own forward, got Linear",
    "other forward": "TypeError: experts: experts must be GroupedExperts with their own forward, got Clamped",
    "meta with a group": "ValueError: experts on the meta device need a DeviceMesh",
    "no experts inside": "ValueError: there are no GroupedExperts in Linear",
    "one bad layer": "ValueError: bad.experts: num_experts=5 cannot be shared equally among 2 processes",
    "parametrized": "ValueError: the experts hold gate_up_proj, parametrizations.down_proj.original0",
    "other dtype held": "RuntimeError: the processes bring different experts: bytes_per_value is 4 on rank 0, 8 on",
    "bias on one": "RuntimeError: the processes bring different experts: bias is 0 on rank 0, 1 on rank 1",
    "meta on one": "RuntimeError: the processes bring different experts: is_meta is 0 on rank 0, 1 on rank 1",
    "another mesh": "ValueError: ExpertParallel: the experts are already distributed, over 2 processes",
    "afterwards": "nothing was raised",
}
OF_RANK_0 = {
    "dtype on one": "RuntimeError: rank 1 of this expert-parallel group refused its arguments",
    "other E": "ValueError: routing has num_experts=4, but up holds 6 experts",
    "rows": "ValueError: x of shape [3, 8] has 3 rows, but routing has 4",
    "no routing": "TypeError: routing must be a Routing",
    "gradient mode": "grad_enabled is True on rank 0 and False on rank 1",
    "trained on one": "trained_experts is False on rank 0 and True on rank 1",
    "weighted input on one": "weight_input is False on rank 0 and True on rank 1",
    "distributed rows": "TypeError: x is a DTensor; every process passes its own rows",
    "rows elsewhere": "ValueError: x is on meta, but the experts are on cpu",
    "sparse rows": "RuntimeError: reshape is not implemented for sparse tensors",
    "vmap": "NotImplementedError: ExpertParallel does not run inside torch.func transforms",
    "weights on one": "weights_dtype is torch.float32 on rank 0 and torch.float64 on rank 1",
}


@pytest.mark.parametrize("what", SHARED)
def test_every_process_is_told(ranks: list[dict[str, Any]], what: str) -> None:
    assert all(rank[what].startswith(SHARED[what]) for rank in ranks), [rank[what] for rank in ranks]


@pytest.mark.parametrize("what", OF_RANK_0)
def test_rank_0_is_told_what_does_not_fit(ranks: list[dict[str, Any]], what: str) -> None:
    assert OF_RANK_0[what] in ranks[0][what]


@pytest.mark.parametrize("what", OF_RANK_0)
def test_no_process_is_left_waiting(ranks: list[dict[str, Any]], what: str) -> None:
    assert ranks[1][what].startswith(("RuntimeError", "TypeError", "ValueError"))


def test_process_outside_the_group_is_refused(ranks: list[dict[str, Any]]) -> None:
    assert ranks[1]["not a member"] == "ValueError: this process is not a member of the group"


def test_group_of_fewer_processes_shares_among_them_alone(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["alone"]


def test_nothing_is_changed_when_one_layer_cannot_be_shared(ranks: list[dict[str, Any]]) -> None:
    assert [rank["unchanged"] for rank in ranks] == ["GroupedExperts"] * 2


def test_sharing_again_over_the_same_mesh_changes_nothing(ranks: list[dict[str, Any]]) -> None:
    assert all(rank["same mesh again"] for rank in ranks)


def test_missing_initialisation_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"torch\.distributed is not initialised; start the program with torchrun"):
        ExpertParallel(whole(), dist.group.WORLD)


if __name__ == "__main__":
    start_processes(work, (sys.argv[2],), nprocs=2, start_method="fork")
