"""The command line ``shared-core``. Needs the extra: ``pip install 'shared-core[cli]'``.

Commands are plain functions; heavy imports stand inside them, so that ``--help`` is quick. Results go to stdout or to
the file asked for, progress and errors to stderr. Exit codes: 0 done, 1 failed work, 2 bad input (one line, no
traceback).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

try:
    import typer
except ModuleNotFoundError:  # the base install has numpy only; main() says what to do
    typer = None  # type: ignore[assignment]

# Imports inside functions are the rule of this file, see above.

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from rich.table import Table

    from shared_core.budget import Allocation

_SHOWN = 20  # choices that `budget` prints when they go to no file


# ---------------------------------------------------------------------------------------------------------------------
# Commands


def budget(
    problem: Annotated[Path, typer.Argument(help="CSV with columns group,choice,cost,value.", show_default=False)],
    budget: Annotated[int, typer.Option(help="Common budget, in units of cost.", show_default=False)],
    method: Annotated[
        Literal["exact", "greedy"], typer.Option(help="exact: proven optimum. greedy: faster, with a bound.")
    ] = "exact",
    out: Annotated[Path | None, typer.Option(help="Write the chosen rows to this CSV.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of a table.")] = False,
) -> None:
    """Pick one choice per group: most value within a common budget (multiple-choice knapsack)."""
    from shared_core.budget import solve_mckp
    from shared_core.budget_csv import read_problem, write_choice

    with _bad_input():
        rows = read_problem(problem)
        if out is not None:
            _check_folder(out)
        groups: dict[str, list[tuple[str, int, float]]] = {}
        for group, choice, cost, value in rows:
            groups.setdefault(group, []).append((choice, cost, value))
        costs = [[cost for _, cost, _ in choices] for choices in groups.values()]
        values = [[value for _, _, value in choices] for choices in groups.values()]
        allocation = solve_mckp(costs, values, budget, method=method)
    chosen = [
        (group, *choices[j]) for (group, choices), j in zip(groups.items(), allocation.choice.tolist(), strict=True)
    ]
    if out is not None:
        write_choice(out, chosen)
    if as_json:
        facts = {name: getattr(allocation, name) for name in ("value", "cost", "upper_bound", "multiplier", "optimal")}
        picked = [dict(zip(("group", "choice", "cost", "value"), row, strict=True)) for row in chosen]
        _print_json({"method": method, "budget": budget, **facts, "choice": picked})
        return
    _print(_budget_summary(allocation, budget, len(chosen), len(rows)))
    if out is None:
        _print(_choice_table(chosen))


def load(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Routing traces (.npz of Routing.save), one a layer, or one .npz of token states (key 'hidden').",
            show_default=False,
        ),
    ],
    experts: Annotated[int | None, typer.Option(help="Token states: number of experts.", show_default=False)] = None,
    top_k: Annotated[int | None, typer.Option(help="Token states: experts per token.", show_default=False)] = None,
    balance: Annotated[
        bool, typer.Option("--balance", help="Token states: also after balancing by bias (needs torch).")
    ] = False,
    updates: Annotated[
        int, typer.Option(help="With --balance: bias updates, of 1024 random tokens each.", min=1)
    ] = 400,
    update_rate: Annotated[float, typer.Option(help="With --balance: size of a bias step.")] = 0.002,
    seed: Annotated[
        int, typer.Option(help="Of the random gate and of the tokens drawn by --balance.", min=0, max=2**63 - 1)
    ] = 0,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw the loads to this picture; with --balance, those after balancing.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of a table.")] = False,
) -> None:
    """Report how evenly rows are spread over experts.

    Reads routing traces, or token states, which a randomly drawn linear gate routes: the load a model starts with.
    """
    import numpy as np

    from shared_core.load import load_stats
    from shared_core.load_files import holds_states, loads_of_states, loads_of_traces

    with _bad_input():
        if plot is not None:
            _check_folder(plot)
            _check_picture(plot)
        if holds_states(files):
            sources = loads_of_states(files[0], experts, top_k, seed, (updates, update_rate) if balance else None)
        else:
            if balance or experts is not None or top_k is not None:
                raise ValueError(
                    "--experts, --top-k and --balance are for token states; these files are routing traces"
                )
            sources = loads_of_traces(files)
        if plot is not None:
            # Balanced and not have little to say to each other as layers; the plot shows what was asked for.
            shown = [counts for _, counts in sources[-1:]] if balance else [counts for _, counts in sources]
            if len({counts.size for counts in shown}) > 1:
                raise ValueError("--plot draws layers with the same number of experts; these differ")
            _write_plot(plot, np.stack(shown))
    stats = [(source, load_stats(counts)) for source, counts in sources]
    if as_json:
        fields = ("cv", "max_violation", "entropy", "dead_fraction", "gini", "effective_number")
        records = [
            {"source": source, **{name: _number(getattr(s, name)) for name in fields}, "counts": s.counts.tolist()}
            for source, s in stats
        ]
        _print_json(records)
    else:
        _print(_load_table(stats))


def bench(
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="qwen3-30b-a3b, qwen3-half, olmoe, mid, mixtral, or E,k,H,I; may be repeated.  [default: olmoe]",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[str, typer.Option(help="Rows a step, with commas.")] = "1,8,512",
    dtype: Annotated[str, typer.Option(help="bf16, fp32, or both with a comma.")] = "bf16",
    backward: Annotated[bool, typer.Option("--backward", help="Forward and backward.")] = False,
    routing: Annotated[str, typer.Option(help="uniform, zipf, or both with a comma.")] = "uniform",
    backend: Annotated[
        str, typer.Option(help="Backends of this package, with commas; ratios are about the first.")
    ] = "auto",
    threads: Annotated[int, typer.Option(help="Threads of torch. One: CPU time counts; more: wall time.", min=1)] = 1,
    seconds: Annotated[float, typer.Option(help="To spend on a case, about.", min=0.0)] = 2.0,
    seed: Annotated[int, typer.Option(help="Of weights, inputs and routings.", min=0, max=2**63 - 1)] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Append rows to this JSON file.", show_default=False)
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")] = False,
) -> None:
    """Measure the experts against transformers' implementations and the machine's limits, in one run."""
    with _bad_input():
        if find_spec("torch") is None:
            raise ImportError("bench needs PyTorch: pip install 'shared-core[torch]'")
        import torch

        from shared_core.bench import make_cases, missing_peers_note, parse_shape, read_rows, run_bench
        from shared_core.kernels import resolve_backend

        if json_file is not None:
            _check_folder(json_file)
            read_rows(json_file)
        rows = [_whole_number("--tokens", part) for part in tokens.split(",")]
        shapes = [parse_shape(text) for text in shape or ["olmoe"]]
        cases = make_cases(shapes, rows, dtype.split(","), backward=backward, routings=routing.split(","))
        backends = backend.split(",")
        for name in backends:
            resolve_backend(name, torch.device("cpu"), torch.float32)  # where the benchmark runs
    if (note := missing_peers_note()) is not None:
        print(f"shared-core: {note}", file=sys.stderr)
    with _progress(len(cases), quiet) as advance:
        measurements = list(
            run_bench(
                cases,
                backends=backends,
                threads=threads,
                seconds=seconds,
                seed=seed,
                progress=lambda case: advance(f"{case.shape.name}: {case.what}"),
            )
        )
    from shared_core.bench import result_rows, result_table, write_rows
    from shared_core.doctor import machine

    _print(result_table(measurements), width=120)
    if json_file is not None:
        write_rows(json_file, result_rows(measurements, machine()))


def doctor(
    aot: Annotated[
        bool,
        typer.Option("--aot", help="Also compile every Triton kernel for sm_80, sm_90 and sm_100 (minutes; no GPU)."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of tables.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")] = False,
) -> None:
    """Show versions, CPU features, and which backend "auto" picks for which dtype and why."""
    from shared_core import doctor as doctor_

    if aot:
        with _progress(None, quiet) as advance:
            try:
                facts = doctor_.report(ahead_of_time=True, progress=advance)
            except RuntimeError as error:
                _fail(str(error), code=1)
    else:
        facts = doctor_.report()
    if as_json:
        _print_json(facts)
    else:
        for table in doctor_.tables(facts):
            _print(table)
    if facts.get("ahead_of_time", {}).get("failures"):
        _fail("the ahead-of-time check failed", code=1)


# ---------------------------------------------------------------------------------------------------------------------
# The program

_EXAMPLES: dict[Callable[..., None], str] = {
    budget: "shared-core budget problem.csv --budget 12288 --out choice.csv",
    load: "shared-core load states.npz --experts 64 --top-k 8 --balance --plot load.png",
    bench: "shared-core bench --shape mid --tokens 1,512 --dtype fp32,bf16 --json rows.json",
    doctor: "shared-core doctor",
}


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit.

    Parameters
    ----------
    arguments
        Instead of ``sys.argv[1:]``.
    """
    if typer is None:
        _fail("shared-core needs its command-line extra: pip install 'shared-core[cli]'", prefix="")
    app = typer.Typer(name="shared-core", add_completion=False, pretty_exceptions_enable=False)

    @app.callback()
    def _root(
        version: Annotated[
            bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
        ] = False,
    ) -> None:
        """Routers, balance, experts and budgeted selection for mixtures of experts."""

    for command, example in _EXAMPLES.items():
        app.command(epilog=f"Example: {example}")(command)
    # The base of typer's usage errors; asked for through typer, since newer versions bring their own copy of click.
    usage_error: type[Any] = typer.BadParameter.__mro__[1]
    try:
        code = app(list(sys.argv[1:] if arguments is None else arguments) or ["--help"], standalone_mode=False)
    except usage_error as error:
        _fail(error.format_message())
    except (typer.Abort, KeyboardInterrupt):
        _fail("interrupted", code=1)
    except (OSError, MemoryError) as error:
        _fail(str(error) or "out of memory", code=1)
    sys.exit(code or 0)


