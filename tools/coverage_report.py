"""Report the coverage that ``run_tests.py --coverage`` measured: each member against its limit, then all together."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys

from members import ROOT, load_members

OVERALL_LIMIT = 85


def coverage(*arguments: str) -> int:
    """Run coverage at the root and return its exit status."""
    return subprocess.run([sys.executable, "-m", "coverage", *arguments], cwd=ROOT, check=False).returncode


def main(argv: list[str] | None = None) -> int:
    """Print the reports; 1 when a member or the whole is below its limit or was not measured."""
    parser = argparse.ArgumentParser(description="Report the coverage of each member and of all.")
    parser.add_argument("name", nargs="?", default="")
    arguments = parser.parse_args(argv)
    members = [m for m in load_members() if arguments.name in ("", m.name)]
    failed = []
    for member in members:
        data = ROOT / f".coverage.{member.name}"
        limit = int(member.promises.get("coverage", OVERALL_LIMIT))
        print(f"\n== coverage of {member.name} (at least {limit} %)", flush=True)
        if not data.exists() or coverage("report", f"--data-file={data}", f"--fail-under={limit}"):
            failed.append(member.name)
    if not arguments.name and not failed:
        # `combine` consumes its inputs: it works on copies.
        copies = [shutil.copy(ROOT / f".coverage.{m.name}", ROOT / f".coverage-all.{m.name}") for m in members]
        print(f"\n== coverage of all (at least {OVERALL_LIMIT} %)", flush=True)
        coverage("combine", "--quiet", "--data-file=.coverage", *map(str, copies))
        if coverage("report", "--data-file=.coverage", "--format=total", f"--fail-under={OVERALL_LIMIT}"):
            failed.append("all")
    if failed:
        print(f"coverage is below the limit or was not measured: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
