"""What the documents show runs: every Python block of every README, every example script."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from members import ROOT, load_members

_FENCE = re.compile(r"^```python([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_MAX_NOT_RUN = 2
# An example for several processes shows this command in its first lines.
_PROCESSES = "--standalone --nproc-per-node=2"
_TORCHRUN = ["-m", "torch.distributed.run", *_PROCESSES.split()]
# PyTorch, about once in forty runs under load: a thread of gloo lives as long as DTensor's caches hold its mesh, wants
# the interpreter while that ends, and is ended by the C++ library, after all work is done.
_ABORTED_AT_EXIT = "terminate called without an active exception"

READMES = [ROOT / "README.md", *(ROOT / m.path / "README.md" for m in load_members())]
EXAMPLES = [path for m in load_members() for path in sorted((ROOT / m.path / "examples").glob("*.py"))]


def blocks(readme: Path) -> list[tuple[int, str, bool]]:
    """Line, code and whether it is to be run, of every Python block of a document."""
    text = readme.read_text(encoding="utf-8")
    return [
        (text.count("\n", 0, match.start()) + 2, match[2], "no-run" not in match[1]) for match in _FENCE.finditer(text)
    ]


@pytest.mark.parametrize("readme", READMES, ids=lambda p: p.parent.name)
def test_readme_blocks_run_in_order(readme, tmp_path):
    found = blocks(readme)
    assert found, "a README shows code"
    # Blank lines keep the line numbers of a traceback those of the document.
    script = ""
    for line, code, run in found:
        if run:
            script += "\n" * (line - 1 - script.count("\n")) + code
    (tmp_path / "readme.py").write_text(script, encoding="utf-8")
    environment = {**os.environ, "MPLBACKEND": "agg", "PYTHONWARNINGS": "default"}
    done = subprocess.run(
        [sys.executable, "readme.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("readme", READMES, ids=lambda p: p.parent.name)
def test_almost_every_readme_block_is_run(readme):
    assert sum(not run for *_, run in blocks(readme)) <= _MAX_NOT_RUN


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: f"{p.parent.parent.name}-{p.stem}")
def test_example_runs(example, tmp_path):
    environment = {**os.environ, "MPLBACKEND": "agg"}
    launcher = _TORCHRUN if f"torchrun {_PROCESSES}" in example.read_text(encoding="utf-8") else []
    command = [sys.executable, *launcher, str(example)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    if launcher and _ABORTED_AT_EXIT in done.stderr:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "an example shows something"
