"""Served: would FreeToken's server load an FTW? It finds out itself only after it has read gigabytes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ftw.errors import CheckpointError, printable
from ftw.layouts.expected.config_check import check_config
from ftw.layouts.expected.needs_check import check_needs, find_layers
from ftw.layouts.expected.sizes import Sizes
from ftw.layouts.families.family import MOE
from ftw.layouts.families.table import NOT_SERVED, find_family
from ftw.layouts.freetoken.bank_formats import FORMATS
from ftw.layouts.freetoken.experts_check import find_bank_problem
from ftw.layouts.recipes.dense_tensor import as_stored
from ftw.tensors import EXPERTS_BANK

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftw.checkpoint import Checkpoint
    from ftw.tensors import TensorInfo

_GGUF = "was made from a GGUF, in whose metadata its server looks for the types of tensors; it reads the GGUF itself"


def find_obstacle(checkpoint: Checkpoint) -> str | None:
    """Return what stands against FreeToken 0.2.1 serving an FTW; None if nothing that can be seen without reading it.

    Names, and types and counts as far as they tell; the bytes are what `ftw verify` is for.
    """
    config = checkpoint.config
    if config.is_gguf:
        return _GGUF
    if config.architecture in NOT_SERVED:
        return f"{config.architecture}: {NOT_SERVED[config.architecture]}"
    family = find_family(checkpoint)
    if family is None:
        return f"architecture is {printable(str(config.architecture))}, of which ftw does not know what FreeToken loads"
    dense = [as_stored(tensor, name, 0) for name, tensor in checkpoint.tensors.items() if _is_dense(tensor)]
    try:
        layers, sizes = find_layers(checkpoint, family), Sizes(checkpoint, family.needs)
        check_config(checkpoint, family.needs.rules, sizes)
        check_needs(checkpoint, replace(family, refuses_others=True), dense, layers, sizes)
        return _find_bank_obstacle(checkpoint, sum(MOE in kinds for kinds in layers), sizes)
    except CheckpointError as error:
        return printable(str(error.with_traceback(None)).removeprefix(f"{printable(error.path)}: "))


def _is_dense(tensor: TensorInfo) -> bool:
    return tensor.kind != EXPERTS_BANK and not tensor.shard  # what has a shard lies in a side file


def _find_bank_obstacle(checkpoint: Checkpoint, num_layers: int, sizes: Sizes) -> str | None:
    """Return what is wrong with the banks of `num_layers` layers with experts."""
    banks = {name: tensor for name, tensor in checkpoint.tensors.items() if tensor.kind == EXPERTS_BANK}
    tags = _find_tags(checkpoint.metadata, num_layers)
    if not num_layers:
        return f"{printable(next(iter(banks)))}: is a bank of experts, config.json tells of none" if banks else None
    if len(tags) != num_layers:
        return f"quant_format: tells of {len(tags)} layers with experts, config.json of {num_layers}"
    known = {found.tag for found in FORMATS}
    if any(tag not in known for tag in tags):  # of a kernel of others, for which FreeToken packs them on a GPU
        return None if banks else "no tensor is a bank of experts"
    found = find_bank_problem(tags, {name: (tensor.dtype, tensor.shape) for name, tensor in banks.items()}, sizes)
    return None if found is None else ": ".join(found)


def _find_tags(metadata: Mapping[str, object], num_layers: int) -> list[str]:
    """Return the format of each layer's experts, as an index tells it."""
    tags = metadata.get("layer_quant_formats") or [metadata.get("quant_format")] * num_layers
    return [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []
