"""Permissions of what a conversion makes: the umask's, and never more than the source's.

The group and others may read or change a file of the FTW if the umask lets them, and all of the source's weight files
and its folder do. They may list, enter or change its folder if the umask lets them (or an FTW folder of one's own that
it replaces), and the source's folder and all of its weight files do. A copied file or folder grants no more than its
original. If the FTW's group is not the source's, it gets what both the source's group and others have.
"""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING, NamedTuple

from ftw.host import OpenFolder, granted, granted_by, is_own, temporary_name

if TYPE_CHECKING:
    import os

    from ftw.checkpoint import Checkpoint

_READ, _READ_AND_WRITE, _ENTER = 0o044, 0o066, 0o011  # bits of the group and of others


class Permissions(NamedTuple):
    """What the group and others may do at most with the files and folders of an FTW; what a new folder lets them do."""

    files: int
    folders: int
    new_folder: int

    def mode_of_folder(self, folder: OpenFolder, replaced: os.stat_result | None) -> int:
        """Return the mode of the FTW's folder, which may replace another one."""
        wished = self.new_folder
        if replaced is not None and is_own(replaced):
            wished = granted(replaced, folder.status().st_gid)
        return stat.S_IRWXU | wished & self.folders


def find_permissions(checkpoint: Checkpoint, folder: OpenFolder) -> Permissions:
    """Find out what may be done with an FTW that is made of a checkpoint in a folder."""
    group = folder.status().st_gid
    outer, weights = granted_by(checkpoint.folder, group), _READ_AND_WRITE
    for file in checkpoint.files:
        weights &= granted_by(file.path, group)
    files = weights & (outer & _ENTER) * 0o6
    folders = outer & (weights | (weights & _READ) >> 2)  # who may read them may enter
    return Permissions(files, folders, _mode_of_new_folder(folder))


def narrow(folder: OpenFolder, permissions: Permissions) -> None:
    """Take from all that a folder holds what is not allowed."""
    for name in folder.names():
        mode = folder.status_of(name).st_mode
        is_folder = stat.S_ISDIR(mode)
        if is_folder:
            with OpenFolder(folder.path / name, folder) as inner:
                narrow(inner, permissions)
        excess = mode & 0o077 & ~(permissions.folders if is_folder else permissions.files)
        if excess:
            folder.set_mode_of(name, stat.S_IMODE(mode) & ~excess)


def _mode_of_new_folder(folder: OpenFolder) -> int:
    """Make a folder and look at it: the umask cannot be read without changing it for all threads."""
    name = temporary_name()
    folder.make_folder(name)
    try:
        return folder.status_of(name).st_mode & 0o077
    finally:
        folder.remove_empty(name)
