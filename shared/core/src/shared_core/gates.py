"""Gates: modules that turn rows into one logit for each expert.

Dimension letters: R rows, H width, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shared_core.kernels.cpu import linear


class LinearGate(nn.Linear):
    """:class:`torch.nn.Linear` from H to E whose product is computed in float32, also under autocast.

    Rounding logits to bfloat16 (8 bits) reorders close experts; the gate is too small for the precision to cost much.

    Parameters
    ----------
    in_features, out_features, bias, device, dtype
        As in :class:`torch.nn.Linear`: H and E.

    Examples
    --------
    >>> gate = LinearGate(4, 2, bias=False, dtype=torch.bfloat16)
    >>> gate(torch.zeros(3, 4, dtype=torch.bfloat16)).dtype
    torch.float32
    """

    def forward(self, input: Tensor) -> Tensor:
        """Logits ``[..., E]`` of ``[..., H]``, float32 (float64 for float64)."""
        if input.shape[-1] != self.in_features:
            raise ValueError(f"x must have shape [..., H] with H={self.in_features}, got {list(input.shape)}")
        return float32_linear(input, self.weight, self.bias)


class NoisyGate(LinearGate):
    r"""Linear gate with learned noise: :math:`z = W_g x + \varepsilon \cdot \mathrm{softplus}(W_n x)`.

    Noise is added in training mode only. Its scale starts at ``softplus(0) ≈ 0.69`` for every expert.

    Parameters
    ----------
    hidden_size, num_experts
        H and E.
    bias
        Whether :math:`W_g x` has a bias.
    generator
        Source of the standard normal :math:`\varepsilon`; torch's default one if None.
    device, dtype
        Of the parameters.

    References
    ----------
    Shazeer et al. (2017), Outrageously Large Neural Networks, eq. 3-5 and appendix A
    (:func:`shared_core.noisy_load_loss`).

    Examples
    --------
    >>> from shared_core import Router
    >>> router = Router(NoisyGate(8, 4, generator=torch.Generator().manual_seed(0)), num_experts=4, top_k=2)
    >>> router(torch.zeros(1, 8)).num_rows
    1
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        *,
        bias: bool = False,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, num_experts, bias=bias, device=device, dtype=dtype)
        self.noise_weight = nn.Parameter(torch.zeros(num_experts, hidden_size, device=device, dtype=dtype))
        self.generator = generator

    def distribution(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (the noiseless logits) and standard deviation of the logits, both ``[..., E]`` float32."""
        return super().forward(x), nn.functional.softplus(float32_linear(x, self.noise_weight, None))

    def forward(self, input: Tensor) -> Tensor:
        """Logits ``[..., E]`` of ``[..., H]``: noisy in training mode, else their mean."""
        if not self.training:
            return super().forward(input)
        mean, std = self.distribution(input)
        noise = torch.randn(mean.shape, generator=self.generator, device=mean.device, dtype=mean.dtype)
        return mean + noise * std


def float32_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x Wᵀ + b`` in float32, or float64 if ``x`` is, whatever autocast says."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    x, weight, bias = x.to(wide), weight.to(wide), None if bias is None else bias.to(wide)
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        with torch.autocast(kind, enabled=False):
            return linear(x, weight, bias)
    return linear(x, weight, bias)
