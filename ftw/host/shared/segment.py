"""SharedSegment: a table in memory that all processes of a user on a host share.

The first process that asks for the table makes the segment and fills it; the others wait until it is ready and map the
same pages. If the one who fills fails or is killed, the next one fills. The segment goes with its last user, however
that one ends.
"""

from __future__ import annotations

import contextlib
import errno
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from ftw.host.shared.file import open_segment_file
from ftw.host.shared.header import SegmentSpec, check_free_space, missing_nbytes
from ftw.host.shared.pages import SharedPages

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftw.host.shared.file import SegmentFile

FOLDER = Path("/dev/shm")  # noqa: S108 - the tmpfs that containers share with --ipc


class SharedSegment:
    """A table in shared memory, as `ftw.host.memory.Memory`; used by this process until it is closed or dropped.

    The pages themselves live until the last view of them is gone, in whichever process.

    Attributes:
        nbytes: Bytes asked for.
        mapped_nbytes: The same, rounded up to whole pages.
        path: The name that other processes find it under.
        numa_policy: "interleave" where this process filled it, on a machine of several NUMA nodes; otherwise "default".
    """

    def __init__(self, spec: SegmentSpec, file: SegmentFile | None, pages: SharedPages | None) -> None:
        self.nbytes = spec.nbytes
        self.mapped_nbytes = pages.mapped_nbytes if pages is not None else 0
        self.path = spec.path
        self.numa_policy = pages.numa_policy if pages is not None else "default"
        self._file = file
        self._pages = pages
        if file is not None:
            weakref.finalize(self, file.close).atexit = False  # at the end of the process its reaper does that

    @property
    def address(self) -> int:
        """Address of the first byte, at the start of a page; 0 for an empty or closed segment."""
        return self._pages.address if self._pages is not None else 0

    def view(self) -> memoryview:
        """Return the bytes, writable; they stay valid as long as this view or the segment lives."""
        return self._pages.view() if self._pages is not None else memoryview(bytearray())

    def close(self) -> None:
        """Stop using the segment; the last process to do so removes its name."""
        if self._pages is not None:
            self._pages.close()
        if self._file is not None:
            self._file.close()


def open_segment(
    identity: str,
    nbytes: int,
    fill: Callable[[memoryview], None],
    *,
    name: str,
    check: Callable[[memoryview], None] | None = None,
    check_room: Callable[[int], None] | None = None,
    folder: Path = FOLDER,
    huge_pages: bool = True,
) -> SharedSegment:
    """Return a table that is filled once per host; waits while another process fills it.

    Args:
        identity: What tells its content from any other's, at most 4 KiB.
        nbytes: Its size; a table of 0 bytes is not shared.
        fill: Writes all of it. It is called by one process at a time, and by none once the table is complete.
        name: The table's, for messages.
        check: Compares a table that another process filled with one's own source, and raises if they differ.
        check_room: Told how many bytes of memory are missing before they are taken, by the process that fills alone;
            raises if the host lacks them.
        folder: The tmpfs that the processes share.
        huge_pages: Whether to ask for them.

    Raises:
        SharedMemoryError: The table cannot be shared, or what is shared is another one.
    """
    spec = SegmentSpec(name, identity, nbytes, folder)
    if not nbytes:
        return SharedSegment(spec, None, None)
    with contextlib.ExitStack() as undo:
        file = open_segment_file(spec)
        undo.callback(file.close)
        pages = _map_pages(spec, file, huge_pages=huge_pages)
        undo.callback(pages.close)
        if file.wait_to_fill():
            if check_room is not None:
                check_room(missing_nbytes(spec, file.descriptor))
            _populate(spec, file, pages)
            fill(pages.view())
            file.mark_ready()
        elif check is not None:
            check(pages.view())
        undo.pop_all()
    return SharedSegment(spec, file, pages)


def _map_pages(spec: SegmentSpec, file: SegmentFile, *, huge_pages: bool) -> SharedPages:
    try:
        return SharedPages(file.descriptor, spec.nbytes, huge_pages=huge_pages)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        advice = "raise the limit of addresses ('ulimit -v') or of mappings (vm.max_map_count)"
        problem = f"{spec.nbytes} bytes cannot be mapped: {error.strerror}; {advice}"
        raise spec.error(problem) from error


def _populate(spec: SegmentSpec, file: SegmentFile, pages: SharedPages) -> None:
    check_free_space(spec, file.descriptor)
    try:
        pages.populate(file.descriptor)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise spec.no_space(file.descriptor) from error
