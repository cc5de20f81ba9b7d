"""What loading costs, on the device and in host memory: measured, not computed."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from ftw.host import max_resident_nbytes, resident_nbytes
from ftw.pinned.buffer import count_pinned_bytes
from ftw.pinned.devices import resolve_device
from ftw.sizes import count_of, format_size

if TYPE_CHECKING:
    from collections.abc import Mapping

_SAMPLE_SECONDS = 0.005

_log = logging.getLogger("ftw")


@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """Memory at one moment, in bytes; the device's entries are 0 on a CPU.

    Attributes:
        device_free: Free on the device, by its driver, so other processes count.
        device_allocated: Held by torch's tensors.
        device_reserved: Held by torch's allocator.
        host_resident: Resident memory of this process, shared pages included.
        host_pinned: Bytes that this process has page-locked, through ftw and through torch. In a report of a CPU,
            which page-locks nothing, its tables count instead, as in `pinned_bytes`.
    """

    device_free: int
    device_allocated: int
    device_reserved: int
    host_resident: int
    host_pinned: int


@dataclass(frozen=True, slots=True, repr=False)
class MemoryReport:
    """What it cost to put tables into host memory.

    Attributes:
        device: The device.
        placement: "host" or "gpu", of the token embedding.
        reason: Why it is there; with `embed="auto"` the reason of a table that had to stay.
        pinned_bytes: Page-locked bytes by table; on a CPU plain bytes.
        before: Memory before.
        peak: The worst of each entry meanwhile, so the least of `device_free`, which is sampled every 5 ms. Tensors and
            resident memory are exact where they reached a new maximum of the process.
        after: Memory after.
    """

    device: str
    placement: str
    reason: str
    pinned_bytes: Mapping[str, int]
    before: MemorySnapshot
    peak: MemorySnapshot
    after: MemorySnapshot

    def __repr__(self) -> str:
        """Return a line of what was taken and freed; the snapshots have the rest."""
        pinned = "page-locked" if self.device != "cpu" else "in host memory"
        tables = f"{count_of(len(self.pinned_bytes), 'table')}, {format_size(self.total_pinned_bytes)} {pinned}"
        resident = f"resident {format_size(self.before.host_resident)} before, {format_size(self.after.host_resident)}"
        freed = f"{format_size(self.freed_bytes)} of VRAM freed"
        where = f"{self.device}, token embedding: {self.placement} ({self.reason})"
        return f"MemoryReport({where}; {tables}; {freed}; {resident} after)"

    @property
    def total_pinned_bytes(self) -> int:
        """Bytes of all tables in host memory."""
        return sum(self.pinned_bytes.values())

    @property
    def freed_bytes(self) -> int:
        """By how much the device's free memory has grown, by its driver; 0 where it has shrunk."""
        return max(0, self.after.device_free - self.before.device_free)


def snapshot(device: torch.device | str | None = None) -> MemorySnapshot:
    """Measure the memory of a device, the current one where it is None, and of this process.

    An engine that sizes its caches after loading calls this: VRAM that a table has given back counts as free.

    Raises:
        DeviceError: torch has no such device.
        FtwError: The system does not say what this process holds.
    """
    where = resolve_device(device)
    free = allocated = reserved = 0
    if where.type != "cpu":
        free, _ = torch.cuda.mem_get_info(where)
        allocated, reserved = torch.cuda.memory_allocated(where), torch.cuda.memory_reserved(where)
    return MemorySnapshot(free, allocated, reserved, resident_nbytes(), count_pinned_bytes())


class MemoryMonitor:
    """Watches memory while its `with` block runs: a snapshot before, a thread that samples, and a `report`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._end = threading.Event()
        # A daemon: a process may end while a thread of its own still loads.
        self._thread = threading.Thread(target=self._sample, name="ftw-memory", daemon=True)
        self._problem: BaseException | None = None

    def __enter__(self) -> MemoryMonitor:
        self.before = self._peak = snapshot(self._device)
        self._maxima = _read_maxima(self._device)
        try:
            self._thread.start()
        except RuntimeError as error:  # too many threads are running
            _log.warning("%s: memory: its peak is not sampled: %s", self._device, error)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def report(self, placement: str, reason: str, pinned_bytes: Mapping[str, int]) -> MemoryReport:
        """End watching and return what was seen; raise what ended the sampling before."""
        self._stop()
        if self._problem is not None:
            raise self._problem
        after = snapshot(self._device)
        if self._device.type == "cpu":
            after = replace(after, host_pinned=after.host_pinned + sum(pinned_bytes.values()))
        peak = _worse(self._peak, after)
        maxima = _read_maxima(self._device)
        if maxima.device_allocated > self._maxima.device_allocated:
            peak = replace(peak, device_allocated=maxima.device_allocated)
        if maxima.host_resident > self._maxima.host_resident:
            peak = replace(peak, host_resident=max(peak.host_resident, maxima.host_resident))
        return MemoryReport(str(self._device), placement, reason, dict(pinned_bytes), self.before, peak, after)

    def _sample(self) -> None:
        """Sample what can fall back before the end; reading the rest costs the loading threads time."""
        try:
            while not self._end.wait(_SAMPLE_SECONDS):
                free = torch.cuda.mem_get_info(self._device)[0] if self._device.type != "cpu" else 0
                seen = replace(self._peak, device_free=free, host_resident=resident_nbytes())
                self._peak = _worse(self._peak, seen)
        except BaseException as error:  # whoever wants the report gets it
            self._problem = error

    def _stop(self) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()


def _worse(one: MemorySnapshot, other: MemorySnapshot) -> MemorySnapshot:
    return MemorySnapshot(
        device_free=min(one.device_free, other.device_free),
        device_allocated=max(one.device_allocated, other.device_allocated),
        device_reserved=max(one.device_reserved, other.device_reserved),
        host_resident=max(one.host_resident, other.host_resident),
        host_pinned=max(one.host_pinned, other.host_pinned),
    )


class _Maxima(NamedTuple):
    """Highest values since the process began, by torch and by the kernel."""

    device_allocated: int
    host_resident: int


def _read_maxima(device: torch.device) -> _Maxima:
    allocated = 0 if device.type == "cpu" else torch.cuda.max_memory_allocated(device)
    return _Maxima(allocated, max_resident_nbytes())
