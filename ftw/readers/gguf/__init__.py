"""The GGUF format: which files make up a model, their headers, metadata and byte order.

Imports: `ftw.files`, `ftw.hub`, the seam in `ftw.readers.base`. No torch.
"""

from ftw.readers.gguf.byte_order import rearrange_blocks
from ftw.readers.gguf.files import choose_files
from ftw.readers.gguf.metadata import ARCHITECTURE_KEY, OUTPUT_WEIGHT_KEY, MetadataArray
from ftw.readers.gguf.reader import GgufReader, read_gguf_metadata

__all__ = [
    "ARCHITECTURE_KEY",
    "OUTPUT_WEIGHT_KEY",
    "GgufReader",
    "MetadataArray",
    "choose_files",
    "read_gguf_metadata",
    "rearrange_blocks",
]
