"""State-dict keys and shapes are frozen: checkpoints of earlier releases must load."""

import pytest
import torch
from torch import nn

from shared_core import BiasBalancer, GroupedExperts, LoRAExperts, MoE, NoisyGate, Router

# Change nothing here without a new minor version and a line in the CHANGELOG.
FROZEN = {
    "Router.linear": (
        lambda: Router.linear(8, 4, 2),
        {"gate.weight": (4, 8)},
    ),
    "Router.linear with bias and balancer": (
        lambda: Router.linear(8, 4, 2, bias=True, balancer=BiasBalancer(4)),
        {"gate.weight": (4, 8), "gate.bias": (4,), "balancer.expert_bias": (4,)},
    ),
    "GroupedExperts": (
        lambda: GroupedExperts(8, 6, 4),
        {"gate_up_proj": (4, 12, 8), "down_proj": (4, 8, 6)},
    ),
    "GroupedExperts with bias": (
        lambda: GroupedExperts(8, 6, 4, bias=True),
        {"gate_up_proj": (4, 12, 8), "gate_up_proj_bias": (4, 12), "down_proj": (4, 8, 6), "down_proj_bias": (4, 8)},
    ),
    "GroupedExperts without gate": (
        lambda: GroupedExperts(8, 6, 4, gated=False, bias=True),
        {"up_proj": (4, 6, 8), "up_proj_bias": (4, 6), "down_proj": (4, 8, 6), "down_proj_bias": (4, 8)},
    ),
    "LoRAExperts": (
        lambda: LoRAExperts(8, 6, 4, rank=[1, 2, 3, 4], alpha=2.0),
        {"lora_A": (10, 8), "lora_B": (6, 10)},
    ),
    "MoE": (
        lambda: MoE(Router.linear(8, 4, 2, balancer=BiasBalancer(4)), GroupedExperts(8, 6, 4), nn.Linear(8, 8)),
        {
            "router.gate.weight": (4, 8),
            "router.balancer.expert_bias": (4,),
            "experts.gate_up_proj": (4, 12, 8),
            "experts.down_proj": (4, 8, 6),
            "shared_expert.weight": (8, 8),
            "shared_expert.bias": (8,),
        },
    ),
}


@pytest.mark.parametrize("name", FROZEN)
def test_keys_and_shapes_are_those_of_the_first_release(name):
    make, expected = FROZEN[name]
    assert {key: tuple(value.shape) for key, value in make().state_dict().items()} == expected


def test_noisy_gate_keeps_both_of_its_matrices():
    state = NoisyGate(8, 4).state_dict()
    assert sum(value.shape == (4, 8) for value in state.values()) == 2


def test_expert_tensors_of_a_transformers_layer_load_without_a_copy_or_a_transpose():
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(num_experts=4, hidden_size=8, moe_intermediate_size=6, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    theirs = Qwen3MoeExperts(config)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.05)
    ours = GroupedExperts(8, 6, 4)
    ours.load_state_dict(theirs.state_dict(), assign=True)
    assert ours.gate_up_proj.data_ptr() == theirs.gate_up_proj.data_ptr()

    from shared_core import route

    x, routing = torch.randn(5, 8), route(torch.randn(5, 4), 2)
    torch.testing.assert_close(ours(x, routing), theirs(x, routing.indices, routing.weights))
