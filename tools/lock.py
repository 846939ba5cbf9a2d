"""Keep uv.lock and what uv resolves in step.

python tools/lock.py check             # lock again; fail when a version differs from the committed one
python tools/lock.py update [name …]   # lock again after a change of dependencies; print what moved
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

from members import ROOT

_PACKAGE = re.compile(r'^\[\[package\]\]\nname = "([^"]+)"\nversion = "([^"]+)"', re.MULTILINE)


def locked_versions(text: str) -> set[tuple[str, str]]:
    """Return the name and version pairs of a lock file; one name may be locked at several versions."""
    return set(_PACKAGE.findall(text.replace("\r\n", "\n")))


def describe_moves(before: set[tuple[str, str]], after: set[tuple[str, str]]) -> list[str]:
    """Describe in one line a package what differs between two sets of locked versions."""
    lines = []
    for name in sorted({name for name, _ in before ^ after}):
        old = ", ".join(sorted(v for n, v in before if n == name)) or "–"
        new = ", ".join(sorted(v for n, v in after if n == name)) or "–"
        lines.append(f"{name}: {old} → {new}")
    return lines


def uv(*arguments: str) -> None:
    """Run uv at the root, from the PATH or as a module of this interpreter."""
    program = ["uv"] if shutil.which("uv") else [sys.executable, "-m", "uv"]
    subprocess.run([*program, *arguments], cwd=ROOT, check=True)


def main(argv: list[str] | None = None) -> int:
    """Check or update the lock."""
    parser = argparse.ArgumentParser(description="Keep uv.lock and what uv resolves in step.")
    parser.add_argument("action", choices=["check", "update"])
    parser.add_argument("packages", nargs="*", help="with update: packages to move to their newest version")
    arguments = parser.parse_args(argv)
    path = Path(ROOT / "uv.lock")
    committed = path.read_text(encoding="utf-8") if path.exists() else ""
    upgrades = [option for name in arguments.packages for option in ("--upgrade-package", name)]
    uv("lock", "--quiet", *upgrades)
    moves = describe_moves(locked_versions(committed), locked_versions(path.read_text(encoding="utf-8")))
    if arguments.action == "update":
        print("\n".join(moves) or "no version moved")
        return 0
    if moves:
        path.write_text(committed, encoding="utf-8")
        print(
            "uv.lock does not say what uv resolves (run `make lock` after a change of dependencies):", file=sys.stderr
        )
        print("\n".join(f"  {line}" for line in moves), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
