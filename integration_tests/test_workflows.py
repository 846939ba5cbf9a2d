"""The files of .github are valid, and know every member."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from members import ROOT, load_members

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def run(*command: str) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).parent / command[0]
    return subprocess.run([str(program), *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False)


def test_workflows_fit_their_schema():
    assert len(WORKFLOWS) == 3
    done = run("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *map(str, WORKFLOWS))
    assert done.returncode == 0, done.stdout


def test_dependabot_fits_its_schema():
    done = run("check-jsonschema", "--builtin-schema", "vendor.dependabot", ".github/dependabot.yml")
    assert done.returncode == 0, done.stdout


def test_the_schema_check_can_fail(tmp_path):
    broken = tmp_path / "broken.yml"
    broken.write_text("name: x\non: push\njobs: {a: {steps: []}}\n", encoding="utf-8")
    assert run("check-jsonschema", "--builtin-schema", "vendor.github-workflows", str(broken)).returncode == 1


def test_zizmor_finds_nothing():
    done = run("zizmor", "--offline", "--quiet", ".github")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda p: p.stem)
def test_actions_are_pinned_by_commit_with_their_version(workflow):
    uses = re.findall(r"uses: (.*)", workflow.read_text(encoding="utf-8"))
    assert uses
    assert [u for u in uses if not re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+(\.\d+)*", u)] == []


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda p: p.stem)
def test_jobs_are_bounded_and_read_only_unless_they_say_so(workflow):
    content = yaml.safe_load(workflow.read_text(encoding="utf-8"))
    assert content["permissions"] == {"contents": "read"}
    assert all("timeout-minutes" in job for job in content["jobs"].values())


def test_ok_waits_for_every_job():
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))["jobs"]
    assert set(jobs["ok"]["needs"]) == set(jobs) - {"ok"}
    assert jobs["ok"]["if"] == "always()"


def test_the_matrix_is_made_of_the_members():
    text = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    jobs = yaml.safe_load(text)["jobs"]
    for name in ("test", "isolation"):
        assert jobs[name]["strategy"]["matrix"]["member"] == "${{ fromJSON(needs.changes.outputs.members) }}"
    assert "tools/affected.py" in text


def test_every_member_has_an_owner(member, root):
    owners = (root / ".github/CODEOWNERS").read_text(encoding="utf-8")
    assert re.search(rf"^/{re.escape(member.path)}/\s+@org/[\w-]+$", owners, flags=re.MULTILINE)


def test_integration_tests_belong_to_every_team(root):
    owners = (root / ".github/CODEOWNERS").read_text(encoding="utf-8")
    team = {path: set(names.split()) for path, names in re.findall(r"^(/\S+)\s+(.*)$", owners, flags=re.MULTILINE)}
    of_members = set().union(*(team[f"/{m.path}/"] for m in load_members()))
    assert team["/integration_tests/"] == of_members


def test_every_member_has_a_release_environment(member, root):
    text = (root / ".github/workflows/release.yml").read_text(encoding="utf-8")
    assert re.search(rf"pypi-{re.escape(member.name)}\b", text)
    assert yaml.safe_load(text)["jobs"]["publish"]["environment"] == "pypi-${{ needs.build.outputs.dist }}"


def test_every_member_can_be_named_in_an_issue(member, root):
    for form in ("bug", "feature"):
        body = yaml.safe_load((root / f".github/ISSUE_TEMPLATE/{form}.yml").read_text(encoding="utf-8"))["body"]
        (packages,) = [field for field in body if field.get("id") == "package"]
        assert member.name in packages["attributes"]["options"]


def test_every_member_has_a_page(member, root):
    assert (root / "docs" / f"{member.name}.md").exists()
