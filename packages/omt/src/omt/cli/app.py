"""What the commands share: the application, common options, one sentence for every error, and how results are shown."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import typer

__all__ = [
    "Json",
    "Output",
    "Quiet",
    "Reg",
    "Seed",
    "Source",
    "Target",
    "Tau",
    "app",
    "check_exists",
    "check_output",
    "check_representation",
    "note",
    "one_sentence",
    "report",
]

_P = ParamSpec("_P")

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"terminal_width": 110},  # examples stay on one line, to be copied
    help="Optimal mixture transport: which subpopulation becomes which. Start with: omt demo",
)

Output = Annotated[Path, typer.Option("--output", "-o", help="Where the result is written.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress and no table.")]
Seed = Annotated[int, typer.Option(help="Seed, at least 0; the same seed gives the same result.")]
Source = Annotated[str, typer.Option(help="Group at the start, a value of the --groupby column.", show_default=False)]
Target = Annotated[str, typer.Option(help="Group at the end.", show_default=False)]
Reg = Annotated[float, typer.Option(help="Outer temperature relative to the mean cost; 0 is the exact linear program.")]
Tau = Annotated[float, typer.Option(help="Mass conservation in (0, 1]; below 1 mass may grow and vanish.")]


def one_sentence(command: Callable[_P, None]) -> Callable[_P, None]:
    """Turn errors into one sentence on stderr: exit 2 for bad input, 1 for what failed later; OMT_TRACEBACK=1 shows
    where.
    """

    @functools.wraps(command)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> None:
        import warnings

        for backend in ("PYTORCH", "JAX", "CUPY", "TENSORFLOW"):
            # POT would import each of them if it is installed, seconds that no command needs
            os.environ.setdefault(f"POT_BACKEND_DISABLE_{backend}", "1")

        def show(message: Warning | str, *_: object, **__: object) -> None:
            print(f"omt: warning: {message}", file=sys.stderr)

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # of the libraries underneath: nothing a user can act on
                warnings.simplefilter("ignore", DeprecationWarning)
                warnings.showwarning = show
                command(*args, **kwargs)
        except typer.Exit:  # itself a RuntimeError
            raise
        except (
            ValueError,
            TypeError,
            KeyError,
            FileNotFoundError,
            NotADirectoryError,
            IsADirectoryError,
            ImportError,
        ) as error:
            _fail(error, 2)
        except (OSError, RuntimeError, MemoryError, ArithmeticError) as error:
            _fail(error, 1)

    return guarded


def _fail(error: BaseException, status: int) -> None:
    if os.environ.get("OMT_TRACEBACK"):
        raise error
    sentence = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    print(f"omt: {' '.join(sentence.split()) or type(error).__name__}", file=sys.stderr)
    raise typer.Exit(status) from error


def check_exists(path: Path) -> None:
    """Refuse an input that is not there before libraries are imported that take seconds."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")


def check_output(path: Path, *, folder: bool = False, apart_from: Iterable[Path | None] = ()) -> None:
    """Refuse a place that cannot be written, or is that of another file, before the work is done, not after."""
    for other in apart_from:
        if other is not None and path.resolve() == other.resolve():
            raise ValueError(f"{path} is given twice; writing there would replace the other: give another name")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: the folder {path.parent} does not exist")
    if folder and path.is_file():
        raise NotADirectoryError(f"cannot write {path}: it is a file; give the name of a folder")
    if not folder and path.is_dir():
        raise IsADirectoryError(f"cannot write {path}: it is a folder; give the name of a file")


def check_representation(data: Path, obsm: Iterable[str], use_rep: str) -> None:
    """Refuse a file without the features, and say what a file of raw counts needs."""
    names = list(obsm)
    if use_rep not in names:
        raise ValueError(
            f"{data} has no {use_rep!r} in obsm; it has: {', '.join(names) or '(none)'}. "
            "Name one by --use-rep, or give --prepare if X holds raw counts"
        )


def note(sentence: str, *, quiet: bool) -> None:
    """Say on stderr what the table does not show."""
    if not quiet:
        print(f"omt: {sentence}", file=sys.stderr)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"omt {version('omt')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def report(content: dict[str, Any], rows: list[dict[str, Any]], *, as_json: bool, quiet: bool) -> None:
    """Print a result: JSON for programs, a table for people, nothing with --quiet."""
    if as_json:
        print(json.dumps(content))
        return
    if quiet or not rows:
        return
    cells = [[str(name) for name in rows[0]], *([_text(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    for line in cells:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
