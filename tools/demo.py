"""Run the demo of each member and print one table of what they found.

A member names its demo in ``[tool.workspace-member]``. The command takes ``--out FOLDER`` and ``--json``, writes
pictures to the folder, and prints one JSON object whose ``rows`` have ``job``, ``measure``, ``value``, ``target`` and
``ok``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from members import ROOT, Member, load_members


def run_demo(member: Member, out: Path) -> list[dict[str, Any]]:
    """Run one member's demo and return its rows; raise `RuntimeError` with what it said when it fails."""
    program, *arguments = member.promises["demo"]
    command = [str(Path(sys.executable).with_name(program)), *arguments, "--out", str(out), "--json"]
    # Small matrices: more threads of the BLAS only wait for each other.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the demo of {member.name} ended with status {done.returncode}")
    rows: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    if not rows:
        raise RuntimeError(f"the demo of {member.name} found nothing")
    return rows


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main(argv: list[str] | None = None) -> int:
    """Run the demos; 1 when one failed or missed its target."""
    parser = argparse.ArgumentParser(description="Run each member's main job on data that comes with it.")
    parser.add_argument("name", nargs="?", default="")
    parser.add_argument("--out", type=Path, default=ROOT / "out")
    arguments = parser.parse_args(argv)
    start = time.monotonic()
    table = [("package", "job", "measure", "value", "target", "")]
    failed = False
    for member in load_members():
        if "demo" not in member.promises or arguments.name not in ("", member.name):
            continue
        folder = (arguments.out / member.name).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            rows = run_demo(member, folder)
        except RuntimeError as error:
            print(error, file=sys.stderr)
            failed = True
            continue
        for row in rows:
            failed |= not row["ok"]
            mark = "ok" if row["ok"] else "MISSED"
            table.append((member.name, row["job"], row["measure"], _text(row["value"]), _text(row["target"]), mark))
    widths = [max(len(line[column]) for line in table) for column in range(6)]
    for line in table:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())
    out = arguments.out.resolve()
    where = out.relative_to(ROOT) if out.is_relative_to(ROOT) else out
    pictures = sorted(path.relative_to(out).as_posix() for path in out.rglob("*.png"))
    print(f"\npictures in {where}/: {', '.join(pictures)}\n{time.monotonic() - start:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
