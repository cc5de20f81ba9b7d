"""Checks of routed experts: they are in the layers that config.json says, in the format that it declares."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftw.errors import CheckpointError
from ftw.layouts.families.family import MOE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftw.checkpoint import Checkpoint
    from ftw.layouts.families.family import Family
    from ftw.layouts.freetoken.banks import Banks
    from ftw.layouts.freetoken.declared_schemes import DeclaredSchemes
    from ftw.layouts.freetoken.needs_check import Layers
    from ftw.tensors import TensorInfo

_BELOW = ".experts."
# What config.json declares of experts in each format.
_KINDS = {
    "bf16": {"unquantised"},
    "fp8_block": {"fp8_block"},
    "nvfp4": {"nvfp4"},
    "ds_fp4": {"mxfp4", "unquantised"},  # FreeToken's DeepSeek-V4.1 does not ask
    "mxfp4_triton": {"mxfp4"},
}


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
