"""Checks that a result holds what FreeToken's model loads: every name, and no others.

FreeToken's server finds out after it has read gigabytes, or serves zeros where an expert is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftw.checkpoint import TIE_KEY, config_parts
from ftw.errors import CheckpointError
from ftw.files import short_repr
from ftw.layouts.families.layer_kinds import MAX_LAYERS
from ftw.layouts.recipes.dense_tensor import FLOATS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from ftw.checkpoint import Checkpoint
    from ftw.layouts.families.family import Family
    from ftw.layouts.recipes.dense_tensor import DenseTensor

    Layers = Sequence[AbstractSet[str]]

_HEAD = "lm_head."
_PLAIN_ROLES = ("weight", "bias")
_DF11_ROLES = ("low8", "bitstream", "chunk_start", "lut")
# What a weight of a type needs beside it, one of each, and what a module may hold beside its weight and bias.
_SCALES = {"F8_E4M3": (("weight_scale", "weight_scale_inv"),), "U8": (("weight_scale",), ("weight_global",))}
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
    num_layers = checkpoint.config.num_layers
    if num_layers is None:
        raise CheckpointError(checkpoint.source, "config.json", "num_hidden_layers is missing")
    if num_layers > MAX_LAYERS:
        problem = f"is {num_layers}, at most {MAX_LAYERS} are allowed"
        raise CheckpointError(checkpoint.source, "config.json: num_hidden_layers", problem)
    return [frozenset()] * num_layers


def has_tied_head(checkpoint: Checkpoint, family: Family) -> bool:
    """Tell whether FreeToken's model takes its embedding as LM head: by the flag of the part that it asks."""
    parts = config_parts(checkpoint.config.raw)
    flag = parts[-1 if family.asks_top_for_tie else 0].get(TIE_KEY)
    return family.is_tied_by_default if flag is None else bool(flag)


def check_needs(
    checkpoint: Checkpoint, family: Family, tensors: list[DenseTensor], layers: Layers
) -> list[DenseTensor]:
    """Return the tensors that a family's model loads, if they are all there.

    Raises:
        CheckpointError: One is missing or has a type that the model does not load, or there is one that the model has
            no place for and the family refuses.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    check = _Check(checkpoint, by_name)
    check.run(family, layers)
    others = [name for name in by_name if name not in check.allowed]
    if others and family.refuses_others:
        problem = f"FreeToken's {checkpoint.config.architecture} has no place for it, as {others[0]}"
        raise CheckpointError(checkpoint.source, by_name[others[0]].origin, problem)
    return [tensor for tensor in tensors if tensor.name in check.allowed]


class _Check:
    """Goes through what a family needs, and collects the names that are allowed."""

    def __init__(self, checkpoint: Checkpoint, tensors: Mapping[str, DenseTensor]) -> None:
        self._checkpoint = checkpoint
        self._tensors = tensors
        self._modules: dict[str, list[str]] = {}
        for tensor in tensors.values():
            self._modules.setdefault(tensor.module, []).append(tensor.role)
        self.allowed: set[str] = set()

    def run(self, family: Family, layers: Layers) -> None:
        """Check all.

        Raises:
            CheckpointError: A tensor is missing, or has a type that the model does not load.
        """
        config, needs = self._checkpoint.config, family.needs
        is_tied = has_tied_head(self._checkpoint, family)
        self._need("", needs.model if is_tied else needs.model.replace(f"{_HEAD}?", _HEAD))
        for number, kinds in enumerate(layers):
            prefix = f"model.layers.{number}."
            for group in needs.layers:
                self._need_one(prefix, group)
            for kind, text in needs.of_kind:
                if kind in kinds:
                    self._need(prefix, text)
        vision = config.raw.get(needs.vision_part) if needs.vision_part else config.raw
        if needs.vision and isinstance(vision, dict) and (needs.vision_part or vision.get(needs.block_count)):
            self._need("", needs.vision)
            for block in range(self._count(vision, needs.block_count) if needs.blocks else 0):
                for group in needs.blocks:
                    self._need_one(f"{needs.block_prefix}{block}.", group)
        for text in needs.by_config(self._checkpoint) if needs.by_config else ():
            self._need("", text)

    def _count(self, part: Mapping[str, Any], key: str) -> int:
        found = part.get(key) or 0
        if not isinstance(found, int) or not 0 <= found <= MAX_LAYERS:
            problem = f"is {short_repr(found)}, a count of at most {MAX_LAYERS} is needed"
            raise CheckpointError(self._checkpoint.source, f"config.json: {key}", problem)
        return found

    def _need_one(self, prefix: str, group: Iterable[str]) -> None:
        """Check that one of a group's texts is there, all of it."""
        missing = {text: list(self._missing(prefix, text)) for text in group}
        fitting = [text for text, names in missing.items() if not names]
        if not fitting:  # the text of which the least is missing is the one that was meant
            fitting = [min(missing, key=lambda text: len(missing[text]) / len(text.split()))]
        self._need(prefix, fitting[0])

    def _need(self, prefix: str, text: str) -> None:
        for name in self._missing(prefix, text):
            problem = f"is missing, FreeToken's {self._checkpoint.config.architecture} needs it"
            raise CheckpointError(self._checkpoint.source, name, problem)
        for name, _ in _iter_names(prefix, text):
            if name.endswith((".", ".+")):
                module = name.removesuffix("+").removesuffix(".")
                more = ("bias",) if name.endswith("+") else ()
                self.allowed.update(f"{module}.{role}" for role in (*self._roles(module), *more))
            else:
                self._check_plain(name)
                self.allowed.add(name)

    def _roles(self, module: str) -> tuple[str, ...]:
        """Return what a module may hold beside its bias."""
        if "low8" in self._modules.get(module, []):
            return _DF11_ROLES
        weight = self._tensors.get(f"{module}.weight")
        return ("weight", *(_SCALE_ROLES.get(weight.dtype, ()) if weight else ()))

    def _check_plain(self, name: str) -> None:
        """Check that a weight which is asked for by itself has no scales, which would get lost."""
        tensor = self._tensors.get(name)
        if tensor is not None and tensor.role in _PLAIN_ROLES and tensor.dtype not in FLOATS:
            problem = f"is {tensor.dtype}, FreeToken's {self._checkpoint.config.architecture} takes BF16, F16 or F32"
            raise CheckpointError(self._checkpoint.source, tensor.origin, problem)

    def _missing(self, prefix: str, text: str) -> Iterator[str]:
        """Yield the names of a text that are needed and not there."""
        for name, is_needed in _iter_names(prefix, text):
            module = name.removesuffix("+").removesuffix(".")
            if not name.endswith((".", ".+")):
                if is_needed and name not in self._tensors:
                    yield name
            elif is_needed or module in self._modules:
                yield from self._missing_of_module(module)
                if name.endswith("+") and "bias" not in self._modules.get(module, ()):
                    yield f"{module}.bias"

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


def _iter_names(prefix: str, text: str) -> Iterator[tuple[str, bool]]:
    """Yield each name of a text, and whether it is needed."""
    for word in text.split():
        yield prefix + word.removesuffix("?"), not word.endswith("?")
