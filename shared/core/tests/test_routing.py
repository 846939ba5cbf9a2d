"""Routing as a record of tensors, capacity and overlap."""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree

from shared_core import Routing, RoutingTrace, capacity, route, routing_overlap

E = 4


def small() -> Routing:
    return Routing.from_topk(
        torch.tensor([[0, 2], [2, E], [1, 2]]), torch.tensor([[0.75, 0.25], [1.0, 9.0], [0.5, 0.5]]), num_experts=E
    )


def fields(routing: Routing) -> list[object]:
    tensors = (routing.indices, routing.weights, routing.logits, routing.scores, routing.mask)
    return [None if tensor is None else tensor.tolist() for tensor in tensors] + [routing.num_experts]


def full() -> Routing:
    return route(torch.randn(6, E, generator=torch.Generator().manual_seed(1)), 2, mask=torch.arange(6) != 3)


# ---------------------------------------------------------------------------------------------------------- Routing
def test_from_topk_clears_weights_of_sentinels() -> None:
    assert small().weights[1].tolist() == [1.0, 0.0]


def test_from_topk_widens_half_precision_weights_to_float32() -> None:
    routing = Routing.from_topk(torch.tensor([[0]], dtype=torch.int32), torch.ones(1, 1).bfloat16(), num_experts=1)
    assert (routing.indices.dtype, routing.weights.dtype) == (torch.int64, torch.float32)


def test_counts_leave_sentinels_out() -> None:
    assert small().counts().tolist() == [1, 1, 3, 0]


def test_dense_places_weights_at_their_experts() -> None:
    assert small().dense().tolist() == [[0.75, 0.0, 0.25, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.5, 0.5, 0.0]]


def test_expand_by_a_number_repeats_every_row() -> None:
    assert small().expand(2).indices.tolist() == [[0, 2], [0, 2], [2, E], [2, E], [1, 2], [1, 2]]


def test_expand_by_a_tensor_repeats_rows_by_its_entries() -> None:
    assert small().expand(torch.tensor([0, 1, 2])).indices.tolist() == [[2, E], [1, 2], [1, 2]]


