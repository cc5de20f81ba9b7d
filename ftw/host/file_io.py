"""Files read and written at a position, through the page cache or around it (O_DIRECT)."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import os
import threading
from typing import TYPE_CHECKING

from ftw.host.libc import libc_function
from ftw.host.memory import PAGE_NBYTES

if TYPE_CHECKING:
    from pathlib import Path

DIRECT_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)  # of a file system without O_DIRECT, or of larger blocks
_BINARY = getattr(os, "O_BINARY", 0)  # Windows translates line ends without it
_DIRECT = getattr(os, "O_DIRECT", 0)
_CACHESTAT = 451  # number of cachestat(2), Linux 6.5, on all architectures but alpha

_seeking = threading.Lock()  # a descriptor that threads share has one position


def open_descriptor(path: Path | str, flags: int, mode: int = 0o666, *, dir_fd: int | None = None) -> int:
    """Open a file, of which no byte is translated; one that is made gets a mode, less the umask.

    `dir_fd` is an open folder, in which a path is looked up that is not absolute.
    """
    return os.open(path, flags | _BINARY, mode, dir_fd=dir_fd)


def open_direct(path: Path | str, flags: int, mode: int = 0o666, *, dir_fd: int | None = None) -> int | None:
    """Open a file around the page cache; return None if the system or its file system has no such way."""
    if not _DIRECT:
        return None
    try:
        return os.open(path, flags | _DIRECT, mode, dir_fd=dir_fd)
    except OSError as error:  # tmpfs before Linux 6.6
        if error.errno not in DIRECT_REFUSALS:
            raise
    if flags & os.O_EXCL:  # some file systems make the file before they refuse the flag
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path, dir_fd=dir_fd)
    return None


def end_direct(descriptor: int) -> bool:
    """Go on through the page cache; return False if that is the way already."""
    if not _DIRECT:
        return False
    import fcntl  # Windows lacks it, as it lacks O_DIRECT

    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~_DIRECT)
    return bool(flags & _DIRECT)


def read_at(descriptor: int, view: memoryview, offset: int) -> int:
    """Read up to as many bytes as the view has; return how many they were, 0 at the file's end."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [view], offset)
    with _seeking, io.FileIO(descriptor, closefd=False) as file:
        file.seek(offset)
        return file.readinto(view) or 0


def write_at(descriptor: int, view: memoryview, offset: int) -> int:
    """Write some of a view; return how many bytes they were."""
    if hasattr(os, "pwrite"):
        return os.pwrite(descriptor, view, offset)
    with _seeking:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.write(descriptor, view)


class _CachestatRange(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("nbytes", ctypes.c_uint64))


class _Cachestat(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


def is_cached(descriptor: int, offset: int, nbytes: int) -> bool:
    """Return whether the page cache holds at least half of a range: it is then faster than the disk."""
    wanted, found = _CachestatRange(offset, nbytes), _Cachestat()
    call = libc_function("syscall")
    if call(ctypes.c_long(_CACHESTAT), descriptor, ctypes.byref(wanted), ctypes.byref(found), 0):
        return False  # a kernel before 6.5 does not say
    return bool(found.cached * PAGE_NBYTES * 2 >= nbytes)
