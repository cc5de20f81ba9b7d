"""Locks on single bytes of a file that end with the open file that took them, however its process ends.

They belong to an open file description (fcntl(2), "Open file description locks", Linux 3.15): two openings of one file
exclude each other in threads as in processes, and a fork shares its parent's. A new shared lock passes those who wait
for an exclusive one. Other systems have none, or another `struct flock`: every call then fails with ENOTSUP.
"""

from __future__ import annotations

import errno
import os
import struct

from ftw.host.libc import IS_LINUX

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

HAS_BYTE_LOCKS = IS_LINUX and hasattr(fcntl, "F_OFD_SETLK")
_FLOCK = struct.Struct("hhqqi0q")  # l_type, l_whence, l_start, l_len, l_pid, padded as the C compiler does


def exclusive_lock(byte: int) -> bytes:
    """Return the `struct flock` that fcntl(2) takes for an exclusive lock on one byte."""
    return _lock("F_WRLCK", byte)


def lock_shared(descriptor: int, byte: int) -> None:
    """Wait for a shared lock on one byte."""
    _call(descriptor, "F_OFD_SETLKW", _lock("F_RDLCK", byte))


def lock_exclusive(descriptor: int, byte: int) -> None:
    """Wait for an exclusive lock on one byte; signal handlers run meanwhile, and may raise."""
    _call(descriptor, "F_OFD_SETLKW", _lock("F_WRLCK", byte))


def try_lock_exclusive(descriptor: int, byte: int) -> bool:
    """Take an exclusive lock on one byte if nobody else holds one; a shared lock of one's own stays if that fails."""
    try:
        _call(descriptor, "F_OFD_SETLK", _lock("F_WRLCK", byte))
    except BlockingIOError:
        return False
    return True


def unlock(descriptor: int, byte: int) -> None:
    """Give a lock back."""
    _call(descriptor, "F_OFD_SETLK", _lock("F_UNLCK", byte))


def is_locked(descriptor: int, byte: int) -> bool:
    """Return whether somebody else holds a lock on one byte."""
    found = _call(descriptor, "F_OFD_GETLK", _lock("F_WRLCK", byte))
    return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)


def lock_folder(descriptor: int) -> bool:
    """Lock a whole folder by flock(2); return False if somebody else has locked it.

    The lock ends with the open folder, however its process ends. Without fcntl (Windows) nothing is locked, and the
    answer is True: two processes that want the same folder are then not kept apart.
    """
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _call(descriptor: int, command: str, lock: bytes) -> bytes:
    return fcntl.fcntl(descriptor, getattr(fcntl, command), lock)


def _lock(kind: str, byte: int) -> bytes:
    if not HAS_BYTE_LOCKS:
        raise OSError(errno.ENOTSUP, "only Linux locks bytes of an open file")
    return _FLOCK.pack(getattr(fcntl, kind), os.SEEK_SET, byte, 1, 0)
