"""`ftw bench`: measure on this machine, beside a limit or a peer, in one run."""

from __future__ import annotations

import importlib
import json
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import make_console
from .plot import check_plot, plot_bars, plot_decoding, plot_lookups

if TYPE_CHECKING:
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
) -> None:
    """Measure on this machine, beside a limit or a peer; scratch files go into the current folder."""
    if layers is not None and subject is not Subject.decode:
        raise typer.BadParameter(f"{subject.value} builds no layers, decode does", param_hint="'--layers'")
    if plot is not None:
        check_plot(plot)
    environment = importlib.import_module("ftw.bench.environment")
    module = importlib.import_module(f"ftw.bench.{subject.value}")
    figures = module.run() if layers is None else module.run(layers)
    result = {"bench": subject.value, "environment": environment.describe_environment(), **figures}
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    _print_result(result)
    if plot is not None:
        _plot_result(result, plot)


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
    """Print rows of figures; their quantiles are for the file alone."""
    from rich import box
    from rich.table import Table

    names = dict.fromkeys(name for row in rows for name in row)
    headings = [name for name in names if "_p20_" not in name and "_p80_" not in name]
    table = Table(box=box.SIMPLE, pad_edge=False)
    for heading in headings:
        words = heading.split("_")  # between which a long heading is wrapped
        table.add_column(" ".join(words), min_width=max(map(len, words)))
    for row in rows:
        table.add_row(*(str(row.get(heading, "")) for heading in headings))
    console.print(table)
