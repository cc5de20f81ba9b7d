"""Checks that a result holds what FreeToken's model loads: every name, and no others.

FreeToken's server finds out after it has read gigabytes, or serves zeros where an expert is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftw.checkpoint import TIE_KEY, config_parts
from ftw.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ftw.checkpoint import Checkpoint
    from ftw.conversion.families.family import Family
    from ftw.conversion.recipes.dense_tensor import DenseTensor

_HEAD = "lm_head."
_DF11_ROLES = ("low8", "bitstream", "chunk_start", "lut")
# What a module may hold beside its weight, and what a weight of a type needs: one of each.
_ROLES = frozenset({"weight", "bias", "weight_scale", "weight_scale_inv", "weight_global", "input_scale", *_DF11_ROLES})
_SCALES = {"F8_E4M3": (("weight_scale", "weight_scale_inv"),), "U8": (("weight_scale",), ("weight_global",))}


def check_needs(checkpoint: Checkpoint, family: Family, tensors: list[DenseTensor]) -> list[DenseTensor]:
    """Return the tensors that a family's model loads, if they are all there.

    Raises:
        CheckpointError: One is missing, or there is one that the model has no place for and the family refuses.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    check = _Check(checkpoint, by_name)
    check.run(family)
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

    def run(self, family: Family) -> None:
        """Check all.

        Raises:
            CheckpointError: A tensor is missing.
        """
        config, needs = self._checkpoint.config, family.needs
        is_tied = any(part.get(TIE_KEY) for part in config_parts(config.raw))
        self._need("", needs.model if is_tied else needs.model.replace(f"{_HEAD}?", _HEAD))
        for layer in range(config.num_layers or 0):
            for group in needs.layers:
                self._need_one(f"model.layers.{layer}.", group)
        vision = config.raw.get("vision_config")
        if needs.vision and isinstance(vision, dict):
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
                self.allowed.update(f"{name}{role}" for role in _ROLES)
            else:
                self.allowed.add(name)

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
