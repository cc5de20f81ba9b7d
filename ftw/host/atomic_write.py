"""Files and folders that are there after a power failure, whole or not at all."""

from __future__ import annotations

import contextlib
import os
import stat
from typing import TYPE_CHECKING

from ftw.host.file_io import open_descriptor
from ftw.host.ownership import granted, is_own

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


def temporary_name() -> str:
    """Return a name that nobody can foresee, for what gets another name soon or is gone again."""
    return f".ftw-{os.urandom(8).hex()}.tmp"


def write_atomically(path: Path, pieces: Iterable[bytes], *, dir_fd: int | None = None) -> None:
    """Write a file so that its name shows either the whole content or what was there before.

    The content is written under a random name, in a file that is made for it, so that nothing is opened that another
    user has put there. A link of the name is replaced, not followed. A file of one's own hands its permissions on to
    the one that replaces it; otherwise they are those of any new file.

    Args:
        path: The file.
        pieces: Its content.
        dir_fd: The folder, open, in which the last part of `path` is used; the rest of it is for messages.

    Raises:
        OSError: It names the file.
    """
    name: Path | str = path if dir_fd is None else path.name
    temporary: Path | str = path.with_name(temporary_name()) if dir_fd is None else temporary_name()
    try:
        replaced = _own_file(name, dir_fd)
        mode = 0o666 if replaced is None else 0o600
        descriptor = open_descriptor(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode, dir_fd=dir_fd)
        try:
            _write(descriptor, pieces, replaced)
            os.replace(temporary, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=dir_fd)
            raise
    except OSError as error:  # it names the temporary file, or none
        raise OSError(error.errno, error.strerror, str(path)) from error
    if dir_fd is None:
        fsync_folder(path.parent)
    else:
        os.fsync(dir_fd)


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder last, if the system lets folders be opened: Windows does not."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _own_file(name: Path | str, dir_fd: int | None) -> os.stat_result | None:
    """Return the status of a file that is there, if it is one's own and neither a link nor anything else."""
    try:
        status = os.lstat(name, dir_fd=dir_fd)
    except FileNotFoundError:
        return None
    return status if stat.S_ISREG(status.st_mode) and is_own(status) else None


def _write(descriptor: int, pieces: Iterable[bytes], replaced: os.stat_result | None) -> None:
    """Write a file, and make its content last, with the permissions of the one that it replaces."""
    with os.fdopen(descriptor, "wb") as file:
        if replaced is not None and hasattr(os, "fchmod"):
            mode = stat.S_IMODE(replaced.st_mode) & 0o700 | granted(replaced, os.fstat(descriptor).st_gid)
            with contextlib.suppress(PermissionError):  # of a file system without permissions
                os.fchmod(descriptor, mode)
        file.writelines(pieces)
        file.flush()
        os.fsync(descriptor)
