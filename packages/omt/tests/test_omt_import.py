"""The face of the package: light to import, complete, and `omt.transport` stays the function."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import omt

HEAVY = ("ot", "matplotlib", "scanpy", "sklearn", "dask", "torch", "jax", "pandas", "scipy", "anndata", "typer")


def in_new_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_no_heavy_library():
    loaded = json.loads(
        in_new_process(f"import sys, json, omt; print(json.dumps([m for m in {HEAVY} if m in sys.modules]))")
    )
    assert loaded == []


def test_import_costs_less_than_half_a_second_more_than_anndata():
    # CPU time of one process: `import omt` after anndata, so that what both need is not counted.
    code = "import time, anndata; t = time.process_time(); import omt; print(time.process_time() - t)"
    assert float(in_new_process(code)) < 0.5


@pytest.mark.parametrize(
    "first", ["import omt.transport", "from omt.transport import Transport", "import omt.chain", "pass"]
)
def test_transport_is_the_function_whatever_is_imported_first(first):
    assert in_new_process(f"{first}\nimport omt\nprint(type(omt.transport).__name__)").strip() == "function"


@pytest.mark.parametrize("name", sorted(omt.__all__))
def test_every_public_name_is_there(name):
    value = getattr(omt, name)
    assert value is not None
    assert name in dir(omt)
    assert value.__doc__


def test_unknown_name_lists_the_public_ones():
    with pytest.raises(AttributeError, match=r"module 'omt' has no attribute 'transprot'; public names are: Mixture, "):
        omt.transprot  # noqa: B018


def test_version_is_that_of_the_distribution():
    from importlib.metadata import version

    assert omt.__version__ == version("omt")
