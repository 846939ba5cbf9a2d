"""The mixture-of-experts layer: a router, its experts and optionally a shared expert that every row passes through."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from shared_core.routing import Routing


class MoE(nn.Module):
    r"""Route each row, run its experts, add the shared one: ``y = Σ_j w_{r,j} y_{S_r(j)}(x_r) + shared(x_r)``.

    The routing is returned with the output, so that balance losses are computed where the training loss is and nothing
    is collected behind the user's back.

    Parameters
    ----------
    router : Router
        Or any module ``(x, **router_kwargs) -> Routing``.
    experts : nn.Module
        ``(x [..., H], routing) -> [..., O]``; :class:`~shared_core.GroupedExperts`,
        :class:`~shared_core.LoRAExperts` or your own.
    shared_expert : nn.Module, optional
        ``x [..., H] -> [..., O]``, applied to every row and added without a routing weight.

    Raises
    ------
    ValueError
        When router and experts name different numbers of experts.

    Examples
    --------
    >>> import torch
    >>> from shared_core import GroupedExperts, MoE, Router, load_balance_loss
    >>> layer = MoE(Router.linear(32, num_experts=8, top_k=2, renormalize=True), GroupedExperts(32, 48, num_experts=8))
    >>> y, routing = layer(torch.randn(4, 10, 32))
    >>> y.shape, routing.indices.shape
    (torch.Size([4, 10, 32]), torch.Size([40, 2]))
    >>> loss = y.square().mean() + 0.01 * load_balance_loss(routing)
    """

    def __init__(self, router: nn.Module, experts: nn.Module, shared_expert: nn.Module | None = None) -> None:
        super().__init__()
        routed, held = getattr(router, "num_experts", None), getattr(experts, "num_experts", None)
        if routed is not None and held is not None and routed != held:
            raise ValueError(f"router chooses among num_experts={routed}, experts has num_experts={held}")
        self.router = router
        self.experts = experts
        self.shared_expert = shared_expert

    def forward(self, x: Tensor, **router_kwargs: Any) -> tuple[Tensor, Routing]:
        """Apply the layer.

        Parameters
        ----------
        x : Tensor ``[..., H]``
            Rows in any leading shape.
        **router_kwargs
            Passed to the router: `logit_bias`, `selection_bias`, `mask`, or what your own router takes.

        Returns
        -------
        y : Tensor ``[..., O]``
            Rows masked out by `mask` get the shared expert's output alone, or 0.
        routing : Routing
            The decision, over the flattened rows.
        """
        routing: Routing = self.router(x, **router_kwargs)
        y: Tensor = self.experts(x, routing)
        if self.shared_expert is not None:
            y = y + self.shared_expert(x)
        return y, routing
