"""OpenFolder: a folder by its descriptor, in which files are made and opened whoever renames it.

No link is followed in it, so what is done in it stays in it. It is locked and marked as a whole. The lock is that of
flock(2), which can only be found by taking it. So whoever holds it also holds a shared one of fcntl(2), the mark, which
a look at it sees without taking any lock, and thus without being in anybody's way.

A system that cannot open folders (Windows) uses its path instead. There is then no lock and no mark: two conversions
into it at a time are not kept apart.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from typing import TYPE_CHECKING, TypeVar

from ftw.host import file_lock
from ftw.host.atomic_write import temporary_name, write_atomically
from ftw.host.file_io import open_descriptor, open_direct
from ftw.host.libc import exchange_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

_Result = TypeVar("_Result")
_HAS_DIR_FD = os.mkdir in os.supports_dir_fd
_MARK = 0  # the byte that is marked; a folder's bytes are but places for locks


class OpenFolder:
    """A folder that is open. Use it as a context manager, which closes it, and so ends its lock and its mark.

    Errors name the path under which it was opened, and the file.

    Attributes:
        path: Where it was when it was opened; whoever renames it has to set it.
    """

    def __init__(self, path: Path, parent: OpenFolder | None = None) -> None:
        """Open a folder; in an open folder, which outlives it, by the last part of its path.

        Raises:
            FileNotFoundError: It is not there.
            NotADirectoryError: It is a link or a file.
        """
        self.path = path
        self._parent = parent
        self._descriptor = _open(path, parent)
        self._first = self.status()

    def __enter__(self) -> OpenFolder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    # the folder itself

    @property
    def parent(self) -> OpenFolder:
        """The folder in which it was opened."""
        if self._parent is None:
            raise ValueError(f"{self.path}: was opened by its path alone")
        return self._parent

    def status(self) -> os.stat_result:
        """Return its owner, its permissions and what else there is to know."""
        return self.path.lstat() if self._descriptor is None else os.fstat(self._descriptor)

    def is_at(self, path: Path) -> bool:
        """Tell whether a name in the folder in which it was opened, the last part of a path, stands for it now."""
        try:
            found = path.lstat() if self._parent is None else self._parent.status_of(path.name)
            return os.path.samestat(self._first, found)
        except FileNotFoundError:
            return False

    def set_mode(self, mode: int) -> None:
        """Give it permissions, if its file system has any; whose group its files get stays as it is."""
        mode |= self.status().st_mode & stat.S_ISGID
        with contextlib.suppress(PermissionError):  # the owner may, but where there are no permissions
            if self._descriptor is None:
                self.path.chmod(mode)
            else:
                os.fchmod(self._descriptor, mode)

    def sync(self) -> None:
        """Make the names in it last, if the system lets folders be opened."""
        if self._descriptor is not None:
            os.fsync(self._descriptor)

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

    # what is in it

    def names(self) -> list[str]:
        """Return the names in it."""
        return os.listdir(self.path if self._descriptor is None else self._descriptor)

    def status_of(self, name: str) -> os.stat_result:
        """Return the status of what has a name in it; a link is not followed.

        Raises:
            FileNotFoundError: Nothing has.
        """
        return self._call(os.lstat, name)

    def open(self, name: str, flags: int, mode: int = 0o666) -> int:
        """Return the descriptor of a file in it; one that is made gets a mode, less the umask.

        Raises:
            OSError: It is a link, or cannot be opened.
        """
        return self._call(open_descriptor, name, flags | getattr(os, "O_NOFOLLOW", 0), mode)

    def open_direct(self, name: str, flags: int) -> int | None:
        """Return the descriptor of a file in it around the page cache, None if that cannot be."""
        return self._call(open_direct, name, flags | getattr(os, "O_NOFOLLOW", 0))

    def status_of_private_file(self) -> os.stat_result | None:
        """Return the status that a private file gets which this process makes in it, None if it may make none.

        Some file systems know neither permissions nor owners, or give their own (FAT, network shares). The file has a
        random name and is gone at once.
        """
        name = temporary_name()
        try:
            descriptor = self.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError:
            return None
        try:
            return os.fstat(descriptor)
        finally:
            os.close(descriptor)
            self.remove_file(name)

    def write(self, name: str, pieces: Iterable[bytes]) -> None:
        """Write a file in it so that its name shows either the whole content or what was there before."""
        write_atomically(self.path / name, pieces, dir_fd=self._descriptor)

    def set_mode_of(self, name: str, mode: int) -> None:
        """Give permissions to a file or a folder in it, which is no link, if its file system has any."""
        with contextlib.suppress(PermissionError):
            self._call(os.chmod, name, mode)

    def make_folder(self, name: str, mode: int = 0o777) -> None:
        """Make a folder in it; it gets a mode, less the umask."""
        self._call(os.mkdir, name, mode)

    def remove_file(self, name: str) -> None:
        """Remove a file or a link from it."""
        self._call(os.unlink, name)

    def remove_empty(self, name: str) -> None:
        """Remove an empty folder from it."""
        self._call(os.rmdir, name)

    def remove(self, name: str) -> None:
        """Remove a file, a link or a folder with all that it holds from it; no link is followed."""
        if not stat.S_ISDIR(self.status_of(name).st_mode):
            self.remove_file(name)
            return
        import shutil  # whose compressors would take part of every start

        if self._descriptor is not None and sys.version_info >= (3, 11):
            shutil.rmtree(name, dir_fd=self._descriptor)
        else:
            shutil.rmtree(self.path / name)

    def rename(self, old: str, new: str) -> None:
        """Give what has a name in it another one."""
        place = self.path if self._descriptor is None else ""
        paths = os.path.join(place, old), os.path.join(place, new)
        try:
            os.rename(*paths, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        except OSError as error:
            error.filename, error.filename2 = str(self.path / old), str(self.path / new)
            raise

    def exchange(self, one: str, other: str) -> bool:
        """Exchange two names in one step; return False if the system or its file system cannot."""
        return self._descriptor is not None and exchange_names(one, other, dir_fd=self._descriptor)

    def _call(self, function: Callable[..., _Result], name: str, *arguments: int) -> _Result:
        """Call a function of the system for a name in the folder; its errors get the whole path."""
        if self._descriptor is None:
            return function(self.path / name, *arguments)
        try:
            return function(name, *arguments, dir_fd=self._descriptor)
        except OSError as error:
            error.filename = str(self.path / name)
            raise


def _open(path: Path, parent: OpenFolder | None) -> int | None:
    """Return a descriptor of a folder, None if the system cannot open folders."""
    if _HAS_DIR_FD and hasattr(os, "O_DIRECTORY") and hasattr(os, "O_NOFOLLOW"):
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
        return os.open(path, flags) if parent is None else parent.open(path.name, flags)
    if not stat.S_ISDIR(path.lstat().st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    return None
