"""tools/affected.py on small git repositories made for the purpose."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


class Repository:
    """A git repository with three members: the core, and a and b that stand on it."""

    def __init__(self, folder: Path, tools: Path) -> None:
        self.folder, self.tools = folder, tools
        self.git("init", "-q", "-b", "main")
        self.git("config", "user.name", "test")
        self.git("config", "user.email", "test@example.invalid")
        self.write("pyproject.toml", '[tool.uv.workspace]\nmembers = ["shared/core", "packages/*"]\n')
        self.write("shared/core/pyproject.toml", '[project]\nname = "shared-core"\nversion = "1"\n')
        for name in ("a", "b"):
            self.write(
                f"packages/{name}/pyproject.toml",
                f'[project]\nname = "{name}"\nversion = "1"\ndependencies = ["shared-core>=1"]\n',
            )
            self.write(f"packages/{name}/src/{name}/code.py", "one\ntwo\nthree\n")
        self.write("docs/index.md", "hello\n")
        self.commit()

    def git(self, *arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=self.folder, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def write(self, path: str, text: str) -> None:
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_text(text, encoding="utf-8")

    def commit(self) -> str:
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "change")
        return self.git("rev-parse", "HEAD")

    def affected(self, base: str) -> dict[str, object]:
        script = [sys.executable, str(self.tools / "affected.py"), "--repository", str(self.folder)]
        done = subprocess.run([*script, "--base", base, "--json"], capture_output=True, text=True, check=True)
        return json.loads(done.stdout)

    def names(self, base: str = "HEAD~1") -> list[str]:
        return [m["name"] for m in self.affected(base)["members"]]


@pytest.fixture
def repository(tmp_path, root):
    return Repository(tmp_path, root / "tools")


def test_a_change_in_a_package_affects_itself(repository):
    repository.write("packages/a/src/a/code.py", "changed\n")
    repository.commit()
    assert repository.names() == ["a"]


@pytest.mark.parametrize(
    "path", ["shared/core/README.md", "pyproject.toml", "uv.lock", ".ci/run", "conftest.py", "Makefile"]
)
def test_a_change_in_what_all_stand_on_affects_all(repository, path):
    file = repository.folder / path
    repository.write(path, (file.read_text() if file.exists() else "") + "\n# changed\n")
    repository.commit()
    assert repository.names() == ["shared-core", "a", "b"]


def test_a_change_in_the_documents_affects_none(repository):
    repository.write("docs/index.md", "changed\n")
    repository.commit()
    assert repository.affected("HEAD~1") == {"members": [], "portable": [], "any": False, "integration": False}


def test_a_change_in_the_tools_is_for_the_integration_tests(repository):
    repository.write("tools/x.py", "changed\n")
    repository.commit()
    assert repository.affected("HEAD~1") == {"members": [], "portable": [], "any": False, "integration": True}


def test_a_file_moved_between_packages_affects_both(repository):
    repository.git("mv", "packages/a/src/a/code.py", "packages/b/src/b/moved.py")
    repository.commit()
    assert repository.names() == ["a", "b"]


def test_only_this_branch_counts_not_what_main_did_meanwhile(repository):
    repository.git("checkout", "-q", "-b", "feature")
    repository.write("packages/a/src/a/code.py", "changed\n")
    repository.commit()
    repository.git("checkout", "-q", "main")
    repository.write("packages/b/src/b/code.py", "changed\n")
    repository.commit()
    repository.git("checkout", "-q", "feature")
    assert repository.names("main") == ["a"]


def test_what_is_not_committed_counts(repository):
    repository.write("packages/b/src/b/new.py", "new\n")
    assert repository.names("HEAD") == ["b"]


@pytest.mark.parametrize("base", ["0" * 40, "no-such-branch", ""])
def test_without_a_base_everything_is_affected(repository, base):
    assert repository.names(base) == ["shared-core", "a", "b"]


def test_outputs_of_a_workflow_step_are_one_line_each(repository):
    repository.write("packages/a/src/a/code.py", "changed\n")
    script = [sys.executable, str(repository.tools / "affected.py"), "--repository", str(repository.folder)]
    done = subprocess.run([*script, "--base", "HEAD", "--github"], capture_output=True, text=True, check=True)
    lines = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert json.loads(lines["members"]) == [{"name": "a", "path": "packages/a", "package": "a"}]
    assert (lines["any"], lines["integration"], lines["portable"]) == ("true", "true", "[]")
