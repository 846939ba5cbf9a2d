"""Versions, changelogs and bounds agree with each other."""

from __future__ import annotations

import importlib
import importlib.metadata
import re

from packaging.requirements import Requirement

from members import CORE, requirement_name


def test_version_is_the_metadata_version(member):
    module = importlib.import_module(member.package)
    assert module.__version__ == importlib.metadata.version(member.name) == member.version


def test_changelog_has_unreleased_and_the_current_version(member, root):
    text = (root / member.path / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## \[?([^\]\s]+)", text, flags=re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert headings[1] == member.version


def test_bound_admits_the_current_core(member, members):
    (core,) = [m for m in members if m.name == CORE]
    for line in member.requirements:
        if requirement_name(line) == CORE:
            assert core.version in Requirement(line).specifier


def test_licence_of_the_member_is_that_of_the_repository(member, root):
    assert (root / member.path / "LICENSE").read_bytes() == (root / "LICENSE").read_bytes()


def test_heavy_packages_stay_out_of_an_import(member):
    import subprocess
    import sys

    lazy = member.promises["lazy"]
    code = f"import sys, {member.package}; print([m for m in {lazy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_everything_public_exists(member):
    module = importlib.import_module(member.package)
    assert len(set(module.__all__)) == len(module.__all__)
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
