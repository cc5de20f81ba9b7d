"""FtwWriter: writes the region of an FTW, in its shards, and then its index. See `ftw.readers.ftw` for the format.

Bytes pass through a few page-aligned buffers, a chunk of the region in each: two threads read, one writes around the
page cache, and the caller's takes checksums in between. A chunk may hold many tensors, so that small ones cost no write
of their own. The limit is the disk, which reading and writing share. Work of the processor takes from it, even where
threads hide it, so each byte is moved at most once, while its checksum is taken.
"""

from __future__ import annotations

import ctypes
from collections import deque
from typing import TYPE_CHECKING, Any

from ftw.conversion.writing.checksums import TensorHasher
from ftw.conversion.writing.chunk_reader import buffer_nbytes
from ftw.conversion.writing.index_file import iter_index
from ftw.conversion.writing.shard_files import ShardFiles
from ftw.conversion.writing.shard_plan import iter_write_chunks
from ftw.errors import CheckpointError
from ftw.host import HostMemory, address_of, start_threads
from ftw.readers import ALIGNMENT, INDEX_NAME
from ftw.sizes import align_up

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from ftw.conversion.writing.checksums import Checksums
    from ftw.conversion.writing.shard_plan import Chunk, ChunkPart, ShardPlan
    from ftw.host import OpenFolder

    ReadChunk = Callable[[Chunk, memoryview], Sequence[int]]

_CHUNK_NBYTES = 16 << 20
_NUM_READERS = 2
_NUM_BUFFERS = _NUM_READERS + 3  # of the chunks in the caller's thread and being written, and one that evens out
_STEP_NBYTES = 256 << 10  # stays in the processor's cache between the move and the checksum


class FtwWriter:
    """Writes the tensors of a `ShardPlan`, in its order, then the index. Use it as a context manager.

    Memory: five buffers of 16 MiB, whatever the size of the checkpoint, and what reading takes.
    """

    def __init__(
        self,
        folder: OpenFolder,
        shard_plan: ShardPlan,
        *,
        source: str = "source",
        checksums: Sequence[Checksums] = (),
        record: Callable[[Sequence[Checksums]], None] | None = None,
    ) -> None:
        """Make a writer.

        Args:
            folder: Where the shards go.
            shard_plan: What is written; checksums in it are those that the source has of its tensors.
            source: Its name, for messages.
            checksums: Of the first tensors, which an earlier process has written; the writer resumes after them.
            record: Called by another thread, with the checksums of the next tensors whose bytes have been written.
        """
        self._folder = folder
        self._shard_plan = shard_plan
        self._source = source
        self._checksums = list(checksums)
        self._record = record
        self._shards = ShardFiles(folder, shard_plan)
        self._buffers = [HostMemory(buffer_nbytes(_CHUNK_NBYTES)) for _ in range(_NUM_BUFFERS)]
        self._writes: list[Future[None] | None] = [None] * _NUM_BUFFERS
        self._has_failed = False
        (self._writer,) = start_threads(1, "ftw-write")
        self._readers = start_threads(_NUM_READERS, "ftw-read")

    def __enter__(self) -> FtwWriter:
        return self

    def __exit__(self, *_: object) -> None:
        while True:
            try:  # what has a checksum is written: the next conversion may resume it
                for reader in self._readers:
                    reader.shutdown(wait=True, cancel_futures=True)
                self._writer.shutdown(wait=True)
                break
            except KeyboardInterrupt:  # once more: drop what waits, but nothing may be written after this
                self._has_failed = True
        self._shards.close()

    def write(self, read: ReadChunk, progress: Callable[[int], None] | None = None) -> None:
        """Write all tensors, and make their shards last.

        Args:
            read: Reads a chunk into a buffer and returns where in it each part lies, as `ChunkReader.read` does. Two
                threads call it.
            progress: Called with the bytes of tensors that have been read, after each chunk of at most 16 MiB.

        Raises:
            CheckpointError: A tensor of the plan has a checksum, and what was read has another.
            OSError: The disk is full or fails; it names the shard.
        """
        hasher = TensorHasher(self._shard_plan)
        reading: deque[tuple[Chunk, int, Future[Sequence[int]]]] = deque()

        def pass_on() -> None:
            chunk, buffer, places = reading.popleft()
            view = self._buffers[buffer].view()
            ended = self._finish_parts(chunk, view, places.result(), hasher)
            self._checksums += ended
            self._writes[buffer] = self._writer.submit(self._write, chunk, view[: chunk.nbytes], ended)
            if progress:
                progress(sum(part.nbytes for part in chunk.parts))

        for number, chunk in enumerate(iter_write_chunks(self._shard_plan, _CHUNK_NBYTES, len(self._checksums))):
            buffer = number % _NUM_BUFFERS
            reader = self._readers[number % len(self._readers)]
            reading.append((chunk, buffer, reader.submit(self._read, read, chunk, buffer)))
            if len(reading) > _NUM_READERS:
                pass_on()
        while reading:
            pass_on()
        for buffer in range(_NUM_BUFFERS):
            self._wait(buffer)
        self._shards.end_shard()

    def finish(self, extra: dict[str, Any]) -> None:
        """Write the index under its name, once all tensors have been written; `extra` holds its further keys."""
        self._folder.write(INDEX_NAME, iter_index(self._shard_plan, self._checksums, extra))

    def _read(self, read: ReadChunk, chunk: Chunk, buffer: int) -> Sequence[int]:
        self._wait(buffer)
        return read(chunk, self._buffers[buffer].view())

    def _finish_parts(
        self, chunk: Chunk, view: memoryview, places: Sequence[int], hasher: TensorHasher
    ) -> list[Checksums]:
        """Move parts to their places, take checksums, pad the tensors that end; return the checksums of those."""
        ended: list[Checksums] = []
        for part, place in zip(chunk.parts, places, strict=True):
            _move_and_hash(part, view, place, hasher)
            if part.is_last:
                ended.append(hasher.end(part.tensor))
                problem = ended[-1].find_difference(part.tensor)
                if problem:  # a new checksum would hide what is wrong
                    raise CheckpointError(self._source, part.tensor.name, problem)
                end = part.start + part.nbytes
                padded = align_up(end, ALIGNMENT)
                view[end:padded] = bytes(padded - end)
        return ended

    def _wait(self, buffer: int) -> None:
        write, self._writes[buffer] = self._writes[buffer], None
        if write is not None:
            write.result()

    def _write(self, chunk: Chunk, view: memoryview, ended: list[Checksums]) -> None:
        if self._has_failed:  # `record` would leave a gap
            return
        try:
            self._shards.write(chunk, view)
            if self._record and ended:
                self._record(ended)
        except BaseException:
            self._has_failed = True
            raise


def _move_and_hash(part: ChunkPart, view: memoryview, place: int, hasher: TensorHasher) -> None:
    """Move a part from `place`, which lies behind its start, to there, and take its bytes into the checksum."""
    end = part.start + part.nbytes
    if place == part.start:
        hasher.update(part.tensor, view[place:end])
        return
    address, shift = address_of(view), place - part.start
    for start in range(part.start, end, _STEP_NBYTES):
        step = view[start : min(start + _STEP_NBYTES, end)]
        ctypes.memmove(address + start, address + start + shift, len(step))  # without Python's lock, unlike a slice
        hasher.update(part.tensor, step)
