"""A Hugging Face mixture of experts on this package: faster experts, captured routing, another routing rule.

    python shared/core/examples/transformers_adapter.py

The model is tiny and random, so nothing is downloaded; with a real one, only the first lines of `main` differ:
`AutoModelForCausalLM.from_pretrained(path, experts_implementation="shared_core")`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from shared_core import Routing, load_stats, routing_overlap
from shared_core.integrations.transformers import as_router, capture_routing, register, replace_routers


def tiny_model() -> Qwen3MoeForCausalLM:
    config = Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
    )
    model = Qwen3MoeForCausalLM._from_config(config, experts_implementation="shared_core").eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.5 if "gate.weight" in name else 0.05, generator=generator)
    return model


def prefer(resident: Tensor, strength: float) -> Callable[[str, nn.Module], Callable[[Tensor], Routing]]:
    """A factory of rules that favour experts in fast memory, while the mixture weights stay the model's own."""

    def factory(_: str, router: nn.Module) -> Callable[[Tensor], Routing]:
        ours = as_router(router)
        return lambda x: ours(x, selection_bias=strength * resident)

    return factory


def main() -> None:
    register()
    model = tiny_model()
    tokens = torch.randint(0, 128, (2, 64), generator=torch.Generator().manual_seed(1))

    with torch.no_grad():
        ours = model(tokens).logits
        model.set_experts_implementation("eager")
        theirs = model(tokens).logits
        model.set_experts_implementation("shared_core")
    print(f"largest difference of a logit to transformers' own experts: {float((ours - theirs).abs().max()):.1e}")

    with capture_routing(model) as before, torch.no_grad():
        model(tokens)
    for name, routing in before.items():
        print(f"{name}: {load_stats(routing.counts())}")

    resident = (torch.arange(16) < 8).float()
    for strength in (0.0, 0.02, 0.1):
        with replace_routers(model, prefer(resident, strength)), capture_routing(model) as after, torch.no_grad():
            logits = model(tokens).logits
        counts = sum(routing.counts() for routing in after.values())
        hits = float(counts[:8].sum() / counts.sum())
        kept = sum(float(routing_overlap(before[name], after[name])) for name in after) / len(after)
        drift = float((logits - ours).norm() / ours.norm())
        print(f"bias {strength}: {hits:.0%} of choices are resident, overlap {kept:.2f}, logits moved by {drift:.1%}")


if __name__ == "__main__":
    main()
