"""Expert kernels on a CUDA device: what the interpreter cannot show."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from shared_core import Routing, experts_forward

pytest.importorskip("triton")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

QWEN3 = (128, 8, 2048, 768)  # E, k, H, I
SMALL = (16, 4, 512, 256)
MIB = 2**20


class Layer:
    """Random experts in bfloat16 and rows that are routed to them, some slots empty."""

    def __init__(self, rows: int, sizes: tuple[int, int, int, int], dtype: torch.dtype = torch.bfloat16) -> None:
        num_experts, slots, hidden, inner = sizes
        generator = torch.Generator("cuda").manual_seed(0)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=generator, device="cuda") * scale).to(dtype).requires_grad_()

        self.indices = torch.rand(rows, num_experts + 1, generator=generator, device="cuda").topk(slots).indices
        self.num_experts = num_experts
        weights = torch.rand(rows, slots, generator=generator, device="cuda")
        self.leaves = {
            "x": draw(rows, hidden),
            "weights": weights.masked_fill(self.indices == num_experts, 0.0).requires_grad_(),
            "up": draw(num_experts, 2 * inner, hidden, scale=hidden**-0.5),
            "down": draw(num_experts, hidden, inner, scale=inner**-0.5),
        }
        self.grad = draw(rows, hidden).detach()

    def forward(self, backend: str = "triton") -> Tensor:
        x, weights, up, down = self.leaves.values()
        return experts_forward(
            x, Routing(self.indices, weights, None, None, self.num_experts), up, down, backend=backend
        )

    def step(self, backend: str = "triton") -> dict[str, Tensor]:
        out = self.forward(backend)
        return {"out": out.detach()} | dict(
            zip(self.leaves, torch.autograd.grad(out, list(self.leaves.values()), self.grad), strict=True)
        )


@pytest.fixture(autouse=True)
def _room() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize("rows", [1, 8, 100, 512, 4096])
@pytest.mark.parametrize(
    ("sizes", "dtype", "tolerance"),
    [
        (QWEN3, torch.bfloat16, 4e-2),
        ((8, 2, 1024, 3584), torch.bfloat16, 4e-2),
        (SMALL, torch.float16, 1e-2),
        (SMALL, torch.float32, 3e-5),
        ((6, 3, 72, 36), torch.bfloat16, 4e-2),
    ],
    ids=["Qwen3", "Mixtral", "float16", "float32", "odd sizes"],
)
def test_output_and_gradients_match_another_backend_in_a_wider_dtype(
    rows: int, sizes: tuple[int, int, int, int], dtype: torch.dtype, tolerance: float
) -> None:
    layer = Layer(rows, sizes, dtype)
    got = layer.step()
    wider = torch.float64 if dtype == torch.float32 else torch.float32
    layer.leaves = {
        n: (t if n == "weights" else t.to(wider)).detach().requires_grad_() for n, t in layer.leaves.items()
    }
    layer.grad = layer.grad.to(wider)
    want = layer.step("grouped_mm")  # a loop of exact products, because grouped_mm takes neither of the wider dtypes
    for name, tensor in want.items():
        assert float((got[name].double() - tensor.double()).norm() / tensor.double().norm()) <= tolerance, name


def test_auto_takes_the_kernels() -> None:
    layer = Layer(64, SMALL)
    assert torch.equal(layer.forward("auto"), layer.forward("triton"))


@pytest.mark.parametrize("rows", [8, 2048])
def test_a_step_never_waits_once_its_sizes_are_tuned(rows: int) -> None:
    layer = Layer(rows, SMALL)
    layer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("rows", [8, 2048])
def test_two_steps_agree_to_the_bit(rows: int) -> None:
    layer = Layer(rows, SMALL)
    layer.step()
    first, second = layer.step(), layer.step()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_forward_pass_is_captured_in_a_graph_that_follows_its_routing() -> None:
    layer = Layer(8, SMALL)
    with torch.no_grad():
        layer.forward()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = layer.forward()
        layer.indices.copy_(layer.indices.roll(1, 0))
        graph.replay()
        torch.testing.assert_close(captured, layer.forward(), rtol=0.0, atol=0.0)


def test_sizes_that_were_never_tuned_can_be_captured_too() -> None:
    layer = Layer(24, (16, 4, 576, 320))
    with torch.no_grad():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = layer.forward()
        graph.replay()
        torch.testing.assert_close(captured, layer.forward("reference"), rtol=2e-2, atol=2e-2)


def test_the_forward_pass_keeps_no_permuted_copy_of_the_rows() -> None:
    rows, (_, slots, hidden, inner) = 16384, (16, 4, 4096, 256)
    layer = Layer(rows, (16, slots, hidden, inner))
    with torch.no_grad():
        layer.forward()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        layer.forward()
        peak = torch.cuda.max_memory_allocated() - before
    by_slot, hidden_layer, out = (2 * rows * each for each in (slots * hidden, slots * inner, hidden))
    plan = 64 * rows * slots  # the radix sort's buffers and the sorted assignments
    assert peak <= by_slot + hidden_layer + out + plan + 2 * MIB  # a copy of the rows would be another by_slot


def test_launches_follow_the_device_of_the_tensors() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    layer = Layer(8, SMALL)
    want = layer.forward().detach()
    layer.indices = layer.indices.to("cuda:1")
    layer.leaves = {name: tensor.detach().to("cuda:1") for name, tensor in layer.leaves.items()}
    torch.testing.assert_close(layer.forward().to(want.device), want)
