"""`ftw inspect`: what a checkpoint is, its lookup tables, and what leaving the GPU frees."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ftw.errors import printable
from ftw.sizes import format_size
from ftw.verdict import Report, inspect, refusal

from .exit_codes import DONE, REFUSED
from .links import FollowLinksOption
from .output import make_console, print_error, print_json, print_line, print_warning
from .plot import check_plot, plot_budget
from .sizes import parse_size_option

if TYPE_CHECKING:
    from rich.table import Table

    from ftw.verdict import Budget, BudgetSide


_MIN_VRAM = 1 << 20


def _parse_vram(text: str) -> int:
    nbytes = parse_size_option(text)
    if nbytes < _MIN_VRAM:
        raise typer.BadParameter(f"'{text}' is {format_size(nbytes)}, at least 1 MiB is needed; write 24GiB for 24 GiB")
    return nbytes


def inspect_command(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Folder, weight file, or hub id.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 3 unless the token embedding may leave the GPU.")
    ] = False,
    vram: Annotated[
        int | None,
        typer.Option(parser=_parse_vram, metavar="SIZE", help="Tell how a GPU of this much memory is spent."),
    ] = None,
    follow_links: FollowLinksOption = False,
    decode_df11: Annotated[
        bool, typer.Option("--decode-df11", help="Take DF11 lookup tables for the plain bf16 ones they decode to.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw that as a picture; needs --vram and matplotlib.")
    ] = None,
) -> int:
    """Tell what a checkpoint is and whether its lookup tables may leave the GPU."""
    if plot is not None:
        if vram is None:
            raise typer.BadParameter("it draws how the memory of a GPU is spent, so --vram SIZE is needed with it")
        check_plot(plot)
    report = inspect(source, vram_bytes=vram, decode_df11=decode_df11, follow_links=follow_links)
    for warning in report.verdict.warnings:
        print_warning(warning)
    if as_json:
        print_json(report.to_dict())
    else:
        _print_report(report)
    if plot is not None:
        plot_budget(report, plot)
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
    if any(table.name for table in report.verdict.tables):
        _print_tables(report)
    if report.budget is not None:
        _print_budget(report.budget)
    if report.format == "ftw":
        obstacle = report.freetoken_obstacle
        print_line(f"FreeToken 0.2.1: {'serves it' if obstacle is None else f'does not serve it: {obstacle}'}")
    for entry in report.left_out:
        print_line(f"left out: {entry.name} ({entry.reason})")


def _print_tables(report: Report) -> None:
    make_console().print(_tables(report))
    for table in report.verdict.tables:
        if table.name:
            print_line(f"{table.name}: {table.reason}, {table.detail}")
    print_line(_gain_words(report))


def _print_budget(budget: Budget) -> None:
    print_line(f"of {format_size(budget.vram_bytes)} of VRAM")
    experts = f", {format_size(budget.expert_bytes)} of routed experts left out" if budget.expert_bytes else ""
    print_line(f"  weights take {format_size(budget.weights_bytes)}{experts}")
    print_line(f"  tables on the GPU: {_share_words(budget.before)}")
    print_line(f"  tables in host memory: {_share_words(budget.after)}")


def _share_words(share: BudgetSide) -> str:
    if share.left_bytes < 0:
        return f"{format_size(-share.left_bytes)} too little for weights and tables"
    experts = None if share.expert_slots is None else f"{share.expert_slots} experts"
    tokens = None if share.kv_tokens is None else f"{share.kv_tokens} KV tokens"
    return f"{format_size(share.left_bytes)} left{_room_words(experts, tokens)}"


def _room_words(*things: str | None) -> str:
    """Say what there is room for; nothing if the checkpoint does not tell."""
    known = [thing for thing in things if thing is not None]
    return f": room for {', or '.join(known)}" if known else ""


def _tie_words(report: Report) -> str:
    words = {True: "tied to the token embedding", False: "not tied", None: "not known to be tied or not"}
    is_conflict = any(table.reason == "tie_conflict" for table in report.verdict.tables)
    return f"{'conflict' if is_conflict else words[report.verdict.tied]} ({', '.join(report.verdict.tie_evidence)})"


def _tables(report: Report) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    tables = Table(box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    tables.add_column("lookup table", overflow="fold")  # alone it gives way: a reason or a number is never cut
    tables.add_column("role", no_wrap=True)
    for heading in ("rows", "columns", "dtype", "size"):
        tables.add_column(heading, justify="right", no_wrap=True)
    tables.add_column("may leave", no_wrap=True)
    for table in filter(lambda table: table.name, report.verdict.tables):
        tables.add_row(
            printable(table.name),
            table.role,
            "?" if table.rows is None else str(table.rows),
            "?" if table.columns is None else str(table.columns),
            printable(table.dtype),
            format_size(table.nbytes),
            Text("yes", "green") if table.eligible else Text(f"no: {table.reason}", "red"),
        )
    return tables


def _gain_words(report: Report) -> str:
    gain = report.gain
    if not gain.vram_bytes:
        return "leaving the GPU frees nothing"
    slots = tokens = None
    if gain.expert_slots is not None and gain.expert_slot_bytes is not None:
        slots = f"{gain.expert_slots} expert slots of {format_size(gain.expert_slot_bytes)}"
    if gain.kv_tokens is not None and gain.kv_bytes_per_token is not None:
        tokens = f"{gain.kv_tokens} KV tokens of {format_size(gain.kv_bytes_per_token)}"
    return f"leaving the GPU frees {format_size(gain.vram_bytes)} of VRAM{_room_words(slots, tokens)}"
