"""What `ftw inspect` prints for people: the answer and what to do next, then the facts that it rests on."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from ftw.checkpoint import MOVED_ROLES
from ftw.errors import in_command_words, printable
from ftw.sizes import count_of, format_size
from ftw.verdict import explain

from .output import make_console, print_command, print_line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ftw.verdict import Budget, BudgetSide, Report, TableVerdict

_TARGET = "TARGET"  # of a command that is shown, to be replaced by a folder to make
# What a reason of the verdict lets one do, if its detail does not say it.
_WAYS_OUT = {
    "tied": "leave the table on the GPU, where the LM head needs it",
    "tie_conflict": "find out which is right, and mend tie_word_embeddings or the file",
    "unsupported_encoding": "quantise the model without its embedding, or leave the table on the GPU",
}


def print_report(report: Report) -> None:
    """Print a report: first whether the table may leave the GPU, what that gains and what to type."""
    _print_answer(report)
    print()
    architecture = report.config.architecture or "unknown architecture"
    print_line(f"{report.format}, {architecture}")
    dtypes = ", ".join(f"{dtype} {format_size(nbytes)}" for dtype, nbytes in report.dtypes.items())
    print_line(f"{count_of(report.num_tensors, 'tensor')}, {format_size(report.nbytes)}{': ' * bool(dtypes)}{dtypes}")
    if report.ftw is not None:
        _print_ftw(report)
    if report.verdict.tie_evidence:
        print_line(f"LM head: {_tie_words(report)}")
    if any(table.name for table in report.verdict.tables):
        _print_tables(report)
    if report.budget is not None:
        _print_budget(report.budget)
    for entry in report.left_out:
        print_line(f"left out: {entry.name} ({entry.reason})")


def _print_answer(report: Report) -> None:
    table, moved = report.verdict.token_embedding, _moved(report)
    why = in_command_words(explain(report.verdict, table))
    if report.not_a_model is not None:
        print_line(f"{report.source}: no: {in_command_words(report.not_a_model.text)}")
    elif table.eligible:
        print_line(f"{report.source}: yes, {table.name} can leave the GPU: {why}")
    elif table.reason == "no_table":
        print_line(f"{report.source}: no lookup table found: {why}")
    else:
        print_line(f"{report.source}: no, {table.name} must stay on the GPU: {why}")
    if moved and not table.eligible:
        print_line(f"other tables can leave the GPU: {', '.join(other.name for other in moved)}")
    if moved:
        print_line(_gain_words(report))
    elif table.eligible:
        print_line("leaving the GPU frees nothing")
    _print_next(report, "host" if table.eligible else "auto" if moved else "")


def _print_next(report: Report, embed: str) -> None:
    """Print what to type to have the tables in host memory, or what else can be done."""
    source = shlex.quote(printable(report.source))
    if report.not_a_model is not None:
        return
    if embed:
        print_command("to use it in Python", f"ftw.load({report.source!r}, embed={embed!r})")
        if report.format != "ftw":
            print_command("to convert it first, if you like", f"ftw convert {source} {_TARGET} --embed {embed}")
    elif way_out := _WAYS_OUT.get(report.verdict.token_embedding.reason):
        print_line(f"what to do: {way_out}")


def _moved(report: Report) -> list[TableVerdict]:
    return [table for table in report.verdict.eligible_tables if table.role in MOVED_ROLES]


def _print_ftw(report: Report) -> None:
    facts = report.ftw
    if facts is None:
        return
    print_line(f"written by {facts.producer or 'a program that does not say its name'}, layout {facts.layout}")
    total = count_of(report.num_tensors, "tensor")
    sha256 = f", {facts.num_sha256} a SHA-256" if facts.num_sha256 else ""
    print_line(f"checksums: {facts.num_checksums} of {total} have one{sha256}")
    print_line(f"placed for host memory: {', '.join(facts.host_tensors) or 'nothing'}")
    obstacle = report.freetoken_obstacle
    print_line(f"FreeToken 0.2.1: {'serves it' if obstacle is None else f'does not serve it: {obstacle}'}")


def _print_tables(report: Report) -> None:
    tables = [table for table in report.verdict.tables if table.name]
    console, grid = make_console(), _grid(tables)
    if _fits(console, grid):
        console.print(grid)
    else:
        for table in tables:
            _print_table_as_lines(table)
    for table in tables:
        print_line(in_command_words(f"{table.name}: {table.reason}, {table.detail}"))


def _fits(console: Console, grid: Table) -> bool:
    """Tell whether a table finds room without a cell that is cut or folded."""
    from rich.measure import Measurement

    endless = console.options.update(max_width=1 << 16)
    return Measurement.get(console, endless, grid).maximum <= console.width


def _print_table_as_lines(table: TableVerdict) -> None:
    print()
    print_line(table.name)
    for words in (table.role, f"{_shown(table.rows)} rows", f"{_shown(table.columns)} columns", table.dtype):
        print_line(f"  {words}")
    print_line(f"  {format_size(table.nbytes)}")
    print_line(f"  may leave: {_may_leave(table)}")


def _shown(count: int | None) -> str:
    return "?" if count is None else str(count)


def _may_leave(table: TableVerdict) -> str:
    return "yes" if table.eligible else f"no: {table.reason}"


def _grid(found: list[TableVerdict]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    tables = Table(box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    tables.add_column("lookup table", no_wrap=True)
    tables.add_column("role", no_wrap=True)
    for heading in ("rows", "columns", "dtype", "size"):
        tables.add_column(heading, justify="right", no_wrap=True)
    tables.add_column("may leave", no_wrap=True)
    for table in found:
        tables.add_row(
            printable(table.name),
            table.role,
            _shown(table.rows),
            _shown(table.columns),
            printable(table.dtype),
            format_size(table.nbytes),
            Text(_may_leave(table), "green" if table.eligible else "red"),
        )
    return tables


def _print_budget(budget: Budget) -> None:
    print_line(f"of {format_size(budget.vram_bytes)} of VRAM")
    print_line(
        f"  {format_size(budget.reserved_bytes)} is kept for the CUDA context, activations and others (--reserve)"
    )
    experts = f", {format_size(budget.expert_bytes)} of routed experts left out" if budget.expert_bytes else ""
    print_line(f"  weights take {format_size(budget.weights_bytes)}{experts}")
    if not budget.before.table_bytes:
        print_line(f"  left: {_side_words(budget, budget.before)}")
        return
    print_line(f"  tables on the GPU: {_side_words(budget, budget.before)}")
    print_line(f"  tables in host memory: {_side_words(budget, budget.after)}")


def _side_words(budget: Budget, side: BudgetSide) -> str:
    if side.left_bytes < 0:
        what = "weights and tables" if side.table_bytes else "weights"
        return f"{format_size(-side.left_bytes)} too little for {what}"
    experts = None if side.expert_slots is None else count_of(side.expert_slots, "expert")
    if side.expert_slots and side.expert_slots == budget.num_experts:
        experts = f"all {count_of(budget.num_experts, 'expert')} ({format_size(budget.expert_bytes)})"
    tokens = None if side.kv_tokens is None else count_of(side.kv_tokens, "KV token")
    return f"{format_size(side.left_bytes)} left{_room_words(experts, tokens)}"


def _room_words(*things: str | None) -> str:
    """Say what there is room for, the one or the other; nothing if the checkpoint does not tell."""
    known = [thing for thing in things if thing is not None]
    return f": room for {', or '.join(known)}" if known else ""


def _tie_words(report: Report) -> str:
    words = {True: "tied to the token embedding", False: "not tied", None: "not known to be tied or not"}
    is_conflict = any(table.reason == "tie_conflict" for table in report.verdict.tables)
    return f"{'conflict' if is_conflict else words[report.verdict.tied]} ({', '.join(report.verdict.tie_evidence)})"


def _gain_words(report: Report) -> str:
    gain = report.gain
    slots = tokens = None
    if gain.expert_slots is not None and gain.expert_slot_bytes is not None:
        slots = f"{count_of(gain.expert_slots, 'expert slot')} of {format_size(gain.expert_slot_bytes)}"
        if report.experts.number is not None and gain.expert_slots >= report.experts.number:
            slots = f"all {count_of(report.experts.number, 'expert')} ({format_size(report.experts.nbytes)})"
    if gain.kv_tokens is not None and gain.kv_bytes_per_token is not None:
        tokens = f"{count_of(gain.kv_tokens, 'KV token')} of {format_size(gain.kv_bytes_per_token)}"
    return f"leaving the GPU frees {format_size(gain.vram_bytes)} of VRAM{_room_words(slots, tokens)}"
