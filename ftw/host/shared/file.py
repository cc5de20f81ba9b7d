"""SegmentFile: the file that a segment lies in, from its first user to its last.

Who uses it is counted by the kernel, in locks on bytes of the file that end with their process:

    byte 0  users    shared by each user; free for exclusive use when nobody is left
    byte 1  filler   held by the one who fills
    byte 2  reaper   held by the process that waits for byte 0 and removes the name then (`reaper_program`)

The file gets its name when its header is complete and its reaper waits, so whatever is killed, the name goes with the
last user. A reaper that was killed is made up for: who attaches starts another, the last user to close removes the
name itself, and each opening removes the user's other segments that nobody holds. A process that was forked without
exec has its parent's locks: a close gives them back for both, but those of a parent that is killed end with its child.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
from typing import TYPE_CHECKING

from ftw.errors import SharedMemoryError, printable
from ftw.host import file_lock
from ftw.host.shared.header import (
    DO_NOT_SHARE,
    check_free_space,
    check_header,
    check_kind,
    check_user,
    find_distrust,
    is_ready,
    mark_ready,
    name_prefix,
    write_header,
)
from ftw.host.shared.reaper import start_reaper
from ftw.host.shared.tmpfs import is_tmpfs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ftw.host.shared.header import SegmentSpec

_USERS, _FILLER, _REAPER = range(3)
_log = logging.getLogger("ftw")


class SegmentFile:
    """An open segment, in use until it is closed."""

    def __init__(self, spec: SegmentSpec, descriptor: int) -> None:
        self.spec = spec
        self.descriptor = descriptor
        self._process = os.getpid()

    def wait_to_fill(self) -> bool:
        """Wait until nobody else fills the table; return whether it is still to be filled, by this process alone."""
        if is_ready(self.spec, self.descriptor):
            return False
        if file_lock.is_locked(self.descriptor, _FILLER):
            _log.info("%s: %s: waits for another process to fill it", self.spec.path, printable(self.spec.name))
        file_lock.lock_exclusive(self.descriptor, _FILLER)
        if not is_ready(self.spec, self.descriptor):
            return True
        file_lock.unlock(self.descriptor, _FILLER)
        return False

    def mark_ready(self) -> None:
        """Let the others use the table that this process has filled."""
        mark_ready(self.spec, self.descriptor)
        file_lock.unlock(self.descriptor, _FILLER)

    def close(self) -> None:
        """Stop using the segment; the last one removes its name."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor < 0:
            return
        try:
            if os.getpid() != self._process:
                return  # a fork has its parent's locks, which are the parent's to give up
            file_lock.unlock(descriptor, _FILLER)  # a forked child has them too, so closing alone would not end them
            if not file_lock.try_lock_exclusive(descriptor, _USERS):
                # Two who close at once each see the other's lock. Once theirs are gone, one of them is let in.
                file_lock.unlock(descriptor, _USERS)
                if not file_lock.try_lock_exclusive(descriptor, _USERS):
                    return
            _unlink(descriptor, self.spec.path)
            file_lock.unlock(descriptor, _USERS)
        finally:
            os.close(descriptor)


def open_segment_file(spec: SegmentSpec) -> SegmentFile:
    """Attach to the segment, or make it; remove what killed processes left in the folder.

    Raises:
        SharedMemoryError: The system has no such memory, the folder is not a tmpfs or is full, or another file or table
            lies under the name; or this process has no user of its own.
    """
    if not file_lock.HAS_BYTE_LOCKS:
        needed = "one table for all processes of a host (share='node') needs Linux, its locks on bytes of a file"
        raise SharedMemoryError(f"{printable(spec.name)}: shared memory: {needed} and /dev/shm; {DO_NOT_SHARE}")
    check_user(spec)
    try:
        folder = os.open(spec.folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise spec.error(f"its folder cannot be opened: {error.strerror}") from error
    try:
        if not is_tmpfs(folder):
            raise spec.error("its folder is not on a tmpfs, whose files are memory; mount one there")
        _sweep(spec)
        while True:  # each further round follows another process's progress
            descriptor = _attach(spec)
            if descriptor is None:
                descriptor = _create(spec, folder)
            if descriptor is not None:
                return SegmentFile(spec, descriptor)
    finally:
        os.close(folder)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe under the name must not stop us


def _attach(spec: SegmentSpec) -> int | None:
    """Open the segment and become one of its users; None where there is none, or it was just removed."""
    try:
        descriptor = _open(spec.path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise spec.error(f"cannot be opened: {error.strerror}; remove it, or {DO_NOT_SHARE}") from error
    with _closed_on_error(descriptor):
        check_kind(spec, descriptor)
        file_lock.lock_shared(descriptor, _USERS)  # waits while somebody removes the name
        if _is_still(descriptor, spec.path):
            check_header(spec, descriptor)
            _ensure_reaper(spec, descriptor)
            return descriptor
    os.close(descriptor)
    return None


def _create(spec: SegmentSpec, folder: int) -> int | None:
    """Make the segment and become its first user; None where another process was faster."""
    try:
        descriptor = os.open(spec.folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError as error:
        raise spec.error(f"cannot be made: {error.strerror}") from error
    with _closed_on_error(descriptor):
        os.fchmod(descriptor, 0o600)  # whatever the umask
        file_lock.lock_shared(descriptor, _USERS)
        check_free_space(spec, descriptor)
        try:
            write_header(spec, descriptor)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise spec.no_space(descriptor) from error
        _ensure_reaper(spec, descriptor)
        with contextlib.suppress(FileExistsError):
            # A folder's descriptor makes Python call linkat(2), the one call that follows the link in /proc.
            os.link(f"/proc/self/fd/{descriptor}", spec.path.name, dst_dir_fd=folder)
            return descriptor
    os.close(descriptor)
    return None


@contextlib.contextmanager
def _closed_on_error(descriptor: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        os.close(descriptor)
        raise


def _ensure_reaper(spec: SegmentSpec, descriptor: int) -> None:
    if not file_lock.is_locked(descriptor, _REAPER):
        own_lock, users_lock = file_lock.exclusive_lock(_REAPER), file_lock.exclusive_lock(_USERS)
        start_reaper(descriptor, spec.path, own_lock=own_lock, users_lock=users_lock)


def _sweep(spec: SegmentSpec) -> None:
    """Remove the user's other segments that nobody uses."""
    pattern = re.compile(re.escape(name_prefix()) + "[0-9a-f]{32}")
    for name in os.listdir(spec.folder):
        if pattern.fullmatch(name) and name != spec.path.name:
            with contextlib.suppress(OSError):  # gone meanwhile, or not a file
                _remove_unused(spec.folder / name)


def _remove_unused(path: Path) -> None:
    descriptor = _open(path)
    try:
        if not find_distrust(os.fstat(descriptor)) and file_lock.try_lock_exclusive(descriptor, _USERS):
            _unlink(descriptor, path)
    finally:
        os.close(descriptor)


def _unlink(descriptor: int, path: Path) -> None:
    """Remove a name if it still stands for the file; nobody else does so while the caller has the users' lock."""
    if _is_still(descriptor, path):
        path.unlink(missing_ok=True)


def _is_still(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False
