"""The steps of a release that are ours: read the tag, refuse what does not fit, extract the notes.

python tools/release.py check omt-v0.3.0     # exit 0 when the tag may be released
python tools/release.py notes omt-v0.3.0     # that version's section of the changelog
python tools/release.py dist omt-v0.3.0      # omt
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from members import CORE, ROOT, Member, load_members

_TAG = re.compile(r"(?P<name>[a-z0-9]+(?:-[a-z0-9]+)*)-v(?P<version>[0-9][0-9A-Za-z.+]*)")


class ReleaseError(ValueError):
    """A tag that must not be released, with the reason."""


def parse_tag(tag: str, members: list[Member]) -> tuple[Member, Version]:
    """Split ``<dist>-v<version>`` and find the member."""
    match = _TAG.fullmatch(tag)
    if match is None:
        raise ReleaseError(f"{tag!r} is not of the form <dist>-v<version>, such as omt-v0.3.0")
    by_name = {m.name: m for m in members}
    if match["name"] not in by_name:
        raise ReleaseError(f"{tag!r} names no member; members are: {', '.join(by_name)}")
    try:
        return by_name[match["name"]], Version(match["version"])
    except InvalidVersion:
        raise ReleaseError(f"{match['version']!r} is not a version") from None


def changelog_section(text: str, version: str) -> str:
    """Return the body of a version's section of a changelog; raise when there is none or it is empty."""
    heading = re.compile(rf"^## \[?{re.escape(version)}\]?(?:\s.*)?$", re.MULTILINE)
    match = heading.search(text)
    if match is None:
        raise ReleaseError(f"CHANGELOG.md has no section for {version}")
    body = re.split(r"^## ", text[match.end() :], maxsplit=1, flags=re.MULTILINE)[0].strip()
    if not body:
        raise ReleaseError(f"the section of CHANGELOG.md for {version} is empty")
    return body


def released_versions(root: Path, name: str) -> list[Version]:
    """List the versions of a member that have a tag."""
    done = subprocess.run(["git", "tag", "--list", f"{name}-v*"], cwd=root, capture_output=True, text=True, check=True)
    return [Version(tag.removeprefix(f"{name}-v")) for tag in done.stdout.split()]


def check(tag: str, root: Path = ROOT) -> Member:
    """Return the member that a tag releases; raise `ReleaseError` when it may not be released.

    The rule of order: a dependent goes out only when some released shared-core satisfies its bound.
    """
    members = load_members(root)
    member, version = parse_tag(tag, members)
    if version != Version(member.version):
        raise ReleaseError(f"{tag} does not fit the version in {member.path}/pyproject.toml, which is {member.version}")
    changelog_section((root / member.path / "CHANGELOG.md").read_text(encoding="utf-8"), member.version)
    for line in member.requirements:
        bound = Requirement(line)
        if bound.name == CORE:
            released = released_versions(root, CORE)
            if not any(v in bound.specifier for v in released):
                have = ", ".join(map(str, sorted(released))) or "none"
                raise ReleaseError(f"{member.name} needs {bound}; released: {have}. Release {CORE} first")
    return member


def main(argv: list[str] | None = None) -> int:
    """Check a tag, or print what it names."""
    parser = argparse.ArgumentParser(description="Check a release tag and extract its notes.")
    parser.add_argument("action", choices=["check", "notes", "dist"])
    parser.add_argument("tag")
    parser.add_argument("--root", type=Path, default=ROOT)
    arguments = parser.parse_args(argv)
    try:
        if arguments.action == "check":
            member = check(arguments.tag, arguments.root)
            print(f"{member.name} {member.version} may be released")
        else:
            member, _ = parse_tag(arguments.tag, load_members(arguments.root))
            if arguments.action == "dist":
                print(member.name)
            else:
                text = (arguments.root / member.path / "CHANGELOG.md").read_text(encoding="utf-8")
                print(changelog_section(text, member.version))
    except ReleaseError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
