"""TieClaim: what a configuration claims about the tie of LM head and token embedding, and by which flag.

transformers 5   reads the flag in the part whose class has the LM head (`families` says where), and a default where
                 that part does not state it
transformers 4   reads `tie_word_embeddings` in the language model's own part, the innermost one
remote code      may read any of them, so every flag in a part that may have the head is evidence
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ftw.checkpoint import TIE_KEY
from ftw.verdict import families

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ftw.checkpoint import ConfigPart, ModelConfig, TieFlag

_MAX_SHOWN = 8  # flags in the evidence


class TieClaim(NamedTuple):
    """What a configuration claims about the tie.

    Attributes:
        v5: Whether transformers 5 ties by it.
        v4: Whether transformers 4 does.
        is_stated: Whether a flag in the configuration says so, not a default alone.
        contradicts_two_weights: Whether an LM head with other bytes contradicts it.
        family: Of the part whose class has the LM head.
        evidence: The flags, or the default that counts instead.
        words: What decides, for people.
    """

    v5: bool
    v4: bool
    is_stated: bool
    contradicts_two_weights: bool
    family: str | None
    evidence: tuple[str, ...]
    words: str

    @property
    def has_tie(self) -> bool:
        """Whether any release ties by it."""
        return self.v5 or self.v4


class _Reading(NamedTuple):
    """What transformers 5 makes of a part: by its flags, if it states any, else by a default or a rule."""

    value: bool
    flags: tuple[TieFlag, ...]
    words: str
    is_forced: bool = False


def read_claim(config: ModelConfig) -> TieClaim:
    """Read what a configuration claims about the tie."""
    if not config.parts:
        return TieClaim(v5=False, v4=True, is_stated=False, contradicts_two_weights=False, family=None,
                        evidence=("no config.json",), words=f"there is no config.json with {TIE_KEY}")  # fmt: skip
    top = config.parts[0]
    reading, inner = _read_v5(config, top), _inner_flags(config)
    text_type = config.text_model_type if config.text_path else top.model_type
    v4 = any(flag.value for flag in inner) if inner else _default(text_type, unknown=True)
    family = _owner(config, top).model_type
    if family in families.NEVER_TIED:
        v4 = False
    if not reading.flags:
        contradicts = v4 and (reading.value or bool(inner))
    elif reading.is_forced:  # there, false says that head and table are two weights
        contradicts = any(flag.value for flag in reading.flags)
    else:
        contradicts = reading.value or (any(flag.value for flag in reading.flags) and v4)
    words = _flag_words(inner) if inner and not reading.flags and not reading.is_forced else reading.words
    evidence = _evidence(config)
    is_stated = any(flag.value for flag in (*reading.flags, *inner)) and (reading.value or v4)
    return TieClaim(reading.value, v4, is_stated, contradicts, family, evidence, words)


def _read_v5(config: ModelConfig, part: ConfigPart) -> _Reading:
    """Read a part as transformers 5 does, from the outermost one in to the one whose class has the LM head."""
    flags = _flags_of(part)
    if part.model_type in families.FLAG_FORCED:
        return _Reading(True, flags, f"{part.model_type} always ties by {TIE_KEY}", is_forced=True)
    if part.model_type in families.FLAG_WITHOUT_EFFECT or part.model_type in families.NEVER_TIED:
        return _Reading(False, flags, f"{part.model_type} does not tie by {TIE_KEY}")
    inner = _part_below(config, part, families.FLAG_IN_PART.get(part.model_type or ""))
    if inner is not None:
        return _read_v5(config, inner)
    text = _part_below(config, part, "text_config")
    if part.model_type in families.FLAG_AT_TOP_OR_IN_TEXT and text is not None:
        both = (*flags, *_flags_of(text))
        value = _value_of(part, flags) or _value_of(text, _flags_of(text))
        return _Reading(value, both, _flag_words(both) if both else _default_words(part))
    if part.model_type in families.FLAG_IN_TEXT_IF_ABSENT and not flags and text is not None:
        return _read_v5(config, text)
    return _Reading(_value_of(part, flags), flags, _flag_words(flags) if flags else _default_words(part))


def _part_below(config: ModelConfig, part: ConfigPart, key: str | None) -> ConfigPart | None:
    """Return a part of a part, which may be without facts of its own; None for a path of no part."""
    return config.part(f"{part.path}.{key}" if part.path else key) if key else None


def _flags_of(part: ConfigPart) -> tuple[TieFlag, ...]:
    """Return the one flag of a part that its family reads, or those that unknown code may read."""
    if not families.is_known(part.model_type):
        return part.flags
    by_key = {flag.key: flag for flag in part.flags}
    keys = families.FLAG_NAMES.get(part.model_type or "", (TIE_KEY,))
    return tuple(by_key[key] for key in keys if key in by_key)[:1]


def _inner_flags(config: ModelConfig) -> tuple[TieFlag, ...]:
    """Return the flags that transformers 4 reads: the language model's own, or those of parts that are not known."""
    top = config.parts[0]
    text = config.part(config.text_path)
    if not families.is_known(top.model_type) or not config.text_path or text is None:
        below = tuple(flag for part in config.parts[1:] for flag in _flags_of(part))
        return below or _flags_of(top)
    beside = [part for part in config.parts if not f"{config.text_path}.".startswith(f"{part.path}.".lstrip("."))]
    return _flags_of(text) or tuple(flag for part in beside for flag in _flags_of(part))


def _value_of(part: ConfigPart, flags: tuple[TieFlag, ...]) -> bool:
    return any(flag.value for flag in flags) if flags else _default(part.model_type, unknown=False)


def _default(model_type: str | None, *, unknown: bool) -> bool:
    """Return the family's default of the flag; transformers 4 ties what declares none, transformers 5 does not."""
    if model_type in families.TIED_BY_DEFAULT:
        return True
    if model_type in families.UNTIED_BY_DEFAULT:
        return False
    return unknown


def _evidence(config: ModelConfig) -> tuple[str, ...]:
    stated = [f"config:{_as_text(flag)}" for part in config.parts for flag in _flags_of(part)]
    if stated:
        more = len(stated) - _MAX_SHOWN
        return (*stated[:_MAX_SHOWN], *([f"config:{more} other tie flags"] if more > 0 else ()))
    owner = _owner(config, config.parts[0])
    if families.is_known(owner.model_type):
        default = str(_default(owner.model_type, unknown=False)).lower()
        return (f"default:{owner.model_type} {TIE_KEY}={default}",)
    return (f"config:no {TIE_KEY}",)


def _owner(config: ModelConfig, part: ConfigPart) -> ConfigPart:
    """Return the part whose class has the LM head."""
    inner = _part_below(config, part, families.FLAG_IN_PART.get(part.model_type or ""))
    return part if inner is None else _owner(config, inner)


def _flag_words(flags: Iterable[TieFlag]) -> str:
    return "config says " + " and ".join(_as_text(flag) for flag in list(flags)[:_MAX_SHOWN])


def _default_words(part: ConfigPart) -> str:
    if not families.is_known(part.model_type):
        return f"config has no {TIE_KEY}"
    default = str(_default(part.model_type, unknown=False)).lower()
    return f"config has no {TIE_KEY}, and {default} is the default of {part.model_type}"


def _as_text(flag: TieFlag) -> str:
    return f"{flag.name}={str(flag.value).lower()}"
