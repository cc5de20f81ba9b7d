"""Page-locked host memory, the device that reads it, and what it costs."""

from ftw.pinned.buffer import PinnedBuffer, count_pinned_bytes

__all__ = ["PinnedBuffer", "count_pinned_bytes"]
