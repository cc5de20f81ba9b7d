"""A lookup table as a module: `HostEmbedding` gives rows for ids, wherever its table lies.

Imports: `ftw.kernels`, `ftw.pinned`.
"""

from ftw.lookup.embedding import HostEmbedding
from ftw.lookup.hot_rows import count_slots
from ftw.lookup.sharded_embedding import ShardedEmbedding, all_or_none, resolve_group

__all__ = [
    "HostEmbedding",
    "ShardedEmbedding",
    "all_or_none",
    "count_slots",
    "resolve_group",
]
