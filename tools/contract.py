"""Write down what shared-core offers to its dependents, so that a change of it is seen in review.

python tools/contract.py write     # docs/core-contract.json
python tools/contract.py check     # fail when the file no longer says what the package offers
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import sys
from typing import Any

from members import ROOT

# Modules whose ``__all__`` dependents may rely on.
PUBLIC_MODULES = (
    "shared_core",
    "shared_core.files",
    "shared_core.integrations.transformers",
    "shared_core.kernels",
    "shared_core.parallel",
    "shared_core.plot",
)
FILE = ROOT / "docs" / "core-contract.json"


def _signature(value: object) -> str:
    return str(inspect.signature(value))  # type: ignore[arg-type]


def _describe(value: Any) -> Any:
    if not callable(value):
        return repr(value)
    if not inspect.isclass(value):
        return _signature(value)
    # What the class itself defines: what it inherits (from torch.nn.Module, from ValueError) is not ours to promise.
    methods = {
        name: "property" if isinstance(member, property) else _signature(getattr(value, name))
        for name, member in sorted(vars(value).items())
        if not name.startswith("_")
        and (isinstance(member, property | classmethod | staticmethod) or inspect.isfunction(member))
    }
    fields = sorted(getattr(value, "__dataclass_fields__", {}))
    bases = [base.__name__ for base in value.__mro__[1:-1] if not base.__name__.startswith("_")]
    init = {} if issubclass(value, BaseException) else {"signature": _signature(value)}
    return {**init, "bases": bases[:1], "fields": fields, "methods": methods}


def contract() -> dict[str, dict[str, Any]]:
    """Return signature and public methods of every public name, by module."""
    offered: dict[str, dict[str, Any]] = {}
    for name in PUBLIC_MODULES:
        module = importlib.import_module(name)
        public = sorted(set(module.__all__) - {"__version__"})
        offered[name] = {entry: _describe(getattr(module, entry)) for entry in public}
    return offered


def main(argv: list[str] | None = None) -> int:
    """Write the file or compare it."""
    parser = argparse.ArgumentParser(description="Write down or check what shared-core offers.")
    parser.add_argument("action", choices=["write", "check"])
    arguments = parser.parse_args(argv)
    text = json.dumps(contract(), indent=1, ensure_ascii=False) + "\n"
    if arguments.action == "write":
        FILE.write_text(text, encoding="utf-8")
        return 0
    if not FILE.exists() or FILE.read_text(encoding="utf-8") != text:
        print(
            "shared-core offers something else than docs/core-contract.json says: "
            "run `python tools/contract.py write` and look at the difference",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
