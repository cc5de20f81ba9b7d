"""ModelConfig: what a checkpoint's configuration says of a model, under one name for each fact; and config.json.

The metadata of a GGUF are read by `ftw.checkpoint.gguf_config`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ftw.checkpoint.contradictions import find_contradictions
from ftw.checkpoint.kv_cache import HIDDEN_SIZE, KvCache, count_kv, first_count
from ftw.errors import CheckpointError
from ftw.files import short_repr

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from ftw.hub import Place

CONFIG_NAME = "config.json"
TIE_KEY = "tie_word_embeddings"
TIE_KEYS = (TIE_KEY, "tie_embedding")  # what a tie flag is called; the second is LFM2's

# Where a multimodal or an encoder-decoder config keeps its language model; the first that is there counts.
_TEXT_KEYS = ("text_config", "llm_config", "language_config", "thinker_config", "decoder", "generator")

# Words in the keys of parts that are no language model, or one whose LM head is not the model's.
_OTHER_PARTS = frozenset(
    """
    adapter aligner audio clip code2wav codec connector decoding depth diffusion dit draft eagle encoder generation
    image img medusa mtp perceiver projector protein qformer quantization question resampler sam siglip speaker speech
    t2u talker token2wav tokenizer tower vae video vision visual vit vocoder vq vqmodel
    """.split()
)

# Hostile configurations have more of them, deeper ones, and longer keys; Qwen-Omni's language model is two levels deep.
_MAX_PARTS, _MAX_LEVELS, _MAX_KEY = 256, 8, 64

_NUM_LAYERS = ("num_decoder_layers", "decoder_layers", "num_hidden_layers", "n_layer", "num_layers", "n_layers")
_NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "n_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token")


class TieFlag(NamedTuple):
    """A tie flag, the path of the part that it is in, empty at the top, and what it is called there."""

    path: str
    key: str
    value: bool

    @property
    def name(self) -> str:
        """Its whole path, such as "text_config.tie_word_embeddings"."""
        return f"{self.path}.{self.key}" if self.path else self.key


class ConfigPart(NamedTuple):
    """A part of a configuration that may have the LM head.

    Attributes:
        path: The keys that lead to it, such as "thinker_config.text_config"; empty for the whole.
        model_type: Its family.
        flags: The tie flags that it states.
    """

    path: str
    model_type: str | None
    flags: tuple[TieFlag, ...]

    def flag(self, key: str) -> bool | None:
        """Return the value of a tie flag, None if the part does not state it."""
        return next((flag.value for flag in self.flags if flag.key == key), None)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model's configuration; a fact that the checkpoint does not tell is None.

    Attributes:
        architecture: The first of `architectures`, such as "Qwen3MoeForCausalLM"; GGUF's, such as "qwen3moe".
        architectures: All of them; none of a GGUF.
        model_class: The class that is really loaded, whatever they say; None where that is not known.
        model_type: The family, such as "qwen3_moe"; GGUF's architecture again.
        text_model_type: The family of the language model inside a multimodal one, else `model_type`.
        vocab_size: Rows of the token embedding that have a meaning.
        hidden_size: Width of the residual stream, in elements.
        num_layers: Decoder layers.
        num_attention_layers: Those of them that keep keys and values.
        kv_elements_per_token: Elements that one token adds to the KV caches of all of them.
        num_experts: Routed experts of one MoE layer.
        experts_per_token: How many of them one token uses.
        parts: The parts that may have the LM head, the whole first.
        text_path: The path of the language model's own part; empty if there is none.
        is_present: Whether there was a configuration at all.
        is_unread: Whether there is one that must not be read, as it is a link out of the folder.
        is_gguf: Whether it is a GGUF's, which has no tie flag: there an LM head of its own is stored, or none.
        has_output_weight: Whether the GGUF that an FTW was made from stored one.
        num_tokens: Entries of a GGUF's token list.
        contradictions: What of it contradicts itself; no figure is computed of that.
        raw: The whole of config.json, or a GGUF's metadata.
    """

    architecture: str | None = None
    architectures: tuple[str, ...] = ()
    model_class: str | None = None
    model_type: str | None = None
    text_model_type: str | None = None
    vocab_size: int | None = None
    hidden_size: int | None = None
    num_layers: int | None = None
    num_attention_layers: int | None = None
    kv_elements_per_token: int | None = None
    num_experts: int | None = None
    experts_per_token: int | None = None
    parts: tuple[ConfigPart, ...] = ()
    text_path: str = ""
    is_present: bool = False
    is_unread: bool = False
    is_gguf: bool = False
    has_output_weight: bool | None = None
    num_tokens: int | None = None
    contradictions: tuple[str, ...] = ()
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def tie_flag(self) -> bool | None:
        """`tie_word_embeddings` at the top level."""
        return self.parts[0].flag(TIE_KEY) if self.parts else None

    @property
    def text_tie_flag(self) -> bool | None:
        """The same in the language model's own part."""
        part = self.part(self.text_path) if self.text_path else None
        return part and part.flag(TIE_KEY)

    def part(self, path: str) -> ConfigPart | None:
        """Return the part at a path, None if there is none or it can have no LM head."""
        return next((part for part in self.parts if part.path == path), None)

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
    architectures = raw.get("architectures")
    named = tuple(name for name in architectures if isinstance(name, str)) if isinstance(architectures, list) else ()
    num_layers = first_count(parts, _NUM_LAYERS)
    contradictions = find_contradictions(parts[0])
    kv_cache = KvCache(None, None) if contradictions else count_kv(parts, num_layers)
    return ModelConfig(
        architecture=named[0] if named else None,
        architectures=named,
        model_type=_text_or_none(raw.get("model_type")),
        text_model_type=_text_or_none(parts[0].get("model_type")),
        vocab_size=first_count(parts, ("vocab_size",)),
        hidden_size=first_count(parts, HIDDEN_SIZE),
        num_layers=num_layers,
        num_attention_layers=kv_cache.num_layers,
        kv_elements_per_token=kv_cache.elements_per_token,
        num_experts=first_count(parts, _NUM_EXPERTS),
        experts_per_token=first_count(parts, _EXPERTS_PER_TOKEN),
        parts=tuple(_find_parts(raw, path)),
        text_path=_text_path(raw),
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


def _text_path(raw: Mapping[str, Any]) -> str:
    """Return the path of the first of `config_parts`."""
    keys: list[str] = []
    part = raw
    while key := next((key for key in _TEXT_KEYS if isinstance(part.get(key), dict) and part[key]), ""):
        part = part[key]
        keys.append(key)
    return ".".join(keys)


def _find_parts(raw: Mapping[str, Any], file: Path) -> list[ConfigPart]:
    """Return the parts that may have the LM head: the whole, and those that state a family or a tie flag."""
    text_path = _text_path(raw)
    found: list[ConfigPart] = []
    waiting: list[tuple[str, Mapping[str, Any]]] = [("", raw)]
    for path, part in waiting:  # which grows
        flags = tuple(_tie_flags(part, path, file))
        model_type = _text_or_none(part.get("model_type"))
        if flags or model_type or path in ("", text_path):
            found.append(ConfigPart(path, model_type, flags))
        if len(found) > _MAX_PARTS:
            problem = f"more than {_MAX_PARTS} parts name a family or a tie flag, no model has so many"
            raise CheckpointError(file, "parts", problem)
        if path.count(".") < _MAX_LEVELS:
            start = f"{path}." if path else ""
            waiting += [(f"{start}{key}", value) for key, value in part.items() if _may_have_head(key, value)]
    return found


def _may_have_head(key: str, part: object) -> bool:
    is_part = isinstance(part, dict) and bool(part) and len(key) <= _MAX_KEY
    return is_part and _OTHER_PARTS.isdisjoint(key.lower().split("_"))


def _tie_flags(part: Mapping[str, Any], path: str, file: Path) -> Iterator[TieFlag]:
    for key in TIE_KEYS:
        value = part.get(key)
        if isinstance(value, bool):
            yield TieFlag(path, key, value)
        elif value is not None:
            subject = TieFlag(path, key, value=True).name
            raise CheckpointError(file, subject, f"is {short_repr(value)}, true or false is needed")


def _text_or_none(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
