"""Checks that a result holds what FreeToken's model loads: every name in its shape, and no others.

FreeToken's server finds out after it has read gigabytes, or serves zeros where an expert is missing.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ftw.checkpoint import TIE_KEY, config_parts
from ftw.errors import CheckpointError
from ftw.files import short_repr
from ftw.layouts.expected.shapes import FLOATS, INTEGERS, Module, Shape, iter_words
from ftw.layouts.families.layer_kinds import MAX_LAYERS, LayerConfig

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from ftw.checkpoint import Checkpoint
    from ftw.layouts.expected.shapes import Word
    from ftw.layouts.expected.sizes import Sizes
    from ftw.layouts.families.family import Family
    from ftw.layouts.recipes.dense_tensor import DenseTensor

    Layers = Sequence[AbstractSet[str]]

_OPTIONAL_HEAD = re.compile(r"\blm_head\.\?(=\S+)?")
_DF11_ROLES = ("low8", "bitstream", "chunk_start", "lut")
# What a weight of a type needs beside it, one of each, and what a module may hold beside its weight and bias.
_SCALES = {"F8_E4M3": (("weight_scale", "weight_scale_inv"),), "U8": (("weight_scale",), ("weight_global",))}
_PACKED = {
    "weight": frozenset(_SCALES),
    "weight_scale": frozenset({"F8_E4M3"}),
    "weight_scale_inv": frozenset({"U8", "F8_E8M0"}),
    **dict.fromkeys(_DF11_ROLES, INTEGERS),
}
_SCALE_ROLES = {
    "F8_E4M3": ("weight_scale", "weight_scale_inv", "input_scale"),
    "U8": ("weight_scale", "weight_global", "input_scale"),
}


def find_layers(checkpoint: Checkpoint, family: Family) -> Layers:
    """Return what each layer of a checkpoint's model is, from the first one on.

    Raises:
        CheckpointError: Its configuration does not tell.
    """
    if family.needs.kinds is not None:
        return family.needs.kinds(checkpoint)
    return [frozenset()] * LayerConfig(checkpoint).number("num_hidden_layers")


def has_tied_head(checkpoint: Checkpoint, family: Family) -> bool:
    """Tell whether FreeToken's model takes its embedding as LM head: by the flag of the part that it asks."""
    _, flag = find_tie_flag(checkpoint, family)
    return family.is_tied_by_default if flag is None else bool(flag)


def find_tie_flag(checkpoint: Checkpoint, family: Family) -> tuple[str, object]:
    """Return the key of the flag that FreeToken's model asks for a tied head, and what stands there."""
    parts = config_parts(checkpoint.config.raw)
    if family.asks_top_for_tie or len(parts) == 1:
        return TIE_KEY, parts[-1].get(TIE_KEY)
    return f"text_config.{TIE_KEY}", parts[0].get(TIE_KEY)


