"""The GGUF format: which files make up a model, their headers, metadata and byte order.

Imports: `ftw.files`, `ftw.hub`, the seam in `ftw.readers.base`. No torch.
"""

from ftw.readers.gguf.byte_order import rearrange_blocks
from ftw.readers.gguf.metadata import ARCHITECTURE_KEY, OUTPUT_WEIGHT_KEY, MetadataArray

__all__ = ["ARCHITECTURE_KEY", "OUTPUT_WEIGHT_KEY", "MetadataArray", "rearrange_blocks"]
