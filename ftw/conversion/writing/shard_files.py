"""ShardFiles: the shards of an FTW while they are written, one after another, around the page cache."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

from ftw.host import end_direct, write_at

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftw.conversion.writing.shard_plan import Chunk, ShardPlan
    from ftw.host import OpenFolder


class ShardFiles:
    """The shards of a plan, in a folder; used by one thread."""

    def __init__(self, folder: OpenFolder, shard_plan: ShardPlan) -> None:
        self._folder = folder
        self._shard_plan = shard_plan
        self._shard = -1
        self._descriptor = -1

    def write(self, chunk: Chunk, view: memoryview) -> None:
        """Write a chunk. Chunks come in order; the first may resume a shard that an earlier process began.

        Raises:
            OSError: The disk is full or fails; it names the shard.
        """
        if not chunk.nbytes:
            return
        if chunk.shard != self._shard:
            self.end_shard()
            self._shard = chunk.shard
            with self._named_errors():
                self._descriptor = _open(self._folder, self._name, chunk.offset)
        with self._named_errors():
            _write_all(self._descriptor, view, chunk.offset)

    def end_shard(self) -> None:
        """Make the current shard last, and close it."""
        if self._descriptor >= 0:
            with self._named_errors():
                os.fsync(self._descriptor)
            self.close()

    def close(self) -> None:
        """Close the current shard as it is."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)

    @property
    def _name(self) -> str:
        return self._shard_plan.shards[self._shard].name

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Give errors the current shard's name: calls on a descriptor do not know it."""
        try:
            yield
        except OSError as error:
            error.filename = str(self._folder.path / self._name)
            raise


def _open(folder: OpenFolder, name: str, offset: int) -> int:
    """Open a shard, around the page cache where the file system takes that; keep what it holds before `offset`."""
    flags = os.O_WRONLY | (0 if offset else os.O_CREAT | os.O_EXCL)
    descriptor = folder.open_direct(name, flags)
    if descriptor is None:
        descriptor = folder.open(name, flags)
    try:
        os.ftruncate(descriptor, offset)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _write_all(descriptor: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        try:
            done += write_at(descriptor, view[done:], offset + done)
        except OSError as error:
            # Some file systems take O_DIRECT at open and refuse the write, and all refuse to go on after a write that a
            # full disk cut inside a block: the buffered one then says the real reason.
            if error.errno != errno.EINVAL or not end_direct(descriptor):
                raise
