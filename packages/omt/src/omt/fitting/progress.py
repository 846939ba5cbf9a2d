"""A progress bar on stderr for work of more than two seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

# Seconds of work before anything is shown.
_PATIENCE = 2.0


class Progress:
    """One line on stderr that shows the current stage of a long computation.

    Parameters
    ----------
    enabled
        Show it; default: if stderr is a terminal.
    """

    def __init__(self, enabled: bool | None = None) -> None:
        self._enabled = sys.stderr.isatty() if enabled is None else enabled
        self._begin = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    @contextmanager
    def stage(self, title: str, total: int, done: int = 0) -> Iterator[Callable[[float], None]]:
        """One stage of ``total`` passes; gives a function to call after each with the log-likelihood per sample."""

        def advance(value: float) -> None:
            nonlocal done
            done += 1
            if not self._enabled or time.monotonic() - self._begin < _PATIENCE:
                return
            bar = self._shown()
            bar.update(self._task, description=title, total=total, completed=done, value=value)

        yield advance

    def _shown(self) -> Any:
        if self._bar is None:
            from rich import progress  # only loaded when something is shown
            from rich.console import Console

            self._bar = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TextColumn("log-likelihood {task.fields[value]:.4f} a sample"),
                progress.TimeElapsedColumn(),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task("", value=float("nan"))
            self._bar.start()
        return self._bar
