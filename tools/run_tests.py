"""Run the tests of each member in a process of its own, then those across members, and say how each ended.

A failure in one member does not keep the others from running; the exit status is 1 when anything failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass

from affected import affected, changed_files
from members import ROOT, Member, load_members

_NOTHING_COLLECTED = 5


@dataclass(frozen=True)
class Run:
    """One call of pytest: its title, what to pass, and where its coverage goes."""

    title: str
    arguments: tuple[str, ...]
    coverage_file: str | None = None


def plan_runs(members: list[Member], *, integration: bool, coverage: bool, slow: bool) -> list[Run]:
    """List the pytest calls for the chosen members."""
    common = ("-n", "2", *(("-m", "slow and not network and not isolation") if slow else ()))
    runs = []
    for member in members:
        measure = (f"--cov={member.package}", "--cov-report=") if coverage else ()
        data = f".coverage.{member.name}" if coverage else None
        documented = () if slow else (f"{member.path}/src", "--doctest-modules")
        runs.append(Run(member.name, (f"{member.path}/tests", *documented, *common, *measure), data))
    if integration:
        runs.append(Run("integration", ("integration_tests", *common)))
    return runs


def main(argv: list[str] | None = None) -> int:
    """Run the tests of one, some or all members."""
    parser = argparse.ArgumentParser(description="Run the tests of each member, then those across members.")
    parser.add_argument("name", nargs="?", default="", help="one member; all, and the integration tests, when absent")
    parser.add_argument("--affected", metavar="BASE", help="only the members that differ from this commit")
    parser.add_argument("--coverage", action="store_true", help="write .coverage.<member> for coverage_report.py")
    parser.add_argument("--slow", action="store_true", help="the slow tests instead of the fast ones")
    arguments = parser.parse_args(argv)
    members = load_members()
    names = {m.name for m in members}
    if arguments.name and arguments.name not in names:
        print(f"no member is called {arguments.name!r}; members are: {', '.join(sorted(names))}", file=sys.stderr)
        return 2
    if arguments.name:
        names = {arguments.name}
    if arguments.affected:
        names &= affected(changed_files(ROOT, arguments.affected), members)
    chosen = [m for m in members if m.name in names]
    runs = plan_runs(chosen, integration=not arguments.name, coverage=arguments.coverage, slow=arguments.slow)
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    outcomes = []
    for run in runs:
        print(f"\n== tests of {run.title}", flush=True)
        extra = {"COVERAGE_FILE": str(ROOT / run.coverage_file)} if run.coverage_file else {}
        start = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *run.arguments], cwd=ROOT, env={**environment, **extra}, check=False
        )
        ok = done.returncode == 0 or (arguments.slow and done.returncode == _NOTHING_COLLECTED)
        outcomes.append((run.title, ok, time.monotonic() - start))
    print()
    for title, ok, seconds in outcomes:
        print(f"{title:<16} {'passed' if ok else 'FAILED'}  {seconds:6.0f} s")
    return 0 if all(ok for _, ok, _ in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
