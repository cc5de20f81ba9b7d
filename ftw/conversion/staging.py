"""StagingFolder: the hidden folder beside a target, `.NAME.ftw-partial`, in which a conversion writes everything.

The conversion locks it, so that a second one is refused. What a conversion leaves there that is interrupted, the next
one resumes (`ftw.conversion.resume_journal`) or clears.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from typing import TYPE_CHECKING

from ftw.conversion.open_folder import OpenFolder
from ftw.conversion.resume_journal import NotResumableError, is_journal_of, is_resumable, read_journal
from ftw.errors import CheckpointError, OutputError, printable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ftw.conversion.plan import ConversionPlan

_log = logging.getLogger("ftw")
_KEPT = "%s: target: what was written is kept in %s; --resume (resume=True) continues it"
_NOT_REMOVED = "%s: folder: is not needed any more, and cannot be removed: %s"


class StagingFolder:
    """The staging folder of a target, whether it is there or not."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.path = target.parent / f".{target.name}.ftw-partial"

    def is_left(self) -> bool:
        """Tell whether an earlier conversion has left it.

        Nothing is written or locked: a conversion may start at any time, and clear the folder or rename it.

        Raises:
            OutputError: Another conversion is writing the target.
        """
        try:
            with OpenFolder(self.path) as folder:
                if folder.is_marked():
                    raise self._being_written()
        except FileNotFoundError:
            return False
        return True

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

    def read_journal(self, plan: ConversionPlan) -> list[str]:
        """Return the checksums of the first tensors, which an earlier conversion has written as its journal says.

        Raises:
            NotResumableError: It was another conversion.
        """
        if not is_resumable(self.path):
            return []
        if not is_journal_of(self.path, plan.digest):
            found = "belongs to another state of the source, other options or another release and cannot be resumed"
            problem = f"{printable(str(self.path))} {found}; without --resume a new conversion begins"
            raise NotResumableError(f"{printable(str(self.target))}: target: {problem}")
        return read_journal(self.path, plan.shard_plan)

    @contextlib.contextmanager
    def locked(self) -> Iterator[OpenFolder]:
        """Make it, or take over what an earlier conversion left, and keep other conversions out of it.

        Raises:
            OutputError: Another conversion is writing the target.
        """
        self.path.mkdir(exist_ok=True)
        with OpenFolder(self.path) as folder:
            if not folder.lock() or not folder.is_at(self.path):  # just published by the other one
                raise self._being_written()
            folder.mark()
            yield folder

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Lock it, and remove it afterwards, unless an error leaves something in it that can be resumed.

        What was made from a source that has changed cannot.

        Raises:
            OutputError: Another conversion is writing the target.
        """
        is_of_use, is_news = False, False
        with self.locked() as folder:
            try:
                yield
            except BaseException as error:
                is_of_use = not isinstance(error, CheckpointError)
                is_news = not isinstance(error, NotResumableError)
                raise
            finally:
                if folder.is_at(self.path):  # otherwise it is published, and the name may be another conversion's
                    if not is_of_use or not is_resumable(self.path):
                        remove_folder(self.path)
                    elif is_news:
                        _log.warning(_KEPT, printable(str(self.target)), printable(str(self.path)))

    def clear(self) -> None:
        """Remove what a conversion left that was killed after it had published the target.

        Raises:
            OutputError: Another conversion is writing the target.
        """
        if os.path.lexists(self.path):
            with self.in_use():
                pass

    def _being_written(self) -> OutputError:
        return OutputError(f"{printable(str(self.target))}: target: another conversion is writing it")


def remove_folder(folder: Path) -> None:
    """Remove a folder, if it is there; warn if that fails, since it takes room and a name."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        _log.warning(_NOT_REMOVED, printable(str(folder)), error.strerror)
