"""Experts on several processes give the outputs and gradients that one dense formula gives on the joint batch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import start_processes
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shared_core import GroupedExperts, MoE, Router, Routing
from shared_core.parallel import parallelize_experts

E, H, I = 6, 8, 12


@dataclass(frozen=True)
class Case:
    """Rows and k of every rank (as many as there are), experts that exist, and how the layer is called."""

    rows: tuple[int, ...] = (7, 5, 4)
    top_k: tuple[int, ...] = (3, 3, 3)
    available: tuple[int, ...] = tuple(range(E))
    masked: bool = False
    bias: bool = False
    weight_input: bool = False
    recompute: bool = False
    how: str = "plain"


CASES = {
    "spread": Case(),
    "idle rank": Case(rows=(0, 9, 3)),
    "no rows anywhere": Case(rows=(0, 0, 0)),
    "all rows to one rank": Case(available=(4, 5), top_k=(2, 2, 2)),
    "all rows of one rank only to itself": Case(rows=(0, 8, 0), available=(4, 5), top_k=(1, 1, 1)),
    "padding and missing experts": Case(masked=True, available=(1, 4), top_k=(3, 3, 3)),
    "unequal k": Case(top_k=(1, 4, 6)),
    "biases": Case(bias=True),
    "weighted input": Case(weight_input=True, bias=True),
    "recomputed pre-activations": Case(recompute=True),
    "activation checkpointing": Case(rows=(0, 9, 3), how="checkpoint"),
    "checkpointing that keeps what travelled": Case(how="selective"),
}


def make_layer(case: Case, top_k: int) -> MoE:
    torch.manual_seed(3)
    router = Router.linear(H, E, top_k)
    experts = GroupedExperts(H, I, E, init_std=0.4, bias=case.bias, recompute=case.recompute)
    for parameter in (*router.parameters(), *experts.parameters()):
        torch.nn.init.normal_(parameter, std=0.4)
    return MoE(router, experts)


def rows_of(case: Case, rank: int) -> Tensor:
    return torch.randn(case.rows[rank], H, generator=torch.Generator().manual_seed(100 + rank))


def keep_of(case: Case, rank: int) -> Tensor:
    keep = torch.ones(case.rows[rank], dtype=torch.bool)
    keep[::3] = not case.masked
    return keep


def logit_bias_of(case: Case) -> Tensor:
    return torch.full((E,), -torch.inf).index_fill_(0, torch.tensor(case.available), 0.0)


# ---------------------------------------------------------------------------------------------------------------------
# What one process computes.


class Collectives(TorchDispatchMode):
    """Counts exchanges in the ``with`` block."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += operation is torch.ops._c10d_functional.all_to_all_single.default
        return operation(*args, **(kwargs or {}))


def keep_what_travelled(_: Any, operation: Any, *arguments: Any, **settings: Any) -> CheckpointPolicy:
    kept = operation in {torch.ops._c10d_functional.all_to_all_single.default}
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def run_case(case: Case, rank: int) -> dict[str, Tensor | int]:
    layer = make_layer(case, case.top_k[rank])
    parallelize_experts(layer, dist.group.WORLD)
    x = rows_of(case, rank).requires_grad_()
    routing = layer.router(x, logit_bias=logit_bias_of(case), mask=keep_of(case, rank))

    def run(x: Tensor, routing: Routing) -> Tensor:
        return layer.experts(x, routing, weight_input=case.weight_input)

    with Collectives() as forward:
        if case.how == "checkpoint":
            y = checkpoint(run, x, routing, use_reentrant=False)
        elif case.how == "selective":

            def contexts() -> Any:
                return create_selective_checkpoint_contexts(keep_what_travelled)

            y = checkpoint(run, x, routing, use_reentrant=False, context_fn=contexts)
        else:
            y = run(x, routing)
    with Collectives() as backward:
        y.square().sum().backward()
    grads = {name: parameter.grad.full_tensor() for name, parameter in layer.experts.named_parameters()}
    return {
        "y": y.detach(),
        "indices": routing.indices,
        "x": x.grad,
        "gate": layer.router.gate.weight.grad,
        **grads,
        "forward": forward.count,
        "backward": backward.count,
    }


