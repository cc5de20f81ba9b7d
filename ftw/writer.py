"""FtwWriter: lays out an FTW region and writes its shards and its index. See `ftw.readers.ftw` for the format.

Bytes pass through a few page-aligned buffers: the caller fills the next one while the one before it is written around
the page cache by a thread of the writer's own. Buffers hold whole blocks and run across tensor borders, so that small
tensors cost no write of their own. The limit is the disk, which reading and writing share.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from ftw.dtypes import DTYPES
from ftw.host_memory import HostMemory, align_up
from ftw.readers.ftw import ALIGNMENT, FORMAT_NAME, INDEX_NAME, SHARD_NAME, VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path
    from types import TracebackType

    from ftw.tensors import TensorInfo

DEFAULT_SHARD_LIMIT = 8 << 30
_BUFFER_NBYTES = 16 << 20
_NUM_BUFFERS = 3  # one being filled, one being written, one that evens out the difference


class Shard(NamedTuple):
    """One file of the region; `offset` is where it begins in the region."""

    name: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything goes: tensors with their offsets in the region, and the shards that cut it."""

    tensors: tuple[TensorInfo, ...]
    shards: tuple[Shard, ...]
    shard_limit: int

    @property
    def total_bytes(self) -> int:
        """Length of the region, padding included."""
        return sum(shard.nbytes for shard in self.shards)


def plan_layout(tensors: Iterable[TensorInfo], shard_limit: int = DEFAULT_SHARD_LIMIT) -> Layout:
    """Place tensors one after another, each at a multiple of 4096.

    A tensor that fits into a shard is never split: where it does not fit into the rest of the current one, that shard
    stays shorter. A larger tensor goes on from where the region is and spans as many shards as it needs.

    Args:
        tensors: In the order in which they are to lie.
        shard_limit: The most bytes of one shard, a multiple of 4096.
    """
    placed: list[TensorInfo] = []
    lengths: list[int] = [0]
    offset = 0
    for tensor in tensors:
        padded = align_up(tensor.nbytes, ALIGNMENT)
        if lengths[-1] and lengths[-1] + padded > shard_limit >= padded:
            lengths.append(0)
        placed.append(tensor._replace(offset=offset, shard=""))
        offset += padded
        while padded:
            if lengths[-1] == shard_limit:
                lengths.append(0)
            taken = min(padded, shard_limit - lengths[-1])
            lengths[-1] += taken
            padded -= taken
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    shards = [
        Shard(SHARD_NAME.format(number), start, nbytes)
        for number, (start, nbytes) in enumerate(zip(starts, lengths, strict=True))
    ]
    return Layout(tuple(placed), tuple(shards) if offset else (), shard_limit)


class FtwWriter:
    """Writes the tensors of a layout, in its order, then the index. Use it as a context manager.

    Memory: three buffers of 16 MiB, whatever the size of the checkpoint.
    """

    def __init__(self, folder: Path, layout: Layout) -> None:
        self._folder = folder
        self._layout = layout
        self._checksums: dict[str, str] = {}
        self._buffers = [HostMemory(_BUFFER_NBYTES) for _ in range(_NUM_BUFFERS)]
        self._writes: list[Future[None] | None] = [None] * _NUM_BUFFERS
        self._current = 0
        self._filled = 0
        self._position = 0  # in the region, of the current buffer's start
        self._shard = 0
        self._descriptor = -1
        self._pool = ThreadPoolExecutor(1, "ftw-write")

    def __enter__(self) -> FtwWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def write(self, tensor: TensorInfo, read_into: Callable[[memoryview, int], None]) -> None:
        """Write the next tensor of the layout.

        Args:
            tensor: It, as the layout has it.
            read_into: Fills a view with the tensor's bytes from an offset on; called for one piece after another.
        """
        hasher = xxhash.xxh3_64()
        done = 0
        while done < tensor.nbytes:
            view = self._room(tensor.nbytes - done)
            read_into(view, done)
            hasher.update(view)
            self._filled += len(view)
            done += len(view)
        self._pad(align_up(tensor.nbytes, ALIGNMENT) - tensor.nbytes)
        self._checksums[tensor.name] = hasher.hexdigest()

    def finish(self, extra: dict[str, Any]) -> None:
        """Flush and fsync the shards, then write the index under its name; `extra` holds its further keys."""
        self._flush()
        self._end_shard()
        write_atomically(self._folder / INDEX_NAME, _iter_index(self._layout, self._checksums, extra))

    def _room(self, wanted: int) -> memoryview:
        """Return the free part of the current buffer, no longer than wanted and not past the end of the shard."""
        shard = self._layout.shards[self._shard]
        position = self._position + self._filled
        if position == shard.offset + shard.nbytes:
            self._flush()
            self._end_shard()
            self._shard += 1
            return self._room(wanted)
        if self._filled == _BUFFER_NBYTES:
            self._flush()
        room = min(wanted, _BUFFER_NBYTES - self._filled, shard.offset + shard.nbytes - position)
        return self._buffers[self._current].view()[self._filled : self._filled + room]

    def _pad(self, nbytes: int) -> None:
        """Fill up to the block's end: buffers and shards hold whole blocks, so the zeros always fit."""
        if nbytes:
            self._room(nbytes)[:] = bytes(nbytes)
            self._filled += nbytes

    def _flush(self) -> None:
        """Hand the current buffer to the writing thread and go on with the next, once that has been written."""
        if self._filled:
            if self._descriptor < 0:
                self._descriptor = _create(self._folder / self._layout.shards[self._shard].name)
            view = self._buffers[self._current].view()[: self._filled]
            offset = self._position - self._layout.shards[self._shard].offset
            self._writes[self._current] = self._pool.submit(_write_all, self._descriptor, view, offset)
            self._position += self._filled
            self._filled = 0
            self._current = (self._current + 1) % _NUM_BUFFERS
        self._wait(self._current)

    def _wait(self, number: int) -> None:
        write, self._writes[number] = self._writes[number], None
        if write is None:
            return
        with self._named_errors():
            write.result()

    def _end_shard(self) -> None:
        for number in range(_NUM_BUFFERS):
            self._wait(number)
        if self._descriptor >= 0:
            with self._named_errors():
                os.fsync(self._descriptor)
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Give errors the current shard's name: calls on a descriptor do not know it."""
        try:
            yield
        except OSError as error:
            error.filename = str(self._folder / self._layout.shards[self._shard].name)
            raise


