"""LoRAExperts against an explicit sum over experts, written here with one pair of small matrices per expert."""

import math

import pytest
import torch

from shared_core import LoRAExperts, Routing, route

WIDTHS = (6, 5)
# (E, k, R, ranks): the first two run every adapter on every row, the last two only the chosen ones.
CASES = {
    "dense, equal ranks": (4, 2, 7, 3),
    "dense, unequal ranks": (4, 4, 7, (3, 1, 0, 5)),
    "sparse, equal ranks": (16, 2, 520, 2),
    "sparse, unequal ranks": (16, 1, 520, (1, 2, 3, 0) * 4),
}


def draw(name, dtype=torch.float64, seed=0, **kwargs):
    num_experts, top_k, rows, ranks = CASES[name]
    generator = torch.Generator().manual_seed(seed)
    layer = LoRAExperts(*WIDTHS, num_experts, ranks, alpha=3.0, dtype=torch.float64, **kwargs)
    with torch.no_grad():
        layer.lora_A.normal_(generator=generator)
        layer.lora_B.normal_(generator=generator)
    layer = layer.to(dtype)
    # One index more than there are experts: about k/(E+1) of the assignments are sentinels.
    indices = torch.rand(rows, num_experts + 1, generator=generator).topk(top_k).indices
    weights = torch.rand(rows, top_k, generator=generator, dtype=torch.float64)
    x = torch.randn(rows, WIDTHS[0], generator=generator, dtype=torch.float64).to(dtype)
    return layer, x.requires_grad_(), indices, weights.requires_grad_()


def explicit_sum(x, lora_A, lora_B, indices, weights, ranks, alpha, power=1.0):
    """Σ_j w_j · alpha / r^power · B_e (A_e x), a row and a choice at a time."""
    starts = [sum(ranks[:e]) for e in range(len(ranks))]
    rows = []
    for x_r, indices_r, weights_r in zip(x, indices.tolist(), weights, strict=True):
        y_r = x_r.new_zeros(lora_B.shape[0])
        for e, w in zip(indices_r, weights_r, strict=True):
            if e < len(ranks) and ranks[e]:
                own = slice(starts[e], starts[e] + ranks[e])
                y_r = y_r + w * alpha / ranks[e] ** power * (lora_B[:, own] @ (lora_A[own] @ x_r))
        rows.append(y_r)
    return torch.stack(rows)


