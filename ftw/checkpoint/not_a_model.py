"""NotAModel: a checkpoint that opens and is no model of its own: an adapter, a projector, a vocabulary, or nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ftw.errors import printable
from ftw.readers.gguf import ARCHITECTURE_KEY

if TYPE_CHECKING:
    from ftw.checkpoint.checkpoint import Checkpoint

ADAPTER_CONFIG_NAME = "adapter_config.json"
_ADAPTER_FILE = "adapter_model"
_BASE_KEY = "base_model_name_or_path"
_TYPE_KEY = "general.type"
_PROJECTOR_ARCHITECTURES = frozenset({"clip"})
# What GGUF's `general.type` says of a file that is no model.
_GGUF_TYPES = {
    "adapter": "it is a LoRA adapter, which is loaded beside its base model; name the base model",
    "imatrix": "it is an importance matrix, which a quantiser reads; name the model's own file",
    "mmproj": "it is a projector of images or sound, which is loaded beside a model; name the model's own file",
    "vocab": "it is a vocabulary alone, without weights; name the model's own file",
}


class NotAModel(NamedTuple):
    """What a checkpoint is instead of a model: a word for programs, and a part of a sentence with what to do."""

    kind: str
    text: str


def find_not_a_model(checkpoint: Checkpoint) -> NotAModel | None:
    """Return what a checkpoint is instead of a model; None of one that may be a model."""
    config = checkpoint.config
    if config.is_gguf:
        kind = config.raw.get(_TYPE_KEY)
        if config.raw.get(ARCHITECTURE_KEY) in _PROJECTOR_ARCHITECTURES:
            kind = "mmproj"
        if not checkpoint.tensors and kind not in _GGUF_TYPES:
            kind = "vocab"
        if isinstance(kind, str) and kind in _GGUF_TYPES:
            return NotAModel(kind, _GGUF_TYPES[kind])
        return None
    names = [file.path.name for file in checkpoint.files]
    if names and all(name.startswith(_ADAPTER_FILE) for name in names):
        return NotAModel("adapter", describe_adapter(checkpoint.read_json(ADAPTER_CONFIG_NAME)))
    return None if checkpoint.tensors else NotAModel("empty", "it holds no tensor; name a folder or file with weights")


def describe_adapter(config: dict[str, object] | None) -> str:
    """Return what an adapter is, of which model if its configuration says so, and what to do."""
    base = None if config is None else config.get(_BASE_KEY)
    named = f" of '{printable(base)}'" if isinstance(base, str) and base else ""
    return (
        f"it is an adapter (LoRA or the like){named}, no model; inspect or convert the base model, or merge them first"
    )
