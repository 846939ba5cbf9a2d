"""What the tests across members share: the members themselves, and one build of all wheels."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from members import Member, load_members  # noqa: E402  (the tools are scripts, not a distribution)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that asks for a ``member`` once for each."""
    if "member" in metafunc.fixturenames:
        members = load_members()
        metafunc.parametrize("member", members, ids=[m.name for m in members])


@pytest.fixture(scope="session")
def members() -> list[Member]:
    """All members of the workspace."""
    return load_members()


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a wheel and an sdist of every member, built once."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        ["uv", "build", "--quiet", "--all-packages", "--out-dir", str(folder)], cwd=ROOT, check=True, timeout=300
    )
    return folder