@pytest.mark.parametrize("name", CASES)
def test_output_and_every_gradient_equal_the_explicit_sum(name):
    layer, x, indices, weights = draw(name)
    y = layer(x, Routing.from_topk(indices, weights, num_experts=layer.num_experts))
    expected = explicit_sum(x, layer.lora_A, layer.lora_B, indices, weights, layer.ranks, 3.0)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    leaves = [x, weights, layer.lora_A, layer.lora_B]
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
    for got, wanted in zip(
        torch.autograd.grad(y, leaves, upstream), torch.autograd.grad(expected, leaves, upstream), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_finite_differences(name):
    layer, x, indices, weights = draw(name)

    def output(x, weights, lora_A, lora_B):
        routing = Routing.from_topk(indices, weights, num_experts=layer.num_experts)
        return torch.func.functional_call(layer, {"lora_A": lora_A, "lora_B": lora_B}, (x, routing))

    torch.autograd.gradcheck(output, (x, weights, layer.lora_A, layer.lora_B), fast_mode=True)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_low_precision_stays_close_to_the_explicit_sum_in_float64(name, dtype, tolerance):
    layer, x, indices, weights = draw(name, dtype)
    weights = weights.detach().float().requires_grad_()
    y = layer(x, Routing.from_topk(indices, weights, num_experts=layer.num_experts))
    exact = [leaf.detach().double().requires_grad_() for leaf in (x, weights, layer.lora_A, layer.lora_B)]
    expected = explicit_sum(exact[0], exact[2], exact[3], indices, exact[1], layer.ranks, 3.0)
    leaves = [x, weights, layer.lora_A, layer.lora_B]
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    pairs = zip(
        [y, *torch.autograd.grad(y, leaves, upstream)],
        [expected, *torch.autograd.grad(expected, exact, upstream.double())],
        strict=True,
    )
    assert y.dtype == dtype
    assert max((got.double() - wanted).detach().norm() / wanted.detach().norm() for got, wanted in pairs) < tolerance


@pytest.mark.parametrize("name", CASES)
def test_rows_of_sentinels_give_exactly_zero(name):
    layer, x, indices, weights = draw(name)
    indices[::3] = layer.num_experts
    y = layer(x, Routing.from_topk(indices, weights, num_experts=layer.num_experts))
    assert torch.equal(y[::3], torch.zeros_like(y[::3]))


def test_change_is_zero_at_initialisation():
    layer = LoRAExperts(8, 8, 4, 2, alpha=4)
    routing = Routing.from_topk(torch.tensor([[0, 3]]), torch.ones(1, 2), num_experts=4)
    assert torch.equal(layer(torch.randn(1, 8), routing), torch.zeros(1, 8))


def test_lora_a_is_drawn_from_the_interval_of_a_linear_layer():
    torch.manual_seed(0)
    layer = LoRAExperts(400, 8, 4, [2, 4, 8, 16], alpha=4)
    # Kaiming-uniform with a = √5 is U(-1/√D, 1/√D): 12 000 draws come close to both ends.
    assert 0.999 / 20 < float(layer.lora_A.detach().abs().max()) <= 1 / 20


@pytest.mark.parametrize("rslora", [False, True])
def test_delta_weight_is_the_change_of_one_expert_with_weight_one(rslora):
    layer, x, _, _ = draw("dense, unequal ranks", use_rslora=rslora)
    for e in range(layer.num_experts):
        alone, ones = torch.full((len(x), 1), e), torch.ones(len(x), 1, dtype=torch.float64)
        power = 0.5 if rslora else 1.0
        expected = explicit_sum(x, layer.lora_A, layer.lora_B, alone, ones, layer.ranks, 3.0, power)
        torch.testing.assert_close(x @ layer.delta_weight(e).T, expected, rtol=1e-12, atol=1e-12)


def test_one_decision_per_image_reaches_all_its_tokens():
    layer, _, indices, weights = draw("dense, unequal ranks")
    tokens = torch.randn(len(indices), 4, WIDTHS[0], dtype=torch.float64)
    per_image = Routing.from_topk(indices, weights, num_experts=layer.num_experts)
    together = layer(tokens, per_image.expand(4))
    for image in range(len(indices)):
        own = Routing.from_topk(indices[[image] * 4], weights[[image] * 4], num_experts=layer.num_experts)
        torch.testing.assert_close(together[image], layer(tokens[image], own), rtol=1e-12, atol=1e-12)


def test_dropout_acts_in_training_only_and_keeps_the_mean():
    layer, _, _, _ = draw("dense, equal ranks", dropout=0.25)
    x = torch.ones(20_000, WIDTHS[0], dtype=torch.float64)
    routing = Routing.from_topk(torch.zeros(20_000, 1, dtype=torch.long), torch.ones(20_000, 1), num_experts=4)
    torch.manual_seed(0)
    dropped = layer(x, routing)
    kept = layer.eval()(x, routing)
    assert dropped.var(0).min() > 0
    torch.testing.assert_close(kept, (x @ layer.delta_weight(0).T))
    standard_error = dropped.std(0) / len(x) ** 0.5
    assert ((dropped.mean(0) - kept[0]).abs() < 4 * standard_error).all()


@pytest.mark.parametrize("name", CASES)
def test_zero_rows_are_served(name):
    layer, _, indices, weights = draw(name)
    routing = Routing.from_topk(indices[:0], weights[:0], num_experts=layer.num_experts)
    assert layer(torch.empty(0, WIDTHS[0], dtype=torch.float64), routing).shape == (0, WIDTHS[1])


@pytest.mark.parametrize("name", ["dense, unequal ranks", "sparse, unequal ranks"])
def test_autocast_computes_in_its_dtype_and_leaves_gradients_in_theirs(name):
    layer, x, indices, weights = draw(name, torch.float32)
    routing = Routing.from_topk(indices, weights, num_experts=layer.num_experts)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x, routing)
    y.float().sum().backward()
    expected = layer(x, routing).detach()
    assert (y.dtype, x.grad.dtype, layer.lora_A.grad.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert (y.detach().float() - expected).norm() / expected.norm() < 2e-2


@pytest.mark.parametrize("name", ["dense, unequal ranks", "sparse, unequal ranks"])
def test_compiled_without_graph_breaks_equals_eager(name):
    layer, x, indices, weights = draw(name)

    def step(x, weights, indices):
        return layer(x, Routing(indices, weights, None, None, layer.num_experts))

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for rows in (len(x), len(x) - 7):
        leaves = [leaf[:rows].detach().clone().requires_grad_() for leaf in (x, weights)]
        y, expected = (f(*leaves, indices[:rows]) for f in (compiled, step))
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
        got, wanted = (torch.autograd.grad(out.sin().sum(), [*leaves, *layer.parameters()]) for out in (y, expected))
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": [1, 2]}, r"rank has 2 entries for num_experts=4"),
        ({"rank": [1, 2, -1, 3]}, r"every rank must be at least 0 .* got rank=\[1, 2, -1, 3\]"),
        ({"rank": 0}, r"one of them above 0, got rank=0"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        ({"in_features": 0}, r"in_features must be at least 1, got 0"),
        ({"alpha": math.nan}, r"alpha must be finite, got nan"),
    ],
)
def test_bad_construction_says_what_is_wrong(arguments, message):
    good = {"in_features": 6, "out_features": 5, "num_experts": 4, "rank": 2, "alpha": 1.0}
    with pytest.raises(ValueError, match=message):
        LoRAExperts(**good | arguments)


