"""A lookup table as a module: `HostEmbedding` gives rows for ids, wherever its table lies.

Imports: `ftw.kernels`, `ftw.pinned`.
"""

from ftw.lookup.embedding import HostEmbedding
from ftw.lookup.hot_rows import count_slots
from ftw.lookup.sharded_embedding import ShardedEmbedding

__all__ = [
    "HostEmbedding",
    "ShardedEmbedding",
    "count_slots",
]
