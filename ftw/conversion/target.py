"""Target: the folder that a conversion makes, which is complete or is not there. May it be made, and is there room?"""

from __future__ import annotations

import contextlib
import errno
import os
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from ftw.conversion.staging import StagingFolder
from ftw.conversion.strangers import check_new_parent, follow_links
from ftw.errors import OutputError, printable
from ftw.files import MAX_NAME_NBYTES
from ftw.host import check_file_can_be_made, free_disk_nbytes, fsync_folder
from ftw.readers import INDEX_NAME
from ftw.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftw.checkpoint import Checkpoint


class Standing(Enum):
    """What stands at a target; an empty folder is nothing."""

    NOTHING = "nothing"
    FILE = "file"
    MOUNT_POINT = "mount point"
    FTW = "FTW folder"
    OTHER = "other folder"


_REFUSALS = {
    Standing.FILE: "is a file, a folder that does not exist yet is needed",
    Standing.MOUNT_POINT: "is a mount point, which cannot be renamed; name a folder in it",
    Standing.OTHER: "is not an FTW folder; overwrite=True replaces nothing else",
}
_REPLACE = "overwrite=True replaces an FTW folder"
_NOT_EMPTY = f"exists and is not empty; {_REPLACE}"


def resolve_target(given: str | os.PathLike[str]) -> Path:
    """Return a target as a real path: if it is a link, what it points to is made or replaced.

    Raises:
        OutputError: No folder can have that name, or a link is not to be trusted.
    """
    if not os.fspath(given):  # which would be the current folder
        raise OutputError("'': target: is empty, the name of a folder is needed")
    if "\0" in os.fsdecode(given):
        raise _refusal(os.fsdecode(given), "contains a zero byte, which is not allowed in a file name")
    target = follow_links(Path.cwd() / os.fspath(given))
    if target.is_symlink():  # links have been followed, so it leads to itself
        raise _refusal(target, "is a link that leads back to itself, the name of a folder is needed")
    if len(os.fsencode(StagingFolder(target).path.name)) > MAX_NAME_NBYTES:
        found = f"its name has {len(os.fsencode(target.name))} bytes"
        most = MAX_NAME_NBYTES - len(StagingFolder(Path("")).path.name)
        raise _refusal(target, f"{found}, at most {most} are allowed, since a longer one is used while it is written")
    above = next((folder for folder in target.parents if os.path.lexists(folder)), target)
    if not above.is_dir():
        raise _refusal(target, f"lies below {printable(str(above))}, which is a file; a folder is needed there")
    return target


def find_standing(folder: Path) -> Standing:
    """Return what stands at a target."""
    if not folder.exists():
        return Standing.NOTHING
    if not folder.is_dir():
        return Standing.FILE
    if os.path.ismount(folder):
        return Standing.MOUNT_POINT
    if not any(folder.iterdir()):
        return Standing.NOTHING
    return Standing.FTW if (folder / INDEX_NAME).is_file() else Standing.OTHER


def check_target(
    target: Path,
    checkpoint: Checkpoint,
    standing: Standing,
    *,
    overwrite: bool,
    stranger: str | None = None,
    difference: str | None = None,
) -> None:
    """Check that a folder may be made or replaced; `overwrite` allows to replace an FTW folder.

    `stranger` says to whom else it belongs, `difference` how it differs from what would be made, for the message.

    Raises:
        OutputError: It may not.
    """
    source = checkpoint.folder.resolve()
    lies_inside = source in target.parents and checkpoint.path.is_dir()  # beside a single file it may lie
    if target == source and checkpoint.path.is_dir():
        raise _refusal(target, "is the source itself, another folder is needed")
    if target == source or lies_inside or target in source.parents:
        raise _refusal(target, f"and the source {printable(str(source))} must not contain each other")
    if standing in (Standing.FTW, Standing.OTHER) and not overwrite:
        if stranger is not None:
            raise _refusal(target, f"{_NOT_EMPTY}; {stranger}, so it is not trusted")
        if difference is not None:
            raise _refusal(
                target, f"exists and is not empty, and not what this conversion makes: {difference}; {_REPLACE}"
            )
        raise _refusal(target, _NOT_EMPTY)
    if standing in _REFUSALS:
        raise _refusal(target, _REFUSALS[standing])


def free_nbytes(target: Path) -> int:
    """Return what this user may still write to the disk that the target, or the nearest folder above it, lies on."""
    return free_disk_nbytes(_folder_above(target))


def check_disk(target: Path, largest_nbytes: int) -> None:
    """Check that the disk of a target takes files of that size from this user; nothing is written.

    Raises:
        OutputError: It does not: it is read-only, the folder is another's, or no file may be so long.
    """
    above = _folder_above(target)
    try:
        check_file_can_be_made(above, largest_nbytes)
    except OSError as error:
        where = f"be made in {printable(str(above))}"
        if error.errno != errno.EFBIG:
            raise _refusal(target, f"cannot {where}: {os.strerror(error.errno or 0).lower()}") from error
        problem = f"no file of {format_size(largest_nbytes)} can {where}, by its file system or 'ulimit -f'"
        raise _refusal(target, f"{problem}; smaller shards are allowed (--shard-size, shard_limit)") from error


def _folder_above(target: Path) -> Path:
    return next((folder for folder in target.parents if folder.exists()), target)


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
    wanted, left = format_size(needed), format_size(free)
    if wanted == left:  # rounded
        wanted, left = f"{needed} bytes", f"{free}"
    return f"{printable(str(target))}: target: needs {wanted}, {left} free on its disk"


@contextlib.contextmanager
def parent_folders(target: Path) -> Iterator[None]:
    """Make the folders above the target; after an error, those that were made and are empty are gone again.

    Raises:
        OutputError: Another user was faster to make one.
    """
    missing = [folder for folder in target.parents if not folder.exists()]
    made: list[Path] = []
    try:
        for folder in reversed(missing):
            try:
                folder.mkdir()
                made.insert(0, folder)
            except FileExistsError:  # another conversion's, maybe
                check_new_parent(folder, target)
        for folder in made:
            fsync_folder(folder.parent)
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # one that is not empty any more, and those above it
            for folder in made:
                folder.rmdir()
        raise


@contextlib.contextmanager
def named_as_typed(target: Path, typed: str | os.PathLike[str]) -> Iterator[None]:
    """Let errors of a target begin with its path as it was given, not with the real path that it has."""
    try:
        yield
    except OutputError as error:
        start = f"{printable(str(target))}: "
        if str(error).startswith(start):
            error.args = (f"{printable(os.fsdecode(typed))}: {str(error).removeprefix(start)}",)
        raise


def _refusal(target: Path | str, problem: str) -> OutputError:
    return OutputError(f"{printable(str(target))}: target: {problem}")
