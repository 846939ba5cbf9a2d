"""Hugging Face mixture-of-experts models on the experts and routers of this package.

=========================  ============================================================================================
:func:`register`           makes ``experts_implementation="shared_core"`` known to transformers
:func:`capture_routing`    which experts served which token, layer by layer, as :class:`shared_core.Routing`
:func:`replace_routers`    other routing rules inside a loaded model, for the length of a ``with`` block
:func:`as_router`          a model's own router as a :class:`shared_core.Router`, on the same weights
=========================  ============================================================================================

Nothing in transformers is patched: the first uses its registry of experts functions, the others give single instances
another ``forward`` and take it back.

Examples
--------
>>> from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
>>> from shared_core.integrations.transformers import register
>>> register()
>>> config = Qwen3MoeConfig(
...     vocab_size=32, hidden_size=16, intermediate_size=32, moe_intermediate_size=8, num_hidden_layers=1,
...     num_attention_heads=2, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
... )
>>> model = Qwen3MoeForCausalLM._from_config(config, experts_implementation="shared_core")
>>> model.get_experts_implementation()
{'': 'shared_core'}
"""

from __future__ import annotations

from shared_core.integrations.transformers.capture import CapturedRouting, capture_routing
from shared_core.integrations.transformers.conversion import as_router
from shared_core.integrations.transformers.experts import register
from shared_core.integrations.transformers.replacement import replace_routers

__all__ = ["CapturedRouting", "as_router", "capture_routing", "register", "replace_routers"]
