"""The experts of shared-core against those of transformers and against the machine's limits: the whole grid.

python shared/core/benchmarks/bench_experts.py                      # prints tables, about 10 minutes on one core
python shared/core/benchmarks/bench_experts.py --write              # and puts them into RESULTS.md
python shared/core/benchmarks/bench_experts.py --shape mid --rows 1,512 --dtype fp32 --json rows.json
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shlex
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
    Measurement,
    Shape,
    parse_shape,
    result_rows,
    result_table,
    run_bench,
    write_rows,
)
from shared_core.bench.implementations import missing_peers_note
from shared_core.bench.report import table_cells, table_columns

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "RESULTS.md"
# This script's part of it: from its heading to the next one of the same level.
SECTION = re.compile(r"^## experts\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)


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


def table_lines(measurements: list[Measurement], threads: int) -> list[str]:
    columns = table_columns(threads)
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    return lines + ["| " + " | ".join(table_cells(m)) + " |" for m in measurements]


def section(measurements: list[Measurement], threads: int, load: tuple[float, float], minutes: float) -> str:
    found = outcomes(measurements)
    machine = doctor.machine()
    groups = {
        "Decode": [m for m in measurements if m.case.is_decode],
        "Prefill": [m for m in measurements if not (m.case.is_decode or m.case.backward)],
        "Forward and backward": [m for m in measurements if m.case.backward],
    }
    left_out = {f"{m.case.shape.name}, {m.case.what}: {why}" for m in measurements for why in m.left_out.values()}
    clock = "CPU time of the thread" if threads == 1 else "time on the clock"
    lines = [
        "## experts",
        "",
        f"`{shlex.join(['python', 'shared/core/benchmarks/bench_experts.py', *sys.argv[1:]])}`, "
        f"{datetime.date.today().isoformat()}, {minutes:.0f} minutes",
        "",
        f"- CPU: {machine['cpu']}, {machine['cores']} cores usable, {threads} thread(s) used",
        f"- torch {machine['torch']}, transformers {machine['transformers']}, shared-core {machine['shared-core']}, "
        f"Python {machine['python']}, commit {commit()}",
        f"- load average of the machine at the start {load[0]:.1f}, at the end {load[1]:.1f} (this run itself is 1.0)",
        "",
        f"Implementations take turns in one process; the fastest turn of each counts, by {clock}. A ratio is the peer's"
        " time over ours: above 1, ours is faster. The limit is, for decode, reading the same experts' weights by"
        " one-row products; else the rate of one 1024 × 2048 × 2048 product, the best of `torch.mm` and oneDNN (in bf16"
        " also of float32 `torch.mm`, which is faster on CPUs without a full-rate bf16 unit). Before timing, outputs"
        " and gradients of all implementations are compared.",
        "",
        "### Against the targets",
        "",
        *summary_lines(found),
        "",
        *(["Below the target:", "", *missed] if (missed := missed_lines(found)) else ["No case is below its target."]),
    ]
    for title, group in groups.items():
        if group:
            lines += ["", f"### {title}", "", *table_lines(group, threads)]
    if left_out:
        lines += ["", "Not run (–): " + "; ".join(sorted(left_out)) + "."]
    return "\n".join([*lines, "", ""])


def write_section(text: str) -> None:
    """Replace this script's part of RESULTS.md; the parts of other scripts stay."""
    held = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else "# Measured: shared-core\n\n"
    whole, found = SECTION.subn(lambda _: text, held)
    if not found:
        whole = held.rstrip() + "\n\n" + text
    temporary = RESULTS.with_suffix(".tmp")
    temporary.write_text(whole.rstrip() + "\n", encoding="utf-8")
    temporary.replace(RESULTS)


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
    parser.add_argument("--write", action="store_true", help=f"put the tables into {RESULTS.name}")
    arguments = parser.parse_args()
    if arguments.write and missing_peers_note():
        print(missing_peers_note(), file=sys.stderr)
        return 1

    shapes = [parse_shape(name) for name in arguments.shape or SHAPES]
    cases = grid(shapes, [int(r) for r in arguments.rows.split(",")], arguments.dtype.split(","))
    if arguments.only:
        cases = [case for case in cases if case.backward == (arguments.only == "backward")]
    started, load = time.monotonic(), os.getloadavg()[0]

    def progress(case: Case) -> None:
        position = f"[{cases.index(case) + 1}/{len(cases)}, {time.monotonic() - started:.0f} s]"
        print(f"{position} {case.shape.name}: {case.what}", file=sys.stderr, flush=True)

    measurements = list(run_bench(cases, threads=arguments.threads, seconds=arguments.seconds, progress=progress))
    console = Console(width=200)
    console.print(result_table(measurements))
    for line in [*summary_lines(found := outcomes(measurements)), "", *missed_lines(found)]:
        print(line)
    if arguments.json:
        write_rows(arguments.json, result_rows(measurements, doctor.machine() | {"commit": commit()}))
    if arguments.write:
        minutes = (time.monotonic() - started) / 60
        write_section(section(measurements, arguments.threads, (load, os.getloadavg()[0]), minutes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
