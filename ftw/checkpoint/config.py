"""ModelConfig: what a checkpoint's configuration says of a model, under one name for each fact; and config.json.

The metadata of a GGUF are read by `ftw.checkpoint.gguf_config`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ftw.checkpoint.contradictions import find_contradictions
from ftw.checkpoint.kv_cache import HIDDEN_SIZE, KvCache, count_kv, first_count
from ftw.errors import CheckpointError
from ftw.files import short_repr

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ftw.hub import Place

CONFIG_NAME = "config.json"
TIE_KEY = "tie_word_embeddings"

# Where a multimodal or an encoder-decoder config keeps its language model; the first that is there counts.
_TEXT_KEYS = ("text_config", "llm_config", "language_config", "thinker_config", "decoder", "generator")

_NUM_LAYERS = ("num_decoder_layers", "decoder_layers", "num_hidden_layers", "n_layer", "num_layers", "n_layers")
_NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "n_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model's configuration; a fact that the checkpoint does not tell is None.

    Attributes:
        architecture: The first of `architectures`, such as "Qwen3MoeForCausalLM"; GGUF's, such as "qwen3moe".
        model_type: The family, such as "qwen3_moe"; GGUF's architecture again.
        text_model_type: The family of the language model inside a multimodal one, else `model_type`.
        vocab_size: Rows of the token embedding that have a meaning.
        hidden_size: Width of the residual stream, in elements.
        num_layers: Decoder layers.
        num_attention_layers: Those of them that keep keys and values.
        kv_elements_per_token: Elements that one token adds to the KV caches of all of them.
        num_experts: Routed experts of one MoE layer.
        experts_per_token: How many of them one token uses.
        tie_flag: `tie_word_embeddings` at the top level.
        text_tie_flag: The same in the language model's own part.
        has_text_part: Whether there is such a part.
        is_present: Whether there was a configuration at all.
        is_gguf: Whether it is a GGUF's, which has no tie flag: there an LM head of its own is stored, or none.
        has_output_weight: Whether the GGUF that an FTW was made from stored one.
        num_tokens: Entries of a GGUF's token list.
        contradictions: What of it contradicts itself; no figure is computed of that.
        raw: The whole of config.json, or a GGUF's metadata.
    """

    architecture: str | None = None
    model_type: str | None = None
    text_model_type: str | None = None
    vocab_size: int | None = None
    hidden_size: int | None = None
    num_layers: int | None = None
    num_attention_layers: int | None = None
    kv_elements_per_token: int | None = None
    num_experts: int | None = None
    experts_per_token: int | None = None
    tie_flag: bool | None = None
    text_tie_flag: bool | None = None
    has_text_part: bool = False
    is_present: bool = False
    is_gguf: bool = False
    has_output_weight: bool | None = None
    num_tokens: int | None = None
    contradictions: tuple[str, ...] = ()
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def count(self, *names: str) -> int | None:
        """Return the first positive count that `raw` has under one of these names, in its language model's part first.

        None if there is none. The keys of a GGUF begin with the architecture.
        """
        return first_count(config_parts(self.raw), names)


def read_model_config(place: Place) -> ModelConfig:
    """Read the config.json that lies at a place; without one, every fact is None.

    Raises:
        CheckpointError: It is not a JSON object, or a tie flag in it is neither true, false nor null.
    """
    raw = place.read_json(CONFIG_NAME)
    return ModelConfig() if raw is None else parse_model_config(raw, place.folder / CONFIG_NAME)


def parse_model_config(raw: dict[str, Any], path: Path) -> ModelConfig:
    """Build a `ModelConfig` from the content of a config.json, which `path` names in errors.

    Raises:
        CheckpointError: A tie flag is neither true, false nor null.
    """
    parts = config_parts(raw)
    has_text_part = len(parts) > 1
    architectures = raw.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    num_layers = first_count(parts, _NUM_LAYERS)
    contradictions = find_contradictions(parts[0])
    kv_cache = KvCache(None, None) if contradictions else count_kv(parts, num_layers)
    return ModelConfig(
        architecture=architecture if isinstance(architecture, str) else None,
        model_type=_text_or_none(raw.get("model_type")),
        text_model_type=_text_or_none(parts[0].get("model_type")),
        vocab_size=first_count(parts, ("vocab_size",)),
        hidden_size=first_count(parts, HIDDEN_SIZE),
        num_layers=num_layers,
        num_attention_layers=kv_cache.num_layers,
        kv_elements_per_token=kv_cache.elements_per_token,
        num_experts=first_count(parts, _NUM_EXPERTS),
        experts_per_token=first_count(parts, _EXPERTS_PER_TOKEN),
        tie_flag=_tie_flag(raw, path, TIE_KEY),
        text_tie_flag=_tie_flag(parts[0], path, f"text_config.{TIE_KEY}") if has_text_part else None,
        has_text_part=has_text_part,
        is_present=True,
        contradictions=contradictions,
        raw=raw,
    )


def config_parts(raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Return the parts of a config that tell of the language model, in the order in which they are asked.

    Its own part is first, then those around it, if any (Qwen-Omni's thinker), and the whole config is last.
    """
    parts = [raw]
    while inner := [part for key in _TEXT_KEYS if isinstance(part := parts[0].get(key), dict) and part]:
        parts.insert(0, inner[0])
    return tuple(parts)


def _tie_flag(part: Mapping[str, Any], path: Path, subject: str) -> bool | None:
    flag = part.get(TIE_KEY)
    if flag is not None and not isinstance(flag, bool):
        raise CheckpointError(path, subject, f"is {short_repr(flag)}, true or false is needed")
    return flag


def _text_or_none(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
