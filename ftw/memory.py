"""What loading costs, on the device and in host memory: measured, not computed."""

from ftw.pinned import MemoryReport, MemorySnapshot, snapshot

__all__ = ["MemoryReport", "MemorySnapshot", "snapshot"]
