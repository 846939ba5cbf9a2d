"""Which members does a change touch, directly or through what they stand on?

python tools/affected.py --base origin/main          # omt
python tools/affected.py --base "$BASE" --json       # {"members": [...], "portable": [...], "integration": true}
python tools/affected.py --base "$BASE" --github     # the same as outputs of a workflow step
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from members import ROOT, Member, load_members, with_dependents

# A change to one of these can change the outcome of every member's tests.
EVERYONE = ("pyproject.toml", "uv.lock", "conftest.py", "Makefile", ".python-version", ".ci/")
# A change to one of these is checked by the integration tests alone.
INTEGRATION = ("integration_tests/", "tools/", ".github/")


def git(repository: Path, *arguments: str) -> str:
    """Run git in the repository and return what it printed."""
    done = subprocess.run(["git", *arguments], cwd=repository, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def changed_files(repository: Path, base: str) -> list[str] | None:
    """List the paths that differ between the merge base with ``base`` and the working tree.

    A renamed file counts at both of its places. Returns ``None`` when there is nothing to compare with (the first
    commit, or a base that this clone does not have): then everything is affected.
    """
    if not base.strip("0"):
        return None
    try:
        ancestor = git(repository, "merge-base", base, "HEAD").strip()
    except RuntimeError:
        return None
    tracked = git(repository, "diff", "--name-only", "--no-renames", "-z", ancestor).split("\0")
    untracked = git(repository, "ls-files", "--others", "--exclude-standard", "-z").split("\0")
    return sorted({path for path in [*tracked, *untracked] if path})


def affected(files: list[str] | None, members: list[Member]) -> set[str]:
    """Return the names of the members whose tests could come out differently after a change to ``files``."""
    if files is None or any(path.startswith(EVERYONE) for path in files):
        return {m.name for m in members}
    touched = {m.name for m in members if any(path.startswith(f"{m.path}/") for path in files)}
    return with_dependents(touched, members)


def report(files: list[str] | None, members: list[Member]) -> dict[str, object]:
    """Describe what a change affects: members to test, those tested on every system, whether to test across members."""
    names = affected(files, members)
    chosen = [m for m in members if m.name in names]
    entries = [{"name": m.name, "path": m.path, "package": m.package} for m in chosen]
    return {
        "members": entries,
        "portable": [entry for entry, m in zip(entries, chosen, strict=True) if m.promises.get("platforms")],
        "any": bool(chosen),
        "integration": bool(chosen) or any(path.startswith(INTEGRATION) for path in files or []),
    }


def main(argv: list[str] | None = None) -> int:
    """Print the affected members."""
    parser = argparse.ArgumentParser(description="List the members that a change affects.")
    parser.add_argument("--base", default="main", help="commit or branch to compare with (default: main)")
    parser.add_argument("--json", action="store_true", help="a JSON object")
    parser.add_argument("--github", action="store_true", help="outputs of a GitHub workflow step")
    parser.add_argument("--repository", type=Path, default=ROOT)
    arguments = parser.parse_args(argv)
    members = load_members(arguments.repository)
    files = changed_files(arguments.repository, arguments.base)
    outcome = report(files, members)
    if arguments.json:
        print(json.dumps(outcome))
    elif arguments.github:
        print("\n".join(f"{key}={json.dumps(value)}" for key, value in outcome.items()))
    else:
        print(" ".join(m.name for m in members if m.name in affected(files, members)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
