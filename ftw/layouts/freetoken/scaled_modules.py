"""Scaled modules: NVFP4 and FP8 linear layers, whose tensors FreeToken names alike whichever tool has written them.

stored by ModelOpt    by llm-compressor                   FreeToken
weight                weight_packed, weight               weight
weight_scale          weight_scale                        weight_scale, or weight_scale_inv of blocks
weight_scale_2        weight_global_scale, the inverse    weight_global      F32 [rows]
input_scale           input_global_scale, the inverse     input_scale        F32 []

A module must hold what config.json declares (`declared_schemes`), since FreeToken's server makes room for just that.
"""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from ftw.dtypes import FLOAT8_DTYPES
from ftw.errors import CheckpointError
from ftw.layouts.recipes.dense_tensor import FLOATS, cast_to
from ftw.layouts.recipes.dequantized import Dequantized
from ftw.layouts.recipes.recipe import Filled
from ftw.readers import LeftOut

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ftw.layouts.families.family import Family
    from ftw.layouts.freetoken.declared_schemes import DeclaredSchemes, Scheme
    from ftw.layouts.recipes.dense_tensor import DenseTensor

PACKED_DTYPES = FLOAT8_DTYPES | {"U8", "I8"}
# What each stored tensor is, and whether the inverse is stored.
_ROLES = {
    "weight": ("weight", False),
    "weight_packed": ("weight", False),
    "weight_scale": ("scale", False),
    "weight_scale_inv": ("scale", False),
    "weight_scale_2": ("global", False),
    "weight_global_scale": ("global", True),
    "input_scale": ("input", False),
    "input_global_scale": ("input", True),
}
_NOT_DECLARED = "the quantization_config declares no scale of the input, so FreeToken has no place for it"


class _Kind(NamedTuple):
    """What a scheme stores.

    Attributes:
        dtype: The type of the weight.
        scales: Types that the scales can have.
        packed: Elements in one of the weight.
        columns: How many columns share a scale; 0 where no block has fewer than all.
    """

    dtype: str
    scales: frozenset[str]
    packed: int = 1
    columns: int = 0


_KINDS = {
    "nvfp4": _Kind("U8", frozenset({"F8_E4M3"}), packed=2, columns=16),
    "fp8": _Kind("F8_E4M3", FLOATS),
    "fp8_block": _Kind("F8_E4M3", FLOATS | {"F8_E8M0"}),
    "mxfp8": _Kind("F8_E4M3", frozenset({"U8", "F8_E8M0"}), columns=32),
}


class ScaledTensors(NamedTuple):
    """All tensors, those of scaled modules under FreeToken's names, and which it does not use."""

    tensors: list[DenseTensor]
    left_out: list[LeftOut]


def name_as_freetoken(
    source: str, family: Family, tensors: Iterable[DenseTensor], schemes: DeclaredSchemes
) -> ScaledTensors:
    """Return tensors with those of a family's linear layers under FreeToken's names.

    Raises:
        CheckpointError: A module does not hold what its scheme needs, or a tensor is quantised in a place where
            FreeToken's model has no quantised one.
    """
    made = ScaledTensors([], [])
    modules: dict[str, list[DenseTensor]] = {}
    for tensor in tensors:
        if re.search(family.scaled, tensor.module):
            modules.setdefault(tensor.module, []).append(tensor)
        elif tensor.role in _ROLES and tensor.role != "weight":
            raise CheckpointError(
                source, tensor.origin, f"is a scale, which FreeToken's {tensor.module} is not made for"
            )
        elif tensor.dtype in PACKED_DTYPES:
            raise CheckpointError(
                source, tensor.origin, f"is {tensor.dtype}, which FreeToken's {tensor.module} is not made for"
            )
        else:
            made.tensors.append(tensor)
    for parts in modules.values():
        scheme = schemes.of(parts[0].origin.rpartition(".")[0])
        module = _Module(source, scheme, parts)
        is_unpacked = scheme is not None and bool(family.unpacked) and bool(re.search(family.unpacked, parts[0].module))
        made.tensors.extend(module.unpack() if is_unpacked else module.arrange(is_together=family.is_written_by_module))
        made.left_out.extend(module.left_out)
    return made


