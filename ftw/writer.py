"""FtwWriter: writes the region of an FTW, in its shards, and then its index. See `ftw.readers.ftw` for the format.

Bytes pass through a few page-aligned buffers: one is filled by parallel reads while the one before it is written,
around the page cache, by a thread of the writer's own. Runs go across tensor borders, so that small tensors cost
neither a read nor a write of their own; checksums are taken in between, at 21 GiB/s on one core. The limit is the disk,
which reading and writing share.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import xxhash

from ftw.durable import write_atomically
from ftw.errors import CheckpointError
from ftw.host_memory import HostMemory, align_up
from ftw.index_file import iter_index
from ftw.layout import iter_runs
from ftw.readers.ftw import ALIGNMENT, INDEX_NAME
from ftw.shard_files import ShardFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import TracebackType

    from ftw.layout import Layout, Run
    from ftw.tensors import TensorInfo

    ReadMany = Callable[[list[tuple[str, memoryview, int]]], None]

_BUFFER_NBYTES = 32 << 20
_NUM_BUFFERS = 3  # one being filled, one being written, one that evens out the difference


class FtwWriter:
    """Writes the tensors of a layout, in its order, then the index. Use it as a context manager.

    Memory: three buffers of 32 MiB, whatever the size of the checkpoint, and what reading takes.
    """

    def __init__(
        self,
        folder: Path,
        layout: Layout,
        *,
        source: str = "source",
        checksums: Sequence[str] = (),
        record: Callable[[Sequence[str]], None] | None = None,
    ) -> None:
        """Make a writer.

        Args:
            folder: Where the shards go.
            layout: What is written; checksums in it are those that the source has of its tensors.
            source: Its name, for messages.
            checksums: Of the first tensors, which an earlier process has written; the writer goes on after them.
            record: Called by another thread, with the checksums of the next tensors whose bytes have been written.
        """
        self._folder = folder
        self._layout = layout
        self._source = source
        self._checksums = list(checksums)
        self._record = record
        self._shards = ShardFiles(folder, layout)
        self._buffers = [HostMemory(_BUFFER_NBYTES) for _ in range(_NUM_BUFFERS)]
        self._writes: list[Future[None] | None] = [None] * _NUM_BUFFERS
        self._has_failed = False
        self._pool = ThreadPoolExecutor(1, "ftw-write")

    def __enter__(self) -> FtwWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while True:
            try:  # what has been read is written: the next conversion may go on from it
                self._pool.shutdown(wait=True)
                break
            except KeyboardInterrupt:  # once more: drop what waits, but nothing may be written after this
                self._has_failed = True
        self._shards.close()

    def write(self, read_many: ReadMany, progress: Callable[[int], None] | None = None) -> None:
        """Write all tensors, and make their shards last.

        Args:
            read_many: Fills views, each with the bytes of the named tensor from an offset on: `Checkpoint.read_many`.
            progress: Called with the bytes of tensors that have been read, after each run of at most 32 MiB.

        Raises:
            CheckpointError: A tensor of the layout has a checksum, and what was read has another.
            OSError: The disk is full or fails; it names the shard.
        """
        hasher = xxhash.xxh3_64()
        for number, run in enumerate(iter_runs(self._layout, _BUFFER_NBYTES, len(self._checksums))):
            buffer = number % _NUM_BUFFERS
            self._wait(buffer)
            view = self._buffers[buffer].view()[: run.nbytes]
            read_many(
                [
                    (piece.tensor.name, view[piece.start : piece.start + piece.nbytes], piece.offset)
                    for piece in run.pieces
                    if piece.nbytes
                ]
            )
            ended = self._finish_pieces(run, view, hasher)
            self._checksums += ended
            self._writes[buffer] = self._pool.submit(self._write, run, view, ended)
            if progress:
                progress(sum(piece.nbytes for piece in run.pieces))
        for buffer in range(_NUM_BUFFERS):
            self._wait(buffer)
        self._shards.end_shard()

    def finish(self, extra: dict[str, Any]) -> None:
        """Write the index under its name, once all tensors have been written; `extra` holds its further keys."""
        write_atomically(self._folder / INDEX_NAME, iter_index(self._layout, self._checksums, extra))

    def _finish_pieces(self, run: Run, view: memoryview, hasher: xxhash.xxh3_64) -> list[str]:
        """Take the pieces' checksums and pad the tensors that end; return the checksums of those."""
        ended: list[str] = []
        for piece in run.pieces:
            end = piece.start + piece.nbytes
            hasher.update(view[piece.start : end])
            if piece.is_last:
                self._check(piece.tensor, hasher.hexdigest())
                ended.append(hasher.hexdigest())
                hasher.reset()
                padded = align_up(end, ALIGNMENT)
                view[end:padded] = bytes(padded - end)
        return ended

    def _check(self, tensor: TensorInfo, checksum: str) -> None:
        """Hold a tensor against the checksum that its source has of it: a new one would hide what is wrong."""
        if tensor.xxh3_64 not in (None, checksum):
            problem = f"checksum of what was read is {checksum}, its index says {tensor.xxh3_64}"
            raise CheckpointError(self._source, tensor.name, problem)

    def _wait(self, buffer: int) -> None:
        write, self._writes[buffer] = self._writes[buffer], None
        if write is not None:
            write.result()

    def _write(self, run: Run, view: memoryview, ended: list[str]) -> None:
        if self._has_failed:  # `record` would leave a gap
            return
        try:
            self._shards.write(run, view)
            if self._record and ended:
                self._record(ended)
        except BaseException:
            self._has_failed = True
            raise
