"""A member imports itself, the core and third parties: never another domain's package."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from members import CORE, Member, load_members, requirement_name


def imported_packages(source: str) -> set[str]:
    """Top-level packages that a file imports anywhere: also inside functions, and through import_module("…")."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            found |= {
                a.value.split(".")[0] for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)
            }
    return found


def python_files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*.py") if "__pycache__" not in p.parts)


def offences(member: Member, members: list[Member], root: Path) -> list[str]:
    """Every import of another domain's package in a member's folder."""
    allowed = {member.package, CORE.replace("-", "_")}
    foreign = {m.package for m in members} - allowed
    files = python_files(root / member.path)
    return [
        f"{path.relative_to(root)} imports {package}"
        for path in files
        for package in sorted(imported_packages(path.read_text(encoding="utf-8")) & foreign)
    ]


def test_no_member_imports_another_domain(member, members, root):
    assert python_files(root / member.path / "src")
    assert offences(member, members, root) == []


def test_no_member_requires_another_domain(member, members, root):
    others = {m.name for m in members} - {member.name, CORE}
    assert not member.depends_on & others
    if member.name == CORE:
        assert not member.depends_on


def test_every_dependent_bounds_the_core(member):
    bounds = [r for r in member.requirements if requirement_name(r) == CORE]
    if member.name != CORE:
        assert bounds, f"{member.name} does not require {CORE}"
        assert all(">=" in bound and "<" in bound for bound in bounds)


@pytest.mark.parametrize(
    "statement",
    ["import {0}", "import {0}.em", "from {0} import x", "def f():\n    from {0}.tl import y", "__import__('{0}')",
     "import importlib\nimportlib.import_module('{0}.em')"],
)  # fmt: skip
def test_a_foreign_import_is_found_wherever_it_stands(statement, tmp_path, members):
    domain = next(m for m in members if m.name != CORE)
    stranger = Member("other", "0", "packages/other", "other", frozenset(), ())
    folder = tmp_path / "packages" / "other" / "src" / "other"
    folder.mkdir(parents=True)
    (folder / "code.py").write_text(statement.format(domain.package), encoding="utf-8")
    assert offences(stranger, members, tmp_path) == [
        f"{Path('packages/other/src/other/code.py')} imports {domain.package}"
    ]


def test_sources_resolve_every_member_from_the_workspace(root):
    import tomllib

    sources = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["uv"]["sources"]
    assert sources == {m.name: {"workspace": True} for m in load_members(root)}
