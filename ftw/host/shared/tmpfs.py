"""Tmpfs: the file system whose files are memory and nothing else, and how much fits on it."""

from __future__ import annotations

import ctypes
import os
import sys

from ftw.host.libc import libc_function

_MAGIC = 0x01021994  # f_type of statfs(2)


def is_tmpfs(descriptor: int) -> bool:
    """Return whether an open file or folder lies on a tmpfs."""
    found = (ctypes.c_long * 32)()  # struct statfs begins with f_type and has 15 to 16 words
    return libc_function("fstatfs")(descriptor, found) == 0 and found[0] == _MAGIC


def free_nbytes(descriptor: int) -> int:
    """Return how many bytes fit beside an open file; a tmpfs without a limit says that it has 0 blocks."""
    status = os.fstatvfs(descriptor)
    return status.f_bavail * status.f_frsize if status.f_blocks else sys.maxsize
