"""Formats of expert banks: of which tensors of an expert each bank is made, and how.

A bank is `[experts, rows, columns]`; sizes of one expert, H the model's width and I the experts':

    bf16           gate_up [2I, H]                                              down [H, I]
    fp8_block      gate_up [2I, H], gate_up_scale [2I/128, H/128 +]             down [H, I], down_scale [H/128, I/128 +]
    nvfp4          gate_up_packed [2I, H/2], _scale [2I, H/16], _global [2I]    the same of down
    ds_fp4         gate_up_packed [2I, H/2], _scale [2I, H/32]                  the same of down
    mxfp4_triton   gate_up_blocks [H/2, 2I], _scales [H/32, 2I], _bias [2I]     the same of down

    +    each row filled up with zeros, until the scales of one expert are a multiple of 16 bytes
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from ftw.dtypes import DTYPES
from ftw.layouts.recipes.dense_tensor import FLOATS
from ftw.layouts.recipes.recipe import Cast, Filled, PaddedRows, Swapped

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ftw.layouts.recipes.recipe import Recipe

_SCALES_NBYTES = 16
_BLOCK = 128


@dataclass(frozen=True, slots=True)
class ExpertSlice:
    """One tensor of one expert, whether it is stored alone or is a part of one of all experts."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    recipe: Recipe


class BankSpec(NamedTuple):
    """How a bank is made.

    Attributes:
        suffix: What its name has behind "gate_up" or "down".
        roles: The names of the tensor that it is made of, one of which an expert's projection has.
        make: Makes an expert's part of one projection; also takes the role, the rows of the projection's weight, and
            those of the whole bank's.
        dtypes: Types that it can be stored in.
        made: The type that the bank has.
        shape: Returns the shape of an expert's part of the bank, from the rows and columns of its matrix.
        axes: How many axes an expert's tensor can have; of none or one, it must be one number.
    """

    suffix: str
    roles: tuple[str, ...]
    make: Callable[[ExpertSlice, str, int, int], ExpertSlice]
    dtypes: frozenset[str]
    made: str
    shape: Callable[[int, int], tuple[int, ...]]
    axes: tuple[int, ...] = (2,)


class BankFormat(NamedTuple):
    """A format, told by the tensors that a projection has, and by the type of the first.

    Attributes:
        tag: Its name in an index.
        banks: What it is stored in.
        unused: Names of tensors of a projection that no bank is made of.
    """

    tag: str
    banks: tuple[BankSpec, ...]
    unused: frozenset[str] = frozenset()


def _as_stored(part: ExpertSlice, _role: str, _rows: int, _all_rows: int) -> ExpertSlice:
    return part


def _as_bytes(part: ExpertSlice, _role: str, _rows: int, _all_rows: int) -> ExpertSlice:
    return replace(part, dtype="U8")


def _as_bf16(part: ExpertSlice, _role: str, _rows: int, _all_rows: int) -> ExpertSlice:
    if part.dtype == "BF16":
        return part
    return replace(part, dtype="BF16", recipe=Cast(part.recipe, part.dtype, "BF16"))


def _padded(part: ExpertSlice, role: str, rows: int, all_rows: int) -> ExpertSlice:
    """Return scales as bf16 rows, padded so that those of the whole bank, of one expert, are a multiple of 16 bytes."""
    scales = _as_bf16(part, role, rows, all_rows)
    columns, padded = scales.shape[1], _pad(all_rows, scales.shape[1])
    return replace(scales, shape=(part.shape[0], padded), recipe=PaddedRows(scales.recipe, 2 * columns, 2 * padded))


def _pad(rows: int, columns: int) -> int:
    return next(size for size in range(columns, columns + _SCALES_NBYTES) if rows * size * 2 % _SCALES_NBYTES == 0)


def _repeated(part: ExpertSlice, role: str, rows: int, _all_rows: int) -> ExpertSlice:
    recipe = Filled(part.recipe, part.dtype, rows, is_inverse=role == "weight_global_scale")
    return replace(part, dtype="F32", shape=(rows,), recipe=recipe)


