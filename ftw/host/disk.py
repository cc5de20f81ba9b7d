"""What a folder's disk takes: bytes that are free for this user, and whether a file of some size can be made there.

    free bytes    statvfs, and what the user's and the group's quota leaves, by quotactl_fd(2) of Linux 5.14
    a large file  made without a name (O_TMPFILE) and lengthened, which writes nothing and leaves nothing

A quota that the system does not tell bounds nothing.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import struct
from typing import TYPE_CHECKING

from ftw.host.libc import libc_function

if TYPE_CHECKING:
    from pathlib import Path

_QUOTACTL_FD = 443  # its number on all architectures
_GET_QUOTA, _USER, _GROUP = 0x800007, 0, 1
_QUOTA = struct.Struct("=8QI4x")  # if_dqblk: hard and soft limit in KiB, bytes in use, inodes, times, what is valid
_LIMIT_IS_VALID, _USE_IS_VALID = 1, 2
_NO_TMPFILE = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL})  # of old kernels, FAT, NFS


def free_disk_nbytes(folder: Path) -> int:
    """Return what this user may still write to the disk that a folder lies on."""
    free = shutil.disk_usage(folder).free
    return min([free, *_quota_leaves(folder)])


def check_file_can_be_made(folder: Path, nbytes: int) -> None:
    """Check that a file of `nbytes` bytes may be made in a folder; a disk that cannot be asked without a trace passes.

    Raises:
        OSError: It may not: the folder is read-only or another's, or no file may be so long.
    """
    if not os.access(folder, os.W_OK | os.X_OK):
        is_read_only = hasattr(os, "statvfs") and os.statvfs(folder).f_flag & os.ST_RDONLY
        code = errno.EROFS if is_read_only else errno.EACCES
        raise OSError(code, os.strerror(code), str(folder))
    if not hasattr(os, "O_TMPFILE"):
        return
    try:
        descriptor = os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o600)
    except OSError as error:
        if error.errno in _NO_TMPFILE:
            return
        raise
    try:
        os.ftruncate(descriptor, nbytes)
    except OSError as error:
        if error.errno in (errno.EFBIG, errno.EINVAL):
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(folder)) from error
        raise
    finally:
        os.close(descriptor)


def _quota_leaves(folder: Path) -> list[int]:
    """Return what the quotas of this user and group leave, one entry for each that there is."""
    if not hasattr(os, "geteuid"):
        return []
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        asked = ((_USER, os.geteuid()), (_GROUP, os.getegid()))
        left = [_quota_leaves_of(descriptor, kind, number) for kind, number in asked]
    finally:
        os.close(descriptor)
    return [nbytes for nbytes in left if nbytes is not None]


def _quota_leaves_of(descriptor: int, kind: int, number: int) -> int | None:
    answer = ctypes.create_string_buffer(_QUOTA.size)
    command = ctypes.c_uint(_GET_QUOTA << 8 | kind)
    call = libc_function("syscall")
    if call(ctypes.c_long(_QUOTACTL_FD), ctypes.c_uint(descriptor), command, ctypes.c_int(number), answer) != 0:
        return None
    hard, _, used, *_, valid = _QUOTA.unpack(answer.raw)
    needed = _LIMIT_IS_VALID | _USE_IS_VALID
    return max(hard * 1024 - used, 0) if hard and valid & needed == needed else None
