"""Show measurements: a table for people, rows for programs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared_core.bench.implementations import PEERS
from shared_core.bench.runner import Measurement
from shared_core.files import atomic_write

if TYPE_CHECKING:
    from rich.table import Table


# Columns that describe a case; where all lines agree on one, the title says it.
_MAY_BE_COMMON = ("shape", "dtype", "pass", "routing")


def result_rows(measurements: Iterable[Measurement], machine: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Turn measurements into flat records, one for each pair of ours and another implementation.

    Parameters
    ----------
    measurements : iterable of Measurement
    machine : mapping
        What to record about the machine; see :func:`shared_core.doctor.machine`.

    Returns
    -------
    list of dict
        Keys ``what, shape, sizes, ours, peer, ratio, limit_share`` and the numbers behind them; times in seconds.
        ``peer`` is None when there was nothing to compare with.
    """
    rows = []
    for m in measurements:
        common = {
            "what": m.case.what,
            "shape": m.case.shape.name,
            "sizes": m.case.shape.sizes,
            "rows": m.case.rows,
            "rows_per_expert": m.case.rows_per_expert,
            "dtype": m.case.dtype,
            "backward": m.case.backward,
            "routing": m.case.routing,
            "ours": m.ours,
            "ours_cpu": m.timings[m.ours].cpu,
            "ours_wall": m.timings[m.ours].wall,
            "limit_share": m.limit_share,
            "limit_by": m.limit_by,
            "clock": m.clock,
            "threads": m.threads,
            "machine": dict(machine),
        }
        others = [name for name in m.timings if name != m.ours]
        for peer in others:
            theirs = m.timings[peer]
            measured = {"ratio": m.ratio(peer), "peer_cpu": theirs.cpu, "peer_wall": theirs.wall}
            rows.append(common | {"peer": peer} | measured)
        if not others:
            rows.append(common | {"peer": None, "ratio": None, "peer_cpu": None, "peer_wall": None})
    return rows


def read_rows(path: str | os.PathLike[str]) -> list[Any]:
    """Read the records that a JSON file holds already: an empty list when there is no such file.

    Raises
    ------
    ValueError
        When the file holds something else than a list.
    """
    target = Path(path)
    if not target.exists():
        return []
    try:
        held = json.loads(target.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{target} is not JSON, so no rows can be appended to it: {error}") from error
    if not isinstance(held, list):
        raise ValueError(f"{target} holds a JSON {type(held).__name__}, not a list that rows can be appended to")
    return held


def write_rows(path: str | os.PathLike[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Append records to a JSON file that holds a list of them; the file is created when it is not there.

    Raises
    ------
    ValueError
        When the file holds something else than a list.
    """
    held = read_rows(path)
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps([*held, *rows], indent=1) + "\n", encoding="utf-8")


def table_cells(m: Measurement) -> list[str]:
    """Return the cells of a measurement, in the order of :func:`table_columns`."""
    case = m.case
    cells = [
        case.shape.name,
        case.dtype,
        "fwd+bwd" if case.backward else "fwd",
        str(case.rows),
        f"{case.rows_per_expert:.3g}",
        case.routing,
        _milliseconds(m.timings[m.ours].cpu),
        _milliseconds(m.timings[m.ours].wall),
        f"{m.limit_share:.2f}",
    ]
    for peer in PEERS:
        name = f"transformers {peer}"
        cells.append(f"{m.ratio(name):.2f}×" if name in m.timings else "–")
    cells.append("–" if m.best_ratio is None else f"{m.best_ratio:.2f}×")
    return cells


def table_columns(threads: int) -> list[str]:
    """Return the headings of the table."""
    cpu = "CPU ms" if threads == 1 else "CPU ms of the main thread"
    head = ["shape", "dtype", "pass", "rows", "rows/expert", "routing", cpu, "wall ms", "of limit"]
    return [*head, *(f"vs {peer}" for peer in PEERS), "vs best"]


def result_table(measurements: Sequence[Measurement]) -> Table:
    """Lay measurements out for a terminal: ours in milliseconds, then how many times faster than each peer.

    What is the same in all lines stands in the title, and peers that no case ran have no column.

    Raises
    ------
    ValueError
        When there is no measurement.
    """
    from rich import box
    from rich.table import Table

    if not measurements:
        raise ValueError("measurements is empty: there is nothing to show")
    first = measurements[0]
    columns = table_columns(first.threads)
    lines = [table_cells(m) for m in measurements]
    for name in list(first.timings)[1:]:
        if name not in first.peers:
            columns.append(f"vs own {name}")
            lines = [[*line, f"{m.ratio(name):.2f}×"] for line, m in zip(lines, measurements, strict=True)]

    common = [i for i, name in enumerate(columns) if name in _MAY_BE_COMMON and len({line[i] for line in lines}) == 1]
    unused = [i for i in range(len(columns)) if all(line[i] == "–" for line in lines)]
    clock = "CPU time" if first.clock == "cpu" else "wall time"
    about = ", ".join([lines[0][i] for i in common] + [f"backend {first.ours}", f"{first.threads} thread(s)"])
    table = Table(
        title=f"{about}\nratios of {clock}, above 1: ours is faster",
        caption="of limit: 1 is what the memory bandwidth and matrix products measured here allow",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    shown = [i for i in range(len(columns)) if i not in {*common, *unused}]
    for i in shown:
        # Broken before the last word, a heading is not wider than it must be.
        heading = "\n".join(columns[i].replace("/", "/ ").rsplit(" ", 1))
        table.add_column(heading, justify="left" if columns[i] in _MAY_BE_COMMON else "right", no_wrap=True)
    for line in lines:
        table.add_row(*(line[i] for i in shown))
    return table


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"
