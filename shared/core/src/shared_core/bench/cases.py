"""What is measured: shapes of experts, rows, dtypes and how the rows are spread over the experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
ROUTINGS = ("uniform", "zipf")
# Up to this many rows a step is bound by reading weights. Each measurement then walks over several routings, so that
# one step does not find the weights of the step before in the cache.
DECODE_ROWS = 8
_DECODE_ROWS_A_TURN = 16


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer of SwiGLU experts.

    Attributes
    ----------
    name : str
    num_experts, top_k, hidden_size, intermediate_size : int
        ``E``, ``k``, ``H``, ``I``.
    """

    name: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int

    @property
    def sizes(self) -> str:
        """The sizes as ``E,k,H,I``."""
        return f"{self.num_experts},{self.top_k},{self.hidden_size},{self.intermediate_size}"


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("qwen3-30b-a3b", 128, 8, 2048, 768),
        Shape("qwen3-half", 128, 8, 1024, 384),
        Shape("olmoe", 64, 8, 1024, 512),
        Shape("mid", 16, 4, 512, 512),
        Shape("mixtral", 8, 2, 1024, 3584),
    )
}


def parse_shape(text: str) -> Shape:
    """Read a shape's name, or its sizes as ``E,k,H,I``.

    Parameters
    ----------
    text : str
        A key of ``SHAPES`` or four positive integers with commas.

    Returns
    -------
    Shape

    Raises
    ------
    ValueError
        When it is neither, or when ``k > E``.

    Examples
    --------
    >>> parse_shape("olmoe").num_experts
    64
    >>> parse_shape("16,2,64,32")
    Shape(name='16,2,64,32', num_experts=16, top_k=2, hidden_size=64, intermediate_size=32)
    """
    if text in SHAPES:
        return SHAPES[text]
    fields = text.split(",")
    if len(fields) != 4 or not all(field.strip().isdecimal() and int(field) > 0 for field in fields):
        raise ValueError(f"shape {text!r} is neither E,k,H,I (four positive integers) nor one of {', '.join(SHAPES)}")
    num_experts, top_k, hidden_size, intermediate_size = (int(field) for field in fields)
    if top_k > num_experts:
        raise ValueError(f"shape {text!r}: k={top_k} exceeds E={num_experts}")
    return Shape(text, num_experts, top_k, hidden_size, intermediate_size)


@dataclass(frozen=True)
class Case:
    """One row of a benchmark table.

    Attributes
    ----------
    shape : Shape
    rows : int
        ``R``: rows (tokens) a step.
    dtype : str
        A key of ``DTYPES``; of activations and weights.
    backward : bool
        Forward and backward, or forward alone.
    routing : str
        ``"uniform"``: every set of ``k`` experts is equally likely. ``"zipf"``: experts are drawn in proportion to
        ``1/rank``, as skewed as untrained routers are.
    """

    shape: Shape
    rows: int
    dtype: str = "bf16"
    backward: bool = False
    routing: str = "uniform"

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"tokens must be at least 1, got {self.rows}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        if self.routing not in ROUTINGS:
            raise ValueError(f"routing {self.routing!r} is not one of {', '.join(ROUTINGS)}")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype for torch."""
        return DTYPES[self.dtype]

    @property
    def rows_per_expert(self) -> float:
        """Mean number of rows an expert gets: ``R·k/E``."""
        return self.rows * self.shape.top_k / self.shape.num_experts

    @property
    def is_decode(self) -> bool:
        """Whether reading the weights bounds the case, not multiplying."""
        return self.rows <= DECODE_ROWS and not self.backward

    @property
    def num_batches(self) -> int:
        """Different routings one measurement walks over: about as many rows in all for each number of rows."""
        return max(_DECODE_ROWS_A_TURN // self.rows, 4) if self.is_decode else 1

    @property
    def flops(self) -> int:
        """Floating-point operations of the matrix products of one step (backward: twice the forward ones on top)."""
        products = 2 * self.rows * self.shape.top_k * 3 * self.shape.hidden_size * self.shape.intermediate_size
        return products * (3 if self.backward else 1)

    @property
    def what(self) -> str:
        """The case in words, without its shape."""
        step = "forward+backward" if self.backward else "decode" if self.is_decode else "prefill"
        return f"{step} {self.dtype}, {self.rows} rows, {self.routing}"


def make_cases(
    shapes: Sequence[Shape],
    rows: Sequence[int],
    dtypes: Sequence[str],
    *,
    backward: bool = False,
    routings: Sequence[str] = ("uniform",),
) -> list[Case]:
    """Combine everything with everything, cases that share weights next to each other.

    Returns
    -------
    list of Case

    Raises
    ------
    ValueError
        For rows, dtypes or routings out of range.
    """
    return [
        Case(shape, count, dtype, backward, routing)
        for shape in shapes
        for dtype in dtypes
        for count in rows
        for routing in routings
    ]


@dataclass(frozen=True)
class Weights:
    """Weights of all experts in the layout of transformers: ``up [E, 2I, H]`` (gate first) and ``down [E, H, I]``."""

    up: nn.Parameter
    down: nn.Parameter


@dataclass(frozen=True)
class Batch:
    """One step: ``x [R, H]``, ``indices [R, k]``, float32 ``weights [R, k]``; ``grad [R, H]`` of its output."""

    x: Tensor
    indices: Tensor
    weights: Tensor
    grad: Tensor


def make_weights(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Weights:
    """Draw the weights of a layer so that activations keep about unit variance."""
    up = torch.empty(shape.num_experts, 2 * shape.intermediate_size, shape.hidden_size, dtype=dtype)
    down = torch.empty(shape.num_experts, shape.hidden_size, shape.intermediate_size, dtype=dtype)
    up.normal_(0.0, shape.hidden_size**-0.5, generator=generator)
    down.normal_(0.0, shape.intermediate_size**-0.5, generator=generator)
    return Weights(nn.Parameter(up, requires_grad=False), nn.Parameter(down, requires_grad=False))


def make_batches(case: Case, generator: torch.Generator) -> list[Batch]:
    """Draw inputs and routings of a case, ``case.num_batches`` of them."""

    def rows() -> Tensor:
        return torch.randn(case.rows, case.shape.hidden_size, generator=generator).to(case.torch_dtype)

    batches = []
    for _ in range(case.num_batches):
        indices, weights = draw_routing(case.rows, case.shape, case.routing, generator)
        batch = Batch(rows().requires_grad_(case.backward), indices, weights.requires_grad_(case.backward), rows())
        batches.append(batch)
    return batches


def draw_routing(rows: int, shape: Shape, routing: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw ``k`` different experts for each row, and weights that sum to 1.

    Returns
    -------
    indices : Tensor ``[R, k]``
    weights : Tensor ``[R, k]``, float32
    """
    log_popularity = torch.zeros(shape.num_experts)
    if routing == "zipf":
        rank = torch.randperm(shape.num_experts, generator=generator) + 1
        log_popularity = -rank.float().log()
    # Perturbed by Gumbel noise, the k largest are a draw without replacement in proportion to the popularity.
    gumbel = -torch.empty(rows, shape.num_experts).exponential_(generator=generator).log()
    scores, indices = (log_popularity + gumbel).topk(shape.top_k)
    return indices, scores.softmax(-1)
