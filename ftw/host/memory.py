"""Page-aligned host memory, and how much memory this process holds.

Memory comes from private anonymous mappings with transparent huge pages asked for: their first touch runs at 16 to
26 GiB/s, that of 4 KiB pages at 2 to 4, and that of Python's shared default mapping below 2 (2-core virtual machine,
2026-11-29). O_DIRECT and page-locking both need the alignment.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from typing import Protocol

from ftw.errors import FtwError
from ftw.host.libc import libc_function
from ftw.host.numa import place_pages
from ftw.sizes import align_up

PAGE_NBYTES = mmap.PAGESIZE
HUGE_PAGE_NBYTES = 2 << 20
_WIPE_ON_FORK, _KEEP_ON_FORK = 18, 19  # of madvise(2), Linux 4.14
# Windows has one kind of mapping, and no word for it.
_FLAGS = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


class Memory(Protocol):
    """Pages that a buffer lies in: private (`HostMemory`), or shared by the processes of a host (`SharedSegment`)."""

    @property
    def nbytes(self) -> int:
        """Bytes asked for."""
        ...

    @property
    def mapped_nbytes(self) -> int:
        """The same, rounded up to whole pages."""
        ...

    @property
    def address(self) -> int:
        """Address of the first byte, at the start of a page; 0 where there are none, and after the close."""
        ...

    def view(self) -> memoryview:
        """Return the bytes asked for, writable; they stay valid as long as the view lives."""
        ...

    def close(self) -> None:
        """Drop the pages; they go with their last view."""
        ...


class HostMemory:
    """An anonymous mapping of exactly `nbytes`, rounded up to whole pages and no further.

    From 2 MiB on it begins at a multiple of 2 MiB, and is made of huge pages as far as whole ones fit; its end, and
    smaller mappings, are plain pages. The mapping lives until `close` and until the last view of it is gone, whichever
    comes later.

    Attributes:
        numa_policy: "bind" or "preferred", where the pages were asked for on `numa_node`; "default" otherwise.
    """

    def __init__(self, nbytes: int, *, huge_pages: bool = True, numa_node: int | None = None) -> None:
        self.nbytes = nbytes
        self.mapped_nbytes = align_up(nbytes, PAGE_NBYTES)
        self.address = 0
        self.numa_policy = "default"
        self._view: memoryview | None = None
        if not nbytes:
            return
        is_huge = huge_pages and nbytes >= HUGE_PAGE_NBYTES and hasattr(mmap, "MADV_HUGEPAGE")
        # The kernel does not promise to begin at a huge page; what stands before and after takes addresses, no memory.
        slack = HUGE_PAGE_NBYTES if is_huge else 0
        mapping = mmap.mmap(-1, self.mapped_nbytes + slack, **_FLAGS)
        start = -address_of(memoryview(mapping)) % HUGE_PAGE_NBYTES if is_huge else 0
        self._view = memoryview(mapping)[start : start + self.mapped_nbytes]
        self.address = address_of(self._view)
        if is_huge:
            whole = nbytes // HUGE_PAGE_NBYTES * HUGE_PAGE_NBYTES
            with contextlib.suppress(OSError):  # a kernel built without them; plain pages hold the same bytes
                # Where huge pages are the default, one at the end would reach past the mapping's last page.
                mapping.madvise(mmap.MADV_NOHUGEPAGE)
                mapping.madvise(mmap.MADV_HUGEPAGE, start, whole)
        if numa_node is not None:
            self.numa_policy = place_pages(self.address, self.mapped_nbytes, numa_node)

    def view(self) -> memoryview:
        """Return the bytes asked for, writable."""
        return self._view[: self.nbytes] if self._view is not None else memoryview(bytearray())

    def wipe_on_fork(self) -> None:
        """Keep the bytes from processes that are forked from now on: one that reads or writes them ends with SIGSEGV.

        The kernel would copy page-locked pages for each of them, and split huge ones. MADV_DONTFORK would do too, but
        leave the addresses free in the child, whose own memory there would go when it drops the mapping.
        """
        self._call("madvise", _WIPE_ON_FORK)  # a kernel that cannot do it: forks copy the pages, as ever
        _withheld.add(self)

    def keep_on_fork(self) -> None:
        """End `wipe_on_fork`."""
        _withheld.discard(self)
        self._call("madvise", _KEEP_ON_FORK)

    def protect_none(self) -> None:
        """Let nobody in this process read or write the bytes any more."""
        self._call("mprotect", 0)

    def close(self) -> None:
        """Drop the mapping; it is unmapped with its last view."""
        self._view = None
        self.address = 0

    def _call(self, name: str, argument: int) -> None:
        """Call a C function on all of the mapping; what the system cannot do is left undone."""
        if self._view is not None:
            mapping = memoryview(self._view.obj)
            libc_function(name)(address_of(mapping), len(mapping), argument)


_withheld: weakref.WeakSet[HostMemory] = weakref.WeakSet()  # what a process forks is a fact of the process


def _deny_withheld() -> None:
    for memory in list(_withheld):
        memory.protect_none()


if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(after_in_child=_deny_withheld)


def address_of(view: memoryview) -> int:
    """Return the address of a writable view's first byte, 0 for an empty one."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if len(view) else 0


def resident_nbytes() -> int:
    """Return the resident memory of this process, shared pages included.

    Raises:
        FtwError: The system does not say.
    """
    return int(_read_own("statm").split()[1]) * PAGE_NBYTES


def max_resident_nbytes() -> int:
    """Return the most that it ever was; 0 if the kernel does not say.

    Raises:
        FtwError: The system does not say.
    """
    lines = _read_own("status").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def _read_own(name: str) -> str:
    path = f"/proc/self/{name}"
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError as error:
        problem = f"cannot be read: {error.strerror}; what loading costs is measured by Linux's /proc"
        raise FtwError(f"{path}: resident memory: {problem}") from error
