"""WeightFile: one file of a checkpoint, read by position into memory that the caller owns.

A file is opened for each read and checked against what it was when its header was parsed, so that a checkpoint of
thousands of shards needs no descriptor per shard, and a file that is replaced, shortened or rewritten meanwhile gives
an error instead of other bytes. Nothing is ever mapped: a mapped file that shrinks ends the process.

Large aligned reads go around the page cache (O_DIRECT) unless the page cache already holds the bytes; everything else
is read through it.
"""

from __future__ import annotations

import ctypes
import os
import stat
from pathlib import Path
from typing import NamedTuple

from ftw.errors import CheckpointError
from ftw.host_memory import address_of

DIRECT_ALIGNMENT = 4096
DIRECT_MIN_NBYTES = 4 << 20  # below this a buffered read costs no more
_MAX_READ_NBYTES = 16 << 20  # of one system call: large enough for the disk, small enough to be interrupted
_CACHESTAT = 451  # number of cachestat(2), Linux 6.5, on every architecture


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

    __slots__ = ("identity", "path")

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointError(path, "file", "is missing") from error
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(path, "file", "is not a regular file")
        self.identity = _identity(status)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.identity.nbytes

    def read(self, offset: int, nbytes: int) -> bytes:
        """Read `nbytes` at `offset`.

        Raises:
            CheckpointError: The file ends before, or has changed since it was first seen.
        """
        buffer = bytearray(nbytes)
        self.read_into(offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes at `offset`.

        Raises:
            CheckpointError: The file ends before, or has changed since it was first seen.
        """
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._check_unchanged(descriptor)
            done = self._read_direct(descriptor, offset, view)
            self._read_buffered(descriptor, offset + done, view[done:])
            self._check_unchanged(descriptor)  # an in-place rewrite may have begun after the first look
        finally:
            os.close(descriptor)

    def _check_unchanged(self, descriptor: int) -> None:
        if _identity(os.fstat(descriptor)) != self.identity:
            raise CheckpointError(self.path, "file", "changed while it was being read")

    def _read_buffered(self, descriptor: int, offset: int, view: memoryview) -> None:
        done = 0
        while done < len(view):
            count = os.preadv(descriptor, [view[done : done + _MAX_READ_NBYTES]], offset + done)
            if not count:
                problem = f"ends at byte {offset + done}, {len(view) - done} bytes short"
                raise CheckpointError(self.path, "file", problem)
            done += count

    def _read_direct(self, descriptor: int, offset: int, view: memoryview) -> int:
        """Read the whole blocks at the start of `view` around the page cache; return how many bytes that was."""
        if len(view) < DIRECT_MIN_NBYTES or offset % DIRECT_ALIGNMENT or address_of(view) % DIRECT_ALIGNMENT:
            return 0
        if not hasattr(os, "O_DIRECT") or _is_cached(descriptor, offset, len(view)):
            return 0
        try:
            direct = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:  # a file system without it, such as tmpfs before Linux 6.6
            return 0
        try:
            self._check_unchanged(direct)
            whole = len(view) // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT
            done = 0
            while done < whole:
                count = os.preadv(direct, [view[done : min(done + _MAX_READ_NBYTES, whole)]], offset + done)
                done += count
                if not count or count % DIRECT_ALIGNMENT:
                    break
        except OSError:  # an alignment that this file system does not take; the buffered way reads the same bytes
            return 0
        else:
            return done
        finally:
            os.close(direct)


def _identity(status: os.stat_result) -> FileIdentity:
    return FileIdentity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


class _CachestatRange(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("nbytes", ctypes.c_uint64))


class _Cachestat(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


def _is_cached(descriptor: int, offset: int, nbytes: int) -> bool:
    """Tell whether the page cache holds at least half of a range: read from there, it is then faster than the disk."""
    wanted, found = _CachestatRange(offset, nbytes), _Cachestat()
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    if syscall(ctypes.c_long(_CACHESTAT), descriptor, ctypes.byref(wanted), ctypes.byref(found), 0):
        return False  # a kernel before 6.5 cannot tell
    return bool(found.cached * os.sysconf("SC_PAGE_SIZE") * 2 >= nbytes)
