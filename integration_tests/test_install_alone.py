"""Each wheel, installed alone in an empty environment, brings what it promises and nothing of the others."""

from __future__ import annotations

import fnmatch
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from members import CORE, Member

pytestmark = [pytest.mark.isolation, pytest.mark.timeout(900)]

_INVENTORY = """
import importlib, importlib.metadata as md, json, sys
package, name = sys.argv[1:]
module = importlib.import_module(package)
own = md.distribution(name)
print(json.dumps({
    "distributions": sorted((d.metadata["Name"].lower().replace("_", "-"), d.version) for d in md.distributions()),
    "version": module.__version__,
    "urls": own.metadata.get_all("Project-URL") or [],
    "files": [str(f) for f in own.files],
    "location": module.__file__,
}))
"""

_IMPORT_SECONDS = """
import importlib, sys, time
start = time.perf_counter()
importlib.import_module(sys.argv[1])
print(time.perf_counter() - start)
"""


@dataclass(frozen=True)
class Installed:
    """A virtual environment that holds one member and what it brought."""

    member: Member
    venv: Path
    wheel: Path
    empty: Path

    @property
    def bin(self) -> Path:
        """Folder of its programs."""
        return self.venv / ("Scripts" if os.name == "nt" else "bin")

    def run(self, *command: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment in the empty folder."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV", "COVERAGE"))}
        return subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            cwd=self.empty, env=environment, capture_output=True, text=True, check=False, timeout=timeout,
        )  # fmt: skip

    def install(self, requirement: str) -> None:
        """Install into the environment as a user would, with the folder of wheels as an extra source."""
        subprocess.run(
            ["uv", "pip", "install", "--quiet", "--no-sources", "--find-links", str(self.wheel.parent),
             "--python", str(self.venv), requirement],
            cwd=self.empty, check=True, timeout=600,
        )  # fmt: skip


@pytest.fixture(scope="module")
def installed(
    request: pytest.FixtureRequest, distributions: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installed]:
    """The member's wheel, by file path, in a fresh environment."""
    member: Member = request.param
    folder = tmp_path_factory.mktemp(member.package)
    (wheel,) = distributions.glob(f"{member.package}-{member.version}-*.whl")
    subprocess.run(["uv", "venv", "--quiet", "--python", sys.executable, str(folder / "venv")], check=True, timeout=120)
    (folder / "empty").mkdir()
    environment = Installed(member, folder / "venv", wheel, folder / "empty")
    environment.install(str(wheel))
    yield environment
    subprocess.run(["rm", "-rf", str(folder)], check=False)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every test of this file once for each member, all tests of a member together."""
    from members import load_members

    if "installed" in metafunc.fixturenames:
        every = load_members()
        metafunc.parametrize("installed", every, ids=[m.name for m in every], indirect=True, scope="module")


@pytest.fixture(scope="module")
def inventory(installed: Installed) -> dict[str, object]:
    """What importlib.metadata says inside the environment."""
    done = installed.run("python", "-I", "-c", _INVENTORY, installed.member.package, installed.member.name)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_only_the_member_and_the_core_come_from_the_workspace(installed, inventory, members):
    ours = {m.name: m.version for m in members}
    found = {name: version for name, version in inventory["distributions"] if name in ours}
    expected = {installed.member.name, *installed.member.depends_on & {CORE}}
    assert found == {name: ours[name] for name in expected}


def test_the_distribution_is_ours(installed, inventory):
    assert inventory["version"] == installed.member.version
    assert any("moe-microlibraries" in url for url in inventory["urls"])
    assert Path(inventory["location"]).is_relative_to(installed.venv)


def test_nothing_forbidden_arrives(installed, inventory):
    forbidden = [pattern.lower().replace("_", "-") for pattern in installed.member.promises["forbidden"]]
    assert forbidden, "a member must say what it will never bring"
    arrived = [n for n, _ in inventory["distributions"] if any(fnmatch.fnmatch(n, pattern) for pattern in forbidden)]
    assert arrived == []


def test_files_stay_in_the_package(installed, inventory):
    package, info = installed.member.package, f"{installed.member.package}-{installed.member.version}.dist-info"
    outside = [f for f in inventory["files"] if Path(f).parts[0] not in (package, info)]
    assert {Path(f).stem for f in outside} <= {installed.member.name}, "only the console script may lie outside"
    assert f"{package}/py.typed" in [Path(f).as_posix() for f in inventory["files"]]


def test_dependencies_are_consistent(installed):
    done = subprocess.run(
        ["uv", "pip", "check", "--python", str(installed.venv)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_import_is_fast(installed):
    limit = installed.member.promises["import-seconds"]
    times = [
        float(installed.run("python", "-I", "-c", _IMPORT_SECONDS, installed.member.package).stdout) for _ in range(5)
    ]
    assert min(times) <= limit, f"the fastest of five imports took {min(times):.2f} s"


def test_command_line_runs_its_smallest_real_command(installed):
    promises = installed.member.promises
    program = promises["smoke"][0]
    if "cli-extra" in promises:
        bare = installed.run(program, "--help")
        requirement = f"{installed.member.name}[{promises['cli-extra']}]"
        assert (bare.returncode, bare.stdout) == (2, "")
        assert f"pip install '{requirement}'" in bare.stderr
        assert "Traceback" not in bare.stderr
        installed.install(f"{installed.wheel}[{promises['cli-extra']}]")
    help_text = installed.run(program, "--help")
    assert help_text.returncode == 0, help_text.stderr
    assert installed.member.version in installed.run(program, "--version").stdout
    for name, text in promises.get("smoke-files", {}).items():
        (installed.empty / name).write_text(text, encoding="utf-8")
    done = installed.run(*promises["smoke"])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    for sentence in promises.get("smoke-says", []):
        assert sentence in done.stdout + done.stderr


def test_sdists_rebuild_to_the_same_wheel(installed, distributions, tmp_path):
    member = installed.member
    (sdist,) = distributions.glob(f"{member.package}-{member.version}.tar.gz")
    subprocess.run(
        ["uv", "build", "--quiet", "--wheel", "--out-dir", str(tmp_path), str(sdist)], check=True, timeout=300
    )
    (rebuilt,) = tmp_path.glob("*.whl")
    assert _contents(rebuilt) == _contents(installed.wheel)


def test_wheels_pass_the_release_check(distributions):
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent.parent / "tools" / "check_wheels.py"), str(distributions)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def _contents(wheel: Path) -> dict[str, int]:
    import zipfile

    with zipfile.ZipFile(wheel) as archive:
        return {i.filename: i.CRC for i in archive.infolist()}
