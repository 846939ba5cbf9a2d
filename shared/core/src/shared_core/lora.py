"""Low-rank experts: many LoRA adapters over one shared projection, mixed by a routing.

Legend: ``R`` rows, ``E`` experts, ``k`` experts per row, ``D`` input width, ``O`` output width, ``r_e`` rank of expert
``e``, ``P = Σ_e r_e``. All adapters are stored side by side (``A: [P, D]``, ``B: [O, P]``; expert ``e`` owns ``r_e``
consecutive rows of ``A`` and columns of ``B``), which makes any mixture of them two plain matrix products.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from shared_core.kernels.low_rank import chosen_adapters
from shared_core.routing import Routing

# Where running only the chosen experts begins to pay on CPUs (benchmarks/bench_lora.py prints both sides of it). Below,
# gathering rows and many thin products cost more than computing every adapter and multiplying most of it by zero.
_SPARSE_MIN_EXPERTS_PER_CHOICE = 8
_SPARSE_MIN_ROWS = 512


class LoRAExperts(nn.Module):
    r"""A mixture of low-rank adapters: ``y_r = Σ_j w_{r,j} · s_e · B_e A_e x_r`` with ``e = S_r(j)``.

    Only the *change* is returned; add it to the output of the frozen projection. The change is zero at initialisation
    because every ``B_e`` is.

    Parameters
    ----------
    in_features, out_features : int
        Widths ``D`` and ``O`` of the adapted projection.
    num_experts : int
        Number of adapters ``E``.
    rank : int or sequence of int
        One rank for all experts or one per expert, each ≥ 0 and at least one > 0. An expert of rank 0 changes nothing.
    alpha : float
        Scaling: ``s_e = alpha / r_e``, or ``alpha / sqrt(r_e)`` with `use_rslora`.
    dropout : float, default 0
        Probability with which an input feature is dropped on its way into the adapters, in training only.
    use_rslora : bool, default False
        Rank-stabilised scaling.
    device, dtype
        Of the parameters.

    Attributes
    ----------
    lora_A : Parameter ``[P, D]``
        Kaiming-uniform (``a = √5``), as in peft.
    lora_B : Parameter ``[O, P]``
        Zero.
    ranks : tuple of int
    scalings : tuple of float

    Raises
    ------
    ValueError
        For ranks, sizes, a scaling or a dropout out of range.
    TypeError
        For ranks that are no integers.

    References
    ----------
    Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021, eq. 3.
    Kalajdzievski, "A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA", 2023.

    Examples
    --------
    One decision per image, shared by the image's prompt tokens:

    >>> import torch
    >>> from shared_core import LoRAExperts, Router
    >>> router = Router.linear(16, num_experts=4, top_k=2, renormalize=True)
    >>> adapters = LoRAExperts(32, 32, num_experts=4, rank=[8, 4, 4, 2], alpha=8)
    >>> style, prompts = torch.randn(3, 16), torch.randn(3, 10, 32)        # 3 images, 10 prompt tokens each
    >>> routing = router(style).expand(10)
    >>> (prompts + adapters(prompts, routing)).shape
    torch.Size([3, 10, 32])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_experts: int,
        rank: int | Sequence[int],
        alpha: float,
        *,
        dropout: float = 0.0,
        use_rslora: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, size in (
            ("in_features", in_features),
            ("out_features", out_features),
            ("num_experts", num_experts),
        ):
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout must be in [0, 1), got {dropout}")
        if not math.isfinite(alpha):
            raise ValueError(f"alpha must be finite, got {alpha}")
        self.in_features = in_features
        self.out_features = out_features
        self.num_experts = num_experts
        self.alpha = float(alpha)
        self.dropout = float(dropout)
        self.use_rslora = use_rslora
        self.ranks = _check_ranks(rank, num_experts)
        self.offsets = (0, *accumulate(self.ranks))
        self.scalings = tuple(self.alpha / (math.sqrt(r) if use_rslora else r) if r else 0.0 for r in self.ranks)
        total = self.offsets[-1]
        self.lora_A = nn.Parameter(torch.empty(total, in_features, device=device, dtype=dtype))
        self.lora_B = nn.Parameter(torch.empty(out_features, total, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw ``lora_A`` anew and set ``lora_B`` to zero, so that the change is zero again."""
        # The fan-in of each A_e is D whatever its rank, hence one call draws all of them from the right distribution.
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B)

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """Mix the adapters' changes.

        Parameters
        ----------
        x : Tensor ``[..., D]``
            Rows; the leading shape flattens to ``R``.
        routing : Routing
            Of ``R`` rows over ``E`` experts. Sentinels contribute nothing, and rows that its mask leaves out may hold
            anything, NaN too.

        Returns
        -------
        Tensor ``[..., O]``
            In the dtype of `x` (under autocast: the autocast dtype).

        Raises
        ------
        ValueError
            When the widths, the number of rows or of experts disagree.
        TypeError
            When `x` and the parameters differ in dtype outside autocast.
        """
        rows = self._check_input(x, routing)
        x_RD = x.reshape(rows, self.in_features)
        lora_A: Tensor = self.lora_A
        lora_B: Tensor = self.lora_B
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x_RD, lora_A, lora_B = x_RD.to(dtype), lora_A.to(dtype), lora_B.to(dtype)
        if routing.mask is not None:  # padding may hold NaN, which weights of 0 would not remove
            x_RD = x_RD.masked_fill(~routing.mask[:, None], 0.0)
        if self.dropout:
            x_RD = nn.functional.dropout(x_RD, self.dropout, self.training)
        if self._runs_sparse(x.device.type, rows, routing.indices.shape[-1]):
            y_RO = chosen_adapters(x_RD, lora_A, lora_B, routing.indices, routing.weights, self.ranks, self.scalings)
        else:
            y_RO = self._all_adapters(x_RD, lora_A, lora_B, routing.dense())
        return y_RO.reshape(*x.shape[:-1], self.out_features)

    def delta_weight(self, expert: int) -> Tensor:
        """Return the change of the projection's weight that one expert stands for.

        Parameters
        ----------
        expert : int
            Index in ``0..E-1``.

        Returns
        -------
        Tensor ``[O, D]``
            ``s_e · B_e A_e``; add it to the projection's weight to merge the expert.

        Raises
        ------
        IndexError
            When there is no such expert.
        """
        if not 0 <= expert < self.num_experts:
            raise IndexError(f"expert={expert} is outside 0..{self.num_experts - 1}")
        own = slice(self.offsets[expert], self.offsets[expert + 1])
        return torch.mm(self.lora_B[:, own], self.lora_A[own]) * self.scalings[expert]

    def extra_repr(self) -> str:
        """Sizes for ``print(module)``."""
        rank = self.ranks[0] if len(set(self.ranks)) == 1 else list(self.ranks)
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, num_experts={self.num_experts}, "
            f"rank={rank}, alpha={self.alpha:g}, dropout={self.dropout:g}, use_rslora={self.use_rslora}"
        )

    def _runs_sparse(self, device_type: str, rows: int, top_k: int) -> bool:
        # The sparse path reads the rows per expert back to the host; off the CPU that would be a synchronisation.
        return (
            device_type == "cpu"
            and self.num_experts >= _SPARSE_MIN_EXPERTS_PER_CHOICE * top_k
            and rows >= _SPARSE_MIN_ROWS
        )

    def _all_adapters(self, x_RD: Tensor, lora_A: Tensor, lora_B: Tensor, weights_RE: Tensor) -> Tensor:
        h_RP = nn.functional.linear(x_RD, lora_A)
        if len(set(self.ranks)) == 1:
            scaled_RE = weights_RE * self.scalings[0]
            mixed_RP = (h_RP.view(-1, self.num_experts, self.ranks[0]) * scaled_RE[..., None]).flatten(1)
        else:
            # One column block per expert, by broadcasting: an index per column would make the gradient of the weights
            # a scatter-add, whose order is not fixed on accelerators.
            columns = zip(torch.split(h_RP, list(self.ranks), 1), weights_RE.unbind(1), self.scalings, strict=True)
            mixed_RP = torch.cat([h_Rr * (weights_R * s)[:, None] for h_Rr, weights_R, s in columns], 1)
        return nn.functional.linear(mixed_RP.to(x_RD.dtype), lora_B)

    def _check_input(self, x: Tensor, routing: Routing) -> int:
        if x.shape[-1] != self.in_features:
            raise ValueError(f"x has {x.shape[-1]} features, LoRAExperts was built for in_features={self.in_features}")
        if routing.num_experts != self.num_experts:
            raise ValueError(f"routing is over {routing.num_experts} experts, LoRAExperts has {self.num_experts}")
        rows = math.prod(x.shape[:-1])
        if routing.indices.shape[0] != rows:
            raise ValueError(
                f"x has {rows} rows (shape {tuple(x.shape)}), routing has {routing.indices.shape[0]}; "
                "for one decision per group of rows use routing.expand(rows_per_group)"
            )
        if x.dtype != self.lora_A.dtype and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(f"x is {x.dtype}, lora_A is {self.lora_A.dtype}: convert one, or use torch.autocast")
        return rows


def _check_ranks(rank: int | Sequence[int], num_experts: int) -> tuple[int, ...]:
    try:
        ranks = (
            tuple(map(operator.index, rank)) if isinstance(rank, Iterable) else (operator.index(rank),) * num_experts
        )
    except TypeError:
        raise TypeError(f"rank must be an int or one int per expert, got {rank!r}") from None
    if len(ranks) != num_experts:
        raise ValueError(f"rank has {len(ranks)} entries for num_experts={num_experts}")
    if min(ranks) < 0 or max(ranks) == 0:
        raise ValueError(f"every rank must be at least 0 and one of them above 0, got rank={rank}")
    return ranks
