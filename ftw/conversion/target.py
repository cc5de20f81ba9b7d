"""Target: the folder that a conversion makes, which is complete or is not there: may it be made, and is there room?"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from ftw.conversion.staging import StagingFolder
from ftw.errors import OutputError, printable
from ftw.host import fsync_folder
from ftw.readers import INDEX_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator

_MAX_NAME_NBYTES = 255  # of a file, by Linux


def check_target(
    target: Path, *, source: Path, is_whole_folder: bool, overwrite: bool, standing: Path | None = None
) -> None:
    """Check that a folder may be made or replaced.

    Args:
        target: It, as a real path.
        source: The folder of the source, as a real path.
        is_whole_folder: Whether all of that folder is the source; the one around a single file may hold the target too.
        overwrite: Whether an FTW folder may be replaced.
        standing: The folder that is taken for the one of that name, if it is another (`standing_folder`).

    Raises:
        OutputError: It may not.
    """
    name = printable(str(target))
    if target.is_symlink():  # although links have been followed
        raise OutputError(f"{name}: target: is a link that leads back to itself, the name of a folder is needed")
    if len(os.fsencode(StagingFolder(target).path.name)) > _MAX_NAME_NBYTES:
        most = _MAX_NAME_NBYTES - len(StagingFolder(Path("")).path.name)
        found = f"its name has {len(os.fsencode(target.name))} bytes"
        raise OutputError(f"{name}: target: {found}, at most {most} are allowed, since it has another one meanwhile")
    lies_inside = source in target.parents and is_whole_folder
    if target == source or lies_inside or target in source.parents:
        raise OutputError(f"{name}: target: and the source {printable(str(source))} lie in one another, none may")
    standing = standing or target
    if not standing.exists():
        return
    if not standing.is_dir():
        raise OutputError(f"{name}: target: is a file, a folder that does not exist yet is needed")
    if os.path.ismount(standing):
        raise OutputError(f"{name}: target: is a mount point, which cannot be renamed; name a folder in it")
    if any(standing.iterdir()):
        if not overwrite:
            raise OutputError(f"{name}: target: exists and is not empty; --overwrite replaces an FTW folder")
        if not (standing / INDEX_NAME).is_file():
            raise OutputError(f"{name}: target: is not an FTW folder; --overwrite replaces nothing else")


def free_nbytes(target: Path) -> int:
    """Return what is free on the disk that the target, or the nearest folder above it, lies on."""
    return shutil.disk_usage(next((folder for folder in target.parents if folder.exists()), target)).free


def check_free_space(target: Path, needed: int) -> None:
    """Check that `needed` bytes fit on the target's disk.

    Raises:
        OutputError: They do not.
    """
    free = free_nbytes(target)
    if needed > free:
        raise OutputError(no_room(target, needed, free))


def no_room(target: Path, needed: int, free: int) -> str:
    """Return the line that says that a target does not fit on its disk."""
    return f"{printable(str(target))}: target: needs {needed} bytes, {free} are free on its disk"


@contextlib.contextmanager
def parent_folders(target: Path) -> Iterator[None]:
    """Make the folders above the target; after an error, those that were made and are empty are gone again."""
    made = [folder for folder in target.parents if not folder.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        for folder in made:
            fsync_folder(folder.parent)
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # one that is not empty any more, and those above it
            for folder in made:
                folder.rmdir()
        raise
