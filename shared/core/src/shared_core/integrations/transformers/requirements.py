"""The modules of transformers that this package builds on, and one sentence where they are missing or too old."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

__all__ = ["activations", "moe"]

_NAME = "shared_core.integrations.transformers"
_OLDEST = (5, 10)
_INSTALL = "pip install 'shared-core[transformers]'"


def _load() -> tuple[Any, Any]:
    try:
        transformers = import_module("transformers")
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ImportError(f"{_NAME} needs transformers: {_INSTALL}") from error
    found = str(transformers.__version__)
    if tuple(int(part) for part in re.findall(r"\d+", found)[:2]) < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise ImportError(f"{_NAME} needs transformers>={oldest}, but {found} is installed: {_INSTALL}")
    return import_module("transformers.activations"), import_module("transformers.integrations.moe")


activations, moe = _load()
