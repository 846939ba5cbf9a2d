"""Selection policies against brute force over all admissible sets."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from shared_core import ExpertChoice, GroupCappedTopK, GroupLimitedTopK, Router, TopK, route

# Multiples of 1/64: sums of a few are exact, so brute force can compare them for equality.
levels = st.integers(-256, 256).map(lambda level: level / 64)


def scores(rows: tuple[int, int], experts: int | tuple[int, int]) -> st.SearchStrategy[Tensor]:
    width = st.just(experts) if isinstance(experts, int) else st.integers(*experts)
    shape = st.tuples(st.integers(*rows), width)
    return shape.flatmap(lambda size: hnp.arrays(np.float32, size, elements=levels)).map(torch.from_numpy)


def policy_cases() -> st.SearchStrategy[tuple[object, int]]:
    """Policies for 12 experts with a k that they can serve."""
    return st.sampled_from(
        [
            (TopK(), 4),
            (TopK(offset=3), 5),
            (GroupLimitedTopK(4, 2), 4),
            (GroupLimitedTopK(6, 3, group_score="max"), 5),
            (GroupLimitedTopK(12, 4), 3),
            (GroupCappedTopK(torch.arange(12) % 5), 4),
            (GroupCappedTopK(torch.tensor([0] * 7 + [9] * 5), cap=2), 4),
            (ExpertChoice(), 3),
            (ExpertChoice(capacity_factor=0.4), 2),
        ]
    )


# --------------------------------------------------------------------------------------------- any policy, any logits
@given(logits=scores((1, 9), 12), case=policy_cases(), score=st.sampled_from(["softmax", "sigmoid"]))
def test_indices_of_any_policy_are_distinct_and_in_range(logits: Tensor, case: tuple, score: str) -> None:
    policy, k = case
    for row in route(logits, k, score=score, selection=policy).indices.tolist():
        chosen = [expert for expert in row if expert != 12]
        assert len(set(chosen)) == len(chosen)
        assert all(0 <= expert < 12 for expert in chosen)


@given(logits=scores((1, 9), 12), case=policy_cases(), score=st.sampled_from(["softmax", "sigmoid"]))
def test_renormalised_rows_of_any_policy_sum_to_the_scale(logits: Tensor, case: tuple, score: str) -> None:
    policy, k = case
    routing = route(logits, k, score=score, selection=policy, renormalize=True, scale=2.5)
    served = (routing.indices != 12).any(1)
    assert (routing.weights >= 0).all()
    expected = torch.where(served, 2.5, 0.0)
    torch.testing.assert_close(routing.weights.sum(1), expected, rtol=1e-5, atol=1e-5)


@given(logits=scores((1, 6), 12), case=policy_cases(), closed=st.sets(st.integers(0, 11), max_size=12))
def test_unavailable_experts_are_chosen_by_no_policy(logits: Tensor, case: tuple, closed: set[int]) -> None:
    policy, k = case
    bias = torch.tensor([-math.inf if expert in closed else 0.0 for expert in range(12)])
    routing = route(logits, k, selection=policy, logit_bias=bias)
    assert not closed & set(routing.indices.flatten().tolist())
    assert (routing.weights[routing.indices == 12] == 0).all()
    assert routing.weights.isfinite().all()


@given(logits=scores((1, 6), 12), case=policy_cases(), constant=st.integers(-8, 8))
def test_adding_a_constant_to_all_logits_changes_nothing_under_softmax(
    logits: Tensor, case: tuple, constant: int
) -> None:
    policy, k = case
    before, after = (route(z, k, selection=policy) for z in (logits, logits + constant))
    assert torch.equal(before.indices, after.indices)
    torch.testing.assert_close(before.weights, after.weights)


@given(seed=st.integers(0, 10_000), case=policy_cases())
def test_permuting_experts_permutes_the_result(seed: int, case: tuple) -> None:
    policy, k = case
    generator = torch.Generator().manual_seed(seed)
    logits = torch.stack([torch.randperm(12, generator=generator) for _ in range(5)]) / 3.0  # without ties in a row
    order = torch.randperm(12, generator=generator)
    if isinstance(policy, GroupLimitedTopK):  # groups must stay together: whole groups and their members are permuted
        size = 12 // policy.num_groups
        groups = torch.randperm(policy.num_groups, generator=generator)
        order = torch.cat([group * size + torch.randperm(size, generator=generator) for group in groups])
    if isinstance(policy, GroupLimitedTopK) and policy.group_score == "top2_sum":
        logits = torch.rand(5, 12, generator=generator)  # no ties between sums either
    if isinstance(policy, ExpertChoice):
        logits = torch.rand(5, 12, generator=generator)  # nor within the columns
    permuted = policy
    if isinstance(policy, GroupCappedTopK):
        ids = torch.empty(12, dtype=torch.int64)
        for group, members in enumerate(policy.members.tolist()):
            ids[[member for member in members if member < 12]] = group
        permuted = GroupCappedTopK(ids[order], policy.cap)
    dense = route(logits, k, selection=policy).dense()
    torch.testing.assert_close(route(logits[:, order], k, selection=permuted).dense(), dense[:, order])


@given(logits=scores((1, 6), 12), bias=hnp.arrays(np.float32, 12, elements=levels), k=st.integers(1, 12))
def test_selection_bias_leaves_the_weights_of_the_chosen_experts(logits: Tensor, bias: np.ndarray, k: int) -> None:
    routing = route(logits, k, score="sigmoid", selection_bias=torch.from_numpy(bias))
    assert torch.equal(routing.weights, logits.sigmoid().gather(1, routing.indices))


# ---------------------------------------------------------------------------------------------------------- single ones
@given(q=scores((1, 5), (1, 9)), data=st.data())
def test_top_k_with_offset_takes_the_middle_of_a_full_ranking(q: Tensor, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, q.shape[1]))
    offset = data.draw(st.integers(0, q.shape[1] - k))
    ranked = [sorted(range(q.shape[1]), key=lambda expert: (-row[expert], expert)) for row in q.tolist()]
    assert TopK(offset)(q, k).tolist() == [row[offset : offset + k] for row in ranked]


@given(q=scores((1, 4), (1, 8)), data=st.data())
def test_group_capped_choice_is_the_best_of_all_admissible_sets(q: Tensor, data: st.DataObject) -> None:
    experts = q.shape[1]
    groups = data.draw(st.lists(st.integers(-1, 3), min_size=experts, max_size=experts))
    policy = GroupCappedTopK(torch.tensor(groups), cap=data.draw(st.integers(1, 3)))
    k = data.draw(st.integers(1, policy.limit))
    for row, chosen in zip(q.tolist(), policy(q, k).tolist(), strict=True):
        admissible = [
            subset
            for subset in itertools.combinations(range(experts), k)
            if all(sum(groups[expert] == group for expert in subset) <= policy.cap for group in set(groups))
        ]
        assert tuple(sorted(chosen)) in admissible
        assert sum(row[expert] for expert in chosen) == max(sum(row[expert] for expert in s) for s in admissible)
        assert [row[expert] for expert in chosen] == sorted((row[expert] for expert in chosen), reverse=True)


@given(q=scores((1, 4), 8), top_groups=st.integers(1, 4), group_score=st.sampled_from(["top2_sum", "max"]))
def test_group_limited_choice_equals_its_definition(q: Tensor, top_groups: int, group_score: str) -> None:
    policy = GroupLimitedTopK(4, top_groups, group_score)
    for row, chosen in zip(q.tolist(), policy(q, 2).tolist(), strict=True):
        best = [sorted(row[2 * g : 2 * g + 2], reverse=True) for g in range(4)]
        value = [pair[0] if group_score == "max" else sum(pair) for pair in best]
        kept = sorted(range(4), key=lambda g: (-value[g], g))[:top_groups]
        inside = [expert for expert in range(8) if expert // 2 in kept]
        assert chosen == sorted(inside, key=lambda expert: (-row[expert], expert))[:2]


@given(q=scores((1, 6), 12), top_groups=st.integers(1, 4))
def test_group_limited_choice_stays_in_its_groups_with_negative_scores(q: Tensor, top_groups: int) -> None:
    chosen = GroupLimitedTopK(4, top_groups)(q - 10.0, 3)
    assert all(len(set(row)) <= top_groups for row in (chosen // 3).tolist())


def test_group_with_one_available_expert_is_not_taken_for_empty() -> None:
    q = torch.tensor([[5.0, -math.inf, 1.0, 1.0]])
    assert GroupLimitedTopK(2, 1)(q, 1).tolist() == [[0]]


@given(q=scores((1, 9), (1, 6)), factor=st.sampled_from([0.3, 1.0, 1.7, 40.0]), k=st.integers(1, 3))
def test_expert_choice_gives_every_expert_its_best_rows(q: Tensor, factor: float, k: int) -> None:
    rows, experts = q.shape
    share = min(rows, math.ceil(rows * k / experts * factor))
    wanted = {
        (row, expert)
        for expert in range(experts)
        for row in sorted(range(rows), key=lambda row: (-float(q[row, expert]), row))[:share]
    }
    indices = ExpertChoice(factor)(q, k).tolist()
    assert {(row, expert) for row in range(rows) for expert in indices[row] if expert < experts} == wanted


@given(logits=scores((1, 30), 5), k=st.integers(1, 5))
def test_expert_choice_loads_every_expert_with_exactly_its_capacity(logits: Tensor, k: int) -> None:
    capacity = min(logits.shape[0], math.ceil(logits.shape[0] * k / 5))
    assert route(logits, k, selection=ExpertChoice()).counts().tolist() == [capacity] * 5


def test_expert_choice_gives_no_expert_to_masked_rows(generator: torch.Generator) -> None:
    keep = torch.tensor([True, False] * 8)
    routing = route(torch.randn(16, 4, generator=generator), 2, selection=ExpertChoice(), mask=keep)
    assert (routing.indices[~keep] == 4).all()
    assert routing.counts().tolist() == [8, 8, 8, 8]


def test_expert_choice_is_as_wide_as_the_busiest_row() -> None:
    assert ExpertChoice()(torch.tensor([[9.0, 9.0, 9.0], [0.0, 0.0, 0.0]]), 1).tolist() == [[0, 1, 2], [3, 3, 3]]


@pytest.mark.parametrize(
    "policy", [TopK(1), GroupLimitedTopK(4, 2), GroupCappedTopK(torch.arange(12) % 5)], ids=lambda p: type(p).__name__
)
def test_policies_trace_into_one_graph(policy: object, generator: torch.Generator) -> None:
    q = torch.randint(-3, 4, (20, 12), generator=generator) / 2.0
    compiled = torch.compile(lambda q: policy(q, 3), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q), policy(q, 3))


def test_group_table_adds_nothing_to_the_state_dict() -> None:
    router = Router.linear(8, 4, 2, selection=GroupCappedTopK(torch.tensor([0, 0, 1, 1])))
    assert list(router.state_dict()) == ["gate.weight"]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda q: TopK(offset=-1), ValueError, "offset must not be negative, got -1"),
        (lambda q: TopK(offset=3)(q, 4), ValueError, "offset=3 and top_k=4 need 7 experts, got 6"),
        (lambda q: GroupLimitedTopK(4, 2)(q, 2), ValueError, "num_experts=6 is not divisible by num_groups=4"),
        (lambda q: GroupLimitedTopK(3, 4), ValueError, "top_groups must be in 1..num_groups=3, got 4"),
        (lambda q: GroupLimitedTopK(0, 1), ValueError, "num_groups must be at least 1, got 0"),
        (lambda q: GroupLimitedTopK(3, 1)(q, 3), ValueError, "top_k=3 exceeds the 2 experts of top_groups=1"),
        (lambda q: GroupLimitedTopK(3, 1, "mean"), ValueError, "group_score must be 'top2_sum' or 'max', got 'mean'"),
        (
            lambda q: GroupCappedTopK(torch.zeros(4).long())(q, 1),
            ValueError,
            "groups has 4 ids, but there are 6 experts",
        ),
        (
            lambda q: GroupCappedTopK(torch.tensor([0, 0, 0, 1, 1, 1]))(q, 3),
            ValueError,
            "top_k=3 exceeds the 2 experts",
        ),
        (lambda q: GroupCappedTopK(torch.zeros(6)), TypeError, "groups must be integer ids, got torch.float32"),
        (lambda q: GroupCappedTopK(torch.zeros(2, 3).long()), ValueError, r"one id for each expert.*shape \[2, 3\]"),
        (lambda q: GroupCappedTopK(torch.zeros(6).long(), cap=0), ValueError, "cap must be at least 1, got 0"),
        (lambda q: ExpertChoice(0.0), ValueError, "capacity_factor must be positive, got 0.0"),
        (lambda q: ExpertChoice(math.nan), ValueError, "capacity_factor must be positive, got nan"),
    ],
)
def test_policies_refuse(make: object, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        make(torch.zeros(2, 6))


def test_expert_choice_without_rows_gives_no_rows() -> None:
    assert ExpertChoice()(torch.zeros(0, 6), 2).shape[0] == 0


def test_expert_choice_of_unlimited_capacity_gives_every_row_every_expert() -> None:
    assert ExpertChoice(math.inf)(torch.tensor([[0.2, 0.3], [0.5, 0.1]]), 1).tolist() == [[1, 0], [0, 1]]


def test_expert_choice_capacity_that_is_whole_but_for_rounding_gives_no_extra_place(generator: torch.Generator) -> None:
    q = torch.rand(30, 3, generator=generator)
    taken = ExpertChoice(1.1)(q, 1)  # 30 / 3 * 1.1 = 11
    assert torch.bincount(taken.flatten(), minlength=4)[:3].tolist() == [11, 11, 11]


def test_experts_beyond_the_cap_do_not_fill_up_a_row_with_too_few_available():
    q = torch.tensor([[0.5, 0.4, -torch.inf, -torch.inf]])
    assert GroupCappedTopK(torch.tensor([0, 0, 1, 1]))(q, 2).tolist() == [[0, 4]]


def test_experts_of_other_groups_do_not_fill_up_a_row_with_too_few_available():
    q = torch.tensor([[0.5, -torch.inf, 0.1, 0.2]])
    assert GroupLimitedTopK(num_groups=2, top_groups=1)(q, 2).tolist() == [[0, 4]]
