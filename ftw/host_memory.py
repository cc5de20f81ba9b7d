"""Page-aligned host memory, and the arithmetic of alignment.

Memory comes from private anonymous mappings with transparent huge pages asked for: their first touch runs at 16 to
26 GiB/s, that of 4 KiB pages at 2 to 4, and that of Python's shared default mapping below 2 (2-core virtual machine,
2026-11-29). O_DIRECT and page-locking both need the alignment.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap

PAGE_NBYTES = mmap.PAGESIZE
HUGE_PAGE_NBYTES = 2 << 20


def align_up(nbytes: int, alignment: int) -> int:
    """Round `nbytes` up to a multiple of `alignment`."""
    return -(-nbytes // alignment) * alignment


class HostMemory:
    """An anonymous mapping of exactly `nbytes`, rounded up to whole pages and no further.

    The mapping lives until `close` and until the last view of it is gone, whichever comes later.
    """

    def __init__(self, nbytes: int, *, huge_pages: bool = True) -> None:
        self.nbytes = nbytes
        self.mapped_nbytes = align_up(nbytes, PAGE_NBYTES)
        self._mapping: mmap.mmap | None = None
        self.address = 0
        if not nbytes:
            return
        self._mapping = mmap.mmap(-1, self.mapped_nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if huge_pages and nbytes >= HUGE_PAGE_NBYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel built without them; plain pages hold the same bytes
                self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self.address = address_of(memoryview(self._mapping))

    def view(self) -> memoryview:
        """Return the bytes asked for, writable."""
        if self._mapping is None:
            return memoryview(bytearray())
        return memoryview(self._mapping)[: self.nbytes]

    def close(self) -> None:
        """Drop the mapping; it is unmapped with its last view."""
        self._mapping = None
        self.address = 0


def address_of(view: memoryview) -> int:
    """Return the address of a writable view's first byte, 0 for an empty one."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if len(view) else 0
