"""`ftw convert`: a checkpoint to an FTW folder."""

from __future__ import annotations

from typing import Annotated

import typer

from ftw.convert import ConversionResult, convert
from ftw.placement import Embed
from ftw.readers.ftw import ALIGNMENT
from ftw.sizes import format_size, parse_size

from .output import print_json, print_line, print_warning, progress_bar


def _parse_shard_size(text: str) -> int:
    try:
        nbytes = parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if nbytes < ALIGNMENT or nbytes % ALIGNMENT:
        raise typer.BadParameter(f"'{text}' is {nbytes} bytes, a positive multiple of {ALIGNMENT} is needed")
    return nbytes


def convert_command(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Folder, weight file, or hub id.")],
    target: Annotated[str, typer.Argument(metavar="DST", help="Folder to make.")],
    embed: Annotated[
        Embed,
        typer.Option(
            "--embed",
            help="host: lookup tables are laid out for host memory, or refused; auto: where allowed; gpu: not.",
        ),
    ] = "gpu",
    shard_size: Annotated[
        int, typer.Option("--shard-size", metavar="SIZE", parser=_parse_shard_size, help="Most bytes of one shard.")
    ] = "8GiB",  # type: ignore[assignment]
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing FTW folder.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan, write nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Convert a checkpoint to FTW; bytes move unchanged, and every tensor gets a checksum."""
    with progress_bar("convert") as progress:
        result = convert(
            source,
            target,
            embed=embed,
            shard_limit=shard_size,
            overwrite=overwrite,
            dry_run=dry_run,
            progress=progress,
        )
    if embed == "auto" and result.plan.placement.placement == "gpu":
        print_warning(f"{source}: the token embedding stays on the GPU: {result.plan.placement.reason}")
    if as_json:
        print_json(result.to_dict())
    else:
        _print_result(result, dry_run)


def _print_result(result: ConversionResult, dry_run: bool) -> None:
    plan = result.plan
    verb = "would write" if dry_run else "wrote"
    size = format_size(plan.layout.total_bytes)
    tensors, shards = len(plan.layout.tensors), len(plan.layout.shards)
    print_line(f"{verb} {result.target}: {tensors} tensors, {size} in {shards} shard{'s' * (shards != 1)}")
    for table in plan.placement.host_tables:
        print_line(f"laid out for host memory: {table.name}, {format_size(table.nbytes)}")
    print_line(f"beside the weights: {', '.join(plan.metadata_names) or 'nothing'}")
    for name, reason in plan.left_out:
        print_line(f"left out: {name} ({reason})")