def test_bad_input_says_what_is_wrong():
    layer = LoRAExperts(6, 5, 4, 2, alpha=1.0)
    routing = Routing.from_topk(torch.tensor([[0], [3]]), torch.ones(2, 1), num_experts=4)
    with pytest.raises(ValueError, match="x has 7 features, LoRAExperts was built for in_features=6"):
        layer(torch.zeros(2, 7), routing)
    with pytest.raises(ValueError, match=r"x has 6 rows \(shape \(3, 2, 6\)\), routing has 2; .*routing.expand"):
        layer(torch.zeros(3, 2, 6), routing)
    with pytest.raises(ValueError, match="routing is over 5 experts, LoRAExperts has 4"):
        layer(torch.zeros(2, 6), Routing.from_topk(torch.tensor([[0], [3]]), torch.ones(2, 1), num_experts=5))
    with pytest.raises(TypeError, match=r"x is torch.float64, lora_A is torch.float32"):
        layer(torch.zeros(2, 6, dtype=torch.float64), routing)
    with pytest.raises(IndexError, match=r"expert=4 is outside 0..3"):
        layer.delta_weight(4)


@pytest.mark.parametrize("rank", [2.0, [2, 2.5, 1, 1]])
def test_ranks_that_are_no_integers_are_refused(rank):
    with pytest.raises(TypeError, match="rank must be an int or one int per expert, got"):
        LoRAExperts(6, 5, 4, rank, 1.0)


@pytest.mark.parametrize(("rows", "experts"), [(6, 4), (600, 16)])  # every adapter, and the chosen ones only
def test_masked_rows_of_nan_give_zero_and_leave_the_gradient_clean(rows, experts):
    layer = LoRAExperts(6, 5, experts, 2, 1.0)
    torch.nn.init.normal_(layer.lora_B)
    x, mask = torch.randn(rows, 6), torch.arange(rows) % 3 != 0
    x[~mask] = math.nan
    y = layer(x, route(torch.randn(rows, experts), 1, mask=mask))
    y.sum().backward()
    assert not y[~mask].any()
    assert layer.lora_A.grad.isfinite().all()
