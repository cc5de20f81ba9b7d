"""Element types: their names on disk, their widths, and torch's names for them.

name           as safetensors writes it, and everywhere in ftw
bits           bits of one element; F4 and F6 are narrower than a byte
torch_name     torch's name without the prefix, which an FTW index stores; None where no torch has such an element, and
               an older one may lack it
torch_elements how many of them one of torch's elements holds, so many fewer its last dimension has
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class DType(NamedTuple):
    """One element type."""

    name: str
    bits: int
    torch_name: str | None
    torch_elements: int = 1


DTYPES: dict[str, DType] = {
    dtype.name: dtype
    for dtype in (
        DType("BOOL", 8, "bool"),
        DType("F4", 4, "float4_e2m1fn_x2", 2),
        DType("F6_E2M3", 6, None),
        DType("F6_E3M2", 6, None),
        DType("U8", 8, "uint8"),
        DType("I8", 8, "int8"),
        DType("F8_E5M2", 8, "float8_e5m2"),
        DType("F8_E4M3", 8, "float8_e4m3fn"),
        DType("F8_E8M0", 8, "float8_e8m0fnu"),
        DType("F8_E4M3FNUZ", 8, "float8_e4m3fnuz"),
        DType("F8_E5M2FNUZ", 8, "float8_e5m2fnuz"),
        DType("I16", 16, "int16"),
        DType("U16", 16, "uint16"),
        DType("F16", 16, "float16"),
        DType("BF16", 16, "bfloat16"),
        DType("I32", 32, "int32"),
        DType("U32", 32, "uint32"),
        DType("F32", 32, "float32"),
        DType("C64", 64, "complex64"),
        DType("F64", 64, "float64"),
        DType("I64", 64, "int64"),
        DType("U64", 64, "uint64"),
    )
}

BY_TORCH_NAME: dict[str, DType] = {dtype.torch_name: dtype for dtype in DTYPES.values() if dtype.torch_name}

_MAX_ELEMENTS = 1 << 63

FLOAT_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
INTEGER_DTYPES = frozenset({"I64", "I32", "I16", "I8"})
FLOAT8_DTYPES = frozenset({"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})


def torch_shape(dtype: DType, shape: Sequence[int]) -> tuple[int, ...] | None:
    """Return the shape that a tensor has in torch; None if its rows end within one of torch's elements."""
    if dtype.torch_elements == 1:
        return tuple(shape)
    if not shape or shape[-1] % dtype.torch_elements:
        return None
    return (*shape[:-1], shape[-1] // dtype.torch_elements)


def shape_of_torch(dtype: DType, shape: Sequence[int]) -> tuple[int, ...] | None:
    """Return the shape whose shape in torch is the one given, as an FTW index has it; None if there is none."""
    if dtype.torch_elements == 1:
        return tuple(shape)
    return (*shape[:-1], shape[-1] * dtype.torch_elements) if shape else None


def is_too_large(shape: Sequence[int]) -> bool:
    """Tell whether a shape's sizes, zeros left out, multiply to 2^63 or more.

    Stops at the first product that does: a product of all that a hostile header may hold takes hours.
    """
    elements = 1
    for size in shape:
        elements *= size or 1
        if elements >= _MAX_ELEMENTS:
            return True
    return False


def tensor_bits(dtype: DType, shape: Sequence[int]) -> int:
    """Return the size of a tensor in bits, computed in Python integers, so that no product can wrap."""
    return prod(shape) * dtype.bits