def test_expand_carries_the_mask_along() -> None:
    assert full().expand(2).mask.tolist() == (torch.arange(12) // 2 != 3).tolist()


def test_gradient_of_an_expanded_routing_sums_over_the_tokens() -> None:
    weights = torch.ones(2, 1, requires_grad=True)
    Routing.from_topk(torch.tensor([[0], [1]]), weights, num_experts=2).expand(3).weights.sum().backward()
    assert weights.grad.tolist() == [[3.0], [3.0]]


def test_to_casts_what_is_floating_point_only() -> None:
    moved = full().to(torch.float64)
    assert (moved.indices.dtype, moved.mask.dtype) == (torch.int64, torch.bool)
    assert moved.weights.dtype == moved.logits.dtype == moved.scores.dtype == torch.float64


def test_to_moves_every_field_to_a_device() -> None:
    moved = full().to("meta")
    assert {leaf.device.type for leaf in _pytree.tree_leaves(moved)} == {"meta"}


def test_detach_cuts_the_graph() -> None:
    routing = route(torch.randn(3, E, requires_grad=True), 2)
    assert routing.weights.requires_grad
    assert not any(leaf.requires_grad for leaf in _pytree.tree_leaves(routing.detach()))


def test_repr_names_sizes_and_not_values() -> None:
    assert repr(small()) == "Routing(rows=3, slots=2, num_experts=4, dtype=torch.float32, device=cpu)"


def test_pytree_maps_over_the_tensors() -> None:
    doubled = _pytree.tree_map(lambda leaf: leaf * 2 if leaf.is_floating_point() else leaf, small())
    assert doubled.weights.tolist() == (small().weights * 2).tolist()
    assert doubled.num_experts == E


def test_routing_passes_through_vmap() -> None:
    logits = torch.randn(3, 5, E, generator=torch.Generator().manual_seed(0))
    batched = torch.vmap(lambda rows: route(rows, 2))(logits)
    assert torch.equal(batched.indices, torch.stack([route(rows, 2).indices for rows in logits]))


def test_routing_passes_through_activation_checkpointing() -> None:
    logits = torch.randn(5, E, requires_grad=True, generator=torch.Generator().manual_seed(0))
    routing = torch.utils.checkpoint.checkpoint(lambda rows: route(rows, 2), logits, use_reentrant=False)
    (ours,) = torch.autograd.grad(routing.weights.square().sum(), logits)
    (plain,) = torch.autograd.grad(route(logits, 2).weights.square().sum(), logits)
    assert torch.equal(ours, plain)


def test_torch_save_and_load_with_weights_only_give_the_same_fields() -> None:
    routing = full()
    routing.plan()
    file = io.BytesIO()
    torch.save(routing, file)
    file.seek(0)
    assert fields(torch.load(file, weights_only=True)) == fields(routing)


@pytest.mark.parametrize("clone", [copy.deepcopy, copy.copy, lambda routing: pickle.loads(pickle.dumps(routing))])
def test_copies_have_the_same_fields(clone: object) -> None:
    routing = full()
    routing.plan()
    assert fields(clone(routing)) == fields(routing)


def test_pickle_leaves_the_cached_plan_out() -> None:
    routing = full()
    size = len(pickle.dumps(routing))
    routing.plan()
    assert len(pickle.dumps(routing)) == size


def test_saved_trace_is_read_without_torch(tmp_path: Path) -> None:
    small().save(tmp_path / "trace.npz", meta={"layer": 3})
    trace = RoutingTrace.load(tmp_path / "trace.npz")
    assert (trace.indices.tolist(), trace.num_experts, trace.meta) == (small().indices.tolist(), E, {"layer": 3})
    assert (trace.indices.dtype, trace.weights.dtype) == (np.int32, np.float32)


def test_saved_trace_loads_as_the_same_decision(tmp_path: Path) -> None:
    small().save(tmp_path / "trace.npz")
    assert fields(Routing.load(tmp_path / "trace.npz")) == fields(small())


@pytest.mark.parametrize(
    ("indices", "weights", "error", "message"),
    [
        (torch.zeros(2, 1), torch.ones(2, 1), TypeError, "indices must be integers, got torch.float32"),
        (torch.zeros(2, 1, dtype=torch.bool), torch.ones(2, 1), TypeError, "indices must be integers, got torch.bool"),
        (torch.zeros(2).long(), torch.ones(2), ValueError, r"indices must have shape \[R, k\], got \[2\]"),
        (
            torch.zeros(2, 1).long(),
            torch.ones(2, 1).long(),
            TypeError,
            "weights must be floating point, got torch.int64",
        ),
        (torch.zeros(2, 1).long(), torch.ones(2, 2), ValueError, r"one shape \[R, k\], got \(2, 1\) and \(2, 2\)"),
        (
            torch.tensor([[5]]),
            torch.ones(1, 1),
            ValueError,
            r"lie in 0..4 \(4 means no expert\), got values from 5 to 5",
        ),
        (torch.tensor([[-1]]), torch.ones(1, 1), ValueError, "got values from -1 to -1"),
        ([[1]], torch.ones(1, 1), TypeError, "indices must be a torch.Tensor, got list"),
    ],
)
def test_from_topk_refuses(indices: torch.Tensor, weights: torch.Tensor, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        Routing.from_topk(indices, weights, num_experts=E)


@pytest.mark.parametrize(
    ("repeats", "message"),
    [
        (-1, "repeats must not be negative, got -1"),
        (torch.tensor([1, 2]), r"integer tensor \[R\] = \[3\], got torch.int64 of shape \[2\]"),
        (torch.ones(3), r"got torch.float32 of shape \[3\]"),
        (torch.ones(3, dtype=torch.bool), r"got torch.bool of shape \[3\]"),
        (torch.tensor([1, -2, 1]), "repeats must not be negative, got -2"),
    ],
)
def test_expand_refuses(repeats: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small().expand(repeats)


# --------------------------------------------------------------------------------------------------------- capacity
assignments = st.lists(
    st.tuples(st.permutations(range(E + 1)), st.tuples(st.integers(1, 5), st.integers(1, 5))), min_size=1, max_size=8
)


def routing_of(rows: list[tuple[list[int], tuple[int, int]]]) -> Routing:
    indices = torch.tensor([list(order)[:2] for order, _ in rows])
    return Routing.from_topk(indices, torch.tensor([weights for _, weights in rows]) / 4.0, num_experts=E)


@given(
    rows=assignments, factor=st.sampled_from([0.25, 0.5, 1.0, 1.25, 3.0]), drop=st.sampled_from(["weight", "position"])
)
def test_capacity_keeps_what_a_loop_over_assignments_keeps(rows: list, factor: float, drop: str) -> None:
    routing = routing_of(rows)
    expected = routing.indices.clone()
    limit = math.ceil(int(routing.counts().sum()) * factor / E)
    for expert in range(E):
        mine = [tuple(place) for place in (routing.indices == expert).nonzero().tolist()]
        if drop == "weight":
            mine.sort(key=lambda place: -float(routing.weights[place]))  # Python's sort is stable: rows break ties
        for place in mine[limit:]:
            expected[place] = E
    assert torch.equal(capacity(routing, factor, drop=drop)[0].indices, expected)


def test_capacity_returns_the_dropped_share_without_sentinels() -> None:
    routing = Routing.from_topk(torch.tensor([[0], [0], [0], [1], [E]]), torch.ones(5, 1), num_experts=E)
    assert capacity(routing, 1.0)[1].item() == 2 / 4  # C = ceil(4 / 4): two of the three on expert 0 go


def test_capacity_leaves_the_other_weights_and_their_gradient() -> None:
    weights = torch.tensor([[0.2], [0.9], [0.5]], requires_grad=True)
    kept, _ = capacity(Routing.from_topk(torch.tensor([[0], [0], [1]]), weights, num_experts=2), 0.5)
    kept.weights.sum().backward()
    assert (kept.weights.tolist(), weights.grad.tolist()) == (
        [[0.0], [weights[1].item()], [0.5]],
        [[0.0], [1.0], [1.0]],
    )


def test_capacity_of_a_routing_without_assignments_drops_nothing() -> None:
    routing = Routing.from_topk(torch.full((3, 1), E), torch.ones(3, 1), num_experts=E)
    assert capacity(routing, 1.0)[1].item() == 0.0


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"capacity_factor": 0.0}, "capacity_factor must be positive, got 0.0"),
        ({"capacity_factor": math.nan}, "capacity_factor must be positive, got nan"),
        ({"capacity_factor": 1.0, "drop": "random"}, "drop must be 'weight' or 'position', got 'random'"),
    ],
)
def test_capacity_refuses(kwargs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        capacity(small(), **kwargs)


# ---------------------------------------------------------------------------------------------------------- overlap
@given(first=assignments, second=assignments)
def test_overlap_is_the_mean_jaccard_index_of_python_sets(first: list, second: list) -> None:
    size = min(len(first), len(second))
    a, b = routing_of(first[:size]), routing_of(second[:size])
    pairs = [(set(x) - {E}, set(y) - {E}) for x, y in zip(a.indices.tolist(), b.indices.tolist(), strict=True)]
    expected = np.mean([len(x & y) / len(x | y) for x, y in pairs])
    assert routing_overlap(a, b).item() == pytest.approx(expected, abs=1e-6)


def test_overlap_leaves_rows_without_experts_out() -> None:
    logits = torch.eye(3)
    part = route(logits, 1, mask=torch.tensor([True, False, True]))
    assert routing_overlap(part, part).item() == 1.0


def test_overlap_refuses_routings_of_other_rows() -> None:
    with pytest.raises(ValueError, match="got 3 rows and 4 experts against 6 and 4"):
        routing_overlap(small(), full())


def test_overlap_is_lower_for_every_further_step_of_drift() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, drift = torch.randn(512, 16, generator=generator), torch.randn(512, 16, generator=generator)
    before = route(logits, 2)
    overlaps = [routing_overlap(before, route(logits + step * drift, 2)).item() for step in (0.0, 0.1, 0.3, 1.0)]
    assert overlaps[0] == 1.0
    assert all(later < earlier for earlier, later in itertools.pairwise(overlaps))


@pytest.mark.parametrize(
    ("num_experts", "error", "message"),
    [
        (0, ValueError, "num_experts must be at least 1, got 0"),
        (2.5, TypeError, "num_experts must be an int, got float"),
    ],
)
def test_from_topk_refuses_a_number_of_experts_that_is_none(num_experts: object, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        Routing.from_topk(torch.tensor([[0]]), torch.ones(1, 1), num_experts=num_experts)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64])
def test_from_topk_takes_unsigned_indices(dtype: torch.dtype) -> None:
    routing = Routing.from_topk(torch.tensor([[1], [2]]).to(dtype), torch.ones(2, 1), num_experts=2)
    assert routing.counts().tolist() == [0, 1]


def test_capacity_that_is_whole_but_for_rounding_gives_no_extra_place() -> None:
    routing = Routing.from_topk(torch.zeros(100, 1).long(), torch.ones(100, 1), num_experts=10)
    assert capacity(routing, 1.1)[0].counts()[0] == 11  # 100 * 1.1 / 10 is 11.000000000000002 in floating point
