"""Checkpoint toolkit that keeps an LLM's lookup tables in pinned host memory and gives the VRAM back.

Importing this package imports neither torch nor triton; `load` and what belongs to it do, when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ftw._version import __version__
from ftw.checkpoint import Checkpoint, ModelConfig, open_checkpoint
from ftw.conversion import ConversionResult, VerifyResult, convert, verify
from ftw.errors import (
    CheckpointError,
    ClosedError,
    DeviceError,
    FtwError,
    LookupArgumentError,
    NotEligibleError,
    OutputError,
    PinError,
    SharedMemoryError,
    SourceNotFoundError,
    UnknownTensorError,
)
from ftw.tensors import TensorInfo
from ftw.verdict import Report, inspect

if TYPE_CHECKING:
    from ftw import memory
    from ftw.integrations import offload
    from ftw.loading import LoadedModel, load
    from ftw.lookup import HostEmbedding
    from ftw.memory import MemoryReport
    from ftw.offloading import OffloadedModel

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "ClosedError",
    "ConversionResult",
    "DeviceError",
    "FtwError",
    "HostEmbedding",
    "LoadedModel",
    "LookupArgumentError",
    "MemoryReport",
    "ModelConfig",
    "NotEligibleError",
    "OffloadedModel",
    "OutputError",
    "PinError",
    "Report",
    "SharedMemoryError",
    "SourceNotFoundError",
    "TensorInfo",
    "UnknownTensorError",
    "VerifyResult",
    "__version__",
    "convert",
    "inspect",
    "load",
    "memory",
    "offload",
    "open_checkpoint",
    "verify",
]

# Where the names live that need torch.
_LAZY = {
    "HostEmbedding": "ftw.lookup",
    "LoadedModel": "ftw.loading",
    "MemoryReport": "ftw.memory",
    "OffloadedModel": "ftw.offloading",
    "load": "ftw.loading",
    "offload": "ftw.integrations",
}


def __getattr__(name: str) -> Any:
    if name == "memory":
        return importlib.import_module("ftw.memory")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'ftw' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
