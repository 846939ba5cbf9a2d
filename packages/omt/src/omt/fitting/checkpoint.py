"""The state of a long fit on disk, so that a killed run goes on from its last pass and ends with the same result."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omt import archive
from shared_core.files import atomic_write

_FORMAT = 1
# Seconds between two writes; a pass over few samples is shorter than a write.
_INTERVAL = 1.0


@dataclass(frozen=True)
class Kept:
    """A checkpoint that stays when its fit is finished, so that a run over several groups skips those that are done.

    Parameters
    ----------
    path
        The file.
    """

    path: Path

    def __fspath__(self) -> str:
        return os.fspath(self.path)


@dataclass
class Checkpoint:
    """A file that holds the state of one fit.

    Parameters
    ----------
    path
        The file, or ``None`` to keep nothing.
    fingerprint
        What the result depends on: arguments and a summary of the data. A file of another fit is refused.
    """

    path: str | os.PathLike[str] | None
    fingerprint: dict[str, Any]
    _written: float = -float("inf")
    _pending: tuple[dict[str, NDArray[Any]], dict[str, Any]] | None = None

    def save(self, arrays: dict[str, NDArray[Any]], progress: dict[str, Any], *, now: bool = False) -> None:
        """Write the state; if the last write was a moment ago and ``now`` is false, keep it for :meth:`flush`."""
        if self.path is None:
            return
        self._pending = (arrays, progress)
        if now or time.monotonic() - self._written >= _INTERVAL:
            self.flush()

    def flush(self) -> None:
        """Write the last state that :meth:`save` was given, if it is not on disk yet."""
        if self.path is None or self._pending is None:
            return
        arrays, progress = self._pending
        meta = json.dumps({"format": _FORMAT, "fingerprint": self.fingerprint, "progress": progress})
        with atomic_write(self.path) as temporary, temporary.open("wb") as file:
            np.savez(file, meta=np.array(meta), **arrays)  # type: ignore[arg-type]  # array names, not allow_pickle
        self._written, self._pending = time.monotonic(), None

    def load(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]] | None:
        """Arrays and progress of an unfinished fit, or ``None`` if there is none.

        Raises
        ------
        ValueError
            If the file is damaged, of another format version, or belongs to a fit with other data or arguments.
        """
        if self.path is None:
            return None
        if not Path(self.path).exists():
            if not Path(self.path).parent.is_dir():
                raise FileNotFoundError(f"checkpoint: the folder {Path(self.path).parent} does not exist")
            return None
        if Path(self.path).is_dir():
            raise IsADirectoryError(f"checkpoint: {self.path} is a folder; give the name of a file")
        arrays = archive.read_npz(self.path)
        try:
            meta = json.loads(str(arrays.pop("meta")))
            version, fingerprint, progress = meta["format"], meta["fingerprint"], meta["progress"]
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"checkpoint {self.path} was not written by omt, or is damaged: {error}") from error
        if version != _FORMAT:
            raise ValueError(
                f"checkpoint {self.path} is of format {version}; this version of omt reads format {_FORMAT}"
            )
        for key, value in self.fingerprint.items():
            if not _same(fingerprint.get(key), value):
                raise ValueError(
                    f"checkpoint {self.path} belongs to another fit: its {key} is {fingerprint.get(key)}, here it is "
                    f"{value}; delete the file or give another name"
                )
        return arrays, progress

    def finish(self) -> None:
        """Delete the file of a finished fit, or complete it if it is to be kept."""
        if isinstance(self.path, Kept):
            self.flush()
        elif self.path is not None:
            Path(self.path).unlink(missing_ok=True)


def _same(stored: Any, value: Any) -> bool:
    """Whether two entries of a fingerprint agree; sums over the data may differ by the order of summation."""
    if isinstance(value, float) and isinstance(stored, float):
        return math.isclose(stored, value, rel_tol=1e-9, abs_tol=1e-12)
    return bool(stored == value)


def kept_files(folder: str | os.PathLike[str], n_groups: int) -> list[Kept | None]:
    """Checkpoint files of the fits of several groups, in a folder that is made if its parent exists.

    Raises
    ------
    FileNotFoundError, NotADirectoryError
        If the parent does not exist, or the folder is a file.
    """
    place = Path(folder)
    if place.is_file():
        raise NotADirectoryError(f"checkpoint: {place} is a file; give the name of a folder")
    if not place.parent.is_dir():
        raise FileNotFoundError(f"checkpoint: the folder {place.parent} does not exist")
    place.mkdir(exist_ok=True)
    return [Kept(place / f"group{i}.npz") for i in range(n_groups)]


def remove_files(folder: str | os.PathLike[str], files: Iterable[Kept | None]) -> None:
    """Delete checkpoints of finished fits, and their folder if nothing else is in it."""
    for file in files:
        if file is not None:
            file.path.unlink(missing_ok=True)
    if not any(Path(folder).iterdir()):
        Path(folder).rmdir()
