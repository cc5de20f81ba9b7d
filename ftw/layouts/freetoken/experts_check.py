"""Checks of routed experts: they are in the layers that config.json says, in the format that it declares."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftw.errors import CheckpointError
from ftw.layouts.families.family import MOE
from ftw.layouts.freetoken.bank_formats import FORMATS, bank_name, most_common
from ftw.layouts.freetoken.banks import PARTS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ftw.checkpoint import Checkpoint
    from ftw.layouts.expected.needs_check import Layers
    from ftw.layouts.expected.sizes import Sizes
    from ftw.layouts.families.family import Family
    from ftw.layouts.freetoken.bank_formats import BankSpec
    from ftw.layouts.freetoken.banks import Banks
    from ftw.layouts.freetoken.declared_schemes import DeclaredSchemes
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


def find_bank_problem(
    tags: Sequence[str], banks: Mapping[str, tuple[str, tuple[int, ...]]], sizes: Sizes
) -> tuple[str, str] | None:
    """Return the first bank that is not as FreeToken's model takes it, and what is wrong; None if all are.

    Args:
        tags: The tag of the format of each layer with experts.
        banks: The type and the shape of each bank, by name.
        sizes: Those of the model.
    """
    formats = {found.tag: found for found in FORMATS}
    names = formats[most_common(tags)].banks if tags else ()
    for layer, tag in enumerate(tags):
        for part in PARTS:
            for spec, named in zip(formats[tag].banks, names, strict=False):
                own, shared = bank_name(part, named, layer), f"{part}{named.suffix}"
                name = shared if own not in banks and shared in banks else own  # 0.1.2 has one for all layers
                if name not in banks:
                    return name, f"is missing, {tag} experts need it"
                problem = _hold_against(banks[name], part, spec, len(tags) if name == shared else 1, sizes)
                if problem is not None:
                    return name, problem
    return None


def _hold_against(
    found: tuple[str, tuple[int, ...]], part: str, spec: BankSpec, num_layers: int, sizes: Sizes
) -> str | None:
    """Return what is wrong with the type and the shape of a bank, None if nothing is or the sizes are not known."""
    experts, hidden, inner = (sizes.find(name) for name in ("experts", "hidden", "expert_inner"))
    if experts is None or hidden is None or inner is None:
        return None
    keys = {key: value for size in (experts, hidden, inner) for key, value in size.keys.items()}
    said = f"{', '.join(f'{key} {value}' for key, value in keys.items())} of {sizes.file}"
    rows, columns = (inner.value, hidden.value) if part == "gate_up" else (hidden.value, inner.value)
    shape = (num_layers * experts.value, *spec.shape(rows * (2 if part == "gate_up" else 1), columns))
    if found == (spec.made, shape):
        return None
    return f"is {found[0]} {list(found[1])}, {spec.made} {list(shape)} is needed by {said}"


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
