"""tools/release.py and tools/check_wheels.py refuse what must not be published."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest

from check_wheels import check_wheel
from members import Member
from release import ReleaseError, changelog_section, check

CHANGELOG = "# Changelog\n\n## Unreleased\n\n## 0.3.0\n\n- faster\n\n## 0.2.0\n\n- first\n"


@pytest.fixture
def workspace(tmp_path):
    """A repository with the core at 0.2.0 and omt at 0.3.0, which needs shared-core>=0.2,<0.3."""
    (tmp_path / "pyproject.toml").write_text('[tool.uv.workspace]\nmembers = ["shared/core", "packages/*"]\n')
    for path, name, version, needs in (
        ("shared/core", "shared-core", "0.2.0", ""),
        ("packages/omt", "omt", "0.3.0", '"shared-core>=0.2,<0.3"'),
    ):
        (tmp_path / path).mkdir(parents=True)
        (tmp_path / path / "pyproject.toml").write_text(
            f'[project]\nname = "{name}"\nversion = "{version}"\ndependencies = [{needs}]\n'
        )
        (tmp_path / path / "CHANGELOG.md").write_text(CHANGELOG)
    for command in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.invalid"]
    subprocess.run(["git", *identity, "commit", "-q", "-m", "start"], cwd=tmp_path, check=True)
    return tmp_path


def tag(workspace: Path, name: str) -> None:
    subprocess.run(["git", "tag", name], cwd=workspace, check=True)


def test_a_fitting_tag_names_its_member(workspace):
    assert check("shared-core-v0.2.0", workspace).name == "shared-core"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v0.3.0", "not of the form"),
        ("nothing-v0.3.0", "names no member; members are: shared-core, omt"),
        ("omt-v0.4.0", "which is 0.3.0"),
    ],
)
def test_a_tag_that_does_not_fit_is_refused(workspace, name, message):
    with pytest.raises(ReleaseError, match=message):
        check(name, workspace)


def test_a_dependent_waits_for_the_core_it_needs(workspace):
    with pytest.raises(ReleaseError, match=r"released: none\. Release shared-core first"):
        check("omt-v0.3.0", workspace)
    tag(workspace, "shared-core-v0.1.0")
    with pytest.raises(ReleaseError, match=r"released: 0\.1\.0\."):
        check("omt-v0.3.0", workspace)
    tag(workspace, "shared-core-v0.2.0")
    assert check("omt-v0.3.0", workspace).name == "omt"


def test_a_version_without_notes_is_refused(workspace):
    (workspace / "shared/core/CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n")
    with pytest.raises(ReleaseError, match=r"no section for 0\.2\.0"):
        check("shared-core-v0.2.0", workspace)


def test_notes_are_the_section_of_that_version_alone():
    assert changelog_section(CHANGELOG, "0.3.0") == "- faster"


def test_an_empty_section_is_refused():
    with pytest.raises(ReleaseError, match="is empty"):
        changelog_section("## 0.1.0\n\n## 0.0.1\n\n- x\n", "0.1.0")


# -- wheels -----------------------------------------------------------------------------------------------------------

MEMBERS = [
    Member("shared-core", "0.3.0", "shared/core", "shared_core", frozenset(), ()),
    Member("omt", "0.2.0", "packages/omt", "omt", frozenset({"shared-core"}), ()),
    Member("ts-moe", "0.2.0", "packages/ts-moe", "ts_moe", frozenset({"shared-core"}), ()),
]


def wheel(
    folder: Path, *, requires: str = "", version: str = "0.2.0", extra: tuple[str, ...] = (), drop: str = ""
) -> Path:
    """Write an omt wheel with what a test needs to be wrong in it."""
    path = folder / f"omt-{version}-py3-none-any.whl"
    info = f"omt-{version}.dist-info"
    metadata = f"Metadata-Version: 2.4\nName: omt\nVersion: {version}\n{requires}\n"
    files = {"omt/__init__.py": "", "omt/py.typed": "", f"{info}/METADATA": metadata, f"{info}/licenses/LICENSE": "x"}
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**files, **dict.fromkeys(extra, "")}.items():
            if name != drop:
                archive.writestr(name, text)
    return path


def test_a_good_wheel_passes(tmp_path):
    assert check_wheel(wheel(tmp_path, requires="Requires-Dist: shared-core>=0.2,<0.4"), MEMBERS) == []


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"requires": "Requires-Dist: shared-core<0.3,>=0.2"}, "does not admit this workspace's shared-core 0.3.0"),
        ({"requires": "Requires-Dist: ts-moe"}, "requires ts-moe, another domain's package"),
        ({"requires": "Requires-Dist: six @ https://example.invalid/six.whl"}, "requires six by address"),
        ({"version": "0.9.0"}, "version 0.9.0 is not the workspace's 0.2.0"),
        ({"extra": ("tests/test_x.py",)}, "holds files outside omt/: tests/test_x.py"),
        ({"drop": "omt/py.typed"}, "has no py.typed"),
        ({"drop": "omt-0.2.0.dist-info/licenses/LICENSE"}, "has no LICENSE"),
    ],
)
def test_a_faulty_wheel_is_refused(tmp_path, fault, message):
    assert any(message in problem for problem in check_wheel(wheel(tmp_path, **fault), MEMBERS))


def test_a_wheel_over_the_size_limit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("check_wheels.MAX_BYTES", 10)
    assert any("the limit is" in problem for problem in check_wheel(wheel(tmp_path), MEMBERS))