def work(rank: int, world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size, timeout=timedelta(seconds=80)
    )
    try:
        results = {name: run_case(case, rank) for name, case in CASES.items()}
        layer = make_layer(Case(), 3)
        parallelize_experts(layer, dist.group.WORLD)
        x = rows_of(Case(), rank)
        single = make_layer(Case(), 3)
        with torch.no_grad():
            results["no gradient"] = {"y": layer(x)[0], "single": single(x)[0]}
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            results["autocast"] = {"y": layer(x)[0], "single": single(x)[0]}
        x = x.view(1, -1, 1, H).requires_grad_(rank == 1)  # a gradient that only one rank asks for
        y, _ = layer(x)
        y.sum().backward()
        results["one x"] = {"y": y.detach(), "x": None if x.grad is None else x.grad}
        torch.save(results, Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


# ---------------------------------------------------------------------------------------------------------------------
# What it must be: float64, every expert on every row.


def dense(case: Case, indices: list[Tensor], world_size: int) -> dict[str, Tensor]:
    layer = make_layer(case, 1).double()
    own = dict(layer.experts.named_parameters())
    x = torch.cat([rows_of(case, rank) for rank in range(world_size)]).double().requires_grad_()
    keep = torch.cat([keep_of(case, rank) for rank in range(world_size)])
    chosen = torch.cat(
        [torch.zeros(len(part), E + 1).scatter_(1, part, 1.0)[:, :E] for part in indices]
    )  # [R, E], whatever k
    gate = layer.router.gate.weight
    weight = torch.softmax(x @ gate.T + logit_bias_of(case), -1) * chosen * keep[:, None]
    to_up, to_out = own["gate_up_proj"], own["down_proj"]
    inputs = x[:, None] * (weight[..., None] if case.weight_input else 1)  # [R, 1 or E, H]
    z = torch.einsum("reh,ejh->rej", inputs.expand(-1, E, -1), to_up)
    if case.bias:
        z = z + own["gate_up_proj_bias"]
    hidden = torch.nn.functional.silu(z[..., :I]) * z[..., I:]
    y = torch.einsum("rei,ehi->reh", hidden, to_out)
    if case.bias:
        y = y + own["down_proj_bias"]
    y = (y * (chosen * keep[:, None] if case.weight_input else weight)[..., None]).sum(1)
    y.square().sum().backward()
    return {"y": y.detach(), "x": x.grad, "gate": gate.grad, **{name: value.grad for name, value in own.items()}}


@pytest.fixture(scope="module", params=[2, 3], ids=["2 processes", "3 processes"])
def ranks(request: pytest.FixtureRequest, run_ranks: Any) -> Iterator[list[dict[str, Any]]]:
    return run_ranks(__file__, request.param)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return request.param


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)


def expected(name: str, ranks: list[dict[str, Any]]) -> dict[str, Tensor]:
    return dense(CASES[name], [rank[name]["indices"] for rank in ranks], len(ranks))


def test_outputs_are_those_of_the_joint_batch(ranks: list[dict[str, Any]], case: str) -> None:
    close(torch.cat([rank[case]["y"] for rank in ranks]), expected(case, ranks)["y"])


def test_gradients_of_rows_are_those_of_the_joint_batch(ranks: list[dict[str, Any]], case: str) -> None:
    close(torch.cat([rank[case]["x"] for rank in ranks]), expected(case, ranks)["x"])


def test_gradients_of_experts_are_those_of_the_sum_of_losses(ranks: list[dict[str, Any]], case: str) -> None:
    wanted = expected(case, ranks)
    for name in wanted.keys() - {"x", "y", "gate"}:
        close(ranks[0][case][name], wanted[name])


def test_router_gradients_sum_to_those_of_the_joint_batch(ranks: list[dict[str, Any]], case: str) -> None:
    close(torch.stack([rank[case]["gate"] for rank in ranks]).sum(0), expected(case, ranks)["gate"])


def test_rows_without_an_expert_are_exactly_zero(ranks: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(ranks):
        padding = ~keep_of(CASES["padding and missing experts"], number)
        assert not rank["padding and missing experts"]["y"][padding].any()


def test_four_collectives_go_forward_and_three_back(ranks: list[dict[str, Any]]) -> None:
    assert [(rank["spread"]["forward"], rank["spread"]["backward"]) for rank in ranks] == [(4, 3)] * len(ranks)


def test_checkpointing_repeats_the_collectives_of_the_forward_pass(ranks: list[dict[str, Any]]) -> None:
    assert [rank["activation checkpointing"]["backward"] for rank in ranks] == [4 + 3] * len(ranks)


def test_checkpointing_that_keeps_what_travelled_repeats_none(ranks: list[dict[str, Any]]) -> None:
    assert [rank["checkpointing that keeps what travelled"]["backward"] for rank in ranks] == [3] * len(ranks)


def test_without_gradients_the_output_is_the_same(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        torch.testing.assert_close(rank["no gradient"]["y"], rank["no gradient"]["single"])


def test_autocast_rounds_as_one_process_does(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["autocast"]["y"].dtype == torch.bfloat16
        torch.testing.assert_close(rank["autocast"]["y"], rank["autocast"]["single"], atol=0.02, rtol=0.02)


def test_one_rank_alone_may_ask_for_the_gradient_of_its_rows(ranks: list[dict[str, Any]]) -> None:
    assert [rank["one x"]["x"] is not None for rank in ranks] == [number == 1 for number in range(len(ranks))]
    assert ranks[1]["one x"]["x"].abs().sum() > 0


def test_leading_shape_is_kept(ranks: list[dict[str, Any]]) -> None:
    assert ranks[1]["one x"]["y"].shape == (1, 5, 1, H)


if __name__ == "__main__":
    size, where = sys.argv[1:]
    start_processes(work, (int(size), where), nprocs=int(size), start_method="fork")
