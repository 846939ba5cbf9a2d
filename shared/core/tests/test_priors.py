"""Priors against closed forms, brute force over groups, and torch's own divergences."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from shared_core import mix_prior, prior_kl

B, S, E = 3, 5, 4


@pytest.fixture
def logits(generator: torch.Generator) -> Tensor:
    return torch.randn(B, S, E, generator=generator, dtype=torch.float64)


@pytest.fixture
def prior(generator: torch.Generator) -> Tensor:
    """A distribution for each of B series, with one impossible expert."""
    pi = torch.rand(B, E, generator=generator, dtype=torch.float64)
    pi[1, 2] = 0.0
    return pi / pi.sum(-1, keepdim=True)


# --------------------------------------------------------------------------------------------------------- mix_prior
def test_product_is_a_geometric_mixture(logits: Tensor, prior: Tensor) -> None:
    floored = prior.clamp(min=1e-6)[:, None]
    expected = logits.softmax(-1) * floored**0.7
    mixed = mix_prior(logits, prior[:, None], 0.7).softmax(-1)
    torch.testing.assert_close(mixed, expected / expected.sum(-1, keepdim=True))


def test_mixture_is_an_arithmetic_mixture(logits: Tensor, prior: Tensor) -> None:
    mixed = mix_prior(logits, prior[:, None], 0.7, mode="mixture")
    torch.testing.assert_close(mixed.exp(), 0.3 * logits.softmax(-1) + 0.7 * prior[:, None])


def test_product_of_strength_zero_is_the_logits_themselves(logits: Tensor, prior: Tensor) -> None:
    assert mix_prior(logits, prior[:, None], 0.0) is logits


def test_mixture_of_strength_zero_is_the_log_softmax(logits: Tensor, prior: Tensor) -> None:
    assert torch.equal(mix_prior(logits, prior[:, None], 0.0, mode="mixture"), logits.log_softmax(-1))


def test_mixture_of_strength_one_is_the_prior(logits: Tensor, prior: Tensor) -> None:
    torch.testing.assert_close(
        mix_prior(logits, prior[:, None], 1.0, mode="mixture").exp(), prior[:, None].expand_as(logits)
    )


@pytest.mark.parametrize("mode", ["product", "mixture"])
@pytest.mark.parametrize("shape", [(E,), (B * S, E), (B, 1, E), (B, S, E)])
def test_prior_of_every_shape_equals_the_full_one(logits: Tensor, mode: str, shape: tuple[int, ...]) -> None:
    pi = torch.rand(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    pi = pi / pi.sum(-1, keepdim=True)
    full = pi.view(B, S, E) if shape == (B * S, E) else pi.expand(B, S, E)
    torch.testing.assert_close(mix_prior(logits, pi, 0.4, mode=mode), mix_prior(logits, full.clone(), 0.4, mode=mode))


@pytest.mark.parametrize("mode", ["product", "mixture"])
def test_gradients_of_the_mixing_pass_gradcheck(logits: Tensor, prior: Tensor, mode: str) -> None:
    z = logits.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda z: mix_prior(z, prior[:, None], 0.4, mode=mode), z)


def test_expert_impossible_for_router_and_prior_stays_so_with_a_finite_gradient() -> None:
    z = torch.tensor([[0.0, 1.0, 2.0]], requires_grad=True)
    closed = z + torch.tensor([0.0, 0.0, -math.inf])
    mixed = mix_prior(closed, torch.tensor([0.5, 0.5, 0.0]), 0.5, mode="mixture")
    mixed[0, :2].sum().backward()
    assert mixed[0, 2] == -math.inf
    assert z.grad.isfinite().all()


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"prior": torch.tensor([1.5, -0.5])}, ValueError, "prior must not have negative .* entries, got -0.5"),
        ({"prior": torch.tensor([0.5, math.nan])}, ValueError, "prior must not have negative .* entries, got nan"),
        ({"prior": torch.tensor([0.5, 0.4])}, ValueError, "must sum to 1 within 1e-4, got a sum of 0.9"),
        ({"prior": torch.tensor([1, 0])}, TypeError, "prior must be floating point, got torch.int64"),
        (
            {"prior": torch.tensor([1.0, 0.0, 0.0])},
            ValueError,
            r"last size of prior must be the number of experts, 2.*\[3\]",
        ),
        ({"prior": torch.full((4, 2), 0.5)}, ValueError, r"prior of shape \[4, 2\] does not broadcast to .* \[3, 2\]"),
        ({"strength": -0.1}, ValueError, "strength must be finite and not negative, got -0.1"),
        ({"strength": 1.1, "mode": "mixture"}, ValueError, r"strength must be in 0..1 for the mixture, got 1.1"),
        ({"mode": "sum"}, ValueError, "mode must be 'product' or 'mixture', got 'sum'"),
        ({"floor": 0.0}, ValueError, "floor must be positive, got 0.0"),
        ({"logits": torch.zeros(3, 2).long()}, TypeError, "logits must be floating point, got torch.int64"),
    ],
)
def test_mix_prior_refuses(kwargs: dict, error: type, message: str) -> None:
    good = {"logits": torch.zeros(3, 2), "prior": torch.tensor([0.5, 0.5]), "strength": 0.5}
    with pytest.raises(error, match=message):
        mix_prior(**good | kwargs)


# ---------------------------------------------------------------------------------------------------------- prior_kl
def kl(target: Tensor, other: Tensor) -> Tensor:
    """Sum over the experts with a positive target, in plain probabilities."""
    return sum(target[e] * (target[e] / other[e]).log() for e in range(len(target)) if target[e] > 0)


def test_group_level_compares_the_mean_distribution_of_each_group(logits: Tensor, prior: Tensor) -> None:
    order = torch.randperm(B * S, generator=torch.Generator().manual_seed(3))
    ids = torch.arange(B).repeat_interleave(S)[order]
    rows = logits.view(-1, E)[order]
    expected = torch.stack([kl(prior[g], rows[ids == g].softmax(-1).mean(0)) for g in range(B)]).mean()
    torch.testing.assert_close(prior_kl(rows, prior, group=ids), expected)


def test_group_level_without_ids_takes_the_batch_dimension_of_a_b1e_prior(logits: Tensor, prior: Tensor) -> None:
    ids = torch.arange(B).repeat_interleave(S)
    by_ids = prior_kl(logits.view(-1, E), prior, group=ids)
    torch.testing.assert_close(prior_kl(logits, prior[:, None]), by_ids)


def test_group_level_with_one_prior_for_all_groups(logits: Tensor, prior: Tensor) -> None:
    ids = torch.tensor([70, -2, 9]).repeat_interleave(S)
    expected = torch.stack([kl(prior[1], series.softmax(-1).mean(0)) for series in logits]).mean()
    torch.testing.assert_close(prior_kl(logits, prior[1], group=ids), expected)


def test_group_level_without_ids_is_one_group(logits: Tensor, prior: Tensor) -> None:
    expected = kl(prior[1], logits.view(-1, E).softmax(-1).mean(0))
    torch.testing.assert_close(prior_kl(logits, prior[1]), expected)


def test_row_level_is_torchs_kl_divergence(logits: Tensor, prior: Tensor) -> None:
    targets = prior[:, None].expand_as(logits).reshape(-1, E)
    expected = torch.nn.functional.kl_div(logits.view(-1, E).log_softmax(-1), targets, reduction="batchmean")
    torch.testing.assert_close(prior_kl(logits, prior[:, None], level="row"), expected)


def test_row_level_with_ids_takes_the_prior_of_each_rows_group(logits: Tensor, prior: Tensor) -> None:
    ids = torch.arange(B).repeat_interleave(S)
    by_shape = prior_kl(logits, prior[:, None], level="row")
    torch.testing.assert_close(prior_kl(logits.view(-1, E), prior, group=ids, level="row"), by_shape)


@pytest.mark.parametrize("level", ["group", "row"])
def test_masked_rows_do_not_count(logits: Tensor, prior: Tensor, level: str) -> None:
    ids = torch.arange(B).repeat_interleave(S)
    keep = torch.arange(B * S) % 3 != 1
    rows = logits.view(-1, E)
    masked = prior_kl(rows.masked_fill(~keep[:, None], math.nan), prior, mask=keep, group=ids, level=level)
    torch.testing.assert_close(masked, prior_kl(rows[keep], prior, group=ids[keep], level=level))


def test_groups_without_counted_rows_do_not_count(logits: Tensor, prior: Tensor) -> None:
    ids = torch.arange(B).repeat_interleave(S)
    without = prior_kl(logits[[0, 2]].reshape(-1, E), prior[[0, 2]], group=torch.arange(2).repeat_interleave(S))
    torch.testing.assert_close(prior_kl(logits, prior, group=ids, mask=ids != 1), without)


@pytest.mark.parametrize("level", ["group", "row"])
def test_divergence_of_a_distribution_from_itself_is_zero(prior: Tensor, level: str) -> None:
    rows = prior.clamp(min=1e-300).log().repeat_interleave(S, dim=0)
    value = prior_kl(rows, prior, group=torch.arange(B).repeat_interleave(S), level=level)
    assert value.item() == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("level", ["group", "row"])
def test_gradient_passes_gradcheck_and_never_reaches_the_prior(logits: Tensor, prior: Tensor, level: str) -> None:
    ids = torch.arange(B).repeat_interleave(S)
    z, pi = logits.clone().requires_grad_(), prior.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda z: prior_kl(z, pi.detach(), group=ids, level=level), z)
    prior_kl(z, pi, group=ids, level=level).backward()
    assert pi.grad is None


@pytest.mark.parametrize("level", ["group", "row"])
def test_extreme_logits_keep_a_finite_divergence_and_gradient(level: str) -> None:
    z = torch.tensor([[0.0, -200.0], [0.0, -300.0]], requires_grad=True)  # softmax underflows in float32
    value = prior_kl(z, torch.tensor([0.5, 0.5]), level=level)
    value.backward()
    assert 50 < value.item() < 200
    assert z.grad.isfinite().all()
    assert z.grad.abs().sum() > 0


@pytest.mark.parametrize("level", ["group", "row"])
def test_unavailable_expert_without_prior_is_ignored(level: str) -> None:
    z = torch.tensor([[0.0, 0.0, -math.inf]] * 2, requires_grad=True)
    value = prior_kl(z, torch.tensor([0.5, 0.5, 0.0]), level=level)
    value.backward()
    assert value.item() == pytest.approx(0.0, abs=1e-6)
    assert z.grad.isfinite().all()


def test_rows_without_any_available_expert_do_not_count() -> None:
    z = torch.tensor([[0.0, 1.0], [-math.inf, -math.inf]], requires_grad=True)
    value = prior_kl(z, torch.tensor([0.5, 0.5]), level="row")
    value.backward()
    torch.testing.assert_close(value.detach(), prior_kl(z.detach()[:1], torch.tensor([0.5, 0.5]), level="row"))
    assert z.grad[1].tolist() == [0.0, 0.0]


def test_descending_the_group_loss_leaves_single_rows_free() -> None:
    """Two rows on different experts fulfil an even prior of their series, and the loss leaves them there."""
    z = torch.tensor([[6.0, 0.0], [0.0, 6.0]], requires_grad=True)
    prior_kl(z, torch.tensor([[0.5, 0.5]]), group=torch.zeros(2).long()).backward()
    assert z.grad.abs().max() < 1e-6


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"level": "token"}, ValueError, "level must be 'group' or 'row', got 'token'"),
        ({"prior": torch.tensor([[0.7, 0.7]])}, ValueError, "must sum to 1 within 1e-4, got a sum of 1.4"),
        ({"group": torch.zeros(3)}, TypeError, "group must hold integer ids, got torch.float32"),
        ({"group": torch.zeros(4).long()}, ValueError, r"one id for each of 3 rows, got \[4\]"),
        ({"group": torch.tensor([0, 1, 0])}, ValueError, r"group ids must lie in 0..0 \(rows of prior\), got 0 to 1"),
        ({"prior": torch.full((3, 2), 0.5)}, ValueError, r"one group needs a prior \[E\] or \[1, E\], got \[3, 2\]"),
        ({"prior": torch.full((1, 4), 0.25)}, ValueError, r"shape \[G, E\] with E=2, got \[1, 4\]"),
        ({"mask": torch.ones(3)}, TypeError, "mask must be bool"),
        ({"logits": torch.zeros(3, 2).long()}, TypeError, "logits must be floating point, got torch.int64"),
    ],
)
def test_prior_kl_refuses(kwargs: dict, error: type, message: str) -> None:
    good = {"logits": torch.zeros(3, 2), "prior": torch.tensor([[0.5, 0.5]])}
    with pytest.raises(error, match=message):
        prior_kl(**good | kwargs)


@pytest.mark.parametrize(("strength", "mixed"), [(0.0, [0.0, 0.0]), (0.5, [0.1, 0.4]), (1.0, [0.2, 0.8])])
def test_mixture_of_a_row_without_available_experts_is_its_share_of_the_prior(strength: float, mixed: list) -> None:
    logits = torch.full((1, 2), -math.inf, requires_grad=True)
    out = mix_prior(logits, torch.tensor([0.2, 0.8]), strength, mode="mixture")
    torch.testing.assert_close(out.detach().exp(), torch.tensor([mixed]))


def test_mixture_with_a_row_without_available_experts_has_a_finite_gradient() -> None:
    logits = torch.tensor([[-math.inf, -math.inf], [0.0, 1.0]], requires_grad=True)
    mix_prior(logits, torch.tensor([0.2, 0.8]), 0.5, mode="mixture").sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
