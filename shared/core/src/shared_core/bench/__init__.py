"""Measure the experts against transformers' and against the machine's own limits, in one run.

``cases`` says what is run, ``implementations`` who runs it, ``limits`` what the machine could do at best, ``timing``
how time is taken, ``runner`` puts them together and ``report`` shows the result.
"""

from __future__ import annotations

from shared_core.bench.cases import SHAPES, Case, Shape, make_cases, parse_shape
from shared_core.bench.implementations import missing_peers_note
from shared_core.bench.report import read_rows, result_rows, result_table, write_rows
from shared_core.bench.runner import Measurement, run_bench

__all__ = [
    "SHAPES",
    "Case",
    "Measurement",
    "Shape",
    "make_cases",
    "missing_peers_note",
    "parse_shape",
    "read_rows",
    "result_rows",
    "result_table",
    "run_bench",
    "write_rows",
]
