"""OpenFolder: a folder by its descriptor, which locks it, marks it and knows it again whoever renames it.

The lock is that of flock(2), which can only be found by taking it. So whoever holds it also holds a shared one of
fcntl(2), the mark, which a dry run sees without taking any lock, and thus without being in a conversion's way.
A system that cannot open folders (Windows) has neither: the folder is then known by its inode alone, and two
conversions into it at a time are not kept apart.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING

from ftw.host import file_lock

if TYPE_CHECKING:
    from pathlib import Path

_MARK = 0  # the byte that is marked; a folder's bytes are but places for locks


class OpenFolder:
    """A folder that is open. Use it as a context manager, which closes it, and so ends its lock and its mark."""

    def __init__(self, path: Path) -> None:
        """Open a folder.

        Raises:
            FileNotFoundError: It is not there.
            NotADirectoryError: It is a link or a file.
        """
        self._descriptor = _open(path)
        self._status = path.lstat() if self._descriptor is None else os.fstat(self._descriptor)

    def __enter__(self) -> OpenFolder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    @property
    def mode(self) -> int:
        """Its permissions, as they were when it was opened."""
        return stat.S_IMODE(self._status.st_mode)

    def is_at(self, path: Path) -> bool:
        """Tell whether a name stands for this folder now."""
        try:
            return os.path.samestat(self._status, path.lstat())
        except FileNotFoundError:
            return False

    def lock(self) -> bool:
        """Lock it; return False if somebody else has."""
        return self._descriptor is None or file_lock.lock_folder(self._descriptor)

    def mark(self) -> None:
        """Mark it as one that is written. Several processes may hold this mark."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):  # of a file system without such locks: what excludes is the other lock
                file_lock.lock_shared(self._descriptor, _MARK)  # never waits: nobody can lock a folder exclusively

    def is_marked(self) -> bool:
        """Tell whether somebody else has marked it."""
        try:
            return self._descriptor is not None and file_lock.is_locked(self._descriptor, _MARK)
        except OSError:  # as above, where nothing is marked
            return False


def _open(path: Path) -> int | None:
    """Return a descriptor of a folder, None if the system cannot open folders."""
    if hasattr(os, "O_DIRECTORY") and hasattr(os, "O_NOFOLLOW"):
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    if not stat.S_ISDIR(path.lstat().st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    return None
