"""The journal of a partial conversion: what is left of it in its staging folder, and how the next one resumes it.

    freetoken-00000.ftw …    shards, as far as they got
    .ftw-journal             lines of ASCII, each of which counts once it has ended:
        plan <32 hex digits>     digest of what was to be written, and out of which state of which files
        <16 hex digits>          checksum of the region's first tensor, written when all its bytes were
        <16 hex digits>          of the second, and so on

The journal alone proves nothing, since nothing orders its writes against the shards' when the power fails. So the first
tensors count whose bytes, read back, have the checksums that it says; the rest is written anew. SHA-256s that the index
is to have are taken anew of what is read back.
"""

from __future__ import annotations

import os
import re
import shutil
from itertools import takewhile
from typing import TYPE_CHECKING

from ftw.conversion.writing.checksums import TensorHasher
from ftw.conversion.writing.shard_plan import iter_write_chunks
from ftw.errors import OutputError
from ftw.files import WeightFile
from ftw.host import HostMemory, open_descriptor, write_atomically
from ftw.readers import ALIGNMENT, JOURNAL_NAME
from ftw.sizes import align_up

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ftw.conversion.writing.checksums import Checksums
    from ftw.conversion.writing.shard_plan import Chunk, ShardPlan

_CHUNK_NBYTES = 16 << 20
_PLAN = b"plan "
_CHECKSUM = re.compile(rb"[0-9a-f]{16}\n")


class NotResumableError(OutputError):
    """The partial conversion belongs to another source or other options. It cannot be resumed."""


class Journal:
    """The journal of a staging folder. Use it as a context manager, which closes it and leaves it where it is."""

    def __init__(self, folder: Path, digest: str, checksums: Sequence[Checksums] = ()) -> None:
        """Begin a journal, of a conversion that resumes after the tensors of these checksums."""
        self._path = folder / JOURNAL_NAME
        write_atomically(self._path, [_first_line(digest), _lines(checksums)])  # or a kill here would lose it all
        self._descriptor = open_descriptor(self._path, os.O_WRONLY | os.O_APPEND)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def record(self, checksums: Sequence[Checksums]) -> None:
        """Note the checksums of the tensors that have been written next.

        Raises:
            OSError: The disk is full or fails; it names the journal.
        """
        text = _lines(checksums)
        try:
            while text:
                text = text[os.write(self._descriptor, text) :]
        except OSError as error:
            error.filename = str(self._path)
            raise


def remove_journal(folder: Path) -> None:
    """Remove the journal from a folder that is complete and has its name."""
    (folder / JOURNAL_NAME).unlink(missing_ok=True)


def is_resumable(folder: Path) -> bool:
    """Tell whether a folder holds at least one tensor that a conversion can resume after."""
    path = folder / JOURNAL_NAME
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.readline(256).startswith(_PLAN) and _CHECKSUM.fullmatch(file.readline(256)) is not None


def is_journal_of(folder: Path, digest: str) -> bool:
    """Tell whether a folder's journal is that of a plan with this digest."""
    with (folder / JOURNAL_NAME).open("rb") as file:
        return file.readline(256) == _first_line(digest)


def read_journal(folder: Path, shard_plan: ShardPlan) -> list[str]:
    """Return the checksums that a folder's journal, one of this very plan, has of the first tensors."""
    most = 256 + 17 * len(shard_plan.tensors)  # bytes of a journal with a line for each tensor
    with (folder / JOURNAL_NAME).open("rb") as file:
        lines = file.read(most).splitlines(keepends=True)[1:]
    return [line[:-1].decode() for line in takewhile(_CHECKSUM.fullmatch, lines)][: len(shard_plan.tensors)]


def keep_tensors(
    folder: Path, shard_plan: ShardPlan, wanted: list[str], progress: Callable[[int], None]
) -> list[Checksums]:
    """Remove all from a folder but the shards' bytes of tensors that are right; return the checksums of those.

    Args:
        folder: A staging folder.
        shard_plan: What was to be written.
        wanted: The checksums that its journal has of the first tensors.
        progress: Called with the bytes of tensors that have been found right.
    """
    kept = _check_tensors(folder, shard_plan, wanted, progress) if wanted else []
    end = shard_plan.start_of(len(kept))
    shards = [shard for shard in shard_plan.shards if shard.offset < end]
    _clear_folder(folder, but={JOURNAL_NAME, *(shard.name for shard in shards)} if kept else set())
    for shard in shards:
        _cut(folder / shard.name, min(shard.nbytes, end - shard.offset))
    return kept


def _first_line(digest: str) -> bytes:
    return _PLAN + digest.encode() + b"\n"


def _lines(checksums: Sequence[Checksums]) -> bytes:
    return b"".join(b"%s\n" % found.xxh3_64.encode() for found in checksums)


def _check_tensors(
    folder: Path, shard_plan: ShardPlan, wanted: list[str], progress: Callable[[int], None]
) -> list[Checksums]:
    """Read tensors back, in order; return the checksums of those before the first that is not what was `wanted`."""
    right: list[Checksums] = []
    hasher = TensorHasher(shard_plan)
    memory = HostMemory(_CHUNK_NBYTES)
    for chunk in iter_write_chunks(shard_plan, _CHUNK_NBYTES):
        view = memory.view()[: chunk.nbytes]
        held = _read_chunk(folder / shard_plan.shards[chunk.shard].name, chunk, view) if chunk.nbytes else 0
        for part in chunk.parts:
            end = part.start + part.nbytes
            padded = align_up(end, ALIGNMENT)
            hasher.update(part.tensor, view[part.start : end])
            if padded > held or len(right) == len(wanted):
                return right
            if part.is_last:
                found = hasher.end(part.tensor)
                if found.xxh3_64 != wanted[len(right)] or found.find_difference(part.tensor) or any(view[end:padded]):
                    return right
                right.append(found)
                progress(part.tensor.nbytes)
    return right


def _read_chunk(path: Path, chunk: Chunk, view: memoryview) -> int:
    """Fill a view with as much of a chunk as its shard holds; return how much that is."""
    if path.is_symlink() or not path.is_file():
        return 0
    file = WeightFile(path)
    held = max(0, min(chunk.nbytes, file.nbytes - chunk.offset))
    file.read_into(chunk.offset, view[:held])
    return held


def _clear_folder(folder: Path, *, but: set[str]) -> None:
    """Remove what a folder holds, less some names; links are removed, not followed."""
    for path in folder.iterdir():
        if path.name in but:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _cut(path: Path, nbytes: int) -> None:
    """Drop what a shard holds beyond its first bytes, and make those last."""
    descriptor = open_descriptor(path, os.O_WRONLY)
    try:
        if os.fstat(descriptor).st_size > nbytes:
            os.ftruncate(descriptor, nbytes)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
