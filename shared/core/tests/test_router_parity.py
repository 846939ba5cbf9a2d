"""Our router against the routers inside transformers' models, with their weights copied over.

Numbers of experts and of choices are no powers of two; gates are drawn with standard deviation 0.05 or more, since
several configurations start them at zero, on which everything agrees.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from shared_core import GroupLimitedTopK, Router

transformers = pytest.importorskip("transformers")

H, E, K, ROWS = 40, 12, 5, 300


@dataclass
class Family:
    """A peer's router, ours with its weights, and what else its choice depends on."""

    peer: nn.Module
    ours: Router
    selection_bias: Tensor | None = None


def copied(peer: nn.Module, **kwargs: object) -> Router:
    generator = torch.Generator().manual_seed(7)
    for parameter in peer.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.3, generator=generator)
    bias = getattr(peer, "bias", None)
    router = Router.linear(H, E, K, bias=bias is not None, **kwargs)
    router.gate.load_state_dict({"weight": peer.weight.detach()} | ({} if bias is None else {"bias": bias.detach()}))
    return router


def mixtral() -> Family:
    from transformers.models.mixtral import modeling_mixtral as m

    peer = m.MixtralTopKRouter(m.MixtralConfig(hidden_size=H, num_local_experts=E, num_experts_per_tok=K))
    return Family(peer, copied(peer, renormalize=True))


def qwen3_moe(renormalize: bool) -> Family:
    from transformers.models.qwen3_moe import modeling_qwen3_moe as m

    config = m.Qwen3MoeConfig(hidden_size=H, num_experts=E, num_experts_per_tok=K, norm_topk_prob=renormalize)
    peer = m.Qwen3MoeTopKRouter(config)
    return Family(peer, copied(peer, renormalize=renormalize))


def olmoe() -> Family:
    from transformers.models.olmoe import modeling_olmoe as m

    config = m.OlmoeConfig(hidden_size=H, num_experts=E, num_experts_per_tok=K, norm_topk_prob=False)
    peer = m.OlmoeTopKRouter(config)
    return Family(peer, copied(peer))


def deepseek_v3() -> Family:
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as m

    config = m.DeepseekV3Config(
        hidden_size=H, n_routed_experts=E, num_local_experts=E, num_experts_per_tok=K, n_group=4, topk_group=3,
        norm_topk_prob=True, routed_scaling_factor=2.5,
    )  # fmt: skip
    peer = m.DeepseekV3TopkRouter(config)
    router = copied(peer, score="sigmoid", renormalize=True, scale=2.5, selection=GroupLimitedTopK(4, 3))
    # Also negative enough for biased scores below 0, where a zero fill of masked groups would be chosen.
    bias = 0.5 * torch.randn(E, generator=torch.Generator().manual_seed(3)) - 0.5
    peer.e_score_correction_bias.copy_(bias)
    return Family(peer, router, bias)


def gpt_oss() -> Family:
    from transformers.models.gpt_oss import modeling_gpt_oss as m

    peer = m.GptOssTopKRouter(m.GptOssConfig(hidden_size=H, num_local_experts=E, num_experts_per_tok=K))
    return Family(peer, copied(peer, renormalize=True))


def jamba() -> Family:
    from transformers.models.jamba import modeling_jamba as m

    config = m.JambaConfig(hidden_size=H, num_experts=E, num_experts_per_tok=K, use_mamba_kernels=False)
    peer = m.JambaTopKRouter(config)
    return Family(peer, copied(peer))


def ernie_4_5_moe() -> Family:
    from transformers.models.ernie4_5_moe import modeling_ernie4_5_moe as m

    config = m.Ernie4_5_MoeConfig(hidden_size=H, moe_num_experts=E, num_experts=E, moe_k=K, num_experts_per_tok=K)
    peer = m.Ernie4_5_MoeTopKRouter(config)
    router = copied(peer, renormalize=True)
    bias = 0.1 * torch.randn(E, generator=torch.Generator().manual_seed(3))
    peer.moe_statics.e_score_correction_bias.data.copy_(bias[None])
    return Family(peer, router, bias)


FAMILIES = {
    "mixtral": mixtral,
    "qwen3_moe": lambda: qwen3_moe(renormalize=True),
    "qwen3_moe without renormalisation": lambda: qwen3_moe(renormalize=False),
    "olmoe": olmoe,
    "deepseek_v3": deepseek_v3,
    "gpt_oss": gpt_oss,
    "jamba": jamba,
    "ernie_4_5_moe": ernie_4_5_moe,
}


@pytest.fixture(params=FAMILIES, scope="module")
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]()


@pytest.fixture(scope="module")
def x() -> Tensor:
    return torch.randn(ROWS, H, generator=torch.Generator().manual_seed(0))


def dense(indices: Tensor, weights: Tensor) -> Tensor:
    return torch.zeros(ROWS, E).scatter(1, indices, weights)


def test_chosen_sets_are_the_peers(family: Family, x: Tensor) -> None:
    _, _, theirs = family.peer(x)
    ours = family.ours(x, selection_bias=family.selection_bias).indices
    assert torch.equal(ours.sort(-1).values, theirs.sort(-1).values)


def test_rows_do_not_all_choose_the_same(family: Family, x: Tensor) -> None:
    ours = family.ours(x, selection_bias=family.selection_bias).indices.sort(-1).values
    assert ours.unique(dim=0).shape[0] > 50  # the parity above is about something


def test_weights_are_the_peers(family: Family, x: Tensor) -> None:
    _, weights, indices = family.peer(x)
    ours = family.ours(x, selection_bias=family.selection_bias).dense()
    torch.testing.assert_close(ours, dense(indices, weights.float()), rtol=0.0, atol=1e-6)


def test_gradients_of_gate_and_input_are_the_peers(family: Family, x: Tensor) -> None:
    upstream = torch.randn(ROWS, E, generator=torch.Generator().manual_seed(1))
    theirs, ours = x.clone().requires_grad_(), x.clone().requires_grad_()
    _, weights, indices = family.peer(theirs)
    (dense(indices, weights.float()) * upstream).sum().backward()
    (family.ours(ours, selection_bias=family.selection_bias).dense() * upstream).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(family.ours.gate.weight.grad, family.peer.weight.grad, rtol=1e-4, atol=1e-5)
    family.peer.zero_grad()
    family.ours.zero_grad()
