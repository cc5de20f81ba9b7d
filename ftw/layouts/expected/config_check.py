"""Checks of the configuration itself: what FreeToken's model of it refuses, whatever the tensors are."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

from ftw.errors import CheckpointError
from ftw.files import is_count, short_repr
from ftw.layouts.families.layer_kinds import LayerConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftw.checkpoint import Checkpoint
    from ftw.layouts.expected.sizes import Sizes
    from ftw.layouts.families.family import Rules

_ROPE_HEADS = (64, 128, 256, 512)
_CHOSEN_KEY = "num_experts_per_tok"
_ROPE_KEYS = ("rope_parameters", "rope_scaling")


def check_config(checkpoint: Checkpoint, rules: Rules, sizes: Sizes) -> None:
    """Check what a family's row asks of a configuration.

    Raises:
        CheckpointError: It says something that FreeToken's model of that architecture does not take.
    """
    model = f"FreeToken's {checkpoint.config.architecture}"
    problems = chain(_find_sizes(rules, sizes, model), _find_values(rules, sizes, model))
    for subject, problem in chain(problems, _find_layer_types(checkpoint, rules, sizes, model)):
        raise CheckpointError(checkpoint.source, f"{sizes.file}: {subject}", problem)


def _find_sizes(rules: Rules, sizes: Sizes, model: str) -> Iterator[tuple[str, str]]:
    """Yield keys of sizes, and what is wrong with each."""
    for name in rules.rope_heads:
        head = sizes.find(name)
        if head is not None and head.value not in _ROPE_HEADS:
            allowed = ", ".join(map(str, _ROPE_HEADS))
            yield next(iter(head.keys), name), f"heads of {head.value} elements, {model} rotates heads of {allowed}"
    for one, other in rules.equal:
        first, second = sizes.find(one), sizes.find(other)
        if first is not None and second is not None and first.value != second.value:
            said = ", ".join(f"{key} {value}" for key, value in {**first.keys, **second.keys}.items())
            yield one, f"is {first.value}, {second.value} is needed by {said}"


def _find_values(rules: Rules, sizes: Sizes, model: str) -> Iterator[tuple[str, str]]:
    """Yield other keys, and what is wrong with each."""
    for key, values in rules.one_of:
        value = sizes.read(key)
        if value is not None and value not in values:
            yield key, f"is {short_repr(value)}, {model} takes {' or '.join(map(repr, values))}"
    for key, rope in _iter_ropes(sizes) if rules.ropes else ():
        if rope not in rules.ropes:
            yield key, f"is {short_repr(rope)}, {model} has the types {', '.join(rules.ropes)}"
    experts, chosen = sizes.find("experts"), sizes.read(_CHOSEN_KEY)
    if experts is not None and chosen is not None and not (is_count(chosen) and 0 < chosen <= experts.value):
        yield _CHOSEN_KEY, f"is {short_repr(chosen)}, a number of the {experts.value} experts is needed"
    missing = [key for key in rules.required if sizes.read(key.split(".")[0]) and sizes.read(key) is None]
    for key in (*missing, *filter(sizes.is_null, rules.not_null)):
        yield key, f"is {'null' if sizes.is_null(key) else 'missing'}, {model} needs it"


def _find_layer_types(checkpoint: Checkpoint, rules: Rules, sizes: Sizes, model: str) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the list that says what each layer is."""
    types = sizes.read("layer_types")
    if rules.layer_types is None or not isinstance(types, list):
        return
    count = LayerConfig(checkpoint).number("num_hidden_layers")
    if len(types) != count:
        yield "layer_types", f"has {len(types)} entries, num_hidden_layers is {count}"
    for name in types if rules.layer_types else ():
        if name not in rules.layer_types:
            yield "layer_types", f"has {short_repr(name)}, {model} takes {', '.join(rules.layer_types)}"


def _iter_ropes(sizes: Sizes) -> Iterator[tuple[str, Any]]:
    """Yield the names of rotary embeddings, of all layers or of each kind, and the keys that they stand under."""
    for key in _ROPE_KEYS:
        found = sizes.read(key)
        if found is not None and not isinstance(found, dict):
            yield key, found
        elif found is not None:
            parts = {key: found, **{f"{key}.{name}": part for name, part in found.items() if isinstance(part, dict)}}
            for place, part in parts.items():
                rope = part.get("rope_type", part.get("type"))
                if rope is not None:
                    yield f"{place}.rope_type", rope
