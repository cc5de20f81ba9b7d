"""Checks that a result holds what FreeToken's model loads: every name, and no others.

FreeToken's server finds out after it has read gigabytes, or serves zeros where an expert is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftw.checkpoint import TIE_KEY, config_parts
from ftw.errors import CheckpointError
from ftw.files import short_repr

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from ftw.checkpoint import Checkpoint
    from ftw.conversion.families.family import Family
    from ftw.conversion.freetoken.banks import Banks
    from ftw.conversion.freetoken.declared_schemes import DeclaredSchemes
    from ftw.conversion.recipes.dense_tensor import DenseTensor

_HEAD = "lm_head."
_EXPERTS = "@experts"
_BELOW = ".experts."
# What config.json declares of experts in each format.
_KINDS = {
    "bf16": {"unquantised"},
    "fp8_block": {"fp8_block"},
    "nvfp4": {"nvfp4"},
    "ds_fp4": {"mxfp4"},
    "mxfp4_triton": {"mxfp4"},
}
_DF11_ROLES = ("low8", "bitstream", "chunk_start", "lut")
# What a module may hold beside its weight, and what a weight of a type needs: one of each.
_ROLES = frozenset({"weight", "weight_scale", "weight_scale_inv", "weight_global", "input_scale", *_DF11_ROLES})
_SCALES = {"F8_E4M3": (("weight_scale", "weight_scale_inv"),), "U8": (("weight_scale",), ("weight_global",))}


def check_needs(
    checkpoint: Checkpoint,
    family: Family,
    tensors: list[DenseTensor],
    bank_layers: Collection[int] = (),
    side_names: Collection[str] = (),
) -> list[DenseTensor]:
    """Return the tensors that a family's model loads, if they are all there.

    Args:
        checkpoint: The checkpoint.
        family: Its row.
        tensors: The dense ones.
        bank_layers: Layers whose experts are in banks.
        side_names: Tensors in side files.

    Raises:
        CheckpointError: One is missing, or there is one that the model has no place for and the family refuses.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    check = _Check(checkpoint, by_name, bank_layers, side_names)
    check.run(family)
    others = [name for name in by_name if name not in check.allowed]
    if others and family.refuses_others:
        problem = f"FreeToken's {checkpoint.config.architecture} has no place for it, as {others[0]}"
        raise CheckpointError(checkpoint.source, by_name[others[0]].origin, problem)
    return [tensor for tensor in tensors if tensor.name in check.allowed]


def has_tied_head(checkpoint: Checkpoint, family: Family) -> bool:
    """Tell whether FreeToken's model takes its embedding as LM head: by the flag of the part that it asks."""
    parts = config_parts(checkpoint.config.raw)
    flag = parts[-1 if family.asks_top_for_tie else 0].get(TIE_KEY)
    return family.is_tied_by_default if flag is None else bool(flag)


def check_banks(source: str, schemes: DeclaredSchemes, banks: Banks) -> None:
    """Check that the experts of each layer are what config.json declares, by which FreeToken's server picks a kernel.

    Raises:
        CheckpointError: They are not.
    """
    for tag, name in zip(banks.tags, banks.experts, strict=True):
        above = name[: name.rindex(_BELOW) + len(_BELOW) - 1]
        module = name if name.endswith("_proj") else name.rpartition(".")[0]
        asked = (f"{above}.0.gate_proj", above, module)
        kinds = {"unquantised" if scheme is None else scheme.kind for scheme in map(schemes.of, asked)}
        if not kinds & _KINDS[tag]:
            problem = f"experts are {tag}, config.json declares them as {' or '.join(sorted(kinds))}"
            raise CheckpointError(source, name, problem)


class _Check:
    """Goes through what a family needs, and collects the names that are allowed."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        tensors: Mapping[str, DenseTensor],
        bank_layers: Collection[int],
        side_names: Collection[str],
    ) -> None:
        self._checkpoint = checkpoint
        self._tensors = tensors
        self._bank_layers = bank_layers
        self._side_names = side_names
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
        if config.num_layers is None:
            raise CheckpointError(self._checkpoint.source, "config.json", "num_hidden_layers is missing")
        is_tied = has_tied_head(self._checkpoint, family)
        self._need("", needs.model if is_tied else needs.model.replace(f"{_HEAD}?", _HEAD))
        for layer in range(config.num_layers):
            for group in needs.layers:
                self._need_one(f"model.layers.{layer}.", group)
        vision = config.raw.get("vision_config")
        if needs.vision and isinstance(vision, dict):
            self._need("", needs.vision)
            num_blocks = vision.get(needs.block_count) or 0
            if needs.blocks and not isinstance(num_blocks, int):
                problem = f"is {short_repr(num_blocks)}, a count is needed"
                raise CheckpointError(self._checkpoint.source, f"config.json: {needs.block_count}", problem)
            for block in range(num_blocks if needs.blocks else 0):
                for group in needs.blocks:
                    self._need_one(f"{needs.block_prefix}{block}.", group)
        for text in needs.by_config(self._checkpoint) if needs.by_config else ():
            self._need("", text)
        self._check_banks(config.num_layers)

    def _check_banks(self, num_layers: int) -> None:
        """Check that each layer with experts is one of the model's."""
        for layer in sorted(self._bank_layers):
            if layer >= num_layers:
                problem = f"has experts, config.json says that there are {num_layers} layers"
                raise CheckpointError(self._checkpoint.source, f"model.layers.{layer}", problem)

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
                self.allowed.update(f"{name.removesuffix('+')}{role}" for role in _ROLES)
            if name.endswith(".+"):
                self.allowed.add(f"{name.removesuffix('+')}bias")
            self.allowed.add(name)

    def _missing(self, prefix: str, text: str) -> Iterator[str]:
        """Yield the names of a text that are needed and not there."""
        for name, is_needed in _iter_names(prefix, text):
            module = name.removesuffix("+").removesuffix(".")
            if name.endswith(_EXPERTS):
                if int(name.split(".")[2]) not in self._bank_layers:
                    yield name.replace(_EXPERTS, "experts")
            elif not name.endswith((".", ".+")):
                if is_needed and name not in self._tensors and name not in self._side_names:
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
