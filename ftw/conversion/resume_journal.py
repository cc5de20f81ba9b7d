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

import contextlib
import os
import re
import stat
from itertools import takewhile
from typing import TYPE_CHECKING

from ftw.conversion.writing.checksums import TensorHasher
from ftw.conversion.writing.shard_plan import iter_write_chunks
from ftw.errors import OutputError
from ftw.host import DIRECT_REFUSALS, HostMemory, end_direct, read_at
from ftw.readers import ALIGNMENT, JOURNAL_NAME, OWN_NAMES
from ftw.sizes import align_up

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from typing import BinaryIO

    from ftw.conversion.writing.checksums import Checksums
    from ftw.conversion.writing.shard_plan import Chunk, ShardPlan
    from ftw.host import OpenFolder

_CHUNK_NBYTES = 16 << 20
_PLAN = b"plan "
_CHECKSUM = re.compile(rb"[0-9a-f]{16}\n")


class NotResumableError(OutputError):
    """The partial conversion belongs to another source or other options. It cannot be resumed."""


class Journal:
    """The journal of a staging folder. Use it as a context manager, which closes it and leaves it where it is."""

    def __init__(self, folder: OpenFolder, digest: str, checksums: Sequence[Checksums] = ()) -> None:
        """Begin a journal, of a conversion that resumes after the tensors of these checksums."""
        self._path = folder.path / JOURNAL_NAME
        folder.write(JOURNAL_NAME, [_first_line(digest), _lines(checksums)])  # or a kill here would lose it all
        self._descriptor = folder.open(JOURNAL_NAME, os.O_WRONLY | os.O_APPEND)

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


def remove_journal(folder: OpenFolder) -> None:
    """Remove the journal from a folder that is complete and has its name."""
    with contextlib.suppress(FileNotFoundError):
        folder.remove_file(JOURNAL_NAME)


def is_resumable(folder: OpenFolder) -> bool:
    """Tell whether a folder holds at least one tensor that a conversion can resume after."""
    if not _is_file(folder, JOURNAL_NAME):
        return False
    with _open_journal(folder) as file:
        return file.readline(256).startswith(_PLAN) and _CHECKSUM.fullmatch(file.readline(256)) is not None


def is_journal_of(folder: OpenFolder, digest: str) -> bool:
    """Tell whether a folder's journal is that of a plan with this digest."""
    with _open_journal(folder) as file:
        return file.readline(256) == _first_line(digest)


def read_journal(folder: OpenFolder, shard_plan: ShardPlan) -> list[str]:
    """Return the checksums that a folder's journal, one of this very plan, has of the first tensors."""
    most = 256 + 17 * len(shard_plan.tensors)  # bytes of a journal with a line for each tensor
    with _open_journal(folder) as file:
        lines = file.read(most).splitlines(keepends=True)[1:]
    return [line[:-1].decode() for line in takewhile(_CHECKSUM.fullmatch, lines)][: len(shard_plan.tensors)]


def keep_tensors(
    folder: OpenFolder, shard_plan: ShardPlan, wanted: list[str], progress: Callable[[int], None]
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
    clear_folder(folder, but={JOURNAL_NAME, *(shard.name for shard in shards)} if kept else ())
    for shard in shards:
        _cut(folder, shard.name, min(shard.nbytes, end - shard.offset))
    return kept


def clear_folder(folder: OpenFolder, *, but: Collection[str] = ()) -> None:
    """Remove what a folder holds, less some names; links are removed, not followed.

    The names of a conversion's own come last: by them the next one knows what a killed one has left.
    """
    for name in sorted(folder.names(), key=lambda name: OWN_NAMES.fullmatch(name) is not None):
        if name not in but:
            folder.remove(name)


def _first_line(digest: str) -> bytes:
    return _PLAN + digest.encode() + b"\n"


def _lines(checksums: Sequence[Checksums]) -> bytes:
    return b"".join(b"%s\n" % found.xxh3_64.encode() for found in checksums)


def _is_file(folder: OpenFolder, name: str) -> bool:
    """Tell whether a folder holds a regular file of this name."""
    try:
        return stat.S_ISREG(folder.status_of(name).st_mode)
    except FileNotFoundError:
        return False


def _open_journal(folder: OpenFolder) -> BinaryIO:
    return os.fdopen(folder.open(JOURNAL_NAME, os.O_RDONLY), "rb")


def _check_tensors(
    folder: OpenFolder, shard_plan: ShardPlan, wanted: list[str], progress: Callable[[int], None]
) -> list[Checksums]:
    """Read tensors back, in order; return the checksums of those before the first that is not what was `wanted`."""
    right: list[Checksums] = []
    hasher = TensorHasher(shard_plan)
    memory = HostMemory(_CHUNK_NBYTES)
    for chunk in iter_write_chunks(shard_plan, _CHUNK_NBYTES):
        view = memory.view()[: chunk.nbytes]
        held = _read_chunk(folder, shard_plan.shards[chunk.shard].name, chunk, view) if chunk.nbytes else 0
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


def _read_chunk(folder: OpenFolder, name: str, chunk: Chunk, view: memoryview) -> int:
    """Fill a view with as much of a chunk as its shard holds; return how much that is."""
    if not _is_file(folder, name):
        return 0
    descriptor = folder.open_direct(name, os.O_RDONLY)
    if descriptor is None:
        descriptor = folder.open(name, os.O_RDONLY)
    try:
        done = 0
        while done < len(view):
            count = _read_once(descriptor, view[done:], chunk.offset + done)
            if not count:
                break
            done += count
    except OSError as error:
        error.filename = str(folder.path / name)
        raise
    else:
        return done
    finally:
        os.close(descriptor)


def _read_once(descriptor: int, view: memoryview, offset: int) -> int:
    """Read some bytes, around the page cache as long as the file system takes that: blocks that are whole."""
    try:
        return read_at(descriptor, view, offset)
    except OSError as error:
        if error.errno not in DIRECT_REFUSALS or not end_direct(descriptor):
            raise
    return read_at(descriptor, view, offset)


def _cut(folder: OpenFolder, name: str, nbytes: int) -> None:
    """Drop what a shard holds beyond its first bytes, and make those last."""
    descriptor = folder.open(name, os.O_WRONLY)
    try:
        if os.fstat(descriptor).st_size > nbytes:
            os.ftruncate(descriptor, nbytes)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
