"""Checkpoint: an opened checkpoint of any format, read tensor by tensor into memory that the caller owns."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ftw.config import ModelConfig, read_model_config
from ftw.errors import CheckpointError, ClosedError, UnknownTensorError, printable
from ftw.host_memory import HostMemory
from ftw.readers import open_reader
from ftw.source import resolve_source

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping
    from pathlib import Path
    from types import TracebackType

    from ftw.readers.base import LeftOut, Reader
    from ftw.tensors import Extent, TensorInfo
    from ftw.weight_file import WeightFile

CHUNK_NBYTES = 16 << 20
_FIRST_CHUNK_NBYTES = 64 << 10  # two tensors that differ mostly differ here


class Checkpoint:
    """An opened checkpoint. Safe to share between threads; it holds no file open between reads.

    Attributes:
        source: What was opened, as the caller named it.
        path: Where that lies on this machine: a folder or a file.
        config: What config.json says, all None where there is none.
    """

    def __init__(self, reader: Reader, source: str, path: Path) -> None:
        self.source = source
        self.path = path
        self.config: ModelConfig = read_model_config(reader.folder)
        self._reader = reader
        self._closed = False

    @property
    def format(self) -> str:
        """Name of the format: "ftw" or "safetensors"."""
        return self._reader.format

    @property
    def folder(self) -> Path:
        """Folder that holds config.json and the other metadata files."""
        return self._reader.folder

    @property
    def files(self) -> tuple[WeightFile, ...]:
        """Files that hold the weights."""
        return self._reader.files

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Tensors by name, in the order of their bytes on disk."""
        return MappingProxyType(self._reader.tensors)

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Free key-values of the format."""
        return self._reader.metadata

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """What lies beside the checkpoint and is not part of it, with the reason."""
        return self._reader.left_out

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, padding left out."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End reading; a later read raises `ClosedError`."""
        self._closed = True

    def read_into(self, name: str, buffer: Any, *, offset: int = 0) -> None:
        """Fill a writable buffer with the bytes of a tensor, from its byte `offset` on.

        The buffer is the caller's: anything with the buffer protocol, as long as the bytes that are wanted. Bytes go
        from the file straight into it, around the page cache where file and buffer are aligned to 4096.

        Raises:
            UnknownTensorError: There is no such tensor.
            CheckpointError: The buffer reaches past the tensor's end, or the file has changed.
            ClosedError: The checkpoint is closed.
        """
        if self._closed:
            raise ClosedError(f"{printable(self.source)}: checkpoint: is closed")
        tensor = self._tensor(name)
        view = memoryview(buffer)
        view = view.cast("B") if view.nbytes else memoryview(b"")  # shapes with a zero in them cannot be cast
        if offset < 0 or offset + len(view) > tensor.nbytes:
            problem = f"bytes {offset} to {offset + len(view)} were asked for, it has {tensor.nbytes}"
            raise CheckpointError(self.source, name, problem)
        start = 0
        for extent in self.extents(name):
            end = start + extent.nbytes
            low, high = max(start, offset), min(end, offset + len(view))
            if low < high:
                file = self._reader.files[extent.file]
                file.read_into(extent.offset + low - start, view[low - offset : high - offset])
            start = end

    def extents(self, name: str) -> tuple[Extent, ...]:
        """Return where the bytes of a tensor lie: runs of `files`, in order."""
        return self._reader.extents(self._tensor(name))

    def iter_chunks(self, name: str, chunk_nbytes: int = CHUNK_NBYTES) -> Iterator[memoryview]:
        """Yield the bytes of a tensor in order, each time in the same buffer, which the next step overwrites."""
        nbytes = self._tensor(name).nbytes
        memory = HostMemory(min(chunk_nbytes, nbytes))
        for offset in range(0, nbytes, chunk_nbytes):
            view = memory.view()[: nbytes - offset]
            self.read_into(name, view, offset=offset)
            yield view

    def _tensor(self, name: str) -> TensorInfo:
        try:
            return self._reader.tensors[name]
        except KeyError:
            problem = f"no tensor '{printable(name)}' among {len(self._reader.tensors)}"
            raise UnknownTensorError(f"{printable(self.source)}: tensors: {problem}") from None


def open_checkpoint(source: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint: a folder, a weight file, an index file, or a hub id.

    Reads headers alone. Use it as a context manager.

    Raises:
        SourceNotFoundError: There is nothing of that name, or nothing that ftw reads in it.
        CheckpointError: A header, an index or config.json is broken.
    """
    path = resolve_source(source)
    return Checkpoint(open_reader(path), str(source), path)


def equal_tensors(checkpoint: Checkpoint, name: str, other: Checkpoint, other_name: str) -> bool:
    """Tell whether two tensors have the same dtype, shape and bytes; reads both up to the first chunk that differs."""
    left, right = checkpoint.tensors[name], other.tensors[other_name]
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    if left.xxh3_64 and right.xxh3_64 and left.xxh3_64 != right.xxh3_64:
        return False
    first = min(_FIRST_CHUNK_NBYTES, left.nbytes)
    heads = [bytearray(first), bytearray(first)]
    checkpoint.read_into(name, heads[0])
    other.read_into(other_name, heads[1])
    if heads[0] != heads[1]:
        return False
    pairs = zip(checkpoint.iter_chunks(name), other.iter_chunks(other_name), strict=True)
    return all(bytes(mine) == bytes(theirs) for mine, theirs in pairs)
