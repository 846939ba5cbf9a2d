"""The members of the workspace, read from their ``pyproject.toml``: the one place that knows what exists.

python tools/members.py names            # omt shared-core
python tools/members.py paths omt        # packages/omt
python tools/members.py json             # for a CI matrix
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CORE = "shared-core"


@dataclass(frozen=True)
class Member:
    """One distribution of the workspace.

    Attributes
    ----------
    name, version
        Distribution name and version.
    path
        Folder relative to the root, in POSIX form.
    package
        Import name.
    depends_on
        Workspace distributions among its dependencies and extras.
    requirements
        The base requirements, as written.
    promises
        The member's ``[tool.workspace-member]`` table: what must not arrive with it, what its import may cost, its
        smallest real command, its demo. See CONTRIBUTING.md.
    """

    name: str
    version: str
    path: str
    package: str
    depends_on: frozenset[str]
    requirements: tuple[str, ...]
    promises: dict[str, Any] = field(default_factory=dict)

    @property
    def source(self) -> str:
        """Folder of the import package, relative to the root."""
        return f"{self.path}/src/{self.package}"


def requirement_name(requirement: str) -> str:
    """Return the normalised distribution name of a requirement string."""
    match = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", requirement.strip())
    if match is None:
        raise ValueError(f"not a requirement: {requirement!r}")
    return re.sub(r"[-_.]+", "-", match.group()).lower()


def load_members(root: Path = ROOT) -> list[Member]:
    """Read every member that the root's ``[tool.uv.workspace]`` names, the core first, then by name."""
    with (root / "pyproject.toml").open("rb") as stream:
        patterns = tomllib.load(stream)["tool"]["uv"]["workspace"]["members"]
    projects: dict[str, tuple[Path, dict[str, Any]]] = {}
    for pattern in patterns:
        for manifest in sorted(root.glob(f"{pattern}/pyproject.toml")):
            with manifest.open("rb") as stream:
                table = tomllib.load(stream)
            projects[table["project"]["name"]] = (manifest.parent, table)
    members = []
    for name, (folder, table) in projects.items():
        project = table["project"]
        extras = [r for group in project.get("optional-dependencies", {}).values() for r in group]
        named = {requirement_name(r) for r in [*project.get("dependencies", []), *extras]}
        members.append(
            Member(
                name=name,
                version=project["version"],
                path=folder.relative_to(root).as_posix(),
                package=name.replace("-", "_"),
                depends_on=frozenset(named & set(projects)) - {name},
                requirements=tuple(project.get("dependencies", [])),
                promises=table.get("tool", {}).get("workspace-member", {}),
            )
        )
    return sorted(members, key=lambda m: (m.name != CORE, m.name))


def with_dependents(names: set[str], members: list[Member]) -> set[str]:
    """Return ``names`` and every member that stands on one of them."""
    reached = set(names)
    while True:
        more = {m.name for m in members if m.depends_on & reached} - reached
        if not more:
            return reached
        reached |= more


def main(argv: list[str] | None = None) -> int:
    """Print one fact about all members, or about the one named."""
    parser = argparse.ArgumentParser(description="List the members of the workspace.")
    parser.add_argument("what", choices=["names", "paths", "packages", "json"])
    parser.add_argument("name", nargs="?", default="", help="one member; all when absent")
    arguments = parser.parse_args(argv)
    members = load_members()
    if arguments.name:
        known = [m.name for m in members]
        members = [m for m in members if m.name == arguments.name]
        if not members:
            print(f"no member is called {arguments.name!r}; members are: {', '.join(known)}", file=sys.stderr)
            return 2
    if arguments.what == "json":
        print(json.dumps([{"name": m.name, "path": m.path, "package": m.package} for m in members]))
    else:
        attribute = {"names": "name", "paths": "path", "packages": "package"}[arguments.what]
        print(" ".join(getattr(m, attribute) for m in members))
    return 0


if __name__ == "__main__":
    sys.exit(main())