class _Module:
    """A linear layer: its tensors by what they are, checked against its scheme."""

    def __init__(self, source: str, scheme: Scheme | None, parts: Sequence[DenseTensor]) -> None:
        self._source = source
        self._scheme = scheme
        self._kept: dict[str, DenseTensor] = {}
        self._others: list[DenseTensor] = []
        self.left_out: list[LeftOut] = []
        needed = self._needed_roles()
        for part in parts:
            role = _ROLES.get(part.role, ("", False))[0]
            if not role and part.dtype in PACKED_DTYPES:
                raise self._refuse(part, f"is {part.dtype}, FreeToken's {part.role} of a layer is not quantised")
            if not role:
                self._others.append(part)
            elif role == "input" and role not in needed:
                self.left_out.append(LeftOut("tensor", part.origin, _NOT_DECLARED))
            elif role not in needed:
                raise self._refuse(part, f"is a tensor of a quantised layer, {self._declared()}")
            elif role in self._kept:
                raise self._refuse(part, f"and {self._kept[role].origin} are both the {role} of a layer")
            else:
                self._kept[role] = part
        lacking = [role for role in needed if role not in self._kept]
        if lacking:
            raise self._refuse(parts[0], f"its layer stores no {' and no '.join(lacking)}, {self._declared()}")
        self._check_weight()

    def arrange(self, *, is_together: bool) -> list[DenseTensor]:
        """Return the tensors as FreeToken's model holds them."""
        make = {"weight": self._weight, "scale": self._scale, "global": self._global, "input": self._input}
        made = [make[role]() for role in (self._needed_roles() if is_together else self._kept)]
        if is_together:
            made = [replace(part, position=self._kept["weight"].position) for part in made]
        return [*made, *self._others]

    def unpack(self) -> list[DenseTensor]:
        """Return the weight as bf16."""
        weight, scheme = self._kept["weight"], self._scheme
        if scheme is None or scheme.kind not in ("fp8", "fp8_block"):
            problem = f"{self._declared()}; FreeToken holds it as BF16, which can be made of FP8 alone without a GPU"
            raise self._refuse(weight, problem)
        rows, columns = weight.shape
        scale = self._scale()
        block = (scheme.block, scheme.block) if scheme.kind == "fp8_block" else (1, max(columns, 1))
        recipe = Dequantized(weight.recipe, scale.recipe, scale.dtype, columns, block)
        position = max(part.position for part in self._kept.values())
        made = replace(weight, dtype="BF16", shape=(rows, columns), recipe=recipe, position=position)
        inputs = [part for role, part in self._kept.items() if role == "input"]
        self.left_out += [LeftOut("tensor", part.origin, "FreeToken holds its layer as BF16") for part in inputs]
        return [made, *self._others]

    def _needed_roles(self) -> tuple[str, ...]:
        if self._scheme is None:
            return ("weight",)
        inputs = ("input",) if self._scheme.has_input_scale else ()
        return ("weight", "scale", *(("global",) if self._scheme.kind == "nvfp4" else ()), *inputs)

    def _check_weight(self) -> None:
        weight, scheme = self._kept["weight"], self._scheme
        if scheme is None:
            if weight.dtype in PACKED_DTYPES or weight.role != "weight":
                raise self._refuse(weight, f"is {weight.dtype}, {self._declared()}")
            return
        kind = _KINDS.get(scheme.kind)
        if kind is None or weight.dtype != kind.dtype or len(weight.shape) != 2:
            raise self._refuse(weight, f"is {weight.dtype} {list(weight.shape)}, {self._declared()}")
        rows, columns = weight.shape[0], weight.shape[1] * kind.packed
        high, wide = (scheme.block, scheme.block) if scheme.kind == "fp8_block" else (1, kind.columns)
        scale = self._kept["scale"]
        if wide and (rows % high or columns % wide):
            problem = f"has {rows} rows of {columns} elements, FreeToken needs multiples of {high} and {wide}"
            raise self._refuse(weight, problem)
        if wide and scale.shape != (rows // high, columns // wide):
            raise self._refuse(scale, f"is {list(scale.shape)}, {[rows // high, columns // wide]} is needed")
        if scale.dtype not in kind.scales:
            problem = f"is {scale.dtype}, scales of {scheme.kind} are {' or '.join(sorted(kind.scales))}"
            raise self._refuse(scale, problem)

    def _weight(self) -> DenseTensor:
        return _renamed(self._kept["weight"], "weight")

    def _scale(self) -> DenseTensor:
        scale, rows = self._kept["scale"], self._kept["weight"].shape[0]
        if self._scheme is None or self._scheme.kind == "nvfp4":
            return _renamed(scale, "weight_scale")
        if self._scheme.kind != "fp8":
            renamed = _renamed(scale, "weight_scale_inv")
            return replace(renamed, dtype="U8") if self._scheme.kind == "mxfp8" else renamed
        if prod(scale.shape) == 1:
            return _repeated(scale, "weight_scale", rows, is_inverse=False)
        if prod(scale.shape) != rows:
            raise self._refuse(scale, f"is {list(scale.shape)}, 1 or {rows} numbers are needed")
        return replace(cast_to(_renamed(scale, "weight_scale"), "F32"), shape=(rows,))

    def _global(self) -> DenseTensor:
        return self._number("global", "weight_global", self._kept["weight"].shape[0])

    def _input(self) -> DenseTensor:
        return replace(self._number("input", "input_scale", 1), shape=())

    def _number(self, role: str, name: str, count: int) -> DenseTensor:
        part = self._kept[role]
        if prod(part.shape) != 1 or part.dtype not in FLOATS:
            raise self._refuse(part, f"is {part.dtype} {list(part.shape)}, one number is needed")
        return _repeated(part, name, count, is_inverse=_ROLES[part.role][1])

    def _declared(self) -> str:
        if self._scheme is None:
            return "config.json declares its layer as not quantised"
        inputs = " with a scale of the input" if self._scheme.has_input_scale else ""
        return f"config.json declares its layer as {self._scheme.kind}{inputs}"

    def _refuse(self, part: DenseTensor, problem: str) -> CheckpointError:
        return CheckpointError(self._source, part.origin, problem)


def _renamed(tensor: DenseTensor, role: str) -> DenseTensor:
    return replace(tensor, name=f"{tensor.module}.{role}")


def _repeated(tensor: DenseTensor, role: str, count: int, *, is_inverse: bool) -> DenseTensor:
    recipe = Filled(tensor.recipe, tensor.dtype, count, is_inverse)
    return replace(_renamed(tensor, role), dtype="F32", shape=(count,), recipe=recipe)
