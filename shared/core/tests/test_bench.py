"""The benchmark harness: what it runs, how it takes time, and that it does not time wrong results."""

import itertools
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shared_core import bench, cli
from shared_core.bench import cases as cases_
from shared_core.bench import implementations, limits, runner, timing
from shared_core.bench.cases import Case, Shape, draw_routing, make_batches, make_weights

TINY = Shape("tiny", num_experts=6, top_k=2, hidden_size=16, intermediate_size=8)


def seeded():
    return torch.Generator().manual_seed(0)


def spin(seconds):
    """Use the CPU for a while."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


# --- cases ---


def test_published_model_has_its_published_sizes():
    from transformers import OlmoeConfig

    config = OlmoeConfig()
    assert (bench.SHAPES["olmoe"].num_experts, bench.SHAPES["olmoe"].top_k) == (
        config.num_experts,
        config.num_experts_per_tok,
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("olmo", r"shape 'olmo' is neither E,k,H,I .* nor one of qwen3-30b-a3b, qwen3-half, olmoe, mid, mixtral"),
        ("8,2,64", "shape '8,2,64' is neither"),
        ("8,2,64,0", "shape '8,2,64,0' is neither"),
        ("8,9,64,32", "shape '8,9,64,32': k=9 exceeds E=8"),
    ],
)
def test_bad_shapes_say_what_is_expected(text, message):
    with pytest.raises(ValueError, match=message):
        bench.parse_shape(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": 0}, "tokens must be at least 1, got 0"),
        ({"rows": 1, "dtype": "int4"}, "dtype 'int4' is not one of bf16, fp32"),
        ({"rows": 1, "routing": "best"}, "routing 'best' is not one of uniform, zipf"),
    ],
)
def test_bad_cases_say_what_is_expected(arguments, message):
    with pytest.raises(ValueError, match=message):
        Case(TINY, **arguments)


def test_operations_are_counted_as_two_a_multiply_add_and_three_products_with_gradients():
    # 10 rows × 2 experts × (32×16 up + 16×8 down) multiply-adds.
    assert Case(TINY, 10).flops == 2 * 10 * 2 * (16 * 16 + 16 * 8)
    assert Case(TINY, 10, backward=True).flops == 3 * Case(TINY, 10).flops


@pytest.mark.parametrize("routing", ["uniform", "zipf"])
def test_every_row_gets_different_experts_and_weights_that_sum_to_one(routing):
    indices, weights = draw_routing(200, TINY, routing, seeded())
    assert all(len(set(row)) == TINY.top_k for row in indices.tolist())
    torch.testing.assert_close(weights.sum(1), torch.ones(200))


@pytest.mark.parametrize("routing", ["uniform", "zipf"])
def test_first_choices_follow_the_stated_popularity(routing):
    rows = 20_000
    indices, _ = draw_routing(rows, TINY, routing, seeded())
    seen = torch.bincount(indices[:, 0], minlength=6).sort(descending=True).values / rows
    popularity = torch.tensor([1, 1 / 2, 1 / 3, 1 / 4, 1 / 5, 1 / 6]) if routing == "zipf" else torch.ones(6)
    expected = popularity / popularity.sum()
    assert ((seen - expected).abs() < 4 * (expected * (1 - expected) / rows).sqrt()).all()


# --- timing ---


def test_candidates_take_turns():
    order = []
    candidates = {name: (lambda name=name: lambda: order.append(name)) for name in "abc"}
    timing.interleave(candidates, seconds=0.0)
    assert "".join(order) == "abc" * 3


def test_preparation_is_not_timed():
    def prepare():
        spin(0.02)
        return lambda: None

    assert timing.interleave({"a": prepare}, seconds=0.0)["a"].cpu < 0.005


def test_fastest_turn_counts():
    durations = iter([0.03, 0.005, 0.03])
    found = timing.interleave({"a": lambda: lambda: spin(next(durations))}, seconds=0.0)["a"]
    assert 0.005 <= found.cpu < 0.025
    assert found.turns == 3


def test_sleeping_counts_on_the_clock_only():
    found = timing.interleave({"a": lambda: lambda: time.sleep(0.01)}, seconds=0.0)["a"]
    assert found.cpu < 0.005
    assert found.wall >= 0.01


def test_hopelessly_slow_candidate_is_not_run_a_third_time():
    candidates = {"fast": lambda: lambda: None, "slow": lambda: lambda: spin(0.21)}
    found = timing.interleave(candidates, seconds=0.0)
    assert (found["fast"].turns, found["slow"].turns) == (3, 2)


# --- limits ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_way_to_the_peak_computes_the_same_product(dtype):
    products = {name: prepare()() for name, prepare in limits.gemm_candidates(dtype).items()}
    assert all(product.shape == (1024, 2048) for product in products.values())
    reference = products.pop("torch.mm").float()
    for product in products.values():
        assert (product.float() - reference).norm() / reference.norm() < (1e-5 if dtype is torch.float32 else 1e-2)


def test_bandwidth_limit_reads_both_matrices_of_every_chosen_expert_once_a_step(monkeypatch):
    case = Case(TINY, 2, "fp32")
    weights, batches = make_weights(TINY, torch.float32, seeded()), make_batches(case, seeded())
    read = []
    monkeypatch.setattr(limits, "linear", lambda row, weight: read.append((len(row), weight.data_ptr())))
    limits.read_weights(case, weights, batches)()()
    expected = [
        (1, stack[e].data_ptr())
        for batch in batches
        for e in batch.indices.unique().tolist()
        for stack in (weights.up, weights.down)
    ]
    assert sorted(read) == sorted(expected)


# --- running ---


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_peer_and_backend_takes_part_and_agrees(dtype, backward):
    cases = [Case(TINY, rows, dtype, backward) for rows in (1, 40)]
    backends = ("auto", "reference", "cpu", "grouped_mm")
    for m in bench.run_bench(cases, backends=backends, seconds=0.0):
        assert list(m.timings) == [
            *backends,
            *(f"transformers {name}" for name in ("eager", "grouped_mm", "batched_mm")),
        ]
        assert m.best_ratio == min(m.seconds(peer) for peer in m.peers) / m.seconds("auto")
        assert m.limit_share == m.limit / m.seconds("auto") > 0


def test_weights_are_shared_with_the_peers_and_not_copied():
    weights = make_weights(TINY, torch.float32, seeded())
    call = implementations.peer(weights, "eager")
    batch = make_batches(Case(TINY, 3, "fp32"), seeded())[0]
    before = call(batch)().clone()
    with torch.no_grad():
        weights.down.mul_(2)
    torch.testing.assert_close(call(batch)(), 2 * before)


@pytest.mark.parametrize(("broken", "what"), [("output", "output"), ("gradient", "gradient of up")])
def test_wrong_results_are_not_timed(monkeypatch, broken, what):
    right = implementations.experts_forward

    def wrong(x, routing, up, down, **options):
        if broken == "output":
            return 1.01 * right(x, routing, up, down, **options)
        return right(x, routing, 0.5 * up + 0.5 * up.detach(), down, **options)

    monkeypatch.setattr(implementations, "experts_forward", wrong)
    with pytest.raises(RuntimeError, match=f"auto and transformers grouped_mm disagree on the {what} of tiny"):
        next(bench.run_bench([Case(TINY, 40, "fp32", backward=broken == "gradient")], seconds=0.0))


def test_peers_that_would_copy_or_clear_too_much_are_left_out_with_the_reason():
    qwen = bench.SHAPES["qwen3-half"]
    assert implementations.why_left_out(Case(qwen, 512), "batched_mm") == "batched_mm copies 10 GB of weights"
    assert implementations.why_left_out(Case(qwen, 512, backward=True), "eager").startswith("eager clears and adds")
    assert implementations.why_left_out(Case(qwen, 8), "batched_mm") is None
    assert implementations.why_left_out(Case(qwen, 512), "eager") is None


def test_without_transformers_ours_is_measured_alone_and_one_sentence_says_so(monkeypatch):
    monkeypatch.setattr(implementations, "find_spec", lambda name: None)
    m = next(bench.run_bench([Case(TINY, 1, "fp32")], seconds=0.0))
    assert (list(m.timings), m.best_ratio) == (["auto"], None)
    assert bench.missing_peers_note().endswith("pip install 'transformers>=5.10'")
    assert "vs" not in " ".join(str(column.header) for column in bench.result_table([m]).columns)


def test_thread_count_is_restored_and_decides_the_clock():
    before = torch.get_num_threads()
    one, two = (next(bench.run_bench([Case(TINY, 1, "fp32")], threads=n, seconds=0.0)) for n in (1, 2))
    assert torch.get_num_threads() == before
    assert one.seconds("auto") == one.timings["auto"].cpu
    assert two.seconds("auto") == two.timings["auto"].wall


def test_bad_settings_are_named():
    with pytest.raises(ValueError, match="threads must be at least 1, got 0"):
        next(bench.run_bench([Case(TINY, 1)], threads=0))
    with pytest.raises(ValueError, match="backends is empty"):
        next(bench.run_bench([Case(TINY, 1)], backends=()))


# --- report and command ---


@pytest.fixture(scope="module")
def measured():
    return list(bench.run_bench([Case(TINY, rows, "fp32") for rows in (1, 40)], seconds=0.0))


def test_records_hold_a_line_for_each_peer_with_the_ratio_of_the_times(measured):
    records = bench.result_rows(measured, {"cpu": "some CPU"})
    assert [(r["rows"], r["peer"]) for r in records] == [
        (rows, f"transformers {name}") for rows in (1, 40) for name in implementations.PEERS
    ]
    for r in records:
        assert r["ratio"] == r["peer_cpu"] / r["ours_cpu"]
        assert r["machine"] == {"cpu": "some CPU"}
        assert r["what"] in {"decode fp32, 1 rows, uniform", "prefill fp32, 40 rows, uniform"}


def test_records_are_appended_to_those_in_the_file(tmp_path, measured):
    records, path = bench.result_rows(measured, {}), tmp_path / "rows.json"
    bench.write_rows(path, records)
    bench.write_rows(path, records[:1])
    assert json.loads(path.read_text()) == [*records, records[0]]


@pytest.mark.parametrize(("content", "message"), [("{}", "holds a JSON dict, not a list"), ("[1", "is not JSON")])
def test_file_that_holds_something_else_is_left_as_it_is(tmp_path, content, message):
    path = tmp_path / "rows.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        bench.write_rows(path, [])
    assert path.read_text() == content


def test_what_all_lines_share_stands_in_the_title(measured):
    table = bench.result_table(measured)
    assert str(table.title).startswith("tiny, fp32, fwd, uniform, backend auto, 1 thread(s)")
    assert [str(column.header).split("\n")[0] for column in table.columns][:2] == ["rows", "rows/"]
    other = replace(measured[0], case=replace(measured[0].case, routing="zipf"))
    assert "routing" in [column.header for column in bench.result_table([*measured, other]).columns]


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", *arguments])
    return stop.value.code, capsys.readouterr()


def test_command_prints_the_table_on_stdout_and_appends_records(capsys, tmp_path):
    path = tmp_path / "rows.json"
    shape = ["--shape", "6,2,16,8", "--dtype", "fp32", "--seconds", "0", "--json", str(path)]
    code, streams = run(capsys, *shape, "--tokens", "1,40", "--routing", "uniform,zipf", "--quiet")
    assert (code, streams.err) == (0, "")
    assert streams.out.count("zipf") == 2
    records = json.loads(path.read_text())
    assert {(r["rows"], r["routing"]) for r in records} == {(n, kind) for n in (1, 40) for kind in ("uniform", "zipf")}
    assert {"cpu", "torch", "transformers"} <= set(records[0]["machine"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "huge"], "shape 'huge' is neither"),
        (["--tokens", "1,two"], "--tokens: 'two' is not a whole number"),
        (["--dtype", "fp8"], "dtype 'fp8' is not one of bf16, fp32"),
        (["--routing", "best"], "routing 'best' is not one of uniform, zipf"),
        (["--backend", "fastest"], "unknown backend 'fastest'"),
        (["--json", "no/such/folder.json"], "the folder no/such does not exist"),
    ],
)
def test_bad_options_give_one_line_and_exit_code_two(capsys, arguments, message):
    code, streams = run(capsys, *arguments)
    assert (code, streams.out) == (2, "")
    assert message in streams.err
    assert streams.err.count("\n") == 1


@pytest.mark.slow
def test_grid_script_measures_every_kind_of_case_against_its_target():
    script = Path(__file__).parents[1] / "benchmarks" / "bench_experts.py"
    arguments = ["--shape", "16,2,64,32", "--rows", "1,8,512", "--dtype", "fp32", "--seconds", "0"]
    done = subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=110, check=True
    )
    kinds = ("decode, 1 row", "decode, 4-8 rows", "fp32 prefill, ≥ 32 rows", "fp32 forward+backward, 64-127 rows")
    assert all(kind in done.stdout for kind in (*kinds, "every case"))
    # 1, 8, 512 rows uniform; 8, 512 skewed; 512 rows with gradients, uniform and skewed.
    assert "[7/7," in done.stderr


def test_cases_that_share_weights_are_neighbours():
    made = bench.make_cases([TINY, replace(TINY, name="other")], [1, 8], ["fp32", "bf16"], routings=cases_.ROUTINGS)
    keys = [(case.shape.name, case.dtype) for case in made]
    assert len(made) == 16
    assert sum(a != b for a, b in itertools.pairwise(keys)) == 3


def test_weights_are_drawn_once_for_cases_that_share_them(monkeypatch):
    drawn = []
    monkeypatch.setattr(runner, "make_weights", lambda *a: drawn.append(a) or make_weights(*a))
    list(bench.run_bench(bench.make_cases([TINY], [1, 2, 40], ["fp32"]), seconds=0.0))
    assert len(drawn) == 1
