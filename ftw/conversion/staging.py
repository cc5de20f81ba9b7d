"""StagingFolder: the hidden folder beside a target, `.NAME.ftw-partial`, in which a conversion writes everything.

The conversion locks it, so that a second one is refused. What a conversion leaves there that is interrupted, the next
one resumes (`ftw.conversion.resume_journal`) or clears. Nobody else may even read it, so nobody else can lock it, or
put anything there. Its name can be foreseen, so only what is one's own is taken over.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from typing import TYPE_CHECKING

from ftw.conversion.resume_journal import (
    NotResumableError,
    clear_folder,
    is_journal_of,
    is_resumable,
    read_journal,
    remove_journal,
)
from ftw.errors import CheckpointError, OutputError, printable
from ftw.host import OpenFolder, is_own, owner_of
from ftw.readers import OWN_NAMES, STAGING_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ftw.conversion.plan import ConversionPlan

_log = logging.getLogger("ftw")
_KEPT = "%s: target: what was written is kept in %s; resume=True continues it"
_NOT_REMOVED = "%s: folder: is not needed any more, and cannot be removed: %s"
_PRIVATE = 0o700
_WRITABLE = 0o022  # by the group or by others


class StagingFolder:
    """The staging folder of a target, whether it is there or not."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.path = target.parent / f".{target.name}{STAGING_SUFFIX}"

    @contextlib.contextmanager
    def left(self) -> Iterator[OpenFolder | None]:
        """Open what an earlier conversion has left, if it has.

        Nothing is written or locked: a conversion may start at any time, and clear the folder or rename it.

        Raises:
            OutputError: Another conversion is writing the target, or the folder is not one's own.
        """
        with contextlib.ExitStack() as stack:
            folder = None
            if os.path.lexists(self.path):
                with contextlib.suppress(FileNotFoundError):
                    parent = stack.enter_context(OpenFolder(self.target.parent))
                    folder = stack.enter_context(self._opened(parent))
                    if folder.is_marked():
                        raise self._being_written()
            yield folder

    def held_nbytes(self) -> int:
        """Return what its files take of the disk; some may vanish meanwhile, and the folder as well."""
        held = 0
        for parent, folders, files in os.walk(self.path):
            for name in (*folders, *files):
                with contextlib.suppress(FileNotFoundError):
                    status = os.lstat(os.path.join(parent, name))
                    # It counts 512 bytes everywhere; Windows does not tell.
                    held += 512 * status.st_blocks if hasattr(status, "st_blocks") else status.st_size
        return held

    def read_journal(self, folder: OpenFolder, plan: ConversionPlan) -> list[str]:
        """Return the checksums of the first tensors, which an earlier conversion has written as its journal says.

        Raises:
            NotResumableError: It was another conversion.
        """
        if not is_resumable(folder):
            return []
        if not is_journal_of(folder, plan.digest):
            found = "belongs to another state of the source, other options or another release and cannot be resumed"
            problem = f"{printable(str(self.path))} {found}; without resume=True a new conversion begins"
            raise NotResumableError(f"{printable(str(self.target))}: target: {problem}")
        return read_journal(folder, plan.shard_plan)

    @contextlib.contextmanager
    def locked(self) -> Iterator[OpenFolder]:
        """Make it, or take over what an earlier conversion left, and keep other conversions out of it.

        Raises:
            OutputError: Another conversion is writing the target, or the folder is not one's own.
        """
        with OpenFolder(self.target.parent) as parent:
            with contextlib.suppress(FileExistsError):
                parent.make_folder(self.path.name, _PRIVATE)
            with self._opened(parent) as folder:
                if not folder.lock() or not folder.is_at(self.path):  # just published by the other one
                    raise self._being_written()
                folder.mark()
                if stat.S_IMODE(folder.status().st_mode) & ~stat.S_ISGID != _PRIVATE:
                    folder.set_mode(_PRIVATE)  # an earlier release let others read it
                yield folder

    @contextlib.contextmanager
    def in_use(self) -> Iterator[OpenFolder]:
        """Lock it, and remove it afterwards, unless an error leaves something in it that can be resumed.

        What was made from a source that has changed cannot.

        Raises:
            OutputError: Another conversion is writing the target, or the folder is not one's own.
        """
        is_of_use, is_news = False, False
        with self.locked() as folder:
            try:
                yield folder
            except BaseException as error:
                is_of_use = not isinstance(error, CheckpointError)
                is_news = not isinstance(error, NotResumableError)
                raise
            finally:
                if folder.is_at(self.path):  # otherwise it is published, and the name may be another conversion's
                    if is_of_use and is_resumable(folder):
                        folder.set_mode(_PRIVATE)  # it may have been about to be published
                        if is_news:
                            _log.warning(_KEPT, printable(str(self.target)), printable(str(self.path)))
                    else:
                        remove_folder(folder, self.path)

    def clear(self) -> None:
        """Remove what a conversion left that was killed after it had published the target.

        Raises:
            OutputError: Another conversion is writing the target, or the folder is not one's own.
        """
        if os.path.lexists(self.path):
            with self.in_use():
                pass
        with OpenFolder(self.target) as folder:
            if is_own(folder.status()):
                remove_journal(folder)

    @contextlib.contextmanager
    def _opened(self, parent: OpenFolder) -> Iterator[OpenFolder]:
        """Open it in the folder that it lies in, if it is one's own and a conversion's."""
        self._check_own(parent.status_of(self.path.name), parent)  # before, since a stranger's may not open
        with OpenFolder(self.path, parent) as folder:
            self._check_own(folder.status(), parent)
            if not _is_of_a_conversion(folder):
                raise self._refusal("holds none of the files that a conversion makes; move it away")
            yield folder

    def _check_own(self, status: os.stat_result, parent: OpenFolder) -> None:
        """Check that nobody else has made it or could put anything into it."""
        may_write = stat.S_IMODE(status.st_mode) & _WRITABLE if stat.S_ISDIR(status.st_mode) else 0
        if is_own(status) and not (may_write and hasattr(os, "geteuid")):
            return
        private = parent.status_of_private_file()
        is_same = is_own(status) or (private is not None and private.st_uid == status.st_uid)
        if is_same and private is not None and not may_write & ~private.st_mode:
            return
        if not is_same:
            raise self._refusal(f"belongs to {owner_of(status)}, only one's own is used; take another target")
        problem = f"can be changed by others, its mode is {stat.S_IMODE(status.st_mode):04o}, 0700 is needed; remove it"
        raise self._refusal(problem)

    def _refusal(self, problem: str) -> OutputError:
        return OutputError(f"{printable(str(self.target))}: target: {printable(str(self.path))} {problem}")

    def _being_written(self) -> OutputError:
        return OutputError(f"{printable(str(self.target))}: target: another conversion is writing it")


def remove_folder(folder: OpenFolder, path: Path) -> None:
    """Remove a folder that is at a path now; warn if that fails, since it takes room and a name."""
    try:
        clear_folder(folder)
        folder.parent.remove_empty(path.name)
    except FileNotFoundError:
        pass
    except OSError as error:
        _log.warning(_NOT_REMOVED, printable(str(path)), error.strerror)


def _is_of_a_conversion(folder: OpenFolder) -> bool:
    """Tell whether a folder is empty or holds a name of a conversion's own.

    Whoever may rename one's own folders could give any of them the name. A network share calls files that are removed
    and still open .nfs and a number.
    """
    names = folder.names()
    return not names or any(OWN_NAMES.fullmatch(name) or name.startswith((".ftw-", ".nfs")) for name in names)
