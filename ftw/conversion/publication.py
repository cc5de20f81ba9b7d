"""Publication: a complete staging folder gets the target's name; an FTW folder of that name is replaced in one step.

If the system cannot exchange two names, the old folder is first put aside as `.NAME.ftw-old`. A conversion that is
killed between the two renames leaves it there, and the next one gives it its name back.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from typing import TYPE_CHECKING

from ftw.conversion.permissions import narrow
from ftw.conversion.staging import StagingFolder, remove_folder
from ftw.errors import OutputError, printable
from ftw.host import OpenFolder, is_own, owner_of
from ftw.readers import INDEX_NAME

if TYPE_CHECKING:
    from pathlib import Path

    from ftw.conversion.permissions import Permissions

_SHARED = 0o022  # what others may write to is not taken over by the next conversion
_NARROWER = "%s: target: others may do no more with it than with the source: its mode is %04o, that of the old was %04o"
_log = logging.getLogger("ftw")


def aside_of(target: Path) -> Path:
    """Return the name under which the old folder of a target is put aside."""
    return target.parent / f".{target.name}.ftw-old"


def is_put_aside(target: Path) -> bool:
    """Tell whether a killed conversion of this user has put the target's old folder aside, and nothing has its name."""
    # Of a name that is too long pathlib would raise an error, and no good one.
    aside = aside_of(target)
    return not os.path.exists(target) and _is_own_folder(aside) and os.path.isfile(aside / INDEX_NAME)


def restore_target(staging: StagingFolder) -> None:
    """Give an old folder its name back that a killed conversion had put aside.

    Raises:
        OutputError: Another conversion is writing the target, or the staging folder is not one's own.
    """
    with staging.locked() as folder:
        if is_put_aside(staging.target):  # no other conversion was faster
            folder.parent.rename(aside_of(staging.target).name, staging.target.name)
        with contextlib.suppress(OSError):  # it holds what an earlier conversion left
            folder.parent.remove_empty(staging.path.name)


def publish(staging: StagingFolder, folder: OpenFolder, permissions: Permissions) -> None:
    """Give the complete folder its name; an FTW of that name changes places with it at once, and is removed.

    From then on it can be read by others, as far as `permissions` go.

    Raises:
        OutputError: Somebody has renamed the staging folder meanwhile.
    """
    narrow(folder, permissions)
    if not folder.is_at(staging.path):
        raise _was_renamed(staging)
    parent, target = folder.parent, staging.target
    with contextlib.ExitStack() as stack:
        old = None
        with contextlib.suppress(FileNotFoundError):
            old = stack.enter_context(OpenFolder(target, parent))
        replaced = None if old is None else old.status()
        mode = permissions.mode_of_folder(folder, replaced)
        folder.set_mode(mode & ~_SHARED)
        if old is not None and old.names():
            _replace(staging, folder, old)
        else:
            _rename(staging, folder)
    if mode & _SHARED:
        folder.set_mode(mode)
    parent.sync()
    if replaced is not None and is_own(replaced) and stat.S_IMODE(replaced.st_mode) & 0o077 & ~mode:
        _log.warning(_NARROWER, printable(str(target)), mode, stat.S_IMODE(replaced.st_mode))
    _remove_aside(parent, aside_of(target))


def _rename(staging: StagingFolder, folder: OpenFolder) -> None:
    parent, names = folder.parent, (staging.path.name, staging.target.name)
    try:
        parent.rename(*names)
    except FileExistsError:  # Windows does not replace an empty folder
        parent.remove_empty(staging.target.name)
        parent.rename(*names)
    folder.path = staging.target
    if not folder.is_at(staging.target):
        raise _was_renamed(staging)


def _replace(staging: StagingFolder, folder: OpenFolder, old: OpenFolder) -> None:
    parent, names = folder.parent, (staging.path.name, staging.target.name)
    try:
        # It gets the staging folder's name, which no other conversion may then take over: either this lock keeps
        # them away, or that of whoever has it already.
        old.lock()
        old.mark()
        if not parent.exchange(*names):
            _move_aside(staging, folder)
        elif not folder.is_at(staging.target):
            parent.exchange(*names)
            raise _was_renamed(staging)
        folder.path = staging.target
    finally:
        if old.is_at(staging.path):
            if is_own(old.status()):
                old.set_mode(stat.S_IRWXU)
            remove_folder(old, staging.path)


def _move_aside(staging: StagingFolder, folder: OpenFolder) -> None:
    """Replace the target by two renames; a kill between them leaves the old folder put aside."""
    parent, target, aside = folder.parent, staging.target, aside_of(staging.target)
    with contextlib.suppress(FileNotFoundError):
        status = parent.status_of(aside.name)
        if not is_own(status):
            found = f"belongs to {owner_of(status)}, and the old folder needs its name; take another target"
            raise OutputError(f"{printable(str(target))}: target: {printable(str(aside))} {found}")
        _remove_aside(parent, aside)
    parent.rename(target.name, aside.name)
    try:
        _rename(staging, folder)
    except OSError:
        parent.rename(aside.name, target.name)
        raise


def _remove_aside(parent: OpenFolder, aside: Path) -> None:
    """Remove a folder that was put aside, if it is one's own."""
    if _is_own_folder(aside):
        with OpenFolder(aside, parent) as folder:
            remove_folder(folder, aside)


def _is_own_folder(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and is_own(status)


def _was_renamed(staging: StagingFolder) -> OutputError:
    problem = f"{printable(str(staging.path))} was renamed or replaced by somebody while it was written"
    return OutputError(f"{printable(str(staging.target))}: target: {problem}; nobody else may do so there")
