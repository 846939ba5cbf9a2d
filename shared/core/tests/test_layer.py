"""MoE: what the layer adds to a router and experts, compared with a sum over all experts written here."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from shared_core import GroupedExperts, GroupLimitedTopK, LoRAExperts, MoE, Router

H, I, E, K = 12, 10, 6, 2


def make_layer(seed=0, shared=True, **router_kwargs):
    torch.manual_seed(seed)
    layer = MoE(
        Router.linear(H, E, K, renormalize=True, **router_kwargs),
        GroupedExperts(H, I, E, init_std=0.3),
        nn.Sequential(nn.Linear(H, I), nn.SiLU(), nn.Linear(I, H)) if shared else None,
    )
    return layer.double()


def over_all_experts(layer, x, mask=None):
    """Σ_e w_e(x) y_e(x) + shared(x), every expert on every row, from the definition."""
    probabilities = (x @ layer.router.gate.weight.T).softmax(-1)
    cut = probabilities.topk(K).values[:, -1:]
    weights = torch.where(probabilities >= cut, probabilities, 0.0)
    weights = weights / weights.sum(-1, keepdim=True)
    if mask is not None:
        weights = weights * mask[:, None]
    gate, up = torch.einsum("ejh,rh->erj", layer.experts.gate_up_proj, x).chunk(2, -1)
    y = torch.einsum("ehi,eri->erh", layer.experts.down_proj, F.silu(gate) * up)
    return torch.einsum("re,erh->rh", weights, y) + layer.shared_expert(x)


def test_output_and_every_gradient_equal_the_sum_over_all_experts():
    layer = make_layer()
    x = torch.randn(9, H, dtype=torch.float64, requires_grad=True)
    leaves = [x, *layer.parameters()]
    y, _ = layer(x)
    expected = over_all_experts(layer, x)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    for got, wanted in zip(
        torch.autograd.grad(y.square().sum(), leaves), torch.autograd.grad(expected.square().sum(), leaves), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


def test_router_arguments_pass_through_and_masked_rows_get_the_shared_expert_alone():
    layer = make_layer()
    x, mask = torch.randn(9, H, dtype=torch.float64), torch.arange(9) % 3 > 0
    y, routing = layer(x, mask=mask)
    torch.testing.assert_close(y, over_all_experts(layer, x, mask), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(y[~mask], layer.shared_expert(x[~mask]))
    assert torch.equal(routing.mask, mask)


def test_leading_shape_is_kept_and_rows_are_its_flattening():
    layer = make_layer()
    x = torch.randn(2, 3, 4, H, dtype=torch.float64)
    (y, routing), (flat, _) = layer(x), layer(x.reshape(-1, H))
    assert routing.indices.shape == (24, K)
    torch.testing.assert_close(y, flat.view(2, 3, 4, H), rtol=0, atol=0)


def test_experts_may_be_low_rank_ones():
    layer = MoE(Router.linear(H, E, K), LoRAExperts(H, 7, E, rank=2, alpha=2))
    nn.init.normal_(layer.experts.lora_B)
    x = torch.randn(5, H)
    y, routing = layer(x)
    expected = sum(routing.dense()[:, e, None] * (x @ layer.experts.delta_weight(e).T) for e in range(E))
    torch.testing.assert_close(y, expected)


def test_disagreeing_numbers_of_experts_are_named():
    with pytest.raises(ValueError, match="router chooses among num_experts=6, experts has num_experts=8"):
        MoE(Router.linear(H, 6, 2), GroupedExperts(H, I, 8))


def same_output(a, b, x):
    return torch.equal(a(x)[0], b(x)[0])


def test_deepcopy_computes_the_same_and_shares_nothing():
    layer = make_layer(selection=GroupLimitedTopK(3, 1))
    twin, x = copy.deepcopy(layer), torch.randn(4, H, dtype=torch.float64)
    assert same_output(layer, twin, x)
    assert not {p.data_ptr() for p in layer.parameters()} & {p.data_ptr() for p in twin.parameters()}


def test_saved_whole_and_loaded_again_computes_the_same():
    layer, x = make_layer(selection=GroupLimitedTopK(3, 1)), torch.randn(4, H, dtype=torch.float64)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    # The package never unpickles; users and multiprocessing do, and a layer must survive it.
    assert same_output(layer, torch.load(buffer, weights_only=False), x)


def test_safetensors_round_trip_is_exact(tmp_path):
    layer, other, x = make_layer(0), make_layer(1), torch.randn(4, H, dtype=torch.float64)
    assert not same_output(layer, other, x)
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    other.load_state_dict(load_file(tmp_path / "layer.safetensors"), strict=True)
    assert same_output(layer, other, x)


@pytest.mark.parametrize("experts", [lambda: GroupedExperts(H, I, E), lambda: LoRAExperts(H, H, E, [1, 2, 3] * 2, 2)])
def test_built_on_the_meta_device_and_filled_from_a_state_dict_computes_the_same(experts):
    real, x = MoE(Router.linear(H, E, K), experts()), torch.randn(4, H)
    for name, parameter in real.named_parameters():
        nn.init.normal_(parameter, std=0.5 if "gate" in name else 0.3)
    with torch.device("meta"):
        assigned, emptied = MoE(Router.linear(H, E, K), experts()), MoE(Router.linear(H, E, K), experts())
    assert {p.device.type for p in assigned.parameters()} == {"meta"}
    assigned.load_state_dict(real.state_dict(), assign=True)
    emptied.to_empty(device="cpu").load_state_dict(real.state_dict())
    assert same_output(real, assigned, x)
    assert same_output(real, emptied, x)
