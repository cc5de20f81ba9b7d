"""ChunkReader: fills a buffer with the bytes of a chunk's tensors, which may lie anywhere in their files.

Around the page cache only whole blocks can be read, while tensors of a safetensors file or a GGUF begin at any byte. So
each part of a chunk is left where its blocks put it, up to a block further on for each part before it; whoever takes
the checksum moves it on the way, while it is in the processor's cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from ftw.files import DIRECT_ALIGNMENT, DIRECT_MIN_JOB_NBYTES, OpenFile

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ftw.conversion.writing.shard_plan import Chunk, ChunkPart
    from ftw.files import WeightFile


def buffer_nbytes(chunk_nbytes: int) -> int:
    """Return how many bytes a buffer for chunks of `chunk_nbytes` needs."""
    max_shifts = chunk_nbytes // DIRECT_MIN_JOB_NBYTES + 1  # shorter parts are not shifted
    return chunk_nbytes + max_shifts * DIRECT_ALIGNMENT


class TensorBytes(Protocol):
    """The bytes of tensors, each of which is told by its name."""

    def find_bytes(self, name: str, offset: int, nbytes: int) -> tuple[WeightFile, int] | None:
        """Return which file holds bytes of a tensor as they are, and from where on; None if they must be made."""

    def read_many(self, requests: Iterable[tuple[str, Any, int]], *, num_threads: int | None = None) -> None:
        """Fill several buffers, each with bytes of a tensor from an offset on."""


class ChunkReader:
    """Reads chunks of tensors; several threads may do so at a time."""

    def __init__(self, tensors: TensorBytes) -> None:
        self._tensors = tensors

    def read(self, chunk: Chunk, buffer: memoryview) -> list[int]:
        """Read the bytes of a chunk's parts; return at which byte of the buffer those of each begin.

        That is never before `ChunkPart.start`, and each lies after the one before it, so that they may be moved to
        there one after another.

        Args:
            chunk: What to read.
            buffer: `buffer_nbytes` bytes, at a page's start.

        Raises:
            CheckpointError: A file ends before, or has changed since it was first seen.
            OSError: The disk fails; it names the file.
        """
        places: list[int] = []
        shift = 0
        with _LatestFile() as files:
            for part in chunk.parts:
                skipped = self._read(part, buffer[part.start + shift :], files) if part.nbytes else 0
                places.append(part.start + shift + skipped)
                if skipped:  # its last block may reach into the next part's first
                    shift += DIRECT_ALIGNMENT
        return places

    def _read(self, part: ChunkPart, buffer: memoryview, files: _LatestFile) -> int:
        """Read one part; return at which byte of the buffer it begins."""
        name = part.tensor.name
        found = self._tensors.find_bytes(name, part.offset, part.nbytes)
        if found is None:
            self._tensors.read_many([(name, buffer[: part.nbytes], part.offset)], num_threads=1)
            return 0
        file, offset = found
        return files.open(file).read_in_place(offset, part.nbytes, buffer)


class _LatestFile:
    """The file that was read last, open until another is: a chunk may touch thousands, most of them once."""

    def __init__(self) -> None:
        self._file: WeightFile | None = None
        self._opened: OpenFile | None = None

    def __enter__(self) -> _LatestFile:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._close(is_read=error is None)

    def open(self, file: WeightFile) -> OpenFile:
        """Return a file, open.

        Raises:
            CheckpointError: It, or the one before, has changed since it was first seen.
        """
        if self._opened is None or file is not self._file:
            self._close(is_read=True)
            self._file, self._opened = file, OpenFile(file)
        return self._opened

    def _close(self, *, is_read: bool) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            with opened:
                if is_read:
                    opened.check_unchanged()
