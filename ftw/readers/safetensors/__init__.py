"""The safetensors format: which files make up a checkpoint, what their names tell, and their headers.

Imports: `ftw.files`, `ftw.hub`, the seam in `ftw.readers.base`. No torch.
"""

from ftw.readers.safetensors.names import describe_adapter, is_adapter_file, is_of_a_rank

__all__ = ["describe_adapter", "is_adapter_file", "is_of_a_rank"]
