"""NotAModel: a checkpoint that opens and is no model of its own: an adapter, a projector, a vocabulary, or nothing.

A GGUF says it itself. An adapter (weights that are added to those of a base model, or replace some) is known by the
names of its files, or by its tensors: at least half of them are what LoRA and its kin train, of modules whose own
weight is not stored.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from ftw.checkpoint.stored_modules import MAX_NAME
from ftw.readers.gguf import ARCHITECTURE_KEY
from ftw.readers.safetensors import describe_adapter, is_adapter_file

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftw.checkpoint.checkpoint import Checkpoint

_ADAPTER_CONFIG_NAME = "adapter_config.json"
_BASE_KEYS = ("base_model_name_or_path", "model")  # PEFT's, mlx-lm's
_GGUF_BASE_KEYS = ("general.base_model.0.repo_url", "general.base_model.0.name")
_TYPE_KEY = "general.type"
_PROJECTOR_ARCHITECTURES = frozenset({"clip"})
# What GGUF's `general.type` says of a file that is no model, other than an adapter.
_GGUF_TYPES = {
    "imatrix": "it is an importance matrix, which a quantiser reads; name the model's own file",
    "mmproj": "it is a projector of images or sound, which is loaded beside a model; name the model's own file",
    "vocab": "it is a vocabulary alone, without weights; name the model's own file",
}
# LoRA and DoRA of PEFT, mlx-lm and GGUF, LoHa and LoKr, IA3, VeRA, OFT, single tokens, prompts.
_TRAINED = re.compile(
    r"(?:^|\.)(?:lora_(?:embedding_)?[ABab]|lora_magnitude_vector|hada_[wt]\d(?:_[ab])?|lokr_[wt]\d(?:_[ab])?"
    r"|ia3_l|vera_lambda_[bd]|b?oft_[RrSs]|trainable_tokens_\w+|prompt_embeddings)(?=\.|$)"
)
# A part of each such name, since most of a model's names have none, and there may be 100,000.
_HINTS = ("lora_", "hada_", "lokr_", "ia3_l", "vera_lambda_", "oft_", "trainable_tokens_", "prompt_embeddings")


class NotAModel(NamedTuple):
    """What a checkpoint is instead of a model.

    Attributes:
        kind: A word for programs: "adapter", "mmproj", "imatrix", "vocab" or "empty".
        text: A part of a sentence, with what to do.
        evidence: What it is known by.
    """

    kind: str
    text: str
    evidence: str = ""


def find_not_a_model(checkpoint: Checkpoint) -> NotAModel | None:
    """Return what a checkpoint is instead of a model; None of one that may be a model.

    Raises:
        CheckpointError: adapter_config.json is not a JSON object.
    """
    if checkpoint.config.is_gguf:
        return _find_gguf(checkpoint)
    files = [file.path.name for file in checkpoint.files]
    is_named = bool(files) and all(map(is_adapter_file, files))
    trained = "" if is_named else _find_trained(checkpoint)
    if is_named or trained:
        base = _first_text(checkpoint.read_json(_ADAPTER_CONFIG_NAME) or {}, _BASE_KEYS)
        return _make_adapter(base, f"file:{files[0]}" if is_named else f"tensor:{trained}")
    return None if checkpoint.tensors else NotAModel("empty", "it holds no tensor; name a folder or file with weights")


def _find_gguf(checkpoint: Checkpoint) -> NotAModel | None:
    raw = checkpoint.config.raw
    kind = raw.get(_TYPE_KEY)
    if kind == "adapter":
        return _make_adapter(_first_text(raw, _GGUF_BASE_KEYS), f"gguf:{_TYPE_KEY}={kind}")
    if raw.get(ARCHITECTURE_KEY) in _PROJECTOR_ARCHITECTURES:
        kind = "mmproj"
    if not checkpoint.tensors and kind not in _GGUF_TYPES:
        kind = "vocab"
    return NotAModel(kind, _GGUF_TYPES[kind]) if isinstance(kind, str) and kind in _GGUF_TYPES else None


def _make_adapter(base: str, evidence: str) -> NotAModel:
    text = f"it is {describe_adapter(base)}; inspect or convert the base model, or merge them first"
    return NotAModel("adapter", text, evidence)


def _find_trained(checkpoint: Checkpoint) -> str:
    """Return a tensor of an adapter whose module lacks a weight; empty if most of the tensors are not an adapter's."""
    found: list[re.Match[str]] = []
    num_others = 0
    for name in checkpoint.tensors:
        match = _TRAINED.search(name) if _is_hinted(name) else None
        if match:
            found.append(match)
        else:
            num_others += 1
            if 2 * num_others > len(checkpoint.tensors):
                return ""
    return next((one.string for one in found if not _has_weight(checkpoint, one.string[: one.start()])), "")


def _is_hinted(name: str) -> bool:
    for hint in _HINTS:  # `any` takes twice as long
        if hint in name:
            return len(name) <= MAX_NAME
    return False


def _has_weight(checkpoint: Checkpoint, module: str) -> bool:
    return any(not _TRAINED.search(name) for name in checkpoint.names_below(module) if len(name) <= MAX_NAME)


def _first_text(raw: Mapping[str, object], keys: tuple[str, ...]) -> str:
    return next((value for key in keys if isinstance(value := raw.get(key), str) and value), "")
