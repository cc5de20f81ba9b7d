"""WeightFile: one file of a checkpoint, read by position into memory that the caller owns.

A file is opened for each read and checked against what it was when its header was parsed, so that a checkpoint of
thousands of shards needs no descriptor per shard, and a file that is replaced, shortened or rewritten meanwhile gives
an error instead of other bytes. One in whose place there is a pipe is not waited for, and one that was found inside of
the checkpoint's folder is opened without following a link. Nothing is ever mapped: a mapped file that shrinks ends the
process.

Large reads go around the page cache (O_DIRECT) unless the page cache already holds the bytes; everything else is read
through it. The file system takes whole blocks at such places in memory as they have in the file, modulo 4096; where
that is not so, they go through a bounce buffer, if the caller has one, or stay where their blocks put them, if that
will do.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import threading
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ftw.errors import CheckpointError
from ftw.host import DIRECT_REFUSALS, address_of, is_cached, is_link, open_direct_to_read, open_to_read, read_at
from ftw.sizes import align_up

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_Opened = TypeVar("_Opened")

DIRECT_ALIGNMENT = 4096
DIRECT_MIN_NBYTES = 4 << 20  # below this a buffered read costs no more, for a thread that reads alone
DIRECT_MIN_JOB_NBYTES = 1 << 20  # the same for threads that hide one another's waiting
_MAX_READ_NBYTES = 16 << 20  # of one system call: large enough for the disk, small enough to be interrupted


class FileIdentity(NamedTuple):
    """What tells one state of a file from another."""

    device: int
    inode: int
    nbytes: int
    mtime_ns: int


class WeightFile:
    """One file of a checkpoint.

    Attributes:
        path: Where it lies.
        nbytes: Its size when it was first seen.
    """

    __slots__ = ("_real", "identity", "path")

    def __init__(self, path: Path, real: str | None = None) -> None:
        """Look at a file; `real` is what `Roots.locate` says of it, None follows links to anywhere.

        Raises:
            CheckpointError: There is no such file, or it is not a regular one.
        """
        self.path = path
        self._real = real
        try:
            status = os.stat(real or path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointError(path, "file", "is missing") from error
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENAMETOOLONG):
                raise
            why = "is a link to itself" if error.errno == errno.ELOOP else "has a name that is too long"
            raise CheckpointError(path, "file", why) from error
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(path, "file", "is not a regular file")
        self.identity = _identity(status)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.identity.nbytes

    def open(self) -> int:
        """Return a new descriptor of what has its name now; nothing is waited for.

        Raises:
            CheckpointError: Something on the way to it has become a link.
        """
        return self._open(open_to_read)

    def open_direct(self) -> int | None:
        """Return one that goes around the page cache, None where the system or the file system has no such way.

        Raises:
            CheckpointError: Something on the way to it has become a link.
        """
        return self._open(open_direct_to_read)

    def _open(self, function: Callable[..., _Opened]) -> _Opened:
        try:
            return function(self._real or self.path, follow_links=self._real is None)
        except OSError as error:
            if self._real and is_link(error):
                raise CheckpointError(self.path, "file", "changed while it was being read") from error
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def read(self, offset: int, nbytes: int) -> bytes:
        """Read `nbytes` at `offset`.

        Raises:
            CheckpointError: The file ends before, or has changed since it was first seen.
        """
        buffer = bytearray(nbytes)
        self.read_into(offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes at `offset`, in this thread; `parallel_read` has the way for many bytes.

        Raises:
            CheckpointError: The file ends before, or has changed since it was first seen.
        """
        with OpenFile(self) as file:
            file.read_into(offset, view)
            file.check_unchanged()  # an in-place rewrite may have begun after the first look


