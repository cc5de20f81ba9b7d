"""MemoryReport: what loading cost, on the device and in host memory, measured and not computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ftw.host_memory import PAGE_NBYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftw.placement import Placement


@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """Memory at one moment, in bytes; the device's entries are 0 on a CPU.

    Attributes:
        device_free: Free on the device, by its driver, so other processes count.
        device_allocated: Held by torch's tensors.
        device_reserved: Held by torch's allocator.
        host_resident: Resident memory of this process.
    """

    device_free: int
    device_allocated: int
    device_reserved: int
    host_resident: int


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """What loading cost.

    Attributes:
        device: The device.
        placement: "host" or "gpu", of the token embedding.
        reason: Why it is there; with `embed="auto"` the reason of a table that had to stay.
        pinned_bytes: Page-locked bytes by table; on a CPU plain bytes.
        before: Memory before the tables were loaded.
        after: Memory after.
    """

    device: str
    placement: str
    reason: str
    pinned_bytes: Mapping[str, int]
    before: MemorySnapshot
    after: MemorySnapshot

    @property
    def total_pinned_bytes(self) -> int:
        """Bytes of all tables in host memory."""
        return sum(self.pinned_bytes.values())


def snapshot(device: torch.device | str | None = None) -> MemorySnapshot:
    """Measure the memory of a device, the current one where it is None, and of this process."""
    resident = _host_resident()
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu") if device is None else torch.device(device)
    if where.type == "cpu":
        return MemorySnapshot(0, 0, 0, resident)
    free, _ = torch.cuda.mem_get_info(where)
    return MemorySnapshot(free, torch.cuda.memory_allocated(where), torch.cuda.memory_reserved(where), resident)


def make_report(
    device: torch.device,
    placement: Placement,
    pinned_bytes: Mapping[str, int],
    before: MemorySnapshot,
) -> MemoryReport:
    """Take the second snapshot and put the report together."""
    return MemoryReport(
        device=str(device),
        placement=placement.placement,
        reason=placement.reason,
        pinned_bytes=dict(pinned_bytes),
        before=before,
        after=snapshot(device),
    )


def _host_resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[1])
    return pages * PAGE_NBYTES