def _swapped(part: ExpertSlice, _role: str, _rows: int, _all_rows: int) -> ExpertSlice:
    return swap(replace(part, shape=(part.shape[0], part.recipe.nbytes // part.shape[0])))


def swap(part: ExpertSlice) -> ExpertSlice:
    """Return a matrix with its axes swapped."""
    rows, columns = part.shape
    recipe = Swapped(part.recipe, rows, columns, DTYPES[part.dtype].bits // 8)
    return replace(part, shape=(columns, rows), recipe=recipe)


def _whole(rows: int, columns: int) -> tuple[int, ...]:
    return (rows, columns)


def _rows(rows: int, _columns: int) -> tuple[int, ...]:
    return (rows,)


def _padded_blocks(rows: int, columns: int) -> tuple[int, ...]:
    return (rows // _BLOCK, _pad(rows // _BLOCK, columns // _BLOCK))


def _by(number: int) -> Callable[[int, int], tuple[int, ...]]:
    """Return the shape where so many columns share an element."""
    return lambda rows, columns: (rows, columns // number)


_E4M3, _E8M0, _U8, _I8 = (frozenset({dtype}) for dtype in ("F8_E4M3", "F8_E8M0", "U8", "I8"))

FORMATS: tuple[BankFormat, ...] = (
    BankFormat("bf16", (BankSpec("", ("weight",), _as_bf16, FLOATS, "BF16", _whole),)),
    BankFormat(
        "fp8_block",
        (
            BankSpec("", ("weight",), _as_stored, _E4M3, "F8_E4M3", _whole),
            BankSpec("_scale", ("weight_scale_inv", "weight_scale"), _padded, FLOATS, "BF16", _padded_blocks),
        ),
    ),
    BankFormat(
        "nvfp4",
        (
            BankSpec("_packed", ("weight", "weight_packed"), _as_stored, _U8, "U8", _by(2)),
            BankSpec("_scale", ("weight_scale",), _as_stored, _E4M3, "F8_E4M3", _by(16)),
            BankSpec(
                "_global", ("weight_scale_2", "weight_global_scale"), _repeated, FLOATS, "F32", _rows, axes=(0, 1)
            ),
        ),
        unused=frozenset({"input_scale", "input_global_scale"}),
    ),
    BankFormat(
        "ds_fp4",
        (
            BankSpec("_packed", ("weight",), _as_bytes, _I8, "U8", _by(2)),
            BankSpec("_scale", ("scale",), _as_stored, _E8M0, "F8_E8M0", _by(32)),
        ),
    ),
    BankFormat(
        "mxfp4_triton",
        (
            BankSpec(
                "_blocks", ("blocks",), _swapped, _U8, "U8", lambda rows, columns: (columns // 2, rows), axes=(2, 3)
            ),
            BankSpec("_scales", ("scales",), _swapped, _U8, "U8", lambda rows, columns: (columns // 32, rows)),
            BankSpec("_bias", ("bias",), _as_bf16, FLOATS, "BF16", _rows, axes=(1,)),
        ),
    ),
)


def bank_name(part: str, spec: BankSpec, layer: int) -> str:
    """Return the name of a layer's bank: of a part, "gate_up" or "down", and the number among layers with experts."""
    return f"{part}{spec.suffix}#L{layer:05d}"


def most_common(tags: Sequence[str]) -> str:
    """Return the tag of most layers, whose bank names all layers have; of several, that of the lowest layer."""
    return Counter(tags).most_common(1)[0][0]


def find_format(parts: Mapping[str, ExpertSlice]) -> BankFormat | None:
    """Return the format of an expert's projection, from its tensors by their roles; None if it is not known."""
    for found in FORMATS:
        roles = [next((role for role in bank.roles if role in parts), None) for bank in found.banks]
        first = roles[0]
        if (
            None not in roles
            and first
            and parts[first].dtype in found.banks[0].dtypes
            and parts.keys() <= {*roles, *found.unused}
        ):
            return found
    return None
