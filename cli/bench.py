"""`ftw bench`: measure on this machine, beside a limit or a peer, in one run."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import QuietOption, make_console
from .plot import check_plot, plot_bars, plot_decoding, plot_lookups
from .progress import show_waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console


class Subject(str, Enum):
    """What to measure: a module of `ftw.bench` for each."""

    lookup = "lookup"
    load = "load"
    convert = "convert"
    inspect = "inspect"
    decode = "decode"


def bench_command(
    subject: Annotated[
        Subject,
        typer.Argument(metavar="SUBJECT", help="lookup, load (needs 5 GB), convert (needs 9 GB), inspect, or decode."),
    ],
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there too.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw the figures; needs matplotlib.")] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="decode: build N layers of each model; fewer are less work.")
    ] = None,
    quiet: QuietOption = False,
) -> None:
    """Measure on this machine, beside a limit or a peer; scratch files go into the current folder."""
    if layers is not None and subject is not Subject.decode:
        raise typer.BadParameter(f"{subject.value} builds no layers, decode does", param_hint="'--layers'")
    if plot is not None:
        check_plot(plot)
    environment = importlib.import_module("ftw.bench.environment")
    module = importlib.import_module(f"ftw.bench.{subject.value}")
    with show_waiting(f"bench {subject.value}", is_quiet=quiet) as say, _steps_told(say):
        figures = module.run() if layers is None else module.run(layers)
    result = {"bench": subject.value, "environment": environment.describe_environment(), **figures}
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if not quiet:
        _print_result(result)
    if plot is not None:
        _plot_result(result, plot)


@contextlib.contextmanager
def _steps_told(say: Callable[[str], None]) -> Iterator[None]:
    """Hand on what a benchmark logs of its steps."""
    log, handler = logging.getLogger("ftw.bench"), _StepHandler(say)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)


class _StepHandler(logging.Handler):
    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(record.getMessage())


def _plot_result(result: dict[str, Any], path: Path) -> None:
    """Draw a result: lookups as lines, decoding in panels, anything else as bars of its first table's first figure."""
    rows = next(value for value in result.values() if isinstance(value, list))
    if result["bench"] == Subject.lookup.value:
        plot_lookups(rows, path)
    elif result["bench"] == Subject.decode.value:
        plot_decoding(result, path)
    else:
        plot_bars(rows, next(name for name, value in rows[0].items() if not isinstance(value, str)), path)


def _print_result(result: dict[str, Any]) -> None:
    console = make_console()
    for key, value in result.items():
        if key != "environment" and not isinstance(value, list):
            console.print(f"{key}: {value}")
    console.print(", ".join(f"{key} {value}" for key, value in result["environment"].items()), soft_wrap=True)
    for value in result.values():
        if isinstance(value, list):
            _print_table(console, value)


def _print_table(console: Console, rows: list[dict[str, Any]]) -> None:
    """Print rows of figures; quantiles and lists are for the file alone."""
    from rich import box
    from rich.table import Table

    names = dict.fromkeys(name for row in rows for name in row)
    shown = [name for name in names if not {"p20", "p80"} & set(name.split("_"))]
    cells = {name: [_cell(row.get(name, "")) for row in rows] for name in shown if not _is_list(rows, name)}
    widths = _widths(cells, is_wrapped=False)
    if _needed(widths) > console.width:
        widths = _widths(cells, is_wrapped=True)
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for name, width in zip(cells, widths, strict=True):
        table.add_column(name.replace("_", " "), width=width)
    for row in zip(*cells.values(), strict=True):
        table.add_row(*row)
    terminal = console.width
    console.width = max(terminal, _needed(widths))  # rich would leave out a column that finds no room
    console.print(table)
    console.width = terminal


def _widths(cells: dict[str, list[str]], *, is_wrapped: bool) -> list[int]:
    """Return the widths of columns: cells stay on one line, headings may be wrapped between their words."""
    headings = {name: name.split("_") if is_wrapped else [name] for name in cells}
    return [max(map(len, headings[name] + column)) for name, column in cells.items()]


def _needed(widths: list[int]) -> int:
    """Return the width of a table: two spaces between columns, and one at each end."""
    return sum(widths) + 2 * len(widths) + 2


def _is_list(rows: list[dict[str, Any]], name: str) -> bool:
    return any(isinstance(row.get(name), list) for row in rows)


def _cell(value: Any) -> str:
    """Return a figure as text; 1188.0 as 1188."""
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)
