"""ModelConfig out of a GGUF's metadata: `general.*`, and `<architecture>.*`, scalars or a value for each layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

from ftw.checkpoint.config import ModelConfig
from ftw.checkpoint.contradictions import find_gguf_contradictions
from ftw.checkpoint.kv_cache import MAX_COUNT
from ftw.errors import CheckpointError
from ftw.files import is_count, short_repr
from ftw.readers.gguf import ARCHITECTURE_KEY, OUTPUT_WEIGHT_KEY, MetadataArray

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

TOKENS_KEY = "tokenizer.ggml.tokens"
FILE_TYPE_KEY = "general.file_type"

_MAX_LAYERS = 1 << 16
_HEAD_KEYS = ("attention.head_count", "attention.head_count_kv", "embedding_length", "attention.key_length")
_OF_ANY_SIZE = frozenset({"STRING", "ARRAY"})


def parse_gguf_config(metadata: Mapping[str, Any], path: Path) -> ModelConfig:
    """Build a `ModelConfig` from the metadata of a GGUF, which `path` names in errors.

    Raises:
        CheckpointError: There is no architecture, or `freetoken.output_weight_present` is neither true nor false.
    """
    has_output_weight = metadata.get(OUTPUT_WEIGHT_KEY)
    if has_output_weight is not None and not isinstance(has_output_weight, bool):
        raise CheckpointError(path, OUTPUT_WEIGHT_KEY, f"is {short_repr(has_output_weight)}, true or false is needed")
    architecture = metadata.get(ARCHITECTURE_KEY)
    if architecture is None:
        raise CheckpointError(path, ARCHITECTURE_KEY, "is missing, the name of an architecture is needed")
    facts = _Facts(metadata, architecture)
    tokens = metadata.get(TOKENS_KEY)
    num_tokens = len(tokens) if isinstance(tokens, MetadataArray) else None
    blocks = facts.count("block_count")
    drafts = facts.count("nextn_predict_layers") or 0  # blocks for speculative decoding, at the end
    num_layers = blocks - drafts if blocks and drafts < blocks else None
    heads = (facts.value(key) for key in _HEAD_KEYS)
    contradictions = find_gguf_contradictions(*heads)
    is_countable = not contradictions and num_layers is not None and num_layers <= _MAX_LAYERS
    kv_layers = _kv_elements_by_layer(facts, num_layers) if num_layers and is_countable else []
    return ModelConfig(
        architecture=architecture,
        model_type=architecture,
        text_model_type=architecture,
        vocab_size=facts.count("vocab_size") or num_tokens,
        hidden_size=facts.count("embedding_length"),
        num_layers=num_layers,
        num_attention_layers=sum(map(bool, kv_layers)) or None,
        kv_elements_per_token=sum(kv_layers) or None,
        num_experts=facts.count("expert_count"),
        experts_per_token=facts.count("expert_used_count"),
        is_present=True,
        is_gguf=True,
        has_output_weight=has_output_weight,
        num_tokens=num_tokens,
        contradictions=contradictions,
        raw=metadata,
    )


class _Facts:
    """The keys of one architecture."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self._metadata = metadata
        self._architecture = architecture

    def value(self, key: str) -> Any:
        """Return a value as it is, None where there is none."""
        return self._metadata.get(f"{self._architecture}.{key}")

    def count(self, key: str) -> int | None:
        """Return a positive count, of values for each layer the largest; None where there is none."""
        return max(self._counts(key), default=0) or None

    def by_layer(self, key: str, num_layers: int) -> list[int]:
        """Return a count for each layer, zero where a layer has none; empty where the key does not tell."""
        counts = self._counts(key)
        if len(counts) == 1:
            return counts * num_layers
        return counts[:num_layers] if len(counts) >= num_layers else []

    def _counts(self, key: str) -> list[int]:
        value = self.value(key)
        values: list[Any] = [value]
        if _is_by_layer(value):
            values = value.read()
        return values if all(is_count(one) and one < MAX_COUNT for one in values) else []


def _kv_elements_by_layer(facts: _Facts, num_layers: int) -> list[int]:
    """Return how many elements one token adds to each layer's cache; empty where the metadata do not tell.

    Keys and values of the layers that have heads for them; MLA's one compressed vector; of hybrids only each nth layer,
    of models whose last layers share a cache only those before.
    """
    heads = facts.by_layer("attention.head_count", num_layers)
    has_kv_heads = facts.value("attention.head_count_kv") is not None
    kv_heads = facts.by_layer("attention.head_count_kv", num_layers) if has_kv_heads else heads
    if not kv_heads or not heads:
        return []
    latent, rope = facts.count("attention.kv_lora_rank"), facts.count("rope.dimension_count")
    if latent and rope:
        elements = [latent + rope if count else 0 for count in kv_heads]
    else:
        widths = _kv_widths(facts, max(heads), num_layers)
        elements = [count * width for count, width in zip(kv_heads, widths, strict=True)]
    interval = facts.count("full_attention_interval")
    if interval:
        elements = [count if (layer + 1) % interval == 0 else 0 for layer, count in enumerate(elements)]
    shared = facts.count("attention.shared_kv_layers") or 0
    return elements[: max(num_layers - shared, 0)]


def _kv_widths(facts: _Facts, num_heads: int, num_layers: int) -> list[int]:
    """Return the elements of one head's key and value in each layer: those with a sliding window may have others."""
    hidden_size = facts.count("embedding_length")
    default = hidden_size // num_heads if hidden_size and num_heads else 0
    full = (facts.count("attention.key_length") or default) + (facts.count("attention.value_length") or default)
    keys, values = facts.count("attention.key_length_swa"), facts.count("attention.value_length_swa")
    pattern = facts.value("attention.sliding_window_pattern")
    if not keys or not values or not _is_by_layer(pattern) or len(pattern) < num_layers:
        return [full] * num_layers
    return [keys + values if is_sliding else full for is_sliding in pattern.read()[:num_layers]]


def _is_by_layer(value: object) -> TypeGuard[MetadataArray]:
    """Return whether a value is an array with a number for each layer; one of texts or arrays could be of any size."""
    return isinstance(value, MetadataArray) and len(value) <= _MAX_LAYERS and value.element_type not in _OF_ANY_SIZE
