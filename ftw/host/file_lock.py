"""Locks on single bytes of a file that end with the open file that took them, however its process ends.

They belong to an open file description (fcntl(2), "Open file description locks", Linux 3.15): two openings of one file
exclude each other in threads as in processes, and a fork shares its parent's. A new shared lock passes those who wait
for an exclusive one.
"""

from __future__ import annotations

import os
import struct

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_FLOCK = struct.Struct("hhqqi0q")  # l_type, l_whence, l_start, l_len, l_pid, padded as the C compiler does


def exclusive_lock(byte: int) -> bytes:
    """Return the `struct flock` that fcntl(2) takes for an exclusive lock on one byte."""
    return _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)


def lock_shared(descriptor: int, byte: int) -> None:
    """Wait for a shared lock on one byte."""
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLKW, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, byte, 1, 0))


def lock_exclusive(descriptor: int, byte: int) -> None:
    """Wait for an exclusive lock on one byte; signal handlers run meanwhile, and may raise."""
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLKW, exclusive_lock(byte))


def try_lock_exclusive(descriptor: int, byte: int) -> bool:
    """Take an exclusive lock on one byte if nobody else holds one; a shared lock of one's own stays if that fails."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, exclusive_lock(byte))
    except BlockingIOError:
        return False
    return True


def unlock(descriptor: int, byte: int) -> None:
    """Give a lock back."""
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, byte, 1, 0))


def is_locked(descriptor: int, byte: int) -> bool:
    """Tell whether somebody else holds a lock on one byte."""
    found = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, exclusive_lock(byte))
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
