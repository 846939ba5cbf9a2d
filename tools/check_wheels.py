"""Read built wheels the way an installer does, and refuse what must not be published.

    python tools/check_wheels.py dist/

Checks of every wheel: name and version are the workspace's; nothing outside ``<import>/`` and ``<dist>.dist-info/``;
licence and ``py.typed`` inside; at most 5 MB; no requirement by address; no requirement on another domain member; and
the bound on shared-core admits the shared-core of this workspace, whatever ``[tool.uv.sources]`` resolves it to.
"""

from __future__ import annotations

import argparse
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from members import CORE, ROOT, Member, load_members

MAX_BYTES = 5_000_000


def read_metadata(wheel: zipfile.ZipFile) -> Message:
    """Parse the METADATA file of an open wheel."""
    (path,) = [n for n in wheel.namelist() if n.endswith(".dist-info/METADATA") and n.count("/") == 1]
    return Parser().parsestr(wheel.read(path).decode("utf-8"))


def check_wheel(path: Path, members: list[Member]) -> list[str]:
    """Return what is wrong with one wheel; an empty list when nothing is."""
    by_name = {m.name: m for m in members}
    with zipfile.ZipFile(path) as wheel:
        metadata = read_metadata(wheel)
        names = wheel.namelist()
    member = by_name.get(canonicalize_name(metadata["Name"]))
    if member is None:
        return [f"{path.name}: {metadata['Name']} is not a member of this workspace"]
    problems = []
    if metadata["Version"] != member.version:
        problems.append(f"version {metadata['Version']} is not the workspace's {member.version}")
    info = f"{member.package}-{member.version}.dist-info/"
    outside = [n for n in names if not n.startswith((f"{member.package}/", info))]
    if outside:
        problems.append(f"holds files outside {member.package}/: {', '.join(outside[:3])}")
    if f"{member.package}/py.typed" not in names:
        problems.append("has no py.typed")
    if not any(n.startswith(info) and n.endswith("/LICENSE") for n in names):
        problems.append("has no LICENSE")
    if path.stat().st_size > MAX_BYTES:
        problems.append(f"is {path.stat().st_size / 1e6:.1f} MB; the limit is {MAX_BYTES / 1e6:.0f} MB")
    for line in metadata.get_all("Requires-Dist") or []:
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        if requirement.url:
            problems.append(f"requires {name} by address")
        if name in by_name and name not in (CORE, member.name):
            problems.append(f"requires {name}, another domain's package")
        if name == CORE and name != member.name and by_name[CORE].version not in requirement.specifier:
            problems.append(
                f"requires {requirement}, which does not admit this workspace's {CORE} {by_name[CORE].version}"
            )
    return [f"{path.name}: {problem}" for problem in problems]


def main(argv: list[str] | None = None) -> int:
    """Check every wheel of a folder."""
    parser = argparse.ArgumentParser(description="Check built wheels before they are published.")
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args(argv)
    wheels = sorted(arguments.folder.glob("*.whl"))
    if not wheels:
        print(f"{arguments.folder} holds no wheel", file=sys.stderr)
        return 1
    members = load_members(ROOT)
    problems = [problem for wheel in wheels for problem in check_wheel(wheel, members)]
    print("\n".join(problems) if problems else f"{len(wheels)} wheels are as they should be")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
