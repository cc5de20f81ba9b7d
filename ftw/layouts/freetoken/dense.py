"""Dense tensors: what is not an expert's is renamed, fused and cast, as a family's row says."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ftw.errors import CheckpointError
from ftw.layouts.freetoken.scaled_modules import PACKED_DTYPES, ScaledTensors, name_as_freetoken
from ftw.layouts.recipes.dense_tensor import FLOATS, cast_to, concatenate, largest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ftw.layouts.families.family import Family, Fuse
    from ftw.layouts.freetoken.declared_schemes import DeclaredSchemes
    from ftw.layouts.recipes.dense_tensor import DenseTensor


def rename(family: Family, name: str) -> str:
    """Return the name that a family's row gives to a tensor of the source."""
    for pattern, new in family.renames:
        found, count = re.subn(pattern, new, name, count=1)
        if count:
            return found
    return name


def arrange_dense(source: str, family: Family, tensors: list[DenseTensor], schemes: DeclaredSchemes) -> ScaledTensors:
    """Return what a family's row makes of tensors that have their new names, in the order of `position`.

    Raises:
        CheckpointError: A part of a fused module is missing, or the parts do not fit, or a module does not hold what
            config.json declares.
    """
    scaled = name_as_freetoken(source, family, tensors, schemes) if family.scaled else ScaledTensors(tensors, [])
    parts = [_cast(family, tensor) for tensor in scaled.tensors]
    made = [_cast(family, tensor) for tensor in _fuse(source, family, parts)]
    return ScaledTensors(sorted(made, key=lambda tensor: tensor.position), scaled.left_out)


def _cast(family: Family, tensor: DenseTensor) -> DenseTensor:
    if tensor.dtype not in FLOATS:
        return tensor
    dtypes = (dtype for pattern, dtype in family.casts if re.search(pattern, tensor.name))
    return cast_to(tensor, next(dtypes, tensor.dtype))


def _takes(fuse: Fuse, above: str, leaf: str, packed: set[str]) -> bool:
    is_meant = not fuse.if_packed or f"{above}.{fuse.if_packed}" in packed
    return leaf in fuse.parts and is_meant and re.match(fuse.where, above) is not None


def _fuse(source: str, family: Family, tensors: Sequence[DenseTensor]) -> Iterator[DenseTensor]:
    groups: dict[tuple[str, Fuse], dict[str, dict[str, DenseTensor]]] = {}
    packed = {tensor.module for tensor in tensors if tensor.role == "weight" and tensor.dtype in PACKED_DTYPES}
    for tensor in tensors:
        above, _, leaf = tensor.module.rpartition(".")
        fuse = next((fuse for fuse in family.fuses if _takes(fuse, above, leaf, packed)), None)
        if fuse is None:
            yield tensor
        else:
            groups.setdefault((above, fuse), {}).setdefault(tensor.role, {})[leaf] = tensor
    for (above, fuse), roles in groups.items():
        for role, found in roles.items():
            missing = [part for part in fuse.parts if part not in found]
            if missing:
                problem = f"is missing, {fuse.into} is made of {', '.join(fuse.parts)}"
                raise CheckpointError(source, f"{above}.{missing[0]}.{role}", problem)
            parts = [found[part] for part in fuse.parts]
            if fuse.rows_multiple > 1 and parts[0].dtype in PACKED_DTYPES:
                problem = f"is {parts[0].dtype}, FreeToken takes a {fuse.into} that is not quantised"
                raise CheckpointError(source, parts[0].origin, problem)
            name = f"{above}.{fuse.into}.{role}"
            is_number = role == "input_scale" and not parts[0].shape
            yield largest(name, parts) if is_number else concatenate(source, name, parts, fuse.rows_multiple)
