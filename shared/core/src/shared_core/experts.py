"""Many small feed-forward networks, stored as stacked matrices, each applied to the rows that a routing sends to it.

Letters: R rows, k slots, E experts, H hidden (width in and out), I intermediate width, J = 2I if gated else I.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shared_core.checks import check_tensor
from shared_core.kernels import check_backend, resolve_backend
from shared_core.kernels.activations import ACTIVATIONS
from shared_core.kernels.formula import Formula, Parameters
from shared_core.kernels.ops import Settings, run
from shared_core.routing import Routing

__all__ = ["GroupedExperts", "experts_forward"]


def experts_forward(
    x: Tensor,
    routing: Routing,
    up: Tensor,
    down: Tensor,
    *,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    gated: bool = True,
    weight_input: bool = False,
    recompute: bool = False,
    accumulate_grad: bool = False,
    backend: str = "auto",
) -> Tensor:
    r"""Apply to every row the experts that its routing names, and sum their outputs with its weights.

    .. math::

        y_e(x) = W^{down}_e\,\bigl(\mathrm{act}(G) \odot U\bigr) + b^{down}_e, \quad [G; U] = W^{up}_e x + b^{up}_e,
        \qquad out_r = \sum_j w_{r,j}\, y_{S_r(j)}(x_r)

    and without a gate :math:`y_e(x) = W^{down}_e\,\mathrm{act}(W^{up}_e x + b^{up}_e) + b^{down}_e`.

    Parameters
    ----------
    x : Tensor
        ``[..., H]``; the leading dimensions, flattened, are the R rows of the routing.
    routing : Routing
        Indices and weights ``[R, k]``. Index E ("no expert") contributes nothing.
    up : Tensor
        ``[E, 2I, H]`` with the gate's rows first, or ``[E, I, H]`` if not ``gated``.
    down : Tensor
        ``[E, D, I]``; the width out, D, is H in a transformer.
    up_bias, down_bias : Tensor, optional
        ``[E, 2I]`` or ``[E, I]``, and ``[E, D]``.
    activation : {"silu", "gelu", "gelu_tanh", "relu", "relu2"}
        ``gelu`` is the exact one, ``relu2`` the squared relu.
    gated : bool
        SwiGLU and its relatives, or a plain two-layer network.
    weight_input : bool
        Multiply the weight into the expert's input instead of its output (Llama 4).
    recompute : bool
        Keep only ``x`` for the backward pass and compute the pre-activations (``R·k·J`` numbers) again.
    accumulate_grad : bool
        Opt-in: the backward pass adds the gradients of ``up`` and ``down`` in place to a ``.grad`` that is there
        already and reports none for them, which saves a buffer of their size in gradient accumulation. Gradients in
        ``.grad`` are the same; hooks on the two tensors (DDP's among them) do not see the step, and
        ``torch.autograd.grad`` must not be used. Without effect under ``torch.compile``, in ``reference`` and where
        ``.grad`` is None.
    backend : {"auto", "reference", "cpu", "grouped_mm", "triton"}
        See :mod:`shared_core.kernels`.

    Returns
    -------
    Tensor
        ``[..., D]`` in the dtype of ``x`` (under autocast: of autocast). Sums over experts are in float32 (float64 for
        float64), rounded once. Rows without an expert are exactly 0.

    Raises
    ------
    TypeError
        If ``x``, the matrices and the biases are not of one floating dtype outside autocast.
    ValueError
        If shapes do not fit together, an index lies outside 0 .. E (CPU), or a name is unknown.
    NotImplementedError
        From a second or a forward-mode differentiation, except on ``reference``.

    References
    ----------
    Shazeer, "GLU Variants Improve Transformer", 2020, arXiv:2002.05202.

    Examples
    --------
    >>> import torch
    >>> from shared_core import Routing, experts_forward
    >>> routing = Routing.from_topk(torch.tensor([[1], [0]]), torch.tensor([[0.5], [1.0]]), num_experts=2)
    >>> up = torch.tensor([[[1.0]], [[2.0]]])
    >>> down = torch.tensor([[[10.0]], [[100.0]]])
    >>> experts_forward(torch.tensor([[3.0], [4.0]]), routing, up, down, activation="relu", gated=False)
    tensor([[300.],
            [ 40.]])
    """
    check_backend(backend)
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}; valid are: {', '.join(ACTIVATIONS)}")
    _check_shapes(x, routing, up, down, up_bias, down_bias, gated)
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, up, down = x.to(dtype), up.to(dtype), down.to(dtype)
        up_bias = None if up_bias is None else up_bias.to(dtype)
        down_bias = None if down_bias is None else down_bias.to(dtype)
    else:
        _check_dtypes(x, up=up, down=down, up_bias=up_bias, down_bias=down_bias)
    settings = Settings(
        Formula(activation, gated, weight_input),
        recompute,
        accumulate_grad,
        resolve_backend(backend, x.device, x.dtype),
    )
    rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    out = run(rows, routing.indices, routing.weights, Parameters(up, down, up_bias, down_bias), settings)
    return out if x.ndim == 2 else out.view(*x.shape[:-1], out.shape[-1])


def _check_shapes(
    x: Tensor,
    routing: Routing,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    gated: bool,
) -> None:
    for name, value in (("x", x), ("up", up), ("down", down)):
        check_tensor(name, value)
    if not isinstance(routing, Routing):
        raise TypeError(
            f"routing must be a Routing, as router(x) and route(logits, k) give, got {type(routing).__name__}"
        )
    if up.ndim != 3 or down.ndim != 3:
        raise ValueError(f"up and down must be stacked matrices [E, ·, ·], got {list(up.shape)} and {list(down.shape)}")
    experts, width, hidden = up.shape
    inner = down.shape[2]
    if down.shape[0] != experts or width != (2 * inner if gated else inner):
        wanted = "[E, 2I, H]" if gated else "[E, I, H]"
        raise ValueError(
            f"up {list(up.shape)} and down {list(down.shape)} do not fit {wanted} and [E, D, I] (gated={gated})"
        )
    if x.ndim < 1 or x.shape[-1] != hidden:
        raise ValueError(f"x has shape {list(x.shape)}, but up {list(up.shape)} takes rows of width {hidden}")
    if routing.num_experts != experts:
        raise ValueError(f"routing has num_experts={routing.num_experts}, but up holds {experts} experts")
    rows = x.numel() // hidden if hidden else 0
    if routing.indices.shape[0] != rows:
        raise ValueError(f"x of shape {list(x.shape)} has {rows} rows, but routing has {routing.indices.shape[0]}")
    if routing.weights.shape != routing.indices.shape:
        raise ValueError(
            f"routing has indices {list(routing.indices.shape)} but weights {list(routing.weights.shape)}; "
            "both must be [R, k]"
        )
    if up_bias is not None and up_bias.shape != (experts, width):
        raise ValueError(f"up_bias must be [E, {width}] = {[experts, width]}, got {list(up_bias.shape)}")
    if down_bias is not None and down_bias.shape != (experts, down.shape[1]):
        raise ValueError(f"down_bias must be [E, D] = {[experts, down.shape[1]]}, got {list(down_bias.shape)}")


def _check_dtypes(x: Tensor, **parameters: Tensor | None) -> None:
    if not x.is_floating_point():
        raise TypeError(f"x must be floating point, got {x.dtype}")
    for name, parameter in parameters.items():
        if parameter is not None and parameter.dtype != x.dtype:
            raise TypeError(f"x is {x.dtype} but {name} is {parameter.dtype}; cast one of them or use torch.autocast")


class GroupedExperts(nn.Module):
    """E feed-forward experts with stacked weights, in the layout of transformers 5 (gate first).

    Parameters
    ----------
    hidden_size, intermediate_size, num_experts : int
        H, I and E.
    activation : {"silu", "gelu", "gelu_tanh", "relu", "relu2"}
    gated : bool
        With a gate projection (SwiGLU for ``silu``).
    bias : bool
        With biases ``*_bias`` on both projections.
    init_std : float
        Standard deviation of the initial weights; biases start at 0.
    recompute, accumulate_grad, backend
        As in :func:`experts_forward`.
    device, dtype
        Of the parameters.

    Attributes
    ----------
    gate_up_proj : Parameter
        ``[E, 2I, H]``; without a gate it is ``up_proj``, ``[E, I, H]``.
    down_proj : Parameter
        ``[E, H, I]``.

    Raises
    ------
    ValueError
        If a size is not positive or a name unknown.

    Examples
    --------
    >>> import torch
    >>> from shared_core import GroupedExperts, route
    >>> experts = GroupedExperts(hidden_size=16, intermediate_size=32, num_experts=4)
    >>> x = torch.randn(2, 5, 16)
    >>> experts(x, route(torch.randn(10, 4), top_k=2)).shape
    torch.Size([2, 5, 16])
    """

    down_proj: nn.Parameter
    down_proj_bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        *,
        activation: str = "silu",
        gated: bool = True,
        bias: bool = False,
        init_std: float = 0.02,
        recompute: bool = False,
        accumulate_grad: bool = False,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, size in (
            ("hidden_size", hidden_size),
            ("intermediate_size", intermediate_size),
            ("num_experts", num_experts),
        ):
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if activation not in ACTIVATIONS:
            raise ValueError(f"unknown activation {activation!r}; valid are: {', '.join(ACTIVATIONS)}")
        check_backend(backend)
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_experts = num_experts
        self.activation = activation
        self.gated = gated
        self.init_std = init_std
        self.recompute = recompute
        self.accumulate_grad = accumulate_grad
        self.backend = backend
        self._up_name = "gate_up_proj" if gated else "up_proj"
        width = 2 * intermediate_size if gated else intermediate_size

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(num_experts, *shape, device=device, dtype=dtype))

        self.register_parameter(self._up_name, parameter(width, hidden_size))
        self.down_proj = parameter(hidden_size, intermediate_size)
        self.register_parameter(self._up_name + "_bias", parameter(width) if bias else None)
        self.register_parameter("down_proj_bias", parameter(hidden_size) if bias else None)
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the weights from ``N(0, init_std²)`` and set the biases to 0.

        Parameters
        ----------
        generator : torch.Generator, optional
            Source of randomness; PyTorch's own by default.
        """
        for name, parameter in self.named_parameters():
            if name.endswith("_bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=self.init_std, generator=generator)

    def forward(self, x: Tensor, routing: Routing, *, weight_input: bool = False) -> Tensor:
        """Apply the chosen experts to every row.

        Parameters
        ----------
        x : Tensor
            ``[..., H]``.
        routing : Routing
            Of the flattened rows.
        weight_input : bool
            Multiply the weight into the expert's input instead of its output.

        Returns
        -------
        Tensor
            ``[..., H]``.
        """
        return experts_forward(
            x,
            routing,
            getattr(self, self._up_name),
            self.down_proj,
            up_bias=getattr(self, self._up_name + "_bias"),
            down_bias=self.down_proj_bias,
            activation=self.activation,
            gated=self.gated,
            weight_input=weight_input,
            recompute=self.recompute,
            accumulate_grad=self.accumulate_grad,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        """Sizes and the choices that differ from the default."""
        text = f"hidden_size={self.hidden_size}, intermediate_size={self.intermediate_size}"
        text += f", num_experts={self.num_experts}, activation={self.activation!r}, gated={self.gated}"
        text += f", bias={self.down_proj_bias is not None}"
        return text if self.backend == "auto" else text + f", backend={self.backend!r}"
