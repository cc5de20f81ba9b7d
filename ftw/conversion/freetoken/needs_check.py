"""Checks that a result holds what FreeToken's model loads: every name, and no others.

FreeToken's server finds out after it has read gigabytes, or serves zeros where an expert is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftw.checkpoint import TIE_KEY, config_parts
from ftw.conversion.families.family import MOE
from ftw.conversion.recipes.dense_tensor import FLOATS
from ftw.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from ftw.checkpoint import Checkpoint
    from ftw.conversion.families.family import Family, Needs
    from ftw.conversion.recipes.dense_tensor import DenseTensor
    from ftw.tensors import TensorInfo

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
    return [frozenset()] * (checkpoint.config.num_layers or 0)


def check_experts(checkpoint: Checkpoint, family: Family, found: Mapping[int, TensorInfo], layers: Layers) -> None:
    """Check that the layers with experts, of each of which a tensor is given, are those that should have them.

    Raises:
        CheckpointError: A layer has none and should, or the other way round.
    """
    if family.needs.kinds is None:
        return
    wanted = {number for number, kinds in enumerate(layers) if MOE in kinds}
    for number in sorted(wanted - found.keys()):
        problem = f"has no routed experts, config.json says that {len(wanted)} layers have them"
        raise CheckpointError(checkpoint.source, f"layer {number}", problem)
    for number in sorted(found.keys() - wanted):
        problem = f"is an expert's of layer {number}, config.json says that it has none"
        raise CheckpointError(checkpoint.source, found[number].name, problem)


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
    check.run(family.needs, layers)
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

    def run(self, needs: Needs, layers: Layers) -> None:
        """Check all.

        Raises:
            CheckpointError: A tensor is missing, or has a type that the model does not load.
        """
        config = self._checkpoint.config
        is_tied = any(part.get(TIE_KEY) for part in config_parts(config.raw))
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
            for block in range(int(vision.get(needs.block_count) or 0)):
                for group in needs.blocks:
                    self._need_one(f"{needs.block_prefix}{block}.", group)

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
            if name.endswith("."):
                self.allowed.update(name + role for role in self._roles(name[:-1]))
            else:
                self._check_plain(name)
                self.allowed.add(name)

    def _roles(self, module: str) -> tuple[str, ...]:
        """Return what a module may hold."""
        if "low8" in self._modules.get(module, []):
            return (*_DF11_ROLES, "bias")
        weight = self._tensors.get(f"{module}.weight")
        return (*_PLAIN_ROLES, *(_SCALE_ROLES.get(weight.dtype, ()) if weight else ()))

    def _check_plain(self, name: str) -> None:
        """Check that a weight which is asked for by itself has no scales, which would get lost."""
        tensor = self._tensors.get(name)
        if tensor is not None and tensor.role in _PLAIN_ROLES and tensor.dtype not in FLOATS:
            problem = f"is {tensor.dtype}, FreeToken's {self._checkpoint.config.architecture} takes BF16, F16 or F32"
            raise CheckpointError(self._checkpoint.source, tensor.origin, problem)

    def _missing(self, prefix: str, text: str) -> Iterator[str]:
        """Yield the names of a text that are needed and not there."""
        for name, is_needed in _iter_names(prefix, text):
            if not name.endswith("."):
                if is_needed and name not in self._tensors:
                    yield name
            elif is_needed or name[:-1] in self._modules:
                yield from self._missing_of_module(name[:-1])

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