def _print_version(wanted: bool) -> None:
    if wanted:
        from shared_core import __version__

        print(f"shared-core {__version__}")
        raise typer.Exit


def _fail(sentence: str, *, code: int = 2, prefix: str = "shared-core: ") -> NoReturn:
    print(prefix + " ".join(sentence.split()), file=sys.stderr)
    sys.exit(code)


@contextmanager
def _bad_input() -> Iterator[None]:
    """Turn what the library says about bad input into one line and exit code 2."""
    try:
        yield
    except (ValueError, TypeError, ImportError, FileNotFoundError, IsADirectoryError, PermissionError) as error:
        _fail(str(error))


def _check_folder(path: Path) -> None:
    """Refuse an output that cannot be written, before any work is done."""
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: the folder {path.parent} does not exist")
    if path.is_dir():
        raise IsADirectoryError(f"cannot write {path}: it is a folder")


def _print(table: Table, width: int | None = None) -> None:
    """Print a table; `width` is that of files and pipes, where rich would assume 80 columns."""
    from rich.console import Console

    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # names that the terminal's encoding lacks
    console = Console()
    (console if console.is_terminal or width is None else Console(width=width)).print(table)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1, allow_nan=False))


def _number(value: float) -> float | None:
    """JSON has no NaN."""
    return None if value != value else value  # noqa: PLR0124 - NaN is the number that differs from itself


