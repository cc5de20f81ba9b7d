"""PinnedBuffer: host memory of exactly a table's size that the GPU reads over PCIe.

The memory is filled first and page-locked then, so that no page is touched twice. It is a private anonymous mapping, or
shared memory of the host; file-backed mappings, which hang the driver, are never registered.
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
from typing import TYPE_CHECKING

import torch

from ftw.errors import ClosedError, PinError, printable
from ftw.host import HostMemory, count_pages_by_node, read_host_limits
from ftw.pinned.driver import Driver, load_driver, numa_node_of
from ftw.sizes import format_size

if TYPE_CHECKING:
    from ftw.host import Memory

_ADVICE = "free some, raise the limit, or leave the table on the GPU (embed 'gpu', or no offload)"


class _Total:
    """A sum that several threads change."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes += nbytes


_pinned = _Total()  # by all buffers: what a process has page-locked is a fact of the process


class PinnedBuffer:
    """Host memory that is page-locked once it has been filled.

    Close it: one that is dropped instead is given back when it is collected, and the collector waits for the device.

    Private memory is withheld from processes that are forked while it is page-locked: one that reads it ends with
    SIGSEGV. Neither does it call the driver, whatever it closes or collects.

    Attributes:
        nbytes: Bytes asked for.
        pinned_nbytes: Bytes page-locked: `nbytes` rounded up to whole pages, 0 before `pin` and without a GPU.
        name: The table it is for, in messages.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        name: str = "table",
        device: torch.device | None = None,
        huge_pages: bool = True,
        memory: Memory | None = None,
        driver: Driver | None = None,
    ) -> None:
        """Take the memory; nothing of it is touched yet.

        Args:
            nbytes: As many bytes, which may be 0.
            name: The table it is for.
            device: The GPU that will read it: on a machine of several NUMA nodes the pages come from its own.
            huge_pages: Ask for pages of 2 MiB, where they fit. On some kernels their allocation is slow.
            memory: Use this memory instead, of `nbytes` bytes, which the buffer then owns.
            driver: The driver's calls; None for those of the installed torch's kind of GPU.

        Raises:
            PinError: There are no addresses for it.
        """
        self.nbytes = nbytes
        self.pinned_nbytes = 0
        self.name = name
        node = numa_node_of(device) if device is not None and memory is None else None
        self._memory = memory or _map(name, nbytes, huge_pages, node)
        self._driver = driver
        self._device: torch.device | None = None
        self._give_back: weakref.finalize[..., PinnedBuffer] | None = None

    @property
    def address(self) -> int:
        """Address of the first byte; 0 for an empty or closed buffer."""
        return self._memory.address

    @property
    def device_pointer(self) -> int:
        """The address by which the device reads the first byte; 0 for an empty buffer.

        It is mostly `address` itself; on Windows and under other drivers without unified addresses it is not.

        Raises:
            ClosedError: The memory is not page-locked, or not any more.
            PinError: The driver does not tell.
        """
        if not self.nbytes:
            return 0
        if self._driver is None or not self.pinned_nbytes:
            raise ClosedError(f"{printable(self.name)}: page-locked memory: there is none, pin it first")
        code, pointer = self._driver.device_pointer(self.address)
        if code:
            raise PinError(f"{printable(self.name)}: page-locked memory: no address: {self._driver.describe(code)}")
        return pointer

    @property
    def is_shared(self) -> bool:
        """Whether other processes may have this memory too."""
        return not isinstance(self._memory, HostMemory)

    @property
    def numa_policy(self) -> str:
        """How the pages were asked for: "bind", "preferred", "interleave" or "default"."""
        return getattr(self._memory, "numa_policy", "default")

    def numa_nodes(self) -> dict[int, int]:
        """Return how many pages lie on each NUMA node, of a sample of at most 4096; empty where that is not known."""
        return count_pages_by_node(self.address, self.nbytes)

    def view(self) -> memoryview:
        """Return the bytes, writable; they stay valid as long as this view or the buffer lives."""
        return self._memory.view()

    def pin(self, device: torch.device) -> None:
        """Page-lock the memory for a device; on a CPU there is nothing to do.

        Raises:
            PinError: The driver refuses. The memory stays usable by the CPU, and no error stays latched in the driver.
        """
        if device.type == "cpu" or not self.nbytes or self.pinned_nbytes:
            return
        driver = self._driver or load_driver()
        torch.cuda.synchronize(device)  # makes the device's context current, which the driver's own calls need
        nbytes = self._memory.mapped_nbytes
        _withhold(self._memory)  # first, so that no fork comes in between
        code = driver.register(self.address, nbytes)
        if code:
            _give_to_forks(self._memory)
            raise PinError(_refusal(self.name, device, nbytes, driver.describe(code)))
        self._driver, self._device = driver, device
        self.pinned_nbytes = nbytes
        _pinned.add(nbytes)
        self._give_back = weakref.finalize(self, _release, os.getpid(), self.name, self._memory, driver, device)
        self._give_back.atexit = False  # the end of the process gives everything back

    def close(self) -> None:
        """Wait for the device, unregister the memory, and drop it."""
        give_back, self._give_back = self._give_back, None
        self.pinned_nbytes = 0
        if give_back is None:
            self._memory.close()
        else:
            give_back()

    def __enter__(self) -> PinnedBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def tensor_over(view: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor over the bytes of `view`, which it keeps alive."""
    if not len(view):
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(view, dtype=torch.uint8).view(dtype).reshape(shape)


def count_pinned_bytes() -> int:
    """Return the bytes that this process has page-locked: its `PinnedBuffer`s, and what torch holds."""
    if not torch.cuda.is_initialized():
        return _pinned.nbytes
    if not hasattr(torch.cuda, "host_memory_stats"):  # before torch 2.8
        return _pinned.nbytes
    return _pinned.nbytes + int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))


def _map(name: str, nbytes: int, huge_pages: bool, numa_node: int | None) -> HostMemory:
    try:
        return HostMemory(nbytes, huge_pages=huge_pages, numa_node=numa_node)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        problem = (
            f"could not allocate {format_size(nbytes)}: {error.strerror}; {read_host_limits().describe()}; {_ADVICE}"
        )
        raise PinError(f"{printable(name)}: host memory: {problem}") from error


def _withhold(memory: Memory) -> None:
    if isinstance(memory, HostMemory):  # shared pages are not copied by a fork
        memory.wipe_on_fork()


def _give_to_forks(memory: Memory) -> None:
    if isinstance(memory, HostMemory):
        memory.keep_on_fork()


def _release(process: int, name: str, memory: Memory, driver: Driver, device: torch.device) -> None:
    if os.getpid() != process:
        memory.close()  # of a fork, in which the driver must not be called
        return
    try:
        torch.cuda.synchronize(device)  # no kernel may still be reading
    finally:
        code = driver.unregister(memory.address)
        _pinned.add(-memory.mapped_nbytes)
        if not code:
            _give_to_forks(memory)  # views of it may live on
        memory.close()
    if code:
        raise PinError(f"{printable(name)}: page-locked memory: not released by {device}: {driver.describe(code)}")


def _refusal(name: str, device: torch.device, nbytes: int, words: str) -> str:
    """Return the line that says what was refused, what there is, and what to do."""
    asked = f"{device} refused to page-lock {format_size(nbytes)} ({nbytes} bytes): {words}"
    held = f"{format_size(count_pinned_bytes())} are page-locked by this process"
    return f"{printable(name)}: page-locked memory: {asked}; {held}; {read_host_limits().describe()}; {_ADVICE}"
