"""torch.compile of a whole layer: one graph, equal to eager, and not compiled anew for every number of rows."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from shared_core import BiasBalancer, GroupCappedTopK, GroupedExperts, GroupLimitedTopK, LoRAExperts, MoE, Router

H, I, E, K = 16, 12, 8, 2
ROUTERS = {
    "softmax": {"renormalize": True},
    "group-limited sigmoid with balancer": {"score": "sigmoid", "selection": GroupLimitedTopK(4, 2), "balancer": True},
    "group-capped": {"selection": GroupCappedTopK(torch.arange(4).repeat_interleave(2))},
}


def make_layer(router="softmax", experts=None, seed=0):
    torch.manual_seed(seed)
    kwargs = dict(ROUTERS[router])
    if kwargs.pop("balancer", False):
        kwargs["balancer"] = BiasBalancer(E)
    experts = experts or GroupedExperts(H, I, E, init_std=0.3)
    return MoE(Router.linear(H, E, K, **kwargs), experts, nn.Linear(H, H))


def values_and_gradients(function, layer, x):
    x = x.clone().requires_grad_()
    y, routing = function(x)
    gradients = torch.autograd.grad(y.sin().sum() + routing.weights.square().sum(), [x, *layer.parameters()])
    return [y.detach(), routing.indices, routing.weights.detach(), *gradients]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("router", ROUTERS)
def test_one_graph_equals_eager_for_every_number_of_rows_with_at_most_one_recompilation(router):
    layer = make_layer(router)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for rows in (5, 23, 301):
        x = torch.randn(rows, H)
        got, expected = values_and_gradients(compiled, layer, x), values_and_gradients(layer, layer, x)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert counter.frame_count <= 2


def test_layer_with_low_rank_experts_is_one_graph():
    adapters = LoRAExperts(H, H, E, [1, 2, 3, 4] * 2, alpha=4)
    layer = make_layer(experts=adapters)
    nn.init.normal_(adapters.lora_B)
    compiled, x = torch.compile(layer, fullgraph=True, backend="aot_eager"), torch.randn(30, H)
    torch.testing.assert_close(values_and_gradients(compiled, layer, x), values_and_gradients(layer, layer, x))


def test_inference_in_bfloat16_is_one_graph():
    layer, x = make_layer().bfloat16().eval(), torch.randn(30, H).bfloat16()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x)[0], layer(x)[0])


def test_masks_and_biases_pass_through_the_graph():
    layer, x = make_layer(), torch.randn(6, 5, H)
    arguments = {"mask": torch.arange(30).view(6, 5) % 4 > 0, "logit_bias": torch.linspace(-1, 1, E)}
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    (got, routing), (expected, eager_routing) = compiled(x, **arguments), layer(x, **arguments)
    torch.testing.assert_close(got, expected)
    assert torch.equal(routing.indices, eager_routing.indices)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_generated_code_equals_eager_forward_and_backward():
    layer = make_layer()
    compiled = torch.compile(layer, fullgraph=True)
    for rows in (23, 64):
        x = torch.randn(rows, H)
        got, expected = values_and_gradients(compiled, layer, x), values_and_gradients(layer, layer, x)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
