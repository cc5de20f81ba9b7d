"""Target: the folder that a conversion makes, which is complete or is not there.

Everything is written into a hidden folder beside it, `.NAME.ftw-partial`, which the conversion locks, so that a second
one is refused. Complete and synced, it gets the target's name; an FTW folder that is replaced changes places with it in
one step. What a conversion leaves that ends before is a part (`ftw.conversion.resume_journal`), from which the next one
goes on, or which it clears.

The lock is that of flock(2), which can only be found by taking it. So whoever holds it also holds a shared one of
fcntl(2) as a mark, which a dry run sees without taking any lock, and thus without being in a conversion's way.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import os
import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from ftw.conversion.resume_journal import ForeignPartError, has_part
from ftw.errors import CheckpointError, OutputError, printable
from ftw.host import file_lock, fsync_folder
from ftw.readers import INDEX_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator

_log = logging.getLogger("ftw")
_KEPT = "%s: target: what was written is kept in %s; --resume (resume=True) goes on from it"
_NOT_REMOVED = "%s: folder: is not needed any more, and cannot be removed: %s"
_MAX_NAME_NBYTES = 255  # of a file, by Linux
_MARK = 0  # the byte of a staging folder that is marked; a folder's bytes are but places for locks
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of renameat2(2), Linux 3.15


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
    if len(os.fsencode(_staging_of(target).name)) > _MAX_NAME_NBYTES:
        most = _MAX_NAME_NBYTES - len(_staging_of(Path("")).name)
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


def held_nbytes(folder: Path) -> int:
    """Return what the files of a folder take of their disk; some may vanish meanwhile, and the folder as well."""
    held = 0
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            with contextlib.suppress(FileNotFoundError):
                held += 512 * os.lstat(os.path.join(parent, name)).st_blocks  # it counts 512 bytes everywhere
    return held


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


@contextlib.contextmanager
def staging_folder(target: Path) -> Iterator[Path]:
    """Yield the folder beside the target that no other conversion uses, with what one before it has left.

    It is gone afterwards, unless an error leaves a part in it that can be gone on from: one that was made from a source
    that has changed cannot.

    Raises:
        OutputError: Another conversion is writing the target.
    """
    staging, is_of_use, is_news = _staging_of(target), False, False
    with _locked(staging, target) as lock:
        try:
            yield staging
        except BaseException as error:
            is_of_use = not isinstance(error, CheckpointError)
            is_news = not isinstance(error, ForeignPartError)
            raise
        finally:
            if _is_still(lock, staging):  # otherwise it is published, and the name may be another conversion's by now
                if not is_of_use or not has_part(staging):
                    _remove(staging)
                elif is_news:
                    _log.warning(_KEPT, printable(str(target)), printable(str(staging)))


def left_staging_folder(target: Path) -> Path | None:
    """Return the staging folder that an earlier conversion has left, None where there is none.

    Nothing is written or locked: a conversion may start at any time, and clear the folder or rename it.

    Raises:
        OutputError: Another conversion is writing the target.
    """
    staging = _staging_of(target)
    try:
        with _opened(staging) as descriptor:
            if _is_marked(descriptor):
                raise _is_being_written(target)
    except FileNotFoundError:
        return None
    return staging


def standing_folder(target: Path) -> Path:
    """Return the folder that a conversion would find at the target, after `restore_target`; nothing is written.

    Raises:
        OutputError: Another conversion is writing the target, and may have put the old one aside itself.
    """
    if not _is_put_aside(target):
        return target
    left_staging_folder(target)
    return _aside_of(target)


def restore_target(target: Path) -> None:
    """Give an old folder its name back that a conversion had put aside when it was killed.

    Raises:
        OutputError: Another conversion is writing the target.
    """
    if _is_put_aside(target):
        with _locked(_staging_of(target), target):
            _aside_of(target).rename(target)
        with contextlib.suppress(OSError):  # it holds a part
            _staging_of(target).rmdir()


def clear_staging_folder(target: Path) -> None:
    """Remove what a conversion left that was killed after it had published the target.

    Raises:
        OutputError: Another conversion is writing the target.
    """
    if os.path.lexists(_staging_of(target)):
        with staging_folder(target):
            pass


def publish(staging: Path, target: Path) -> None:
    """Give the complete folder its name; an FTW of that name changes places with it at once, and is removed."""
    if target.exists() and any(target.iterdir()):
        _replace(staging, target, _aside_of(target))
    else:
        staging.rename(target)
    fsync_folder(target.parent)
    _remove(_aside_of(target))


def _staging_of(target: Path) -> Path:
    return target.parent / f".{target.name}.ftw-partial"


def _aside_of(target: Path) -> Path:
    return target.parent / f".{target.name}.ftw-old"


def _is_put_aside(target: Path) -> bool:
    # Of a name that is too long pathlib would raise an error, and no good one.
    return not os.path.exists(target) and os.path.isfile(_aside_of(target) / INDEX_NAME)


def _remove(folder: Path) -> None:
    """Remove a folder, if it is there; where that fails say so, since it takes room and a name."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        _log.warning(_NOT_REMOVED, printable(str(folder)), error.strerror)


@contextlib.contextmanager
def _locked(staging: Path, target: Path) -> Iterator[int]:
    """Make the staging folder, unless there is one, and yield a descriptor that locks it."""
    staging.mkdir(exist_ok=True)
    with _opened(staging) as descriptor:
        _lock(descriptor, staging, target)
        yield descriptor


@contextlib.contextmanager
def _opened(staging: Path) -> Iterator[int]:
    descriptor = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _lock(descriptor: int, staging: Path, target: Path) -> None:
    """Lock the staging folder, and make sure that the other conversion did not just give it its final name."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_ours = _is_still(descriptor, staging)
    except BlockingIOError:
        is_ours = False
    if not is_ours:
        raise _is_being_written(target)
    _mark(descriptor)


def _is_being_written(target: Path) -> OutputError:
    return OutputError(f"{printable(str(target))}: target: another conversion is writing it")


def _mark(descriptor: int) -> None:
    """Mark a staging folder as one that is written, for as long as it is open; it is no matter how many do so."""
    with contextlib.suppress(OSError):  # of a file system that lacks such locks: what excludes is the other lock
        file_lock.lock_shared(descriptor, _MARK)  # never waits, since a folder cannot be locked exclusively this way


def _is_marked(descriptor: int) -> bool:
    try:
        return file_lock.is_locked(descriptor, _MARK)
    except OSError:  # as above, where nothing is marked
        return False


def _is_still(descriptor: int, folder: Path) -> bool:
    """Tell whether a name still stands for the folder that was opened under it."""
    try:
        return os.path.samestat(os.fstat(descriptor), folder.lstat())
    except FileNotFoundError:
        return False


def _replace(staging: Path, target: Path, aside: Path) -> None:
    old = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # It gets the staging folder's name, which no other conversion may then take over: either this lock keeps them
        # away, or that of whoever has it already.
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(old, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _mark(old)
        staging.chmod(stat.S_IMODE(os.fstat(old).st_mode) | stat.S_IRWXU)
        if not _exchange(staging, target):
            _move_aside(staging, target, aside)
    finally:
        if _is_still(old, staging):
            _remove(staging)
        os.close(old)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; False where the C library or the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    return bool(renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)


def _move_aside(staging: Path, target: Path, aside: Path) -> None:
    """Replace the target by two renames; a kill between them leaves the old folder under the name `aside`."""
    _remove(aside)
    target.rename(aside)
    try:
        staging.rename(target)
    except OSError:
        aside.rename(target)
        raise
