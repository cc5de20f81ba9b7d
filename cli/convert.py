"""`ftw convert`: a checkpoint to an FTW folder."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import ftw
from ftw.checkpoint import MOVED_ROLES, TOKEN_EMBEDDING
from ftw.errors import in_command_words
from ftw.layouts import Layout
from ftw.readers import ALIGNMENT
from ftw.sizes import count_of, format_size
from ftw.verdict import Embed

from .exit_codes import DONE, FAILED
from .links import FollowLinksOption
from .output import QuietOption, describe_failure, print_error, print_json, print_line, print_warning
from .progress import ProgressOption, show_progress
from .sizes import parse_size_option

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftw.conversion import ConversionResult
    from ftw.readers import LeftOut


def _parse_shard_size(text: str) -> int:
    nbytes = parse_size_option(text)
    if nbytes < ALIGNMENT or nbytes % ALIGNMENT:
        raise typer.BadParameter(f"'{text}' is {format_size(nbytes)}, a positive multiple of {ALIGNMENT} B is needed")
    return nbytes


def convert_command(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Folder, weight file, or hub id.")],
    target: Annotated[str, typer.Argument(metavar="DST", help="Folder to make.")],
    embed: Annotated[
        Embed,
        typer.Option(
            "--embed",
            help="host: place tables for host memory, fail if not possible; auto: if possible; gpu: never.",
        ),
    ] = "gpu",
    shard_size: Annotated[
        int,
        typer.Option(
            "--shard-size",
            metavar="SIZE",
            parser=_parse_shard_size,
            help="Most bytes of one shard, in binary units (1MB is 1MiB).",
        ),
    ] = "8GiB",  # type: ignore[assignment]
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing FTW folder.")] = False,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Check and keep what an interrupted conversion has written."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan, write nothing.")] = False,
    decode_df11: Annotated[
        bool, typer.Option("--decode-df11", help="Decode lookup tables that are stored as DF11 to bfloat16.")
    ] = False,
    layout: Annotated[
        Layout,
        typer.Option("--layout", help="plain: the source's tensors; freetoken: as FreeToken's server needs them."),
    ] = "plain",
    sha256: Annotated[
        bool, typer.Option("--sha256", help="Record the SHA-256 of each tensor, too, which nobody can forge.")
    ] = False,
    follow_links: FollowLinksOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    progress: ProgressOption = "bar",
    quiet: QuietOption = False,
) -> int:
    """Convert a checkpoint to FTW; every tensor gets a checksum, and in the plain layout no byte changes."""
    with show_progress("convert", "none" if quiet and progress == "bar" else progress) as update:
        result = ftw.convert(
            source,
            target,
            embed=embed,
            shard_limit=shard_size,
            overwrite=overwrite,
            resume=resume,
            dry_run=dry_run,
            decode_df11=decode_df11,
            layout=layout,
            sha256=sha256,
            follow_links=follow_links,
            progress=update,
        )
    for warning in result.plan.warnings:
        print_warning(f"{source}: {warning}")
    problem = _room_problem(result)
    if as_json:
        print_json({**result.to_dict(), **(describe_failure(problem) if problem else {})})
    elif not quiet:
        _print_result(result, embed)
    if problem:
        print_error(problem)
        return FAILED
    return DONE


def _room_problem(result: ConversionResult) -> str:
    """Return why the real run would find no room, "" if it would."""
    if not result.dry_run or result.needed_nbytes <= result.free_nbytes:
        return ""
    from ftw.conversion import no_room

    return no_room(Path(result.target), result.needed_nbytes, result.free_nbytes)


def _print_result(result: ConversionResult, embed: str) -> None:
    plan = result.plan
    size = format_size(plan.shard_plan.total_bytes)
    tensors = count_of(len(plan.shard_plan.tensors), "tensor")
    shards = count_of(len(plan.shard_plan.shards), "shard")
    done, found = ("would write", "would be checked") if result.dry_run else ("wrote", "found right")
    if result.was_complete:
        done = "target exists; --resume would compare it with the source:" if result.dry_run else "complete already:"
    print_line(f"{done} {result.target}: {tensors}, {size} in {shards}")
    if result.resumed_nbytes and not result.was_complete:
        print_line(f"of an earlier conversion: {format_size(result.resumed_nbytes)}, {found}")
    for table in plan.tables:
        if plan.is_on_host(table):
            print_line(f"placed for host memory: {table.name}, {format_size(table.nbytes)}")
        elif embed != "gpu" and table.role in MOVED_ROLES:
            what = f"stays on the GPU: {table.name}" if table.name else "token embedding: none"
            why = plan.placement.reason if table.role == TOKEN_EMBEDDING else table.detail
            print_line(in_command_words(f"{what} ({why})"))
    for name, parts in plan.decoded.items():
        print_line(f"decoded: {name}, from {len(parts)} DF11 tensors")
    if result.dry_run:
        print_line(f"needs {format_size(result.needed_nbytes)}, {format_size(result.free_nbytes)} free on its disk")
        for shard in plan.shard_plan.shards:
            print_line(f"shard: {shard.name}, {format_size(shard.nbytes)}")
    print_line(f"beside the weights: {', '.join(plan.metadata_names) or 'nothing'}")
    for line in _left_out_lines(plan.left_out):
        print_line(line)


def _left_out_lines(left_out: tuple[LeftOut, ...]) -> Iterator[str]:
    """Yield a line for each entry, but one for all tensors of a reason, which can be thousands."""
    tensors = Counter(entry.reason for entry in left_out if entry.kind == "tensor")
    for entry in left_out:
        count = tensors.pop(entry.reason, 0) if entry.kind == "tensor" else 1
        if count:
            more = f" and {count_of(count - 1, 'other tensor')}" if count > 1 else ""
            yield f"left out: {entry.name}{more} ({entry.reason})"
