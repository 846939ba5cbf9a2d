r"""From rows to their experts: :func:`route`, a pure function of logits, and :class:`Router`, a gate in front of it.

All arithmetic is float32 (float64 if the logits are), also under autocast:

1. logits :math:`z = \mathrm{gate}(x) + \text{logit\_bias}`
2. scores :math:`p = \mathrm{softmax}(z)` over the experts, or :math:`\sigma(z)` elementwise
3. selection scores :math:`q = p + \text{selection\_bias}`, which decide and carry no gradient
4. the selection policy picks k experts of every row from :math:`q`
5. weights :math:`w_{r,j} = p_{r, S_r(j)}`, optionally divided by their sum, times ``scale``

Dimension letters: R rows, k slots (choices a row), E experts, H width, B batch, S sequence.
"""

from __future__ import annotations

import math
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from shared_core.balancer import BiasBalancer
from shared_core.checks import check_indices, check_logits, check_top_k, eager_cpu, flat_mask, rows_of_experts
from shared_core.gates import LinearGate
from shared_core.kernels.gating_ops import fused_gate
from shared_core.routing import Routing
from shared_core.selection import Selection, TopK

Score = Literal["softmax", "sigmoid"]

_SCORES = ("softmax", "sigmoid")
_BEST = TopK()


def route(
    logits: Tensor,
    top_k: int,
    *,
    score: Score = "softmax",
    selection: Selection | None = None,
    renormalize: bool = False,
    scale: float = 1.0,
    logit_bias: Tensor | None = None,
    selection_bias: Tensor | None = None,
    mask: Tensor | None = None,
) -> Routing:
    """Decide which experts serve which row.

    Parameters
    ----------
    logits
        ``[..., E]``, flattened to R rows in row-major order. ``-inf`` makes an expert unavailable to a row.
    top_k
        k, experts a row.
    score
        ``"softmax"`` over the experts or ``"sigmoid"`` of each.
    selection
        Policy ``(q, k) -> indices``, see :mod:`shared_core.selection`; the k best by default.
    renormalize
        Divide the weights of a row by their sum (+ 1e-20).
    scale
        Factor on the weights, applied last.
    logit_bias
        Added to the logits, so it changes scores **and** weights. ``[E]``, ``[R, E]``, or any shape that broadcasts
        to that of the logits, as ``[B, 1, E]`` does for ``[B, S, E]``.
    selection_bias
        Added to the scores for the choice only: it changes **which** experts are chosen, never their weights, and gets
        no gradient. Shapes as for ``logit_bias``.
    mask
        Bool, the leading shape of the logits or ``[R]``: False for rows (padding) that get no expert.

    Returns
    -------
    Routing
        ``indices`` and ``weights`` ``[R, k]``. Where fewer than k experts are available, and in masked rows, the index
        is the sentinel E and the weight 0. A row whose logits are all ``-inf`` has scores 0 and gradient 0.
        NaN logits are not hidden: they reach the weights.

    Raises
    ------
    TypeError
        If the logits are not floating point, ``mask`` is not bool, or a policy returns no integers.
    ValueError
        If ``top_k`` is not in 1..E, ``score`` unknown, or a bias or the mask does not fit the logits.

    Notes
    -----
    Equal selection scores go to the lower expert index, on every device. The function is pure, reads no values on an
    accelerator and traces under ``torch.compile(fullgraph=True)``.

    References
    ----------
    Shazeer et al. (2017), Outrageously Large Neural Networks; DeepSeek-AI (2024), DeepSeek-V3 Technical Report, eq.
    12-16.

    Examples
    --------
    >>> logits = torch.tensor([[0.0, 1.0, 3.0], [2.0, 2.0, 2.0]])
    >>> route(logits, top_k=2).indices
    tensor([[2, 1],
            [0, 1]])
    >>> route(logits, top_k=1, selection_bias=torch.tensor([1.0, 0.0, 0.0])).weights  # experts 0, with their own weight
    tensor([[0.0420],
            [0.3333]])
    """
    check_logits(logits)
    shape, num_experts = logits.shape, logits.shape[-1]
    check_top_k(top_k, num_experts)
    if score not in _SCORES:
        raise ValueError(f"score must be one of {', '.join(map(repr, _SCORES))}, got {score!r}")

    z = logits if logits.dtype == torch.float64 else logits.float()
    if logit_bias is not None:
        z = z + rows_of_experts("logit_bias", logit_bias, shape).to(z.dtype)
    z = z.reshape(-1, num_experts)
    keep = None
    if mask is not None:
        keep = flat_mask(mask, shape[:-1])
        z = torch.where(keep.unsqueeze(-1), z, 0.0)  # whatever padding holds, NaN too, ends here

    bias = None
    if selection_bias is not None:
        bias = rows_of_experts("selection_bias", selection_bias, shape).detach().to(z.dtype)
        bias = bias.expand(shape).reshape(-1, num_experts)
    policy = _BEST if selection is None else selection
    # One kernel for all that follows, where there is one for this device, policy and size.
    fused = fused_gate(z, bias, keep, top_k, policy, sigmoid=score == "sigmoid", renormalize=renormalize, scale=scale)
    if fused is not None:
        indices, weights, scores = fused
        return Routing(indices, weights, z, scores, num_experts, keep)

    # One look on the CPU spares four passes; where values cannot be read, the careful form runs always.
    plain = z.detach()
    all_available = eager_cpu(plain) and plain.numel() > 0 and plain.amin().item() > -math.inf
    unavailable = None if all_available else plain.isneginf()
    scores = _scores(z, score, unavailable)

    q = scores.detach()
    if bias is not None:
        q = q + bias
    if unavailable is not None:
        q = q.masked_fill(unavailable, -math.inf)
    if keep is not None:
        q = q.masked_fill(~keep.unsqueeze(-1), -math.inf)
    indices = check_choice(policy, policy(q, top_k), q)

    if type(policy) is TopK and all_available and selection_bias is None and keep is None:
        weights = scores.gather(1, indices)
    else:
        inside = indices.clamp(max=num_experts - 1)
        nobody = (indices == num_experts) | q.gather(1, inside).isneginf()
        indices = indices.masked_fill(nobody, num_experts)
        weights = scores.gather(1, inside).masked_fill(nobody, 0.0)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True).add_(1e-20)
    if scale != 1.0:
        weights = weights * scale
    return Routing(indices, weights, z, scores, num_experts, keep)


