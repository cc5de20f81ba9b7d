"""Publication: a complete staging folder gets the target's name; an FTW folder of that name is replaced in one step.

If the system cannot exchange two names, the old folder is first put aside as `.NAME.ftw-old`. A conversion that is
killed between the two renames leaves it there, and the next one gives it its name back.
"""

from __future__ import annotations

import contextlib
import os
import stat
from typing import TYPE_CHECKING

from ftw.conversion.open_folder import OpenFolder
from ftw.conversion.staging import StagingFolder, remove_folder
from ftw.host import exchange_names, fsync_folder
from ftw.readers import INDEX_NAME

if TYPE_CHECKING:
    from pathlib import Path


def aside_of(target: Path) -> Path:
    """Return the name under which the old folder of a target is put aside."""
    return target.parent / f".{target.name}.ftw-old"


def is_put_aside(target: Path) -> bool:
    """Tell whether a killed conversion has put the target's old folder aside, and nothing has its name."""
    # Of a name that is too long pathlib would raise an error, and no good one.
    return not os.path.exists(target) and os.path.isfile(aside_of(target) / INDEX_NAME)


def restore_target(staging: StagingFolder) -> None:
    """Give an old folder its name back that a killed conversion had put aside.

    Raises:
        OutputError: Another conversion is writing the target.
    """
    with staging.locked():
        if is_put_aside(staging.target):  # no other conversion was faster
            aside_of(staging.target).rename(staging.target)
    with contextlib.suppress(OSError):  # it holds what an earlier conversion left
        staging.path.rmdir()


def publish(staging: StagingFolder) -> None:
    """Give the complete folder its name; an FTW of that name changes places with it at once, and is removed."""
    target = staging.target
    if target.exists() and any(target.iterdir()):
        _replace(target, staging.path)
    else:
        _rename(staging.path, target)
    fsync_folder(target.parent)
    remove_folder(aside_of(target))


def _rename(staging: Path, target: Path) -> None:
    try:
        staging.rename(target)
    except FileExistsError:  # Windows does not replace an empty folder
        target.rmdir()
        staging.rename(target)


def _replace(target: Path, staging: Path) -> None:
    with OpenFolder(target) as old:
        try:
            # It gets the staging folder's name, which no other conversion may then take over: either this lock keeps
            # them away, or that of whoever has it already.
            old.lock()
            old.mark()
            staging.chmod(old.mode | stat.S_IRWXU)
            if not exchange_names(staging, target):
                _move_aside(target, staging)
        finally:
            if old.is_at(staging):
                remove_folder(staging)


def _move_aside(target: Path, staging: Path) -> None:
    """Replace the target by two renames; a kill between them leaves the old folder put aside."""
    aside = aside_of(target)
    remove_folder(aside)
    target.rename(aside)
    try:
        staging.rename(target)
    except OSError:
        aside.rename(target)
        raise