def check_needs(
    checkpoint: Checkpoint, family: Family, tensors: list[DenseTensor], layers: Layers, sizes: Sizes
) -> list[DenseTensor]:
    """Return the tensors that a family's model loads, if they are all there.

    Raises:
        CheckpointError: One is missing or has a type or a shape that the model does not load, or there is one that the
            model has no place for and the family refuses.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    check = _Check(checkpoint, family, by_name, sizes)
    check.run(layers)
    others = [tensor for tensor in tensors if tensor.name not in check.allowed]
    if others and family.refuses_others:
        raise CheckpointError(checkpoint.source, others[0].origin, check.describe_other(others[0]))
    return [tensor for tensor in tensors if tensor.name in check.allowed]


class _Check:
    """Goes through what a family needs, and collects the names that are allowed."""

    def __init__(
        self, checkpoint: Checkpoint, family: Family, tensors: Mapping[str, DenseTensor], sizes: Sizes
    ) -> None:
        self._checkpoint = checkpoint
        self._family = family
        self._model = f"FreeToken's {checkpoint.config.architecture}"
        self._tensors = tensors
        self._sizes = sizes
        self._modules: dict[str, list[str]] = {}
        for tensor in tensors.values():
            self._modules.setdefault(tensor.module, []).append(tensor.role)
        self.allowed: set[str] = set()

    def run(self, layers: Layers) -> None:
        """Check all.

        Raises:
            CheckpointError: A tensor is missing, or has a type or a shape that the model does not load.
        """
        config, needs = self._checkpoint.config, self._family.needs
        is_tied = has_tied_head(self._checkpoint, self._family)
        head = "lm_head.?" if is_tied else r"lm_head.\1"  # FreeToken does not look at the head of a tied model
        self._need("", _OPTIONAL_HEAD.sub(head, needs.model))
        for number, kinds in enumerate(layers):
            prefix = f"model.layers.{number}."
            for text in (needs.layers, *(text for kind, text in needs.of_kind if kind in kinds)):
                self._need(prefix, text)
        vision = config.raw.get(needs.vision_part) if needs.vision_part else config.raw
        if needs.vision and isinstance(vision, dict) and (needs.vision_part or vision.get(needs.block_count)):
            self._need("", needs.vision)
            for block in range(self._count(vision, needs.block_count) if needs.blocks else 0):
                self._need(f"{needs.block_prefix}{block}.", needs.blocks)
        for text in needs.by_config(self._checkpoint) if needs.by_config else ():
            self._need("", text)

    def describe_other(self, tensor: DenseTensor) -> str:
        """Return what to say of a tensor that is not needed."""
        place = "" if tensor.name == tensor.origin else f", as {tensor.name}"
        return f"{self._model} has no place for it{place}{self._hint(tensor.name)}"

    def _hint(self, name: str) -> str:
        """Return what config.json says of whether a name is needed, for a message."""
        if name.startswith("lm_head.") and _OPTIONAL_HEAD.search(self._family.needs.model):
            key, found = find_tie_flag(self._checkpoint, self._family)
        else:
            hints = (key for pattern, key in self._family.needs.hints if re.search(pattern, name))
            key = next(hints, "")
            found = self._sizes.read(key) if key else None
        stands = "is missing" if found is None else f"is {short_repr(found)}"
        return f": {key} {stands} in {self._sizes.file}" if key else ""

    def _count(self, part: Mapping[str, Any], key: str) -> int:
        found = part.get(key) or 0
        if not isinstance(found, int) or not 0 <= found <= MAX_LAYERS:
            problem = f"is {short_repr(found)}, a count of at most {MAX_LAYERS} is needed"
            raise CheckpointError(self._checkpoint.source, f"config.json: {key}", problem)
        return found

    def _need(self, prefix: str, text: str) -> None:
        """Check that one of a text's choices is there, all of it."""
        missing = {choice: list(self._missing(prefix, choice)) for choice in text.split("|")}
        # if none is, the one of which the least is missing is the one that was meant
        chosen = min(missing, key=lambda choice: len(missing[choice]) / max(len(choice.split()), 1))
        for name in missing[chosen]:
            raise CheckpointError(
                self._checkpoint.source, name, f"is missing, {self._model} needs it{self._hint(name)}"
            )
        for word in iter_words(chosen):
            name = prefix + word.name
            if word.is_module:
                roles = (*self._roles(name), *(("bias",) if word.has_bias else ()))
                self.allowed.update(f"{name}.{role}" for role in roles)
                self._check_module(name, word, [role for role in roles if f"{name}.{role}" in self._tensors])
            else:
                self.allowed.add(name)
                self._check_tensor(name, word)

    def _roles(self, module: str) -> tuple[str, ...]:
        """Return what a module may hold beside its bias."""
        if "low8" in self._modules.get(module, []):
            return _DF11_ROLES
        weight = self._tensors.get(f"{module}.weight")
        return ("weight", *(_SCALE_ROLES.get(weight.dtype, ()) if weight else ()))

    def _check_module(self, module: str, word: Word, roles: Sequence[str]) -> None:
        for role in roles:
            tensor = self._tensors[f"{module}.{role}"]
            if tensor.dtype not in FLOATS | _PACKED.get(role, frozenset()):
                raise self._refuse(tensor, tensor.dtype, "BF16, F16 or F32")
        weight = self._tensors.get(f"{module}.weight")
        if weight is None or not word.axes:
            return
        scale = next((self._tensors[f"{module}.{role}"] for role in roles if role.startswith("weight_scale")), None)
        stored = (scale.role, scale.dtype) if scale is not None else ("", "")
        expected = Module(Shape(word.axes, self._sizes), weight.dtype, *stored, self._sizes.block)
        unfit = expected.find_unfit()
        if unfit is not None:
            raise CheckpointError(self._checkpoint.source, weight.origin, unfit)
        for role in roles:
            self._check_shape(self._tensors[f"{module}.{role}"], expected, role)

    def _check_tensor(self, name: str, word: Word) -> None:
        """Check a tensor that is asked for by itself: if it had scales, these would get lost."""
        tensor = self._tensors.get(name)
        if tensor is None:
            return
        if tensor.dtype not in word.dtypes:
            raise self._refuse(tensor, tensor.dtype, "integers" if word.dtypes == INTEGERS else "BF16, F16 or F32")
        if word.axes:
            self._check_shape(tensor, Module(Shape(word.axes, self._sizes)), tensor.role)

    def _check_shape(self, tensor: DenseTensor, expected: Module, role: str) -> None:
        """Check a tensor, and those that it is made of if they are the parts that a sum names."""
        sources = list(tensor.recipe.iter_sources())
        parts = expected.shape.parts() if role in ("weight", "bias") else []
        if 1 < len(parts) == len(sources):
            for part, source in zip(parts, sources, strict=True):
                self._compare(source, self._checkpoint.tensors[source].shape, expected._replace(shape=part), role)
        self._compare(tensor.origin, tensor.shape, expected, role)

    def _compare(self, name: str, found: tuple[int, ...], expected: Module, role: str) -> None:
        wanted = expected.expect(role)
        if len(found) != len(wanted) or any(size not in (None, axis) for axis, size in zip(found, wanted, strict=True)):
            needed = ", ".join("*" if size is None else str(size) for size in wanted)
            problem = f"is {list(found)}, [{needed}] is needed{expected.shape.describe()}"
            raise CheckpointError(self._checkpoint.source, name, problem)

    def _refuse(self, tensor: DenseTensor, dtype: str, allowed: str) -> CheckpointError:
        return CheckpointError(self._checkpoint.source, tensor.origin, f"is {dtype}, {self._model} takes {allowed}")

    def _missing(self, prefix: str, text: str) -> Iterator[str]:
        """Yield the names of a text that are needed and not there."""
        for word in iter_words(text):
            name = prefix + word.name
            if not word.is_module:
                if word.is_needed and name not in self._tensors:
                    yield name
            elif word.is_needed or name in self._modules:
                yield from self._missing_of_module(name)
                if word.has_bias and "bias" not in self._modules.get(name, ()):
                    yield f"{name}.bias"

    def _missing_of_module(self, module: str) -> Iterator[str]:
        roles = self._modules.get(module, [])
        if "low8" in roles:
            yield from (f"{module}.{role}" for role in _DF11_ROLES if role not in roles)
            return
        weight = self._tensors.get(f"{module}.weight")
        if weight is None:
            yield f"{module}.weight"
            return
        for choice in _SCALES.get(weight.dtype, ()):
            if not any(role in roles for role in choice):
                yield f"{module}.{choice[0]}"
