"""Scaled modules: NVFP4 and FP8 linear layers, whose tensors FreeToken names alike whichever tool has written them.

stored by ModelOpt    by llm-compressor                   FreeToken
weight                weight_packed, weight               weight
weight_scale          weight_scale                        weight_scale, or weight_scale_inv of 128 x 128 blocks
weight_scale_2        weight_global_scale, the inverse    weight_global      F32 [rows]
input_scale           input_global_scale, the inverse     input_scale        F32 []
"""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from ftw.conversion.recipes.dense_tensor import cast_to
from ftw.conversion.recipes.recipe import Filled
from ftw.dtypes import FLOAT8_DTYPES
from ftw.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ftw.conversion.families.family import Family
    from ftw.conversion.recipes.dense_tensor import DenseTensor

_PACKED = "weight_packed"
_GLOBALS = {"weight_scale_2": False, "weight_global_scale": True}  # whether the inverse is stored
_INPUTS = {"input_scale": False, "input_global_scale": True}


def name_as_freetoken(source: str, family: Family, tensors: Iterable[DenseTensor]) -> list[DenseTensor]:
    """Return tensors with those of a family's scaled modules under FreeToken's names.

    Raises:
        CheckpointError: A module lacks a tensor of its encoding.
    """
    made: list[DenseTensor] = []
    modules: dict[str, list[DenseTensor]] = {}
    for tensor in tensors:
        if re.search(family.scaled, tensor.module):
            modules.setdefault(tensor.module, []).append(tensor)
        else:
            made.append(tensor)
    for parts in modules.values():
        made += _rename_module(source, parts)
    return made


def _rename_module(source: str, parts: Sequence[DenseTensor]) -> list[DenseTensor]:
    by_role = {part.role: part for part in parts}
    weight = by_role.get(_PACKED) or by_role.get("weight")
    if weight is None:
        raise CheckpointError(source, f"{parts[0].module}.weight", f"is missing beside {parts[0].role}")
    made = []
    for part in parts:
        if part is weight:
            made.append(_renamed(part, "weight"))
        elif part.role in _GLOBALS:
            made.append(_repeated(part, "weight_global", weight.shape[0], is_inverse=_GLOBALS[part.role]))
        elif part.role in _INPUTS:
            made.append(_number(part, "input_scale", is_inverse=_INPUTS[part.role]))
        elif part.role == "weight_scale" and weight.dtype in FLOAT8_DTYPES:
            made.append(_fp8_scale(part, weight))
        else:
            made.append(part)
    return made


def _fp8_scale(scale: DenseTensor, weight: DenseTensor) -> DenseTensor:
    """Return the scales of an FP8 weight: of blocks as they are, of rows or of the whole tensor F32 `[rows]`."""
    rows = weight.shape[0]
    if prod(scale.shape) == 1:
        return _repeated(scale, "weight_scale", rows, is_inverse=False)
    if scale.shape in ((rows,), (rows, 1)):
        return replace(cast_to(scale, "F32"), shape=(rows,))
    return _renamed(scale, "weight_scale_inv")


def _renamed(tensor: DenseTensor, role: str) -> DenseTensor:
    return replace(tensor, name=f"{tensor.module}.{role}")


def _repeated(tensor: DenseTensor, role: str, count: int, *, is_inverse: bool) -> DenseTensor:
    recipe = Filled(tensor.recipe, tensor.dtype, count, is_inverse)
    return replace(_renamed(tensor, role), dtype="F32", shape=(count,), recipe=recipe)


def _number(tensor: DenseTensor, role: str, *, is_inverse: bool) -> DenseTensor:
    return replace(_repeated(tensor, role, 1, is_inverse=is_inverse), shape=())
