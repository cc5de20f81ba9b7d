"""A table in shared memory that all processes of a user on a host map: filled once, removed after the last of them.

Imports: `ftw.host`. No torch.
"""

from ftw.host.shared.segment import SharedSegment, open_segment

__all__ = ["SharedSegment", "open_segment"]