def index_nbytes(layout: Layout) -> int:
    """Return the size of a layout's index, less its further keys; a reader takes no more than `MAX_NBYTES` of JSON."""
    checksums = dict.fromkeys((tensor.name for tensor in layout.tensors), "0" * 16)
    return sum(map(len, _iter_index(layout, checksums, {})))


def _iter_index(layout: Layout, checksums: Mapping[str, str], extra: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield the index in pieces: built whole, that of 100,000 tensors would take 100 MB."""
    head = {
        "format": FORMAT_NAME,
        "version": VERSION,
        "align": ALIGNMENT,
        "shard_limit": layout.shard_limit,
        "total_bytes": layout.total_bytes,
        **extra,
    }
    yield json.dumps(head)[:-1].encode() + b', "tensors": ['
    for number, tensor in enumerate(layout.tensors):
        entry = json.dumps(_tensor_entry(tensor, checksums[tensor.name]))
        yield (f",\n{entry}" if number else f"\n{entry}").encode()
    shards = [{"file": shard.name, "global_off": shard.offset, "nbytes": shard.nbytes} for shard in layout.shards]
    yield f'],\n"shards": {json.dumps(shards)}}}\n'.encode()


def _tensor_entry(tensor: TensorInfo, checksum: str) -> dict[str, Any]:
    optional = {
        "ggml_type": tensor.ggml_type,
        "logical_shape": tensor.logical_shape,
        "role": tensor.role,
        "placement": tensor.placement,
        "xxh3_64": checksum,
    }
    return {
        "name": tensor.name,
        "kind": tensor.kind,
        "dtype": DTYPES[tensor.dtype].torch_name,
        "shape": tensor.shape,
        "global_off": tensor.offset,
        "nbytes": tensor.nbytes,
        **{key: value for key, value in optional.items() if value is not None},
    }


def write_atomically(path: Path, pieces: Iterable[bytes]) -> None:
    """Write a file so that its name shows either the whole content or what was there before."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:  # a write does not know the name of its file
        temporary.unlink(missing_ok=True)
        error.filename = error.filename or str(path)
        raise
    temporary.replace(path)
    fsync_folder(path.parent)


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder last."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _create(path: Path) -> int:
    """Create a shard, to be written around the page cache where the file system takes that."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o644)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        path.unlink(missing_ok=True)  # some file systems create the file before they refuse the flag
        return os.open(path, flags, 0o644)


def _write_all(descriptor: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        try:
            done += os.pwrite(descriptor, view[done:], offset + done)
        except OSError as error:
            if error.errno != errno.EINVAL or not _end_direct(descriptor):
                raise


def _end_direct(descriptor: int) -> bool:
    """Go on through the page cache; return False where that is the way already.

    Some file systems take O_DIRECT at open and refuse the write, and all refuse to go on after a write that a full disk
    cut inside a block: the buffered one then tells the real reason.
    """
    direct = getattr(os, "O_DIRECT", 0)
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if not flags & direct:
        return False
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~direct)
    return True
