"""What members use of shared-core is what shared-core promises."""

from __future__ import annotations

import ast
import json

import pytest

from contract import FILE, PUBLIC_MODULES, contract
from members import CORE


@pytest.fixture(scope="module")
def written():
    return json.loads(FILE.read_text(encoding="utf-8"))


def names_taken_from_the_core(source: str) -> set[tuple[str, str]]:
    """Module and name of everything that a file imports from shared_core."""
    return {
        (node.module, alias.name)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "shared_core"
        for alias in node.names
    }


def test_the_written_contract_is_what_the_core_offers(written):
    assert contract() == written, "run `python tools/contract.py write` and look at the difference"


def test_members_take_only_what_is_promised(member, root, written):
    if member.name == CORE:
        pytest.skip("the core may use its own private parts")
    files = list((root / member.path / "src").rglob("*.py"))
    taken = set().union(*(names_taken_from_the_core(p.read_text(encoding="utf-8")) for p in files))
    submodules = {m.removeprefix("shared_core.") for m in PUBLIC_MODULES}
    broken = {
        f"{module}.{name}"
        for module, name in taken
        if name not in written.get(module, {}) and not (module == "shared_core" and name in submodules)
    }
    assert broken == set()
