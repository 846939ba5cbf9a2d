"""Plans, permute and combine against loops over single assignments."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor
from torch.utils import _pytree

from shared_core import DispatchPlan, Routing, combine, permute
from shared_core.dispatch import _GatherRows, _sum_by_place

EXPERTS = 5

routed = hnp.arrays(
    np.int64, hnp.array_shapes(min_dims=2, max_dims=2, max_side=9), elements=st.integers(0, EXPERTS)
).map(lambda indices: Routing.from_topk(torch.from_numpy(indices), torch.rand(indices.shape), num_experts=EXPERTS))


def random_routing(
    generator: torch.Generator, rows: int = 23, slots: int = 3, dtype: torch.dtype = torch.float32
) -> Routing:
    indices = torch.randint(0, EXPERTS + 1, (rows, slots), generator=generator)  # sentinels included
    weights = torch.rand(rows, slots, generator=generator, dtype=dtype).requires_grad_()
    return Routing.from_topk(indices, weights, num_experts=EXPERTS)


def combine_by_hand(y: Tensor, plan: DispatchPlan, weights: Tensor) -> Tensor:
    out = y.new_zeros(plan.num_rows, y.shape[1])
    for position in range(y.shape[0]):
        row, slot = int(plan.rows[position]), int(plan.slots[position])
        out[row] = out[row] + weights[row, slot] * y[position]
    return out


@given(routing=routed)
def test_plan_lists_every_assignment_once_by_expert_row_and_slot(routing: Routing) -> None:
    expected = sorted(
        (expert, row, slot)
        for row, experts in enumerate(routing.indices.tolist())
        for slot, expert in enumerate(experts)
        if expert < EXPERTS
    )
    plan = routing.plan()
    owner = np.searchsorted(plan.offsets.numpy(), np.arange(len(expected)), side="right") - 1
    assert list(zip(owner.tolist(), plan.rows.tolist(), plan.slots.tolist(), strict=True)) == expected


@given(routing=routed)
def test_plan_counts_equal_a_histogram(routing: Routing) -> None:
    expected = np.bincount(routing.indices.numpy().ravel(), minlength=EXPERTS + 1)[:EXPERTS]
    assert routing.plan().counts().tolist() == expected.tolist() == routing.counts().tolist()


@pytest.mark.parametrize("num_experts", [200, 255, 256, 300, 40_000])
def test_plan_sorts_any_number_of_experts(num_experts: int, generator: torch.Generator) -> None:
    indices = torch.randint(0, num_experts + 1, (50, 4), generator=generator)
    indices[0, 0] = num_experts
    plan = Routing.from_topk(indices, torch.ones(50, 4), num_experts=num_experts).plan()
    expected = sorted(expert for expert in indices.flatten().tolist() if expert < num_experts)
    assert indices[plan.rows, plan.slots].tolist() == expected


def test_plan_of_rows_without_experts_is_empty() -> None:
    plan = Routing.from_topk(torch.full((4, 2), EXPERTS), torch.ones(4, 2), num_experts=EXPERTS).plan()
    assert (plan.rows.numel(), plan.offsets.tolist()) == (0, [0] * (EXPERTS + 1))


def test_plan_is_sorted_once_and_kept() -> None:
    routing = Routing.from_topk(torch.tensor([[1], [0]]), torch.ones(2, 1), num_experts=2)
    assert routing.plan() is routing.plan()


def test_kept_plan_serves_several_graphs(generator: torch.Generator) -> None:
    weights = torch.rand(6, 2, generator=generator, requires_grad=True)
    routing = Routing(torch.randint(0, EXPERTS, (6, 2), generator=generator), weights, None, None, EXPERTS)
    for _ in range(2):  # a graph kept inside the plan would be gone the second time
        routing.plan().weights.sum().backward()
    assert torch.equal(weights.grad, torch.full_like(weights, 2.0))


def test_plan_made_without_gradient_has_one_where_it_is_needed(generator: torch.Generator) -> None:
    routing = random_routing(generator)
    with torch.no_grad():
        assert not routing.plan().weights.requires_grad
    assert routing.plan().weights.requires_grad


def test_plan_made_in_inference_mode_can_be_trained_with_later(generator: torch.Generator) -> None:
    routing = random_routing(generator)
    with torch.inference_mode():
        routing.plan()
    x = torch.randn(23, 2, generator=generator, requires_grad=True)
    combine(permute(x, routing.plan()), routing.plan()).sum().backward()
    assert x.grad is not None


def test_permute_gathers_the_rows_of_the_plan(generator: torch.Generator) -> None:
    plan = random_routing(generator).plan()
    x = torch.randn(23, 4, generator=generator)
    assert permute(x, plan).tolist() == [x[row].tolist() for row in plan.rows.tolist()]


def test_combine_sums_weighted_outputs_of_each_row(generator: torch.Generator) -> None:
    routing = random_routing(generator, dtype=torch.float64)
    y = torch.randn(routing.plan().rows.numel(), 4, generator=generator, dtype=torch.float64)
    expected = combine_by_hand(y, routing.plan(), routing.weights.detach())
    torch.testing.assert_close(combine(y, routing.plan()).detach(), expected, rtol=1e-14, atol=1e-14)


def test_combine_unweighted_leaves_the_weights_out(generator: torch.Generator) -> None:
    routing = random_routing(generator, dtype=torch.float64)
    y = torch.randn(routing.plan().rows.numel(), 4, generator=generator, dtype=torch.float64)
    expected = combine_by_hand(y, routing.plan(), torch.ones_like(routing.weights))
    torch.testing.assert_close(combine(y, routing.plan(), weighted=False), expected, rtol=1e-14, atol=1e-14)


def test_gradients_of_the_round_trip_pass_gradcheck(generator: torch.Generator) -> None:
    indices = torch.randint(0, EXPERTS + 1, (5, 3), generator=generator)

    def round_trip(x: Tensor, weights: Tensor) -> Tensor:
        plan = Routing.from_topk(indices, weights, num_experts=EXPERTS).plan()
        return combine(permute(x, plan).sin(), plan)

    x = torch.randn(5, 2, generator=generator, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(5, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(round_trip, (x, weights))
    assert torch.autograd.gradgradcheck(round_trip, (x, weights))


def test_gather_without_atomics_equals_indexing(generator: torch.Generator) -> None:
    plan = random_routing(generator).plan()
    x = torch.randn(23, 4, generator=generator, requires_grad=True)
    places = plan.rows * plan.num_slots + plan.slots
    gathered = _GatherRows.apply(x, plan.rows, places, plan.num_rows, plan.num_slots)
    upstream = torch.randn(gathered.shape, generator=generator)
    (ours,) = torch.autograd.grad(gathered, x, upstream)
    (theirs,) = torch.autograd.grad(x[plan.rows], x, upstream)
    torch.testing.assert_close(ours, theirs)


def test_sum_without_atomics_equals_a_loop(generator: torch.Generator) -> None:
    """The form for accelerators, which the CPU does not take by itself."""
    routing = random_routing(generator, dtype=torch.float64)
    plan = routing.plan()
    y = torch.randn(plan.rows.numel(), 4, generator=generator, dtype=torch.float64)
    summed = _sum_by_place(y, plan.rows * plan.num_slots + plan.slots, plan.num_rows, plan.num_slots)
    torch.testing.assert_close(
        summed, combine_by_hand(y, plan, torch.ones_like(routing.weights)), rtol=1e-14, atol=1e-14
    )


def test_plan_is_a_pytree(generator: torch.Generator) -> None:
    plan = random_routing(generator).plan()
    moved = _pytree.tree_map(lambda leaf: leaf.to("meta"), plan)
    assert (moved.rows.device.type, moved.num_rows, moved.num_slots) == ("meta", 23, 3)


def test_rows_without_experts_combine_to_exact_zeros_beside_nan() -> None:
    routing = Routing.from_topk(torch.tensor([[0, 1], [2, 2]]), torch.ones(2, 2), num_experts=2)
    y = torch.full((2, 3), math.nan)
    assert combine(y, routing.plan())[1].tolist() == [0.0, 0.0, 0.0]


def test_combined_row_does_not_depend_on_the_other_rows(generator: torch.Generator) -> None:
    routing = random_routing(generator).detach()
    x = torch.randn(23, 8, generator=generator)
    order = torch.randperm(23, generator=generator)
    shuffled = Routing.from_topk(routing.indices[order], routing.weights[order], num_experts=EXPERTS)

    def run(x: Tensor, routing: Routing) -> Tensor:
        plan = routing.plan()
        return combine(permute(x, plan).exp(), plan)

    assert torch.equal(run(x[order], shuffled), run(x, routing)[order])


def test_combine_accumulates_bfloat16_in_float32() -> None:
    # 256 + 1 + 1 in bfloat16 steps stays 256; in float32 it is 258, which bfloat16 can hold.
    routing = Routing.from_topk(torch.tensor([[0, 1, 2]]), torch.ones(1, 3), num_experts=3)
    y = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    assert combine(y, routing.plan()).tolist() == [[258.0]]


def test_compiled_round_trip_ignores_what_sentinels_hold(generator: torch.Generator) -> None:
    routing = random_routing(generator).detach()
    x = torch.randn(23, 4, generator=generator)

    def run(x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        plan = Routing.from_topk(indices, weights, num_experts=EXPERTS).plan()
        used = torch.arange(plan.rows.shape[0]) < plan.offsets[-1]
        return combine(permute(x, plan).masked_fill(~used.unsqueeze(1), math.nan), plan)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")(x, routing.indices, routing.weights)
    torch.testing.assert_close(compiled, run(x, routing.indices, routing.weights))


def test_permute_refuses_other_rows_than_the_plans() -> None:
    plan = Routing.from_topk(torch.tensor([[0]]), torch.ones(1, 1), num_experts=1).plan()
    with pytest.raises(ValueError, match="x has 3 rows, but the plan was made for 1"):
        permute(torch.zeros(3, 2), plan)


def test_combine_refuses_other_assignments_than_the_plans() -> None:
    plan = Routing.from_topk(torch.tensor([[0]]), torch.ones(1, 1), num_experts=1).plan()
    with pytest.raises(ValueError, match="y has 3 rows, but the plan has 1 assignments"):
        combine(torch.zeros(3, 2), plan)


@pytest.mark.parametrize("outside", [-1, 5, 10**6])
def test_an_index_outside_is_refused_where_it_would_be_sorted(outside):
    routing = Routing(torch.tensor([[0], [outside]]), torch.ones(2, 1), None, None, 4)
    with pytest.raises(ValueError, match=r"routing.indices must lie in 0..4 \(4 means no expert\), got"):
        routing.plan()
