"""Adapters: weights that are added to those of a base model, or replace some. An adapter is no model.

It is known by `general.type` of a GGUF, by the names of its files, or by its tensors: at least half of them are what
LoRA and its kin train, of modules whose own weight is not stored.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from ftw.checkpoint.stored_modules import MAX_NAME
from ftw.readers import is_adapter_file

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftw.checkpoint.checkpoint import Checkpoint

CONFIG_NAME = "adapter_config.json"
_BASE_KEYS = ("base_model_name_or_path", "model")  # PEFT's, mlx-lm's
_GGUF_KIND, _GGUF_ADAPTER = "general.type", "adapter"
_GGUF_BASE_KEYS = ("general.base_model.0.repo_url", "general.base_model.0.name")
# LoRA and DoRA of PEFT, mlx-lm and GGUF, LoHa and LoKr, IA3, VeRA, OFT, single tokens, prompts.
_TRAINED = re.compile(
    r"(?:^|\.)(?:lora_(?:embedding_)?[ABab]|lora_magnitude_vector|hada_[wt]\d(?:_[ab])?|lokr_[wt]\d(?:_[ab])?"
    r"|ia3_l|vera_lambda_[bd]|b?oft_[RrSs]|trainable_tokens_\w+|prompt_embeddings)(?=\.|$)"
)
# A part of each such name, since most of a model's names have none, and there may be 100,000.
_HINTS = ("lora_", "hada_", "lokr_", "ia3_l", "vera_lambda_", "oft_", "trainable_tokens_", "prompt_embeddings")


class Adapter(NamedTuple):
    """An adapter: the name of its base model, empty where it is not told, and what it is known by."""

    base: str
    evidence: str


def find_adapter(checkpoint: Checkpoint) -> Adapter | None:
    """Return what an adapter is known by; None of what may be a model.

    Raises:
        CheckpointError: adapter_config.json is not a JSON object.
    """
    raw = checkpoint.config.raw
    if checkpoint.config.is_gguf and raw.get(_GGUF_KIND) == _GGUF_ADAPTER:
        return Adapter(_first_text(raw, _GGUF_BASE_KEYS), f"gguf:{_GGUF_KIND}={_GGUF_ADAPTER}")
    files = [file.path.name for file in checkpoint.files]
    if files and all(map(is_adapter_file, files)):
        evidence = f"file:{files[0]}"
    elif trained := _find_trained(checkpoint):
        evidence = f"tensor:{trained}"
    else:
        return None
    return Adapter(_first_text(checkpoint.read_json(CONFIG_NAME) or {}, _BASE_KEYS), evidence)


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
