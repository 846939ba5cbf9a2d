"""Top-k with defined ties against Python's stable sort, on every path that computes it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shared_core import ranking
from shared_core.ranking import top_indices


def sorted_by_python(row: list[float], k: int) -> list[int]:
    return sorted(range(len(row)), key=lambda index: (-row[index], index))[:k]


def traceable(values: torch.Tensor, k: int) -> torch.Tensor:
    """The branch-free path that compiled code and accelerators take."""
    return values.shape[-1] - 1 - (ranking._unique_keys(values).topk(k, dim=-1).values & ranking._INDEX_BITS)


def in_numpy(values: torch.Tensor, k: int) -> torch.Tensor:
    """By short keys first, whatever the size."""
    rows = values.numpy()
    top, unsettled = ranking._rank_by_short_keys(rows, k)
    top[unsettled] = ranking._rank_by_full_keys(rows[unsettled], k)
    return torch.from_numpy(top)


def in_numpy_by_full_keys(values: torch.Tensor, k: int) -> torch.Tensor:
    return torch.from_numpy(ranking._rank_by_full_keys(values.numpy(), k))


PATHS = {"public": top_indices, "traceable": traceable, "numpy": in_numpy, "full keys": in_numpy_by_full_keys}

# Few distinct values, so that ties are the rule; both zeros, denormals and infinities among them.
tied_values = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=2, max_dims=2, max_side=12),
    elements=st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 1e-42, -1e-42, 3e38, math.inf, -math.inf]),
)


@pytest.mark.parametrize("path", PATHS)
@given(values=tied_values, share=st.floats(0, 1))
def test_top_indices_equal_a_stable_sort_by_python(path: str, values: np.ndarray, share: float) -> None:
    k = max(1, round(share * values.shape[1]))
    expected = [sorted_by_python(row, k) for row in values.tolist()]
    assert PATHS[path](torch.from_numpy(values), k).tolist() == expected


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("width", [7, 128, 200, 513, 1100])
def test_wide_rows_equal_torchs_stable_sort(path: str, width: int, generator: torch.Generator) -> None:
    values = torch.randint(-40, 40, (700, width), generator=generator) / 8.0
    expected = values.sort(dim=-1, descending=True, stable=True).indices[:, :6]
    assert torch.equal(PATHS[path](values, 6), expected)


@pytest.mark.parametrize("path", PATHS)
@given(
    values=hnp.arrays(np.float32, (3, 9), elements=st.integers(-8, 8)),
    ulps=hnp.arrays(np.int32, (3, 9), elements=st.integers(-9, 9)),
)
def test_values_that_differ_in_their_last_bits_are_told_apart(path: str, values: np.ndarray, ulps: np.ndarray) -> None:
    close = torch.from_numpy(values).abs().add(1.0).view(torch.int32).add(torch.from_numpy(ulps)).view(torch.float32)
    close = close * torch.from_numpy(values).add(0.5).sign()
    assert PATHS[path](close, 5).tolist() == [sorted_by_python(row, 5) for row in close.tolist()]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_nan_of_either_sign_ranks_first(path: str, sign: float) -> None:
    values = torch.tensor([[1.0, math.inf, math.copysign(math.nan, sign), 2.0]])
    assert PATHS[path](values, 2).tolist() == [[2, 1]]


def test_float64_keeps_differences_that_float32_cannot_hold() -> None:
    values = torch.tensor([[1.0, 1.0 + 1e-12, 1.0]], dtype=torch.float64)
    assert top_indices(values, 3).tolist() == [[1, 0, 2]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_ranked_exactly(dtype: torch.dtype) -> None:
    values = torch.tensor([[0.5, 0.75, 0.5, 0.75]], dtype=dtype)
    assert top_indices(values, 4).tolist() == [[1, 3, 0, 2]]


def test_many_threads_give_the_same_indices(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randint(0, 9, (1024, 96), generator=generator).float()
    expected = values.sort(dim=-1, descending=True, stable=True).indices[:, :4]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert torch.equal(top_indices(values, 4), expected)


def test_vmap_ranks_as_a_batch_does(generator: torch.Generator) -> None:
    values = torch.randint(0, 4, (5, 3, 8), generator=generator).float()
    assert torch.equal(torch.vmap(lambda batch: top_indices(batch, 3))(values), top_indices(values, 3))


def test_no_rows_give_no_indices() -> None:
    assert top_indices(torch.empty(0, 4), 2).shape == (0, 2)
