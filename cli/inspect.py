"""`ftw inspect`: what a checkpoint is, its lookup tables, and what leaving the GPU frees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ftw.errors import printable
from ftw.placement import refusal
from ftw.report import Report, inspect

from .output import make_console, print_error, print_json, print_line, print_warning
from .sizes import format_size
from .status import DONE, REFUSED

if TYPE_CHECKING:
    from rich.table import Table


def inspect_command(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Folder, weight file, or hub id.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 3 unless the token embedding may leave the GPU.")
    ] = False,
) -> int:
    """Tell what a checkpoint is and whether its lookup tables may leave the GPU."""
    report = inspect(source)
    for warning in report.verdict.warnings:
        print_warning(warning)
    if as_json:
        print_json(report.to_dict())
    else:
        _print_report(report)
    if check and not report.is_host_eligible:
        table = report.verdict.token_embedding
        print_error(refusal(table, source, table.detail))
        return REFUSED
    return DONE


def _print_report(report: Report) -> None:
    architecture = report.config.architecture or "unknown architecture"
    print_line(f"{report.source}  {report.format}, {architecture}")
    dtypes = ", ".join(f"{dtype} {format_size(nbytes)}" for dtype, nbytes in report.dtypes.items())
    print_line(f"{report.num_tensors} tensors, {format_size(report.nbytes)}: {dtypes}")
    if report.verdict.tie_evidence:
        print_line(f"LM head: {_tie_words(report)}")
    if report.verdict.token_embedding.reason == "no_table":
        print_line(f"no lookup table: {report.verdict.token_embedding.detail}")
    else:
        _print_tables(report)
    for name, reason in report.left_out:
        print_line(f"left out: {name} ({reason})")


def _print_tables(report: Report) -> None:
    make_console().print(_tables(report))
    for table in report.verdict.tables:
        print_line(f"{table.name}: {table.reason}, {table.detail}")
    print_line(_gain_words(report))


def _tie_words(report: Report) -> str:
    words = {True: "tied to the token embedding", False: "not tied", None: "not known to be tied or not"}
    is_conflict = any(table.reason == "tie_conflict" for table in report.verdict.tables)
    return f"{'conflict' if is_conflict else words[report.verdict.tied]} ({', '.join(report.verdict.tie_evidence)})"


def _tables(report: Report) -> Table:
    from rich import box
    from rich.table import Table

    tables = Table(box=box.SIMPLE, pad_edge=False)
    for heading in ("lookup table", "role"):
        tables.add_column(heading, overflow="fold")
    for heading in ("rows", "columns", "dtype", "size"):
        tables.add_column(heading, justify="right")
    tables.add_column("may leave the GPU")
    for table in report.verdict.tables:
        tables.add_row(
            printable(table.name),
            table.role,
            "?" if table.rows is None else str(table.rows),
            "?" if table.columns is None else str(table.columns),
            printable(table.dtype),
            format_size(table.nbytes),
            "yes" if table.eligible else f"no: {table.reason}",
        )
    return tables


def _gain_words(report: Report) -> str:
    gain = report.gain
    if not gain.vram_bytes:
        return "leaving the GPU frees nothing"
    words = f"leaving the GPU frees {format_size(gain.vram_bytes)} of VRAM"
    if gain.expert_slots is not None and gain.expert_slot_bytes is not None:
        words += f" = {gain.expert_slots} expert slots of {format_size(gain.expert_slot_bytes)}"
    if gain.kv_tokens is not None and gain.kv_bytes_per_token is not None:
        words += f" = {gain.kv_tokens} tokens of KV cache at {format_size(gain.kv_bytes_per_token)}"
    return words
