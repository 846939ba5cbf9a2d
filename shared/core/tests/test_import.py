"""What importing the package costs and gives, with and without torch."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

import shared_core

NUMPY_ONLY = [
    "solve_mckp",
    "Allocation",
    "InfeasibleBudgetError",
    "load_stats",
    "LoadStats",
    "RoutingTrace",
    "soft_assign",
]
NEED_TORCH = sorted(set(shared_core.__all__) - set(NUMPY_ONLY))
BLOCK_TORCH = "import sys; sys.modules['torch'] = None\n"


# Coverage of child processes multiplies the time that the tests of speed measure.
UNTRACED = {name: value for name, value in os.environ.items() if not name.startswith("COV")}


def python(code, env=None):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60, env=env
    )


def test_version_is_that_of_the_distribution():
    assert shared_core.__version__ == importlib.metadata.version("shared-core")


def test_import_and_the_numpy_functions_load_nothing_but_numpy():
    code = (
        "import sys; standard = set(sys.stdlib_module_names)\n"
        "before = {name.partition('.')[0] for name in sys.modules}\n"
        "import shared_core, numpy as np\n"
        "shared_core.solve_mckp([[0, 1]], [[0.0, 1.0]], 1); shared_core.load_stats([1, 2])\n"
        "shared_core.soft_assign(np.zeros((2, 3)), top_k=1); shared_core.RoutingTrace\n"
        "after = {name.partition('.')[0] for name in sys.modules}\n"
        "print(sorted(name for name in after - before - standard if not name.startswith('_')))"
    )
    assert python(code).stdout.strip() == "['numpy', 'shared_core']"


def test_import_takes_at_most_three_tenths_of_a_second():
    code = "import time; start = time.process_time(); import shared_core; print(time.process_time() - start)"
    assert min(float(python(code, UNTRACED).stdout) for _ in range(3)) <= 0.3


@pytest.mark.parametrize("name", NUMPY_ONLY)
def test_name_works_without_torch(name):
    result = python(BLOCK_TORCH + f"import shared_core; shared_core.{name}")
    assert result.returncode == 0, result.stderr


def test_every_other_name_says_without_torch_what_to_install():
    code = BLOCK_TORCH + (
        "import shared_core\n"
        f"for name in {NEED_TORCH}:\n"
        "    try:\n"
        "        getattr(shared_core, name)\n"
        "    except ImportError as error:\n"
        "        print(error)\n"
    )
    expected = [f"shared_core.{name} needs PyTorch: pip install 'shared-core[torch]'" for name in NEED_TORCH]
    assert python(code).stdout.splitlines() == expected


@pytest.mark.parametrize("name", shared_core.__all__)
def test_every_public_name_can_be_imported(name):
    assert getattr(shared_core, name).__name__ == name


def test_submodules_are_reached_as_attributes():
    assert shared_core.plot is importlib.import_module("shared_core.plot")


def test_dir_lists_names_that_are_not_imported_yet():
    assert python("import shared_core; print('MoE' in dir(shared_core))").stdout.strip() == "True"


def test_unknown_names_raise_attribute_error():
    with pytest.raises(AttributeError, match="module 'shared_core' has no attribute 'Rooter'"):
        _ = shared_core.Rooter


def test_a_broken_module_is_not_reported_as_missing_torch(monkeypatch):
    def fail(name):
        raise ModuleNotFoundError("No module named 'else'", name="else")

    monkeypatch.setattr(shared_core, "import_module", fail)
    monkeypatch.delitem(vars(shared_core), "Router", raising=False)
    with pytest.raises(ModuleNotFoundError, match="No module named 'else'"):
        _ = shared_core.Router


def test_type_checkers_see_the_same_names_in_the_same_modules_as_the_lazy_import():
    tree = ast.parse(Path(shared_core.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name: node.module.removeprefix("shared_core.")
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == shared_core._HOME
    assert sorted(seen) == shared_core.__all__


def test_help_of_the_command_line_takes_at_most_a_second():
    def seconds():
        before = os.times()
        command = [sys.executable, "-m", "shared_core.cli", "--help"]
        subprocess.run(command, capture_output=True, check=True, timeout=60, env=UNTRACED)
        after = os.times()
        return after.children_user - before.children_user + after.children_system - before.children_system

    # CPU time of the child: the machine may be busy.
    assert min(seconds() for _ in range(3)) <= 1.0
