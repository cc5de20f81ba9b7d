"""The KV cache by config.json: which layers keep keys and values, and how many elements one token adds to them.

    plain attention    2 * kv heads * head size
    MLA                one compressed vector and the rotary part of the key, kv_lora_rank + qk_rope_head_dim
    hybrids            attention layers alone, by a list of layer types, a pattern, a period, or a list of indices
    shared caches      the last `num_kv_shared_layers` read what layers before them keep
    Gemma 4            full-attention layers have heads of another size and number than those with a sliding window

A sliding window is counted as if it were full: how long it is does not change what one more token adds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ftw.files import is_count

if TYPE_CHECKING:
    from collections.abc import Mapping

# No model has more of anything; a larger number is nonsense, and its products would not print.
MAX_COUNT = 1 << 48
_MAX_LAYERS = 1 << 16

HIDDEN_SIZE = ("hidden_size", "n_embd", "n_embed", "d_model", "dim", "model_dim")
NUM_HEADS = ("decoder_attention_heads", "num_attention_heads", "n_head", "num_heads", "n_heads")
NUM_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_n_heads")
HEAD_DIM = ("head_dim", "attention_head_dim", "d_kv", "kv_channels")
_LAYER_TYPES = ("layer_types", "layers_block_type")
# Families that keep a state of fixed size, though their configurations have heads.
_WITHOUT_KV = frozenset("falcon_mamba gated_deltanet gla mamba mamba2 retnet rwkv rwkv7 xlstm".split())
_INDICES = ("attn_layer_indices", "full_attn_idxs", "hybrid_layer_ids", "full_attn_layers")


class KvCache(NamedTuple):
    """What one token adds: the layers that keep something, and all their elements; None where it is not told."""

    num_layers: int | None
    elements_per_token: int | None


def count_kv(parts: tuple[Mapping[str, Any], ...], num_layers: int | None) -> KvCache:
    """Count what one token adds to the cache; the first of `parts` is the language model's own configuration."""
    if num_layers is None or num_layers > _MAX_LAYERS:
        return KvCache(num_layers, None)
    model_type = parts[0].get("model_type")
    if isinstance(model_type, str) and model_type in _WITHOUT_KV:
        return KvCache(0, None)
    if parts[0].get("block_configs"):  # Nemotron-NAS: each layer has heads of its own number, or none
        return KvCache(None, None)
    keeps = _keeping_layers(parts[0], num_layers)
    shared = first_count(parts[:1], ("num_kv_shared_layers",)) or 0
    keeps = keeps[: max(num_layers - shared, 0)]
    if not any(keeps):
        return KvCache(0, None)
    each, full = _elements(parts), _full_attention_elements(parts)
    if each is None:
        return KvCache(sum(keeps), None)
    types = _layer_types(parts[0]) if full is not None else None
    if full is None or types is None:
        return KvCache(sum(keeps), sum(keeps) * each)
    kinds = zip(keeps, types, strict=False)
    return KvCache(sum(keeps), sum(full if kind == "full_attention" else each for kept, kind in kinds if kept))


def first_count(parts: tuple[Mapping[str, Any], ...], names: tuple[str, ...]) -> int | None:
    """Return the first positive count that one of `parts` has under one of `names`."""
    values = (part.get(name) for part in parts for name in names)
    return next((value for value in values if is_count(value) and 0 < value < MAX_COUNT), None)


def _keeping_layers(part: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Return for each layer whether it keeps keys and values."""
    types = _layer_types(part)
    if types is not None:
        return [_is_attention(kind) for kind in types[:num_layers]]
    pattern = part.get("hybrid_override_pattern")  # Nemotron-H: M for Mamba, * for attention, - for an MLP
    if isinstance(pattern, str) and pattern:
        return [letter == "*" for letter in pattern[:num_layers]]
    cycle = part.get("block_types")  # RecurrentGemma: repeated as often as the layers need
    if isinstance(cycle, list) and cycle:
        return [cycle[layer % len(cycle)] == "attention" for layer in range(num_layers)]
    flags = part.get("attn_type_list")  # MiniMax: 1 for softmax attention, 0 for linear
    if isinstance(flags, list) and len(flags) >= num_layers:
        return [flag == 1 for flag in flags[:num_layers]]
    linear = part.get("linear_attn_config")  # Kimi Linear, which counts from 1
    for owner, first in ((part, 0), (linear if isinstance(linear, dict) else {}, 1)):
        indices = next((owner[name] for name in _INDICES if isinstance(owner.get(name), list)), None)
        if indices is not None:
            numbers = {index for index in indices if is_count(index)}
            return [layer + first in numbers for layer in range(num_layers)]
    period, offset = first_count((part,), ("attn_layer_period",)), part.get("attn_layer_offset", 0)
    if period and is_count(offset):  # Jamba, Zamba
        return [layer % period == offset % period for layer in range(num_layers)]
    interval = first_count((part,), ("full_attention_interval",))  # Qwen3-Next
    if interval:
        return [(layer + 1) % interval == 0 for layer in range(num_layers)]
    return [True] * num_layers


def _layer_types(part: Mapping[str, Any]) -> list[str] | None:
    for key in _LAYER_TYPES:
        types = part.get(key)
        if isinstance(types, list) and types and all(isinstance(kind, str) for kind in types):
            return types
    return None


def _is_attention(layer_type: str) -> bool:
    return layer_type == "hybrid" or ("attention" in layer_type and not layer_type.startswith("linear"))


def _elements(parts: tuple[Mapping[str, Any], ...]) -> int | None:
    """Return the elements that one token adds to one layer."""
    latent, rope = first_count(parts, ("kv_lora_rank",)), first_count(parts, ("qk_rope_head_dim",))
    if latent and rope:
        blocks = 2 if parts[0].get("model_type") == "longcat_flash" and "num_layers" in parts[0] else 1
        return (latent + rope) * blocks
    inner = parts[0].get("attn_config")  # DBRX, MPT
    parts = (*parts[:1], inner, *parts[1:]) if isinstance(inner, dict) else parts
    heads = first_count(parts, NUM_HEADS)
    kv_heads = first_count(parts, NUM_KV_HEADS) or heads
    if any(part.get("multi_query") is True and not part.get("new_decoder_architecture") for part in parts):
        kv_heads = 1
    if any(part.get("multi_query_attention") is True for part in parts):  # ChatGLM
        kv_heads = first_count(parts, ("multi_query_group_num",)) or kv_heads
    hidden_size = first_count(parts, HIDDEN_SIZE)
    head_dim = first_count(parts, HEAD_DIM)
    if head_dim is None and hidden_size and heads:
        head_dim = hidden_size // heads
    return 2 * kv_heads * head_dim if kv_heads and head_dim else None


def _full_attention_elements(parts: tuple[Mapping[str, Any], ...]) -> int | None:
    """Return the elements of one of Gemma 4's layers with full attention, None for models where all are alike."""
    head_dim = first_count(parts, ("global_head_dim",))
    if head_dim is None:
        return None
    kv_heads = first_count(parts, ("num_global_key_value_heads", *NUM_KV_HEADS, *NUM_HEADS))
    return 2 * kv_heads * head_dim if kv_heads else None