def _whole_number(option: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{option}: {text!r} is not a whole number") from None


@contextmanager
def _progress(steps: int | None, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Give a function to call before each step with its name; draws a bar on stderr. None: nobody knows how many."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as bar:
        task = bar.add_task("", total=steps)
        begun = 0

        def advance(name: str) -> None:
            nonlocal begun
            bar.update(task, description=name, completed=begun)
            begun += 1

        yield advance


# ---------------------------------------------------------------------------------------------------------------------
# budget


def _budget_summary(allocation: Allocation, budget: int, groups: int, choices: int) -> Table:
    from rich.table import Table

    table = Table(title=f"{groups} groups, {choices} choices", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    share = f" ({allocation.cost / budget:.1%})" if budget else ""
    table.add_row("value", f"{allocation.value:.8g}")
    table.add_row("cost", f"{allocation.cost} of {budget}{share}")
    if allocation.optimal:
        table.add_row("optimal", "yes")
    else:
        table.add_row("upper bound", f"{allocation.upper_bound:.8g}")
        table.add_row("gap", f"{allocation.upper_bound - allocation.value:.3g}")
    table.add_row("value per further unit", f"{allocation.multiplier:.4g}")
    return table


def _choice_table(chosen: list[tuple[str, str, int, float]]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    rest = len(chosen) - _SHOWN
    table = Table(caption=f"… {rest} more; --out FILE writes them all" if rest > 0 else None)
    for name in ("group", "choice"):
        table.add_column(name)
    for name in ("cost", "value"):
        table.add_column(name, justify="right")
    for group, choice, cost, value in chosen[:_SHOWN]:
        table.add_row(escape(group), escape(choice), str(cost), f"{value:.6g}")
    return table


# ---------------------------------------------------------------------------------------------------------------------
# load


def _load_table(stats: list[tuple[str, Any]]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(
        title="Load of E experts by N assignments",
        caption="MaxVio: largest load / mean - 1. cv: standard deviation / mean. entropy: 1 is uniform. "
        "dead: share of experts without a row. E used: effective number of experts.",
        caption_justify="left",
    )
    table.add_column("source")
    headings = ("E", "N", "cv", "MaxVio", "entropy", "dead", "gini", "E used")
    for heading in headings:
        table.add_column(heading, justify="right")
    for source, s in stats:
        metrics = (s.cv, s.max_violation, s.entropy, s.dead_fraction, s.gini)
        cells = [str(s.counts.size), str(int(s.counts.sum())), *(f"{metric:.3f}" for metric in metrics)]
        table.add_row(escape(source), *cells, f"{s.effective_number:.1f}")
    return table


def _check_picture(path: Path) -> None:
    """Refuse a picture format that matplotlib cannot write, and say so when matplotlib is missing."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ModuleNotFoundError as error:
        raise ImportError("--plot needs matplotlib: pip install 'shared-core[plot]'") from error
    formats = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.lstrip(".").lower() not in formats:
        raise ValueError(f"cannot draw to {path}: its suffix must be one of {', '.join(formats)}")


def _write_plot(path: Path, counts: NDArray[Any]) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    from shared_core.files import atomic_write
    from shared_core.plot import expert_load

    expert_load(counts if len(counts) > 1 else counts[0])
    with atomic_write(path) as temporary:
        pyplot.savefig(temporary, dpi=150)
    pyplot.close()


if __name__ == "__main__":
    main()
