"""Conversion to FTW: bytes move unchanged, a checksum is taken on the way, and the folder appears when it is complete.

A conversion that fails or is killed leaves the target as it was (`ftw.conversion.publication`). The next one can resume
what was written (`ftw.conversion.resume_journal`). Memory is five buffers of 16 MiB, and the headers.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ftw.checkpoint import open_checkpoint
from ftw.conversion import metadata_files
from ftw.conversion.permissions import find_permissions
from ftw.conversion.plan import needed_nbytes, plan_conversion
from ftw.conversion.publication import publish, restore_target
from ftw.conversion.result import ConversionResult
from ftw.conversion.resume_journal import Journal, keep_tensors, remove_journal
from ftw.conversion.staging import StagingFolder
from ftw.conversion.target import (
    check_disk,
    check_free_space,
    check_target,
    find_standing,
    named_as_typed,
    parent_folders,
    resolve_target,
)
from ftw.conversion.target_state import read_target_state
from ftw.conversion.verification import verify
from ftw.conversion.writing.chunk_reader import ChunkReader
from ftw.conversion.writing.shard_plan import DEFAULT_SHARD_LIMIT
from ftw.conversion.writing.writer import FtwWriter
from ftw.errors import FtwError, printable
from ftw.readers import ALIGNMENT

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ftw.checkpoint import Checkpoint
    from ftw.conversion.plan import ConversionPlan
    from ftw.conversion.writing.checksums import Checksums
    from ftw.host import OpenFolder
    from ftw.layouts import SideFile

_SIDE_STEP_NBYTES = 4 << 20


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    embed: str = "gpu",
    shard_limit: int = DEFAULT_SHARD_LIMIT,
    overwrite: bool = False,
    resume: bool = False,
    dry_run: bool = False,
    decode_df11: bool = False,
    layout: str = "plain",
    sha256: bool = False,
    follow_links: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ConversionResult:
    """Convert a checkpoint to an FTW folder.

    Args:
        source: A path or a hub id.
        target: The folder to make.
        embed: "host" places lookup tables for host memory, "auto" does so if it is allowed, "gpu" does not.
        shard_limit: The most bytes of one shard, a multiple of 4096.
        overwrite: Replace an existing FTW folder; it stays as it is until the new one is complete.
        resume: Keep the tensors that an interrupted conversion has written, if they are right. If the target exists,
            compare it with the source, and do nothing if it is what this conversion would make.
        dry_run: Plan and check, write nothing. What `resume` would read back or compare is taken to be right. The
            result says whether the disk has room.
        decode_df11: Decode lookup tables that are stored as DF11 to bfloat16.
        layout: "plain" keeps the tensors of the source; "freetoken" fuses, renames and gathers them as FreeToken's
            server needs them.
        sha256: Record the SHA-256 of each tensor, too, which nobody can forge. What an FTW as the source records is
            checked and kept, with this or without it. It takes a core 0.6 s for each GB, or more.
        follow_links: Follow links that lead out of the source's folder, as `open_checkpoint` does; what they lead to is
            copied, too.
        progress: Called with the bytes done and all bytes, after each chunk of at most 16 MiB.

    Raises:
        NotEligibleError: `embed` is "host" and the token embedding may not leave the GPU.
        CheckpointError: The source is broken, or has changed meanwhile.
        OutputError: The target exists, is a mount point, lies in the source, is being written already, or would not
            fit on its disk; or, with `resume`, another conversion has left what is there.
        OSError: The disk fails. What was written by then is kept for `resume`.
        ValueError: `embed`, `layout` or `shard_limit` is not allowed.
    """
    destination = resolve_target(target)
    if not isinstance(shard_limit, int) or shard_limit < ALIGNMENT or shard_limit % ALIGNMENT:
        raise ValueError(f"shard_limit is {shard_limit}, a positive multiple of {ALIGNMENT} is needed")
    opened = open_checkpoint(source, decode_df11=decode_df11, follow_links=follow_links)
    with named_as_typed(destination, target), opened as checkpoint:
        plan = plan_conversion(checkpoint, embed, shard_limit, layout, sha256=sha256)
        result = partial(ConversionResult, str(source), str(target), checkpoint.format, plan, dry_run=dry_run)
        may_write = partial(check_target, destination, checkpoint, overwrite=overwrite)
        staging = StagingFolder(destination)
        state = read_target_state(staging, plan, checkpoint, resume=resume)
        difference = state.difference
        if state.is_put_aside and state.stranger is None and not dry_run:
            restore_target(staging)
        if state.is_complete:
            difference = None if dry_run else _content_difference(destination, checkpoint, progress)
            if difference is None:
                if not dry_run:
                    staging.clear()
                return result(0, state.free_nbytes, plan.shard_plan.nbytes, was_complete=True)
        may_write(state.standing, stranger=state.stranger, difference=difference)
        check_disk(destination, max((shard.nbytes for shard in plan.shard_plan.shards), default=0))
        needed = needed_nbytes(plan, checkpoint.folder)
        if dry_run:
            # A journal may be ahead of the shards.
            kept = min(state.held_nbytes, plan.shard_plan.start_of(state.num_begun))
            free = state.free_nbytes + state.held_nbytes - kept
            return result(needed - kept, free, plan.shard_plan.nbytes_before(state.num_begun))
        beside = sum(file.nbytes for file in plan.arrangement.side_files)
        report = _Progress(plan.shard_plan.nbytes + beside, progress)
        with parent_folders(destination), staging.in_use() as folder:
            begun = staging.read_journal(folder, plan) if resume else []  # once more: now nobody else writes it
            checksums = keep_tensors(folder, plan.shard_plan, begun, report)
            resumed = report.done
            needed -= plan.shard_plan.start_of(len(checksums))
            check_free_space(destination, needed)
            permissions = find_permissions(checkpoint, folder)
            with Journal(folder, plan.digest, checksums) as journal:
                _write(checkpoint, plan, folder, checksums, journal, report)
            may_write(find_standing(destination))  # once more: writing may have taken an hour
            publish(staging, folder, permissions)
            remove_journal(folder)  # only now: what cannot be published can still be resumed
    return result(needed, state.free_nbytes, resumed)


class _Progress:
    """Adds up the bytes of steps for a function that takes the bytes done and all bytes."""

    def __init__(self, total: int, tell: Callable[[int, int], None] | None) -> None:
        self.done = 0
        self._total = total
        self._tell = tell

    def __call__(self, nbytes: int) -> None:
        self.done += nbytes
        if self._tell:
            self._tell(self.done, self._total)


def _content_difference(
    target: Path, checkpoint: Checkpoint, progress: Callable[[int, int], None] | None
) -> str | None:
    """Return what is wrong with the bytes of the target, as they are now; None if every one is right."""
    try:
        problem = next(iter(verify(target, against=checkpoint, progress=progress).problems), None)
    except FtwError as error:
        problem = str(error)
    return None if problem is None else problem.removeprefix(f"{printable(str(target))}: ")


def _iter_side_file(file: SideFile, progress: Callable[[int], None]) -> Iterator[bytes]:
    """Yield the bytes of a file, 4 MiB at a time."""
    for offset in range(0, file.nbytes, _SIDE_STEP_NBYTES):
        piece = bytearray(min(_SIDE_STEP_NBYTES, file.nbytes - offset))
        file.read_into(piece, offset=offset)
        yield bytes(piece)
        progress(len(piece))


def _write(
    checkpoint: Checkpoint,
    plan: ConversionPlan,
    staging: OpenFolder,
    checksums: list[Checksums],
    journal: Journal,
    progress: Callable[[int], None],
) -> None:
    metadata_files.copy(plan.metadata_files, metadata_files.roots_of(checkpoint), staging)
    for file in plan.derived_files:
        staging.write(file.name, file.read())
    for side_file in plan.arrangement.side_files:
        staging.write(side_file.name, _iter_side_file(side_file, progress))
    name = checkpoint.source
    with FtwWriter(staging, plan.shard_plan, source=name, checksums=checksums, record=journal.record) as writer:
        writer.write(ChunkReader(plan.arrangement).read, progress)
        writer.finish(plan.index_extra)
