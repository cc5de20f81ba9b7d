"""Functions of Linux's C library that Python does not offer.

The numbers that they take and the structures that they fill are those of Linux, so no other system's are called.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of renameat2(2), Linux 3.15
IS_LINUX = sys.platform == "linux"
_RANGE = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)  # address, size, advice or protection
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...] | None]] = {
    "fstatfs": (ctypes.c_int, (ctypes.c_int, ctypes.c_void_p)),
    "madvise": (ctypes.c_int, _RANGE),
    "mmap": (ctypes.c_void_p, (*_RANGE, ctypes.c_int, ctypes.c_int, ctypes.c_long)),
    "mprotect": (ctypes.c_int, _RANGE),
    "renameat2": (ctypes.c_int, (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)),
    "syscall": (ctypes.c_long, None),  # as many arguments as the call has
}


@functools.cache
def libc_function(name: str) -> Callable[..., int]:
    """Return a function, which runs without Python's lock and leaves its error in `ctypes.get_errno`.

    One that the system lacks fails with ENOSYS, as a call does that the kernel lacks.
    """
    try:
        if not IS_LINUX:
            return _fail
        function = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (AttributeError, OSError):
        return _fail
    function.restype, function.argtypes = _SIGNATURES[name]
    return function  # type: ignore[no-any-return]


def _fail(*_: object) -> int:
    ctypes.set_errno(errno.ENOSYS)
    return -1


def exchange_names(one: Path | str, other: Path | str, *, dir_fd: int | None = None) -> bool:
    """Exchange two names in one step; return False if the C library or the file system cannot.

    `dir_fd` is an open folder, in which paths are looked up that are not absolute.
    """
    call, folder = libc_function("renameat2"), _AT_FDCWD if dir_fd is None else dir_fd
    return call(folder, os.fsencode(one), folder, os.fsencode(other), _RENAME_EXCHANGE) == 0
