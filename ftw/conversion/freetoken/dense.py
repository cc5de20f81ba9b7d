"""Dense tensors: what is not an expert's is renamed, fused and cast, as a family's row says."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ftw.conversion.freetoken.scaled_modules import name_as_freetoken
from ftw.conversion.recipes.dense_tensor import FLOATS, cast_to, concatenate, largest
from ftw.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ftw.conversion.families.family import Family, Fuse
    from ftw.conversion.recipes.dense_tensor import DenseTensor


def rename(family: Family, name: str) -> str:
    """Return the name that a family's row gives to a tensor of the source."""
    for pattern, new in family.renames:
        found, count = re.subn(pattern, new, name, count=1)
        if count:
            return found
    return name


def arrange_dense(source: str, family: Family, tensors: Sequence[DenseTensor]) -> list[DenseTensor]:
    """Return what a family's row makes of tensors that have their new names, in the order of `position`.

    Raises:
        CheckpointError: A part of a fused module is missing, or the parts do not fit.
    """
    scaled = name_as_freetoken(source, family, tensors) if family.scaled else tensors
    parts = [_cast(family, tensor) for tensor in scaled]
    made = [_cast(family, tensor) for tensor in _fuse(source, family, parts)]
    return sorted(made, key=lambda tensor: tensor.position)


def _cast(family: Family, tensor: DenseTensor) -> DenseTensor:
    if tensor.dtype not in FLOATS:
        return tensor
    dtypes = (dtype for pattern, dtype in family.casts if re.search(pattern, tensor.name))
    return cast_to(tensor, next(dtypes, tensor.dtype))


def _fuse(source: str, family: Family, tensors: Iterable[DenseTensor]) -> Iterator[DenseTensor]:
    groups: dict[tuple[str, Fuse], dict[str, dict[str, DenseTensor]]] = {}
    for tensor in tensors:
        above, _, leaf = tensor.module.rpartition(".")
        fuse = next((fuse for fuse in family.fuses if leaf in fuse.parts and re.match(fuse.where, above)), None)
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
            name = f"{above}.{fuse.into}.{role}"
            is_number = role == "input_scale" and not parts[0].shape
            yield largest(name, parts) if is_number else concatenate(source, name, parts, fuse.rows_multiple)
