"""Files that somebody else may change at any moment, opened to be read.

Nothing is waited for: not for who writes to a pipe that has taken a file's place. And where a path was judged before,
nothing on it is followed that has become a link since.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import sys

from ftw.host.file_io import DIRECT_REFUSALS
from ftw.host.libc import libc_function

_BINARY = getattr(os, "O_BINARY", 0)
_DIRECT = getattr(os, "O_DIRECT", 0)
_PATH_ONLY = getattr(os, "O_PATH", 0)  # of a folder to be walked through, for which the right to do so is enough
_FOLDER = _PATH_ONLY | getattr(os, "O_DIRECTORY", 0)
_CLOSED_ON_EXEC = getattr(os, "O_CLOEXEC", 0)  # which os.open adds by itself
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
# A pipe or a device is opened without waiting, and a terminal does not become this process's own.
_READ = os.O_RDONLY | _BINARY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
_OPENAT2, _AT_FDCWD = 437, -100  # number of openat2(2), Linux 5.6, on all architectures but alpha
_RESOLVE_NO_LINKS = 0x04 | 0x02  # no symbolic link, nor what /proc has instead of them
_LINKS_FOUND = (errno.ELOOP, errno.ENOTDIR, getattr(errno, "EMLINK", errno.ELOOP))


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_HOW_NBYTES = ctypes.sizeof(_OpenHow)


def open_to_read(path: str | os.PathLike[str], *, follow_links: bool) -> int:
    """Open a file of any kind, or a folder, without waiting; what it is the caller has to look at.

    Without links Linux 5.6 opens it in one step, and so does macOS; an older Linux part by part. On other systems the
    last part alone may be none, and Windows follows all.

    Args:
        path: Where it lies.
        follow_links: Follow links; otherwise refuse them, wherever on the path.

    Raises:
        OSError: It is not there, or may not be read; if `is_link` says so, something on the path is a link.
    """
    return _open(path, _READ, follow_links=follow_links)


def open_direct_to_read(path: str | os.PathLike[str], *, follow_links: bool) -> int | None:
    """Open a file as `open_to_read` does, around the page cache; None if the system or file system has no such way.

    Raises:
        OSError: It is not there, or may not be read; if `is_link` says so, something on the path is a link.
    """
    if not _DIRECT:
        return None
    try:
        return _open(path, _READ | _DIRECT, follow_links=follow_links)
    except OSError as error:  # tmpfs before Linux 6.6
        if error.errno not in DIRECT_REFUSALS:
            raise
        return None


def is_link(error: OSError) -> bool:
    """Tell whether an opening without links failed since there is one, or a file in the place of a folder."""
    return error.errno in _LINKS_FOUND


def _open(path: str | os.PathLike[str], flags: int, *, follow_links: bool) -> int:
    return os.open(path, flags) if follow_links else _open_without_links(os.fspath(path), flags)


def _open_without_links(path: str, flags: int) -> int:
    if _has_openat2():
        sys.audit("open", path, None, flags)  # as os.open does
        return _openat2(path, flags, _RESOLVE_NO_LINKS)
    if _PATH_ONLY and os.open in os.supports_dir_fd:
        return _open_by_parts(path, flags)
    return os.open(path, flags | (getattr(os, "O_NOFOLLOW_ANY", 0) or _NO_LINK))  # the former is macOS's


@functools.cache
def _has_openat2() -> bool:
    """Tell whether the kernel has it; it may be there and forbidden (seccomp)."""
    try:
        os.close(_openat2("/", _FOLDER, 0))
    except OSError:
        return False
    return True


def _openat2(path: str, flags: int, resolve: int) -> int:
    name, how = os.fsencode(path), _open_how(flags, resolve)
    if b"\0" in name:  # where C would end it
        raise ValueError("embedded null byte")
    call = libc_function("syscall")
    while (descriptor := call(_OPENAT2, _AT_FDCWD, name, ctypes.byref(how), _HOW_NBYTES)) < 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number), path)
    return descriptor


@functools.cache
def _open_how(flags: int, resolve: int) -> _OpenHow:
    return _OpenHow(flags | _CLOSED_ON_EXEC, 0, resolve)


def _open_by_parts(path: str, flags: int) -> int:
    *folders, name = [part for part in path.split("/") if part not in ("", ".")]
    at = -1
    try:
        at = os.open("/" if path.startswith("/") else ".", _FOLDER)
        for folder in folders:
            inner = os.open(folder, _FOLDER | _NO_LINK, dir_fd=at)
            os.close(at)
            at = inner
        return os.open(name, flags | _NO_LINK, dir_fd=at)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error
    finally:
        if at >= 0:
            os.close(at)
