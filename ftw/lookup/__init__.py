"""A lookup table as a module: `HostEmbedding` gives rows for ids, wherever its table lies.

Imports: `ftw.kernels`, `ftw.pinned`.
"""

from ftw.lookup.embedding import HostEmbedding
from ftw.lookup.row_options import RowOptions, make_embedding
from ftw.lookup.sharded_embedding import ShardedEmbedding

__all__ = ["HostEmbedding", "RowOptions", "ShardedEmbedding", "make_embedding"]
