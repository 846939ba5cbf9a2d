"""Balance without a loss: a bias on the selection scores that follows the load.

Dimension letters: E experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shared_core.routing import Routing


class BiasBalancer(nn.Module):
    r"""Balance without an auxiliary loss: a bias on the selection scores that follows the load.

    In training mode every routing is counted; :meth:`update` then raises the bias of experts below the mean load and
    lowers it above: :math:`b \mathrel{+}= u\,\mathrm{sign}(\bar c - c)`. The bias decides only *which* experts are
    chosen and gets no gradient, so it does not disturb the task's.

    Parameters
    ----------
    num_experts
        E.
    update_rate
        u. Scores lie in 0..1; 1e-3 to 5e-3 are usual.
    rule
        ``"sign"`` as above, or ``"proportional"``: :math:`u\,(\bar c - c) / \bar c`.
    centered
        Subtract the mean of the bias after an update; otherwise it may drift as a whole (without any effect on the
        choice, but using up float32).

    Attributes
    ----------
    expert_bias
        ``[E]`` float32 buffer, in the state dict.
    tokens_per_expert
        ``[E]`` int64 buffer: assignments since the last update; not in the state dict.

    Raises
    ------
    ValueError
        If ``num_experts`` or ``update_rate`` is not positive or ``rule`` unknown.

    Notes
    -----
    ``.to(torch.bfloat16)`` and the like leave the bias in float32: near 1, bfloat16 numbers lie 1/128 apart, so steps
    of 1e-3 would be lost. Under activation checkpointing rows are counted twice, all alike, which no rule notices.

    References
    ----------
    Wang et al. (2024), Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts.

    Examples
    --------
    >>> from shared_core import Router
    >>> router = Router.linear(16, 8, top_k=2, score="sigmoid", balancer=BiasBalancer(8))
    >>> optimizer = torch.optim.SGD(router.parameters(), lr=0.1)
    >>> handle = BiasBalancer.attach(optimizer, router)
    >>> router(torch.randn(64, 16)).weights.sum().backward()
    >>> optimizer.step()
    >>> bool(router.balancer.expert_bias.any())
    True
    """

    expert_bias: Tensor
    tokens_per_expert: Tensor

    def __init__(
        self,
        num_experts: int,
        update_rate: float = 1e-3,
        *,
        rule: Literal["sign", "proportional"] = "sign",
        centered: bool = True,
    ) -> None:
        super().__init__()
        if num_experts < 1:
            raise ValueError(f"num_experts must be at least 1, got {num_experts}")
        if not 0 < update_rate < math.inf:
            raise ValueError(f"update_rate must be positive and finite, got {update_rate}")
        if rule not in {"sign", "proportional"}:
            raise ValueError(f"rule must be 'sign' or 'proportional', got {rule!r}")
        self.num_experts, self.update_rate = num_experts, update_rate
        self.rule, self.centered = rule, centered
        self.register_buffer("expert_bias", torch.zeros(num_experts, dtype=torch.float32))
        self.register_buffer("tokens_per_expert", torch.zeros(num_experts, dtype=torch.int64), persistent=False)

    @torch.no_grad()
    def observe(self, routing: Routing) -> None:
        """Add the assignments of a routing to the counts, in training mode only.

        Raises
        ------
        ValueError
            If the routing is over another number of experts.
        """
        if routing.num_experts != self.num_experts:
            raise ValueError(f"the balancer is for {self.num_experts} experts, the routing for {routing.num_experts}")
        if self.training:
            self.tokens_per_expert += routing.counts()

    @torch.no_grad()
    def update(self, group: dist.ProcessGroup | None = None) -> None:
        """Move the bias by what was counted since the last update, and start counting anew.

        Parameters
        ----------
        group
            Process group over which the counts are summed first, so that all ranks keep one bias.

        Notes
        -----
        Without any assignment the bias stays as it is, bit for bit.
        """
        counts = self.tokens_per_expert
        if group is not None:
            dist.all_reduce(counts, group=group)
        # E (mean - c) in integers: float32 holds large counts inexactly, and would move experts that are at the mean.
        total = counts.sum()
        lack = total - self.num_experts * counts
        step = lack.sign() if self.rule == "sign" else lack / total.clamp(min=1)
        moved = self.expert_bias + self.update_rate * step
        if self.centered:
            moved = moved - moved.mean()
        self.expert_bias.copy_(torch.where(total > 0, moved, self.expert_bias))
        counts.zero_()

    @staticmethod
    def attach(
        optimizer: torch.optim.Optimizer,
        modules: nn.Module | Iterable[nn.Module],
        group: dist.ProcessGroup | None = None,
    ) -> RemovableHandle:
        """Update every balancer inside ``modules`` before each step of the optimiser.

        Because it follows *steps*, gradient accumulation counts a whole step, and a step that a gradient scaler skips
        moves nothing (its counts go into the next).

        Parameters
        ----------
        optimizer
            Its ``step`` gets a pre-hook.
        modules
            A module or several; balancers are found at any depth, each once.
        group
            As in :meth:`update`.

        Returns
        -------
        RemovableHandle
            ``handle.remove()`` ends it.

        Raises
        ------
        ValueError
            If there is no balancer inside ``modules``.
        """
        roots = [modules] if isinstance(modules, nn.Module) else list(modules)
        found = {id(part): part for root in roots for part in root.modules() if isinstance(part, BiasBalancer)}
        if not found:
            raise ValueError("no BiasBalancer inside modules: give Router(..., balancer=BiasBalancer(num_experts))")

        def update_all(*_: Any) -> None:
            for balancer in found.values():
                balancer.update(group)

        return optimizer.register_step_pre_hook(update_all)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # Called by .to, .cuda, .bfloat16, ...: devices are followed, lower precision is not.
        exact = self.expert_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.expert_bias.dtype != torch.float32:
            self.expert_bias = exact.to(self.expert_bias.device)
        return self

    def extra_repr(self) -> str:
        """Settings for ``print(module)``."""
        return (
            f"num_experts={self.num_experts}, update_rate={self.update_rate}, rule={self.rule!r}, "
            f"centered={self.centered}"
        )
