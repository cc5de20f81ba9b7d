"""Checkpoint toolkit that keeps an LLM's lookup tables in pinned host memory and gives the VRAM back.

Importing this package imports its errors alone; each other name imports its room when it is first used, `load` and what
belongs to it torch and triton too.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ftw._version import __version__
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

if TYPE_CHECKING:
    from ftw import memory
    from ftw.checkpoint import Checkpoint, ModelConfig, open_checkpoint
    from ftw.conversion import ConversionResult, VerifyResult, convert, verify
    from ftw.integrations import offload
    from ftw.loading import LoadedModel, load
    from ftw.lookup import HostEmbedding, HostTable
    from ftw.memory import MemoryReport
    from ftw.offloading import OffloadedModel
    from ftw.tensors import TensorInfo
    from ftw.verdict import Report, inspect

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "ClosedError",
    "ConversionResult",
    "DeviceError",
    "FtwError",
    "HostEmbedding",
    "HostTable",
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

# The room of each name but those of errors: imported when the name is first asked for, some with torch.
_ROOMS = {
    "ftw.checkpoint": ("Checkpoint", "ModelConfig", "open_checkpoint"),
    "ftw.conversion": ("ConversionResult", "VerifyResult", "convert", "verify"),
    "ftw.integrations": ("offload",),
    "ftw.loading": ("LoadedModel", "load"),
    "ftw.lookup": ("HostEmbedding", "HostTable"),
    "ftw.memory": ("MemoryReport",),
    "ftw.offloading": ("OffloadedModel",),
    "ftw.tensors": ("TensorInfo",),
    "ftw.verdict": ("Report", "inspect"),
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "memory":
        return importlib.import_module("ftw.memory")
    if name not in _ROOM_OF:
        raise AttributeError(f"module 'ftw' has no attribute '{name}'")
    value = globals()[name] = getattr(importlib.import_module(_ROOM_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
