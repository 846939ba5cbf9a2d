"""The committed lock names no registry, and uv arrives from it at the same versions."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lock import describe_moves, locked_versions
from members import load_members
from neutral_lock import neutral

FULL = """version = 1
requires-python = ">=3.11"
resolution-markers = [
    "sys_platform == 'win32'",
    "sys_platform == 'linux'",
]

[options]
prerelease-mode = "allow"

[[package]]
name = "six"
version = "1.17.0"
source = { registry = "https://mirror.example/simple" }
sdist = { url = "https://mirror.example/six.tar.gz", hash = "sha256:00" }
wheels = [
    { url = "https://mirror.example/six.whl", hash = "sha256:11" },
]

[[package]]
name = "omt"
version = "0.2.0"
source = { editable = "packages/omt" }
dependencies = [
    { name = "six", source = { registry = "https://mirror.example/simple" } },
]

[package.metadata]
requires-dist = [{ name = "six" }]

[package.metadata.requires-dev]
test = []
"""

NEUTRAL = """version = 1
requires-python = ">=3.11"
resolution-markers = [
    "sys_platform == 'linux'",
    "sys_platform == 'win32'",
]

[[package]]
name = "six"
version = "1.17.0"
source = { registry = "index" }

[[package]]
name = "omt"
version = "0.2.0"
source = { editable = "packages/omt" }
dependencies = [
    { name = "six", source = { registry = "index" } },
]
"""


def neutral_text(text: str) -> str:
    return "".join(neutral(text.splitlines(keepends=True)))


def test_neutral_form_drops_what_depends_on_the_index():
    assert neutral_text(FULL) == NEUTRAL


def test_neutral_form_of_a_neutral_lock_is_itself():
    assert neutral_text(NEUTRAL) == NEUTRAL


def test_the_filter_reads_stdin_and_writes_stdout(root):
    script = [sys.executable, str(root / "tools" / "neutral_lock.py")]
    done = subprocess.run(script, input=FULL.encode(), capture_output=True, check=True)
    assert done.stdout == NEUTRAL.encode()


def test_moves_name_the_package_and_both_versions():
    before, after = {("a", "1"), ("b", "1"), ("c", "1")}, {("a", "2"), ("b", "1"), ("d", "3")}
    assert describe_moves(before, after) == ["a: 1 → 2", "c: 1 → –", "d: – → 3"]


def committed_lock(root: Path) -> str:
    done = subprocess.run(["git", "show", "HEAD:uv.lock"], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("this is not a git checkout with a committed uv.lock")
    return done.stdout


def test_committed_lock_names_no_address(root):
    text = committed_lock(root)
    assert "://" not in text
    assert neutral_text(text) == text


@pytest.mark.timeout(300)
def test_uv_arrives_at_the_committed_versions_and_the_same_neutral_form(root, tmp_path):
    committed = committed_lock(root)
    for name in ("pyproject.toml", ".python-version"):
        shutil.copy(root / name, tmp_path / name)
    for member in load_members(root):
        (tmp_path / member.path).mkdir(parents=True)
        shutil.copy(root / member.path / "pyproject.toml", tmp_path / member.path / "pyproject.toml")
    (tmp_path / "uv.lock").write_text(committed, encoding="utf-8")
    subprocess.run(["uv", "lock", "--quiet"], cwd=tmp_path, check=True)
    resolved = (tmp_path / "uv.lock").read_text(encoding="utf-8")
    assert "://" in resolved, "uv filled in the addresses of the configured index"
    assert locked_versions(resolved) == locked_versions(committed)
    assert neutral_text(resolved) == committed
