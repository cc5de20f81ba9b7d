"""What loading costs, on the device and in host memory: measured, not computed."""

from ftw.pinned.memory_report import MemoryReport, MemorySnapshot, MemoryWatch, snapshot

__all__ = ["MemoryReport", "MemorySnapshot", "MemoryWatch", "snapshot"]
