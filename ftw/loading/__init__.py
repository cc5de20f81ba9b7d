"""Loading: lookup tables straight into page-locked memory, every other tensor to the device on demand.

Imports: `ftw.checkpoint`, `ftw.verdict`, `ftw.lookup`, `ftw.kernels`, `ftw.pinned`, `ftw.files`, `ftw.host`.
"""

from ftw.loading.device_copy import DeviceCopy, torch_dtype, torch_form
from ftw.loading.loaded_model import LoadedModel
from ftw.loading.loader import load, load_opened
from ftw.loading.options import LoadOptions

__all__ = ["DeviceCopy", "LoadOptions", "LoadedModel", "load", "load_opened", "torch_dtype", "torch_form"]
