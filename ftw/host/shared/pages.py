"""SharedPages: a table's pages of a file in shared memory, mapped at a huge page, and made before they are written.

A write to a page that no longer fits ends the process with SIGBUS, so each page is made by a call that can fail.
Without a mount option tmpfs makes plain pages, but MADV_COLLAPSE turns them into huge ones: one page of each is made,
and the call brings the others. For 1 GiB that takes 0.1 s instead of 0.3, and who attaches saves 0.2 s of page faults
(2-core virtual machine, Linux 6.18, 2026-11-30).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

from ftw.host.libc import libc_function
from ftw.host.memory import HUGE_PAGE_NBYTES, PAGE_NBYTES, address_of
from ftw.host.numa import spread_pages
from ftw.sizes import align_up

_PIECE_NBYTES = 64 << 20  # of one call: large enough to be cheap, small enough for Ctrl-C
_THREADS = 2
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # not in Python's mmap before 3.13
_POPULATE_WRITE, _COLLAPSE = 23, 25  # of madvise(2): Linux 5.14 and 6.1


class SharedPages:
    """The first pages of an open file, mapped writable until `close` and until the last view is gone.

    The descriptor is not kept.

    Attributes:
        mapped_nbytes: `nbytes`, rounded up to whole pages.
        address: Of the first byte; 0 once closed.
        numa_policy: How this process asked for the pages: "interleave", or "default" where it did not.
    """

    def __init__(self, descriptor: int, nbytes: int, *, huge_pages: bool) -> None:
        self.mapped_nbytes = align_up(nbytes, PAGE_NBYTES)
        self.numa_policy = "default"
        self._huge_pages = huge_pages and nbytes >= HUGE_PAGE_NBYTES
        # Python's mmap object reserves the addresses and gives them up with its last view; the file takes their place.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        slack = HUGE_PAGE_NBYTES if self._huge_pages else 0
        reserved = mmap.mmap(-1, self.mapped_nbytes + slack, flags=flags)
        start = -address_of(memoryview(reserved)) % HUGE_PAGE_NBYTES if slack else 0
        view = memoryview(reserved)[start : start + nbytes]
        self.address = address_of(view)
        self._view: memoryview | None = view
        _map_file(self.address, self.mapped_nbytes, descriptor)
        if self._huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
            _madvise(self.address, self.mapped_nbytes, mmap.MADV_HUGEPAGE)  # counts where tmpfs has huge=advise

    def view(self) -> memoryview:
        """Return the bytes, writable."""
        return self._view[:] if self._view is not None else memoryview(bytearray())

    def populate(self, descriptor: int) -> None:
        """Make every page, on all NUMA nodes in turn, as GPUs of each may read them; those that exist stay as they are.

        Raises:
            OSError: ENOSPC: they do not fit.
        """
        self.numa_policy = spread_pages(self.address, self.mapped_nbytes)
        starts = range(0, self.mapped_nbytes, _PIECE_NBYTES)
        try:
            with ThreadPoolExecutor(_THREADS) as pool:
                for _ in pool.map(lambda start: self._populate_piece(descriptor, start), starts):
                    pass  # an error of a piece is raised here, and the others are called off
        except RuntimeError:  # no further thread can be started
            for start in starts:
                self._populate_piece(descriptor, start)

    def close(self) -> None:
        """Drop the pages; they are unmapped with their last view."""
        self._view = None
        self.address = 0

    def _populate_piece(self, descriptor: int, start: int) -> None:
        nbytes = min(_PIECE_NBYTES, self.mapped_nbytes - start)
        address = self.address + start
        if self._huge_pages:
            whole = nbytes // HUGE_PAGE_NBYTES * HUGE_PAGE_NBYTES
            for offset in range(0, whole, HUGE_PAGE_NBYTES):
                # Interleaved pages take turns by their number in the file, and a huge page comes to be where the one
                # of it that is made lies: the first of each would all be even, and on one node.
                turn = (start + offset) // HUGE_PAGE_NBYTES * PAGE_NBYTES % HUGE_PAGE_NBYTES
                _madvise(address + offset + turn, PAGE_NBYTES, _POPULATE_WRITE)
            _madvise(address, whole, _COLLAPSE)  # where that fails, plain pages hold the same bytes
        code = _madvise(address, nbytes, _POPULATE_WRITE)
        if code == errno.EINVAL:  # a kernel before 5.14
            os.posix_fallocate(descriptor, start, nbytes)
        elif code in (errno.EFAULT, errno.ENOMEM):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        elif code:
            raise OSError(code, os.strerror(code))


def _map_file(address: int, nbytes: int, descriptor: int) -> None:
    """Map the start of a file over addresses that are reserved already."""
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
    if libc_function("mmap")(address, nbytes, protection, flags, descriptor, 0) != address:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _madvise(address: int, nbytes: int, advice: int) -> int:
    """Call madvise(2), without Python's lock; return 0 or the error's number."""
    return ctypes.get_errno() if libc_function("madvise")(address, nbytes, advice) else 0
