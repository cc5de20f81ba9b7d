"""Page-locked host memory: the buffer, the driver's calls, the budget, and what memory was taken.

Imports: `ftw.host`. The first room with torch.
"""

from ftw.pinned.budget import check_pin_budget
from ftw.pinned.buffer import PinnedBuffer, tensor_over
from ftw.pinned.devices import resolve_device
from ftw.pinned.driver import load_driver
from ftw.pinned.memory_report import MemoryMonitor, MemoryReport, MemorySnapshot, snapshot

__all__ = [
    "MemoryMonitor", "MemoryReport", "MemorySnapshot", "PinnedBuffer", "check_pin_budget", "load_driver",
    "resolve_device", "snapshot", "tensor_over",
]  # fmt: skip
