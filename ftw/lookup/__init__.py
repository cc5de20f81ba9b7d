"""A lookup table as a module: `HostEmbedding` gives rows for ids, wherever its table lies.

Imports: `ftw.kernels`, `ftw.pinned`.
"""

from ftw.lookup.embedding import HostEmbedding
from ftw.lookup.host_table import HostTable
from ftw.lookup.lookup_op import is_taken
from ftw.lookup.row_options import RowOptions, make_embedding
from ftw.lookup.sharded_embedding import ShardedEmbedding

__all__ = ["HostEmbedding", "HostTable", "RowOptions", "ShardedEmbedding", "is_taken", "make_embedding"]
