"""The experts of shared-core against those of transformers and against the machine's limits: the whole grid.

python shared/core/benchmarks/bench_experts.py                      # prints tables, about 10 minutes on one core
python shared/core/benchmarks/bench_experts.py --shape mid --rows 1,512 --dtype fp32 --json rows.json
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from targets import Outcome, outcomes

from shared_core import doctor
from shared_core.bench import (
    SHAPES,
    Case,
    Shape,
    parse_shape,
    result_rows,
    result_table,
    run_bench,
    write_rows,
)
from shared_core.bench.implementations import missing_peers_note

HERE = Path(__file__).resolve().parent


def grid(shapes: list[Shape], rows: list[int], dtypes: list[str]) -> list[Case]:
    """Every shape, dtype and number of rows; skewed routing at 8 and 512 rows; gradients from 512 rows on."""
    cases = []
    for shape in shapes:
        # 600 million weights: bfloat16 only, and one training case.
        large = shape.name == "qwen3-30b-a3b"
        for dtype in dtypes:
            if large and dtype == "fp32":
                continue
            cases += [Case(shape, r, dtype, False, "uniform") for r in rows]
            cases += [Case(shape, r, dtype, False, "zipf") for r in rows if r in (8, 512)]
            cases += [Case(shape, r, dtype, True, "uniform") for r in rows if r >= 512 and not (large and r > 512)]
            cases += [Case(shape, r, dtype, True, "zipf") for r in rows if r == 512 and not large]
    return cases


def summary_lines(found: list[Outcome]) -> list[str]:
    lines = [
        "| case | against | target | worst | median | best | cases | met in |",
        "| --- | --- | --: | --: | --: | --: | --: | --: |",
    ]
    for outcome in found:
        values = [value for value, _ in outcome.measured]
        target = outcome.target
        against = {"limit": "share of limit", "best": "best of transformers"}.get(target.metric, target.metric)
        figures = " | ".join(
            f"{value:.2f}" for value in (target.at_least, values[0], statistics.median(values), values[-1])
        )
        kind = target.kind if target.binding else f"{target.kind} ¹"
        lines.append(f"| {kind} | {against} | {figures} | {len(values)} | {len(values) - len(outcome.missed)} |")
    if not all(outcome.target.binding for outcome in found):
        lines += [
            "",
            "¹ Stated for CPUs on which oneDNN multiplies float32 matrices about twice as fast as MKL. On this one both"
            " sides call the same MKL product, so what remains is the share of the limit.",
        ]
    return lines


def missed_lines(found: list[Outcome]) -> list[str]:
    return [
        f"- {o.target.kind}{'' if o.target.binding else ' ¹'}, {o.target.metric} ≥ {o.target.at_least:.2f}: "
        + "; ".join(f"{value:.2f} ({case.shape.name}, {case.what})" for value, case in o.missed)
        for o in found
        if o.missed
    ]


EXPLANATION = """
Implementations take turns in one process; the fastest turn of each counts, by CPU time of the thread. A ratio is the
peer's time over ours: above 1, ours is faster. The limit is, for decode, reading the same experts' weights by one-row
products; else the rate of one 1024 × 2048 × 2048 product, the best of torch.mm and oneDNN (in bf16 also of float32
torch.mm, which is faster on CPUs without a full-rate bf16 unit). Before timing, outputs and gradients of all
implementations are compared.
"""


def commit() -> str:
    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=HERE, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    head = git("rev-parse", "--short", "HEAD")
    if not head:
        return "none yet"
    return f"{head} with changes" if git("status", "--porcelain", "--", ":!*RESULTS.md") else head


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", help=f"one of {', '.join(SHAPES)}, or E,k,H,I; may be repeated")
    parser.add_argument("--rows", default="1,4,8,512,2048")
    parser.add_argument("--dtype", default="fp32,bf16")
    parser.add_argument("--only", choices=("forward", "backward"), help="leave the other half of the grid out")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.0, help="a case, about")
    parser.add_argument("--json", type=Path, help="append records to this file")
    arguments = parser.parse_args()
    if missing_peers_note():
        print(missing_peers_note(), file=sys.stderr)

    shapes = [parse_shape(name) for name in arguments.shape or SHAPES]
    cases = grid(shapes, [int(r) for r in arguments.rows.split(",")], arguments.dtype.split(","))
    if arguments.only:
        cases = [case for case in cases if case.backward == (arguments.only == "backward")]
    started = time.monotonic()

    def progress(case: Case) -> None:
        position = f"[{cases.index(case) + 1}/{len(cases)}, {time.monotonic() - started:.0f} s]"
        print(f"{position} {case.shape.name}: {case.what}", file=sys.stderr, flush=True)

    measurements = list(run_bench(cases, threads=arguments.threads, seconds=arguments.seconds, progress=progress))
    console = Console(width=200)
    console.print(result_table(measurements))
    left_out = {f"{m.case.shape.name}, {m.case.what}: {why}" for m in measurements for why in m.left_out.values()}
    if left_out:
        print("Not run (–): " + "; ".join(sorted(left_out)) + ".")
    print(EXPLANATION)
    for line in [*summary_lines(found := outcomes(measurements)), "", *missed_lines(found)]:
        print(line)
    if arguments.json:
        write_rows(arguments.json, result_rows(measurements, doctor.machine() | {"commit": commit()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
