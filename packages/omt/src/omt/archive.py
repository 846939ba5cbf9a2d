"""Folders with ``<stem>.npz`` (arrays) and ``meta.json`` (the rest, for people): how omt keeps its objects on disk.

The npz holds everything and is written last, by one rename, so that a reader meets the old object or the new one.
Nothing is pickled, and no size that a file states is believed before it is checked.
"""

from __future__ import annotations

import json
import math
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared_core.files import atomic_write

_META = "meta"


def save(path: str | os.PathLike[str], stem: str, content: Mapping[str, Any]) -> None:
    """Write a nested dict of arrays, strings and numbers as a folder.

    Parameters
    ----------
    path
        Folder; it is made if its parent exists.
    stem
        Name of the npz file without its ending.
    content
        Nested dict with string keys; ``content["format"]`` is the format version.

    Raises
    ------
    FileNotFoundError
        If the parent of the folder does not exist.
    NotADirectoryError
        If ``path`` is a file.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(folder, "thing", {"format": 1, "inside": {"values": np.arange(3)}})
    ...     load(folder, "thing", 1)["inside"]["values"].tolist()
    [0, 1, 2]
    """
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"cannot write {folder}: it is a file; give the name of a folder")
    if not folder.parent.is_dir():
        raise FileNotFoundError(f"cannot write {folder}: the folder {folder.parent} does not exist")
    folder.mkdir(exist_ok=True)
    arrays: dict[str, NDArray[Any]] = {}
    meta = _split(content, "", arrays)
    text = json.dumps(meta, indent=2)
    with atomic_write(folder / "meta.json") as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
    with atomic_write(folder / f"{stem}.npz") as temporary, temporary.open("wb") as file:
        np.savez(file, **{_META: np.array(text)}, **arrays)  # type: ignore[arg-type]  # array names, not allow_pickle


def load(path: str | os.PathLike[str], stem: str, version: int, *, max_bytes: int = 2**32) -> dict[str, Any]:
    """Read what :func:`save` wrote.

    Parameters
    ----------
    path
        The folder.
    stem
        Name of the npz file without its ending.
    version
        The format version that the caller reads.
    max_bytes
        Refuse files whose arrays need more memory than this, all together.

    Returns
    -------
    dict
        The nested dict.

    Raises
    ------
    FileNotFoundError
        If the folder or the file does not exist.
    ValueError
        If the file is truncated, damaged, too large or of another format version.
    """
    file = Path(path) / f"{stem}.npz"
    if not file.is_file():
        raise FileNotFoundError(f"{path} holds no {stem}: there is no file {file}")
    arrays = read_npz(file, max_bytes=max_bytes)
    try:
        meta = json.loads(str(arrays.pop(_META)))
        if not isinstance(meta, dict):
            raise TypeError("its meta entry is not a table")
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} was not written by omt, or is damaged: {error}") from error
    if meta.get("format") != version:
        raise ValueError(f"{file} is stored in format {meta.get('format')}; this version of omt reads format {version}")
    for key, value in arrays.items():
        inner = meta
        *above, last = key.split("/")
        for part in above:
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                raise ValueError(f"{file} is damaged: {key} is stored twice")
        inner[last] = value
    return meta


@contextmanager
def rebuilding(what: str) -> Iterator[None]:
    """Say in one sentence that ``what`` is damaged, whichever entry of the wrong kind or size it is that Python trips
    over.
    """
    try:
        yield
    except (TypeError, KeyError, IndexError, AttributeError, OverflowError) as error:
        raise ValueError(f"{what} was not written by omt, or is damaged ({type(error).__name__}: {error})") from error


def read_npz(path: str | os.PathLike[str], *, max_bytes: int = 2**32) -> dict[str, NDArray[Any]]:
    """Arrays of an npz file, each checked against its own header before memory is taken for it; no pickles.

    Raises
    ------
    ValueError
        If the file is truncated, damaged, larger than ``max_bytes``, or holds objects.
    """
    arrays = {}
    try:
        with zipfile.ZipFile(path) as archive:
            total = sum(info.file_size for info in archive.infolist())
            if total > max_bytes:
                raise ValueError(f"its arrays need {total} bytes, more than the {max_bytes} allowed")
            for info in archive.infolist():
                arrays[info.filename.removesuffix(".npy")] = _read_member(archive, info)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, OSError, ValueError) as error:
        raise ValueError(
            f"{path} is not a readable npz file (truncated or damaged): {str(error) or 'it ends early'}"
        ) from error
    return arrays


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> NDArray[Any]:
    with archive.open(info) as member:
        version = np.lib.format.read_magic(member)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"array {info.filename} has an unknown header version {version}")
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran_order, dtype = read_header(member)
        if dtype.hasobject:
            raise ValueError(f"array {info.filename} holds Python objects, which are never unpickled")
        if dtype.kind not in "fiubU":
            raise ValueError(f"array {info.filename} has dtype {dtype}; omt stores numbers and text")
        size = math.prod(shape) * dtype.itemsize
        if member.tell() + size != info.file_size:
            raise ValueError(f"array {info.filename} should have {size} bytes and has {info.file_size - member.tell()}")
        flat = np.frombuffer(bytearray(member.read()), dtype=dtype) if size else np.empty(math.prod(shape), dtype)
    return flat.reshape(shape, order="F" if fortran_order else "C")


def _split(content: Mapping[str, Any], prefix: str, arrays: dict[str, NDArray[Any]]) -> dict[str, Any]:
    """Move the arrays of a nested dict into ``arrays`` under path-like names; give the rest."""
    rest: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, Mapping):
            rest[key] = _split(value, f"{prefix}{key}/", arrays)
        elif isinstance(value, np.ndarray):
            arrays[prefix + key] = value
        else:
            rest[key] = value
    return rest
