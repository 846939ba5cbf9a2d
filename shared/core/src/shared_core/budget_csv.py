"""Budget problems as CSV: columns group, choice, cost, value; one line a choice."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path

from shared_core.files import atomic_write

COLUMNS = ("group", "choice", "cost", "value")
_SHOWN = 40  # characters of a field in a message
Row = tuple[str, str, int, float]


def read_problem(path: Path) -> list[Row]:
    """Read and check a problem; other columns are ignored and blank lines skipped.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If it is not such a table; the first thing wrong is named by its line and column.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    rows: list[Row] = []
    seen: dict[tuple[str, str], int] = {}
    try:
        # Decoded at once: a decoder that reads on as it goes would count bytes from where it last stopped.
        with io.StringIO(path.read_bytes().decode().removeprefix("\ufeff"), newline="") as file:
            reader = csv.reader(file, strict=True)
            header = [name.strip() for name in next(reader, [])]
            missing = [name for name in COLUMNS if name not in header]
            if missing:
                names = ", ".join(map(repr, missing))
                raise ValueError(f"{path} has no column {names}; its columns are: {', '.join(header) or 'none'}")
            twice = [name for name in COLUMNS if header.count(name) > 1]
            if twice:
                raise ValueError(f"{path} has more than one column {', '.join(map(repr, twice))}")
            at = [header.index(name) for name in COLUMNS]
            for fields in reader:
                line = reader.line_num
                if not any(fields):
                    continue
                if len(fields) != len(header):
                    raise ValueError(f"{path}, line {line}: {len(fields)} fields, but the header has {len(header)}")
                group, choice, cost, value = (fields[i].strip() for i in at)
                if (group, choice) in seen:
                    earlier = seen[group, choice]
                    raise ValueError(
                        f"{path}, line {line}: group {group!r} has choice {choice!r} already (line {earlier})"
                    )
                seen[group, choice] = line
                rows.append((group, choice, _cost(cost, path, line), _value(value, path, line)))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: {error}") from error
    if not rows:
        raise ValueError(f"{path} has a header but no choices")
    return rows


def _cost(text: str, path: Path, line: int) -> int:
    try:
        cost = int(_number(text))
    except ValueError:
        cost = -1
    if not 0 <= cost < 2**62:
        raise ValueError(f"{path}, line {line}, column cost: {_short(text)} is not a whole number >= 0")
    return cost


def _value(text: str, path: Path, line: int) -> float:
    try:
        value = float(_number(text))
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{path}, line {line}, column value: {_short(text)} is not a finite number")
    return value


def _number(text: str) -> str:
    """Refuse ``1_0``, which Python reads as 10 and a table hardly means so."""
    if "_" in text:
        raise ValueError
    return text


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "…")


def write_choice(path: Path, chosen: list[Row]) -> None:
    """Write rows in the same form; an existing file is replaced only by a whole new one."""
    with atomic_write(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(chosen)
