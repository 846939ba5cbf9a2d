"""Files: written whole or not at all, and read without believing anything in them unchecked. numpy only."""

from __future__ import annotations

import math
import os
import secrets
import shutil
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["array_names", "atomic_write", "read_arrays"]


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a temporary name beside `path`; rename it to `path` when the block ends well, remove it when it fails.

    Parameters
    ----------
    path
        The file to write. Its folder must exist. A link is followed, and a file that is there keeps its permissions.

    Yields
    ------
    Path
        A name in the same folder and with the same suffix, for the block to write. No other block gets the same one.
        For what is no ordinary file (a pipe, ``/dev/stdout``) it is `path` itself, which nothing can be renamed to.

    Raises
    ------
    FileNotFoundError
        If the folder of `path` does not exist.
    IsADirectoryError
        If `path` is a folder.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with atomic_write(Path(folder) / "note.txt") as temporary:
    ...         _ = temporary.write_text("done")
    ...     print([file.name for file in Path(folder).iterdir()])
    ['note.txt']
    """
    target = Path(path)
    if target.is_symlink():
        target = target.resolve()
    if not target.parent.is_dir():
        raise FileNotFoundError(f"cannot write {target}: the folder {target.parent} does not exist")
    if target.is_dir():
        raise IsADirectoryError(f"cannot write {target}: it is a folder")
    if target.exists() and not target.is_file():
        yield target
        return
    # The suffix stays last: writers such as numpy and matplotlib choose the format by it. The stem is cut, so that a
    # name of the greatest length leaves room for the rest.
    temporary = target.with_name(f".{target.stem[:40]}.{secrets.token_hex(8)}.tmp{target.suffix}")
    try:
        yield temporary
        if target.exists():
            shutil.copymode(target, temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def read_arrays(
    path: str | os.PathLike[str],
    members: Mapping[str, tuple[int, str]],
    *,
    kind: str = "file",
    max_bytes: int = 2**31,
) -> dict[str, NDArray[Any]]:
    """Read arrays from an ``.npz`` file whose content is not trusted.

    Nothing is unpickled; sizes are checked before memory is taken; each array must agree with its own header. Arrays
    that were not asked for are not read.

    Parameters
    ----------
    path
        The file.
    members
        For each array its number of dimensions (-1: any) and the kinds of dtype it may have: letters of numpy's
        ``dtype.kind``, such as ``"iu"`` for integers, ``"f"`` for floats, ``"U"`` for text.
    kind
        What the file should be, for messages.
    max_bytes
        Most bytes that all these arrays together may need.

    Returns
    -------
    dict
        Name → array.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If it is no whole ``.npz``, lacks an array, holds it in another form, or is larger than `max_bytes`.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(Path(folder) / "states.npz", hidden=np.ones((2, 3)))
    ...     read_arrays(Path(folder) / "states.npz", {"hidden": (2, "f")})["hidden"].shape
    (2, 3)
    """
    with _archive(path, kind) as archive:
        sizes = {name: archive.getinfo(f"{name}.npy").file_size for name in _names(archive)}
        missing = [name for name in members if name not in sizes]
        if missing:
            raise ValueError(f"it has no array named {', '.join(missing)}; it has {', '.join(sorted(sizes)) or 'none'}")
        wanted = sum(sizes[name] for name in members)
        if wanted > max_bytes:
            raise ValueError(f"its arrays need {wanted} bytes, more than max_bytes={max_bytes}")
        return {name: _read_array(archive, name, ndim, kinds, sizes[name]) for name, (ndim, kinds) in members.items()}


def array_names(path: str | os.PathLike[str], *, kind: str = "file") -> list[str]:
    """Name the arrays of an ``.npz`` file without reading them.

    Parameters
    ----------
    path
        The file.
    kind
        What the file should be, for messages.

    Returns
    -------
    list of str

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If it is no ``.npz``.
    """
    with _archive(path, kind) as archive:
        return _names(archive)


def _names(archive: zipfile.ZipFile) -> list[str]:
    return [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]


@contextmanager
def _archive(path: str | os.PathLike[str], kind: str) -> Iterator[zipfile.ZipFile]:
    """Open an ``.npz``; whatever is found wrong with it, here or in the block, becomes one ``ValueError``."""
    source = Path(path)
    if not source.is_file():
        raise FileNotFoundError(f"no such file: {source}")
    try:
        with zipfile.ZipFile(source) as archive:
            yield archive
    except (ValueError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, OSError) as error:
        raise ValueError(f"{source} is not a valid {kind}: {str(error) or 'it is cut short'}") from error


def _read_array(archive: zipfile.ZipFile, name: str, ndim: int, kinds: str, size: int) -> NDArray[Any]:
    """Read one array whose header agrees with what is expected and with its own length."""
    if archive.getinfo(f"{name}.npy").compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
        raise ValueError(f"array {name} is compressed in a way that numpy does not write")
    with archive.open(f"{name}.npy") as member:
        version = np.lib.format.read_magic(member)
        if version not in {(1, 0), (2, 0)}:
            raise ValueError(f"array {name} has an unknown header version {version}")
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        try:
            shape, fortran_order, dtype = read_header(member)
        except (ArithmeticError, LookupError, MemoryError, SyntaxError, TypeError, tokenize.TokenError) as error:
            # numpy parses the header as Python text, and lets out whatever the parser makes of nonsense.
            raise ValueError(f"array {name} has a header that cannot be read") from error
        if dtype.hasobject or dtype.kind not in kinds:
            raise ValueError(f"array {name} has dtype {dtype}")
        if not all(type(length) is int and length >= 0 for length in shape):
            raise ValueError(f"array {name} has shape {list(shape)}")
        if ndim not in {-1, len(shape)}:
            raise ValueError(f"array {name} has shape {list(shape)}, not {ndim} dimensions")
        expected = math.prod(shape) * dtype.itemsize
        if member.tell() + expected != size:
            raise ValueError(f"array {name} should have {expected} bytes of data but has {size - member.tell()}")
        data = member.read()
    flat = np.frombuffer(data, dtype=dtype) if expected else np.empty(0, dtype)
    return flat.reshape(shape, order="F" if fortran_order else "C")
