"""ModelConfig: what config.json says of a model, under one name for each fact."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ftw.errors import CheckpointError
from ftw.strict_json import is_count, read_json_file, shown

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

CONFIG_NAME = "config.json"
TIE_KEY = "tie_word_embeddings"

# Where a multimodal or an encoder-decoder config keeps its language model, the first that is there counts.
_TEXT_KEYS = ("text_config", "llm_config", "language_config", "thinker_config", "decoder", "generator")

_HIDDEN_SIZE = ("hidden_size", "n_embd", "d_model", "dim", "model_dim")
_NUM_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_NUM_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_NUM_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", *_NUM_HEADS)
_NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "n_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token")
# No model has more of anything; a larger number is nonsense, and its products would not print.
_MAX_COUNT = 1 << 48


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model's configuration; a fact that the checkpoint does not tell is None.

    Attributes:
        architecture: The first of `architectures`, such as "Qwen3MoeForCausalLM".
        model_type: The family, such as "qwen3_moe".
        text_model_type: The family of the language model inside a multimodal one, else `model_type`.
        vocab_size: Rows of the token embedding that have a meaning.
        hidden_size: Width of the residual stream, in elements.
        num_layers: Decoder layers.
        num_attention_layers: Those of them that keep keys and values.
        kv_elements_per_layer: Elements that one token adds to the KV cache of one such layer.
        num_experts: Routed experts of one MoE layer.
        experts_per_token: How many of them one token uses.
        tie_flag: `tie_word_embeddings` at the top level.
        text_tie_flag: The same in the language model's own part.
        has_text_part: Whether there is such a part.
        is_present: Whether there was a configuration at all.
        raw: The whole of config.json.
    """

    architecture: str | None = None
    model_type: str | None = None
    text_model_type: str | None = None
    vocab_size: int | None = None
    hidden_size: int | None = None
    num_layers: int | None = None
    num_attention_layers: int | None = None
    kv_elements_per_layer: int | None = None
    num_experts: int | None = None
    experts_per_token: int | None = None
    tie_flag: bool | None = None
    text_tie_flag: bool | None = None
    has_text_part: bool = False
    is_present: bool = False
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)


def read_model_config(folder: Path) -> ModelConfig:
    """Read config.json of a folder; without one, every fact is None.

    Raises:
        CheckpointError: It is not a JSON object, or a tie flag in it is neither true, false nor null.
    """
    path = folder / CONFIG_NAME
    if not os.path.lexists(path):  # a link to nothing is a broken checkpoint, not one without a configuration
        return ModelConfig()
    # Mamba2-type models have an infinite upper bound in theirs, which Python writes as a bare Infinity.
    return parse_model_config(read_json_file(path, allow_non_finite=True), path)


def parse_model_config(raw: dict[str, Any], path: Path) -> ModelConfig:
    """Build a `ModelConfig` from the content of a config.json, which `path` names in errors.

    Raises:
        CheckpointError: A tie flag is neither true, false nor null.
    """
    text = _text_part(raw)
    parts = (text, raw) if text is not None else (raw,)
    architectures = raw.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    num_layers = _first_count(parts, _NUM_LAYERS)
    return ModelConfig(
        architecture=architecture if isinstance(architecture, str) else None,
        model_type=_text_or_none(raw.get("model_type")),
        text_model_type=_text_or_none(parts[0].get("model_type")),
        vocab_size=_first_count(parts, ("vocab_size",)),
        hidden_size=_first_count(parts, _HIDDEN_SIZE),
        num_layers=num_layers,
        num_attention_layers=_num_attention_layers(parts[0], num_layers),
        kv_elements_per_layer=_kv_elements_per_layer(parts),
        num_experts=_first_count(parts, _NUM_EXPERTS),
        experts_per_token=_first_count(parts, _EXPERTS_PER_TOKEN),
        tie_flag=_tie_flag(raw, path, TIE_KEY),
        text_tie_flag=None if text is None else _tie_flag(text, path, f"text_config.{TIE_KEY}"),
        has_text_part=text is not None,
        is_present=True,
        raw=raw,
    )


def _text_part(raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the language model's own part of a composite config, two levels deep (Qwen-Omni's thinker)."""
    for key in _TEXT_KEYS:
        part = raw.get(key)
        if isinstance(part, dict) and part:
            return _text_part(part) or part
    return None


def _tie_flag(part: Mapping[str, Any], path: Path, subject: str) -> bool | None:
    flag = part.get(TIE_KEY)
    if flag is not None and not isinstance(flag, bool):
        raise CheckpointError(path, subject, f"is {shown(flag)}, true or false is needed")
    return flag


def _text_or_none(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _first_count(parts: tuple[Mapping[str, Any], ...], names: tuple[str, ...]) -> int | None:
    values = (part.get(name) for part in parts for name in names)
    return next((value for value in values if is_count(value) and 0 < value < _MAX_COUNT), None)


def _num_attention_layers(part: Mapping[str, Any], num_layers: int | None) -> int | None:
    """Count the layers that keep keys and values, in a hybrid model by its list of layer types."""
    for key in ("layer_types", "layers_block_type"):
        types = part.get(key)
        if isinstance(types, list) and types and all(isinstance(layer, str) for layer in types):
            return sum(_keeps_keys_and_values(layer) for layer in types)
    interval = part.get("full_attention_interval")
    if num_layers is not None and is_count(interval) and interval:
        return int(num_layers // interval)
    return num_layers


def _keeps_keys_and_values(layer_type: str) -> bool:
    return layer_type == "hybrid" or ("attention" in layer_type and not layer_type.startswith("linear"))


def _kv_elements_per_layer(parts: tuple[Mapping[str, Any], ...]) -> int | None:
    """Count the elements that one token adds to one layer's cache: keys and values, or MLA's one compressed vector."""
    latent, rope = _first_count(parts, ("kv_lora_rank",)), _first_count(parts, ("qk_rope_head_dim",))
    if latent and rope:
        return latent + rope
    heads, kv_heads = _first_count(parts, _NUM_HEADS), _first_count(parts, _NUM_KV_HEADS)
    if any(part.get("multi_query") is True and not part.get("new_decoder_architecture") for part in parts):
        kv_heads = 1
    hidden_size = _first_count(parts, _HIDDEN_SIZE)
    head_dim = _first_count(parts, ("head_dim", "attention_head_dim", "d_kv"))
    if head_dim is None and hidden_size and heads:
        head_dim = hidden_size // heads
    return 2 * kv_heads * head_dim if kv_heads and head_dim else None
