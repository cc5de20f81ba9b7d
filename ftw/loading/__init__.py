"""Loading: lookup tables straight into page-locked memory, every other tensor to the device on demand.

Imports: `ftw.checkpoint`, `ftw.verdict`, `ftw.lookup`, `ftw.kernels`, `ftw.pinned`, `ftw.files`, `ftw.host`.
"""

from ftw.loading.device_copy import FileStage, torch_dtype
from ftw.loading.loaded_model import LoadedModel
from ftw.loading.loader import load

__all__ = [
    "FileStage",
    "LoadedModel",
    "load",
    "torch_dtype",
]