def _scores(z: Tensor, score: str, unavailable: Tensor | None) -> Tensor:
    if score == "sigmoid":
        return z.sigmoid()
    if unavailable is None:
        return z.softmax(dim=-1)
    # softmax of a row of -inf is NaN, and so would be its gradient: such a row is computed as zeros and then cleared.
    nobody = unavailable.all(dim=-1, keepdim=True)
    return z.masked_fill(nobody, 0.0).softmax(dim=-1).masked_fill(nobody, 0.0)


def check_choice(policy: Selection, indices: object, q: Tensor) -> Tensor:
    """What a policy returned, if it is ``[R, K]`` integers in 0..E; policies of this package are trusted with that."""
    if not isinstance(indices, Tensor) or indices.ndim != 2 or indices.shape[0] != q.shape[0]:
        got = list(indices.shape) if isinstance(indices, Tensor) else type(indices).__name__
        raise ValueError(f"the selection policy must return indices [R, k] with R={q.shape[0]}, got {got}")
    if not type(policy).__module__.startswith("shared_core."):
        check_indices(indices, q.shape[-1])
    return indices.long()


class Router(nn.Module):
    """A gate, :func:`route`, and optionally a bias that balances the load.

    Parameters
    ----------
    gate
        Module ``[..., H] -> [..., E]`` giving the logits.
    num_experts, top_k
        E and k.
    score, selection, renormalize, scale
        As in :func:`route`.
    balancer
        A :class:`BiasBalancer`: its bias joins the selection scores, and in training mode it counts the assignments.

    Raises
    ------
    ValueError
        If ``top_k`` is not in 1..E, ``score`` unknown, or the balancer made for another number of experts.

    Examples
    --------
    >>> router = Router.linear(hidden_size=16, num_experts=8, top_k=2, renormalize=True)
    >>> routing = router(torch.randn(3, 5, 16))
    >>> routing
    Routing(rows=15, slots=2, num_experts=8, dtype=torch.float32, device=cpu)
    """

    gate: nn.Module
    balancer: BiasBalancer | None

    def __init__(
        self,
        gate: nn.Module,
        num_experts: int,
        top_k: int,
        *,
        score: Score = "softmax",
        selection: Selection | None = None,
        renormalize: bool = False,
        scale: float = 1.0,
        balancer: BiasBalancer | None = None,
    ) -> None:
        super().__init__()
        check_top_k(top_k, num_experts)
        if score not in _SCORES:
            raise ValueError(f"score must be one of {', '.join(map(repr, _SCORES))}, got {score!r}")
        if balancer is not None and balancer.num_experts != num_experts:
            raise ValueError(f"the balancer is for {balancer.num_experts} experts, but num_experts={num_experts}")
        self.gate = gate
        self.num_experts, self.top_k = num_experts, top_k
        self.score: Score = score
        self.renormalize, self.scale = renormalize, scale
        self.selection = selection
        self.balancer = balancer

    @classmethod
    def linear(
        cls,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> Self:
        """Router with a linear gate, whose product stays in float32.

        Parameters
        ----------
        hidden_size
            H.
        num_experts, top_k
            E and k.
        bias, device, dtype
            Of the gate.
        **kwargs
            Further arguments of :class:`Router`.
        """
        gate = LinearGate(hidden_size, num_experts, bias=bias, device=device, dtype=dtype)
        return cls(gate, num_experts, top_k, **kwargs)

    def forward(
        self,
        x: Tensor,
        *,
        logit_bias: Tensor | None = None,
        selection_bias: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Routing:
        """Route ``x``.

        Parameters
        ----------
        x
            ``[..., H]``; row ``b * S + s`` of the routing is ``x[b, s]`` for ``[B, S, H]``.
        logit_bias, selection_bias, mask
            As in :func:`route`.

        Returns
        -------
        Routing
            Of all rows of ``x``.

        Raises
        ------
        ValueError
            If the gate does not give E logits a row; and what :func:`route` raises.
        """
        logits = self.gate(x)
        check_logits(logits, self.num_experts)
        if self.balancer is not None:
            learned = self.balancer.expert_bias
            selection_bias = learned if selection_bias is None else selection_bias + learned
        routing = route(
            logits,
            self.top_k,
            score=self.score,
            selection=self.selection,
            renormalize=self.renormalize,
            scale=self.scale,
            logit_bias=logit_bias,
            selection_bias=selection_bias,
            mask=mask,
        )
        if self.balancer is not None:
            self.balancer.observe(routing)
        return routing

    def extra_repr(self) -> str:
        """Settings for ``print(module)``."""
        return (
            f"num_experts={self.num_experts}, top_k={self.top_k}, score={self.score!r}, "
            f"renormalize={self.renormalize}, scale={self.scale}"
        )
