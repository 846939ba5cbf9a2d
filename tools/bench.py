"""Run the benchmarks of a member, one after the other, and write what they printed to its RESULTS.md.

    python tools/bench.py omt                      # packages/omt/benchmarks/RESULTS.md
    python tools/bench.py omt --only solver,em

Every ``benchmarks/bench_<what>.py`` is a plain script that prints one table, or ends with 2 where it cannot run (no
GPU).
Sections of scripts that were not run stay as they are, each with the machine, versions and commit it was measured on.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

from members import ROOT, Member, load_members

_REPORTED = ("numpy", "scipy", "torch", "transformers", "POT", "ott-jax", "scikit-learn")
_CANNOT_RUN_HERE = 2  # the script has said why, on stderr
_SECTION = re.compile(r"^## (?P<name>[^\n]+)\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)


def processor() -> str:
    """Name the processor as the system names it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = re.findall(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(encoding="utf-8"), flags=re.MULTILINE)
        if names:
            return f"{names[0]} ({len(names)} cores)"
    return f"{platform.processor() or platform.machine()} ({os.cpu_count()} cores)"


def versions() -> str:
    """List the versions of what ran."""
    found = [f"Python {platform.python_version()}"]
    for name in _REPORTED:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def commit() -> str:
    """Return the short commit, marked when the tree differs from it."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def run_script(script: Path) -> str | None:
    """Run one benchmark on one thread and return its section of the results, or None if it needs another machine."""
    command = f"python {script.relative_to(ROOT).as_posix()}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(script)], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode == _CANNOT_RUN_HERE:
        return None
    if done.returncode:
        raise RuntimeError(f"{command} ended with status {done.returncode}")
    return (
        f"## {script.stem.removeprefix('bench_')}\n\n`{command}` — {time.strftime('%Y-%m-%d')}, commit {commit()}, "
        f"{time.monotonic() - start:.0f} s\n\n{processor()}; {versions()}; 1 thread\n\n"
        f"```text\n{done.stdout.rstrip()}\n```\n\n"
    )


def bench(member: Member, only: set[str]) -> None:
    """Run the member's benchmarks and rewrite the sections that were run."""
    folder = ROOT / member.path / "benchmarks"
    results = folder / "RESULTS.md"
    text = results.read_text(encoding="utf-8") if results.exists() else ""
    sections = {match["name"].strip(): match.group() for match in _SECTION.finditer(text)}
    scripts = {path.stem.removeprefix("bench_"): path for path in sorted(folder.glob("bench_*.py"))}
    unknown = only - set(scripts)
    if unknown:
        raise ValueError(f"{member.name} has no benchmark {', '.join(sorted(unknown))}; it has: {', '.join(scripts)}")
    for name, script in scripts.items():
        if not only or name in only:
            print(f"{member.name}: {name}", file=sys.stderr, flush=True)
            measured = run_script(script)
            if measured is not None:
                sections[name] = measured
        kept = [sections[n] for n in scripts if n in sections]
        head = (
            f"# Measured: {member.name}\n\n`make bench P={member.name}` writes this file. Ratios within one run are "
            "the results; times are of one shared machine and say nothing alone.\n\n"
        )
        temporary = results.with_suffix(".tmp")
        temporary.write_text(head + "".join(kept).rstrip() + "\n", encoding="utf-8")
        temporary.replace(results)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmarks of one member or of all."""
    parser = argparse.ArgumentParser(description="Run a member's benchmarks and write its RESULTS.md.")
    parser.add_argument("name", nargs="?", default="", help="one member; all when absent")
    parser.add_argument("--only", default="", help="comma-separated names of benchmarks, without bench_")
    arguments = parser.parse_args(argv)
    members = load_members()
    if arguments.name and arguments.name not in {m.name for m in members}:
        print(f"no member is called {arguments.name!r}", file=sys.stderr)
        return 2
    try:
        for member in members:
            if arguments.name in ("", member.name):
                bench(member, {part for part in arguments.only.split(",") if part})
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