class OpenFile:
    """A file while it is read: one descriptor through the page cache, and one around it once that is wanted.

    Threads may share it. It does not check by itself that the file has not changed by the end: `check_unchanged` does.

    Raises:
        CheckpointError: The file has changed since it was first seen.
    """

    __slots__ = ("_buffered", "_direct", "_file", "_lock", "_takes_direct")

    def __init__(self, file: WeightFile) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._takes_direct = True  # until the file system refuses
        self._direct: int | None = None
        self._buffered = file.open()
        try:
            self._check_unchanged(self._buffered)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close both descriptors; no thread may be reading."""
        os.close(self._buffered)
        if self._direct is not None:
            os.close(self._direct)

    def check_unchanged(self) -> None:
        """Check that the file is what it was when it was first seen.

        Raises:
            CheckpointError: It is not.
        """
        self._check_unchanged(self._buffered)

    def read_into(self, offset: int, view: memoryview, bounce: Callable[[], memoryview] | None = None) -> None:
        """Fill `view` with the bytes at `offset`.

        `bounce` returns memory of one of several threads that read at a time, large enough for the blocks that the
        bytes lie in. Without it only views that lie in memory as the bytes do in the file are read around the page
        cache.

        Raises:
            CheckpointError: The file ends before.
        """
        done = 0
        least = DIRECT_MIN_NBYTES if bounce is None else DIRECT_MIN_JOB_NBYTES
        if len(view) >= least and not is_cached(self._buffered, offset, len(view)):
            if (offset - address_of(view)) % DIRECT_ALIGNMENT == 0:
                done = -offset % DIRECT_ALIGNMENT
                self._read_buffered(offset, view[:done])
                whole = (len(view) - done) // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT
                done += self._read_direct(offset + done, view[done : done + whole])
            elif bounce is not None:
                done = self._read_bounced(offset, view, bounce)
        self._read_buffered(offset + done, view[done:])

    def read_in_place(self, offset: int, nbytes: int, buffer: memoryview) -> int:
        """Read bytes into a buffer without moving them in memory; return at which byte of it they begin.

        That is 0, or around the page cache `offset` modulo 4096. The buffer begins at a multiple of 4096 in memory, and
        has room for all blocks that the bytes lie in.

        Raises:
            CheckpointError: The file ends before.
        """
        is_large = nbytes >= DIRECT_MIN_JOB_NBYTES and not is_cached(self._buffered, offset, nbytes)
        if is_large and self._read_window(offset, nbytes, buffer) == nbytes:
            return offset % DIRECT_ALIGNMENT
        self._read_buffered(offset, buffer[:nbytes])
        return 0

    def _check_unchanged(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or _identity(status) != self._file.identity:
            raise CheckpointError(self._file.path, "file", "changed while it was being read")

    def _read_buffered(self, offset: int, view: memoryview) -> None:
        done = 0
        while done < len(view):
            count = self._read_once(self._buffered, offset, view, done)
            if not count:
                end = os.fstat(self._buffered).st_size
                problem = f"ends at byte {end}, {offset + len(view) - end} bytes short"
                raise CheckpointError(self._file.path, "file", problem)
            done += count

    def _read_bounced(self, offset: int, view: memoryview, bounce: Callable[[], memoryview]) -> int:
        """Read the blocks that the bytes lie in and move the bytes into `view`; return how many those were."""
        with bounce()[:] as window:
            done = self._read_window(offset, len(view), window)
            if done:  # ctypes lets other threads run meanwhile, the assignment of a slice does not
                ctypes.memmove(address_of(view), address_of(window) + offset % DIRECT_ALIGNMENT, done)
        return done

    def _read_window(self, offset: int, nbytes: int, buffer: memoryview) -> int:
        """Read the blocks that bytes lie in, to the start of a buffer; return how many of those bytes there are now."""
        skipped = offset % DIRECT_ALIGNMENT
        with buffer[: align_up(skipped + nbytes, DIRECT_ALIGNMENT)] as blocks:  # an error would keep it alive
            return min(max(self._read_direct(offset - skipped, blocks) - skipped, 0), nbytes)

    def _read_direct(self, offset: int, blocks: memoryview) -> int:
        """Read whole blocks around the page cache, up to the file's end; return how many bytes that was."""
        descriptor = self._open_direct()
        done = 0
        while descriptor is not None and done < len(blocks):
            try:
                count = self._read_once(descriptor, offset, blocks, done)
            except OSError as error:
                if error.errno not in DIRECT_REFUSALS:
                    raise
                self._takes_direct = False  # an alignment that this file system does not take
                break
            done += count
            if not count or count % DIRECT_ALIGNMENT:
                break
        return done

    def _open_direct(self) -> int | None:
        """Return the descriptor that goes around the page cache, None where the file system has no such way."""
        with self._lock:
            if self._direct is None and self._takes_direct:
                self._direct = self._file.open_direct()
                self._takes_direct = self._direct is not None
                if self._direct is not None:
                    self._check_unchanged(self._direct)
            return self._direct if self._takes_direct else None

    def _read_once(self, descriptor: int, offset: int, view: memoryview, done: int) -> int:
        """Read some of what a view still lacks, the bytes at `offset` being its first."""
        try:
            with view[done : done + _MAX_READ_NBYTES] as part:  # an error would keep a bounce buffer alive
                return read_at(descriptor, part, offset + done)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._file.path)) from error


def _identity(status: os.stat_result) -> FileIdentity:
    return FileIdentity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
