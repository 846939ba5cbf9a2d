"""Seven families of mixture-of-experts models, tiny and with weights drawn so that every part matters."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

collect_ignore_glob = [] if find_spec("transformers") else ["test_*.py"]

VOCABULARY, HIDDEN, EXPERTS, TOP_K = 61, 32, 6, 3


def _common(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "num_experts_per_tok": TOP_K, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    } | more  # fmt: skip


def _mixtral() -> Any:
    from transformers import MixtralConfig

    return MixtralConfig(**_common(intermediate_size=20, num_local_experts=EXPERTS))


def _qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(**_common(moe_intermediate_size=20, num_experts=EXPERTS, head_dim=8, norm_topk_prob=True))


def _olmoe() -> Any:
    from transformers import OlmoeConfig

    return OlmoeConfig(**_common(intermediate_size=20, num_experts=EXPERTS))


def _deepseek_v3() -> Any:
    from transformers import DeepseekV3Config

    return DeepseekV3Config(
        **_common(
            num_key_value_heads=4, moe_intermediate_size=20, n_routed_experts=EXPERTS, num_local_experts=EXPERTS,
            n_shared_experts=1, n_group=3, topk_group=2, first_k_dense_replace=1, routed_scaling_factor=2.5,
            norm_topk_prob=True, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
        )
    )  # fmt: skip


def _gpt_oss() -> Any:
    from transformers import GptOssConfig

    return GptOssConfig(
        **_common(
            intermediate_size=20, num_local_experts=EXPERTS, head_dim=8, layer_types=["full_attention"] * 2,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )
    )  # fmt: skip


def _jamba() -> Any:
    from transformers import JambaConfig

    return JambaConfig(
        **_common(
            intermediate_size=20, num_experts=EXPERTS, attn_layer_period=2, attn_layer_offset=1,
            expert_layer_period=1, expert_layer_offset=0, mamba_d_state=4, mamba_dt_rank=4,
        )
    )  # fmt: skip


def _ernie_4_5_moe() -> Any:
    from transformers import Ernie4_5_MoeConfig

    return Ernie4_5_MoeConfig(
        **_common(
            moe_intermediate_size=20, moe_num_experts=EXPERTS, num_experts=EXPERTS, moe_k=TOP_K,
            moe_num_shared_experts=1, moe_layer_start_index=0,
        )
    )  # fmt: skip


CONFIGS: dict[str, Callable[[], Any]] = {
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "olmoe": _olmoe,
    "deepseek_v3": _deepseek_v3,
    "gpt_oss": _gpt_oss,
    "jamba": _jamba,
    "ernie4_5_moe": _ernie_4_5_moe,
}


def _build(family: str, implementation: str = "eager", dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    from shared_core.integrations.transformers import register

    register()
    with torch.random.fork_rng():
        torch.manual_seed(0)  # the vectors keep what the family draws for them
        model = AutoModelForCausalLM.from_config(CONFIGS[family](), experts_implementation=implementation)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            # Several configurations start gates and experts at 0, and the balancing biases too.
            if tensor.ndim >= 2 and "A_log" not in name and tensor.is_floating_point():
                tensor.copy_(0.05 * torch.randn(tensor.shape, generator=generator))
            if "gate.weight" in name or "router.weight" in name:
                tensor.mul_(20)
            if name.endswith(("e_score_correction_bias", "router.bias")):
                tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
    return model.eval().to(dtype)


@pytest.fixture
def build() -> Callable[..., Any]:
    """``build(family, implementation, dtype)``: a model in evaluation mode; the same weights for the same family."""
    return _build


@pytest.fixture(params=CONFIGS)
def family(request: pytest.FixtureRequest) -> str:
    """Each of the seven families."""
    return str(request.param)


@pytest.fixture
def tokens() -> Tensor:
    """Token ids ``[2, 9]``."""
    return torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
