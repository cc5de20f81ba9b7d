"""Units in which rows are copied: the widest integers that rows and their addresses are multiples of."""

from __future__ import annotations

from typing import NamedTuple

import torch

_UNITS: tuple[tuple[int, torch.dtype], ...] = ((4, torch.int32), (2, torch.int16), (1, torch.uint8))
_MAX_BLOCK = 2048


class RowShape(NamedTuple):
    """How a copy is cut into programs: one for each row and `block` units of it."""

    unit: torch.dtype
    unit_nbytes: int
    units: int
    block: int
    num_warps: int


def cut_row(row_nbytes: int, alignment: int) -> RowShape:
    """Cut a row of so many bytes; `alignment` is the addresses and strides that units have to fit, or-ed together."""
    alignment |= row_nbytes
    nbytes, unit = next((nbytes, unit) for nbytes, unit in _UNITS if alignment % nbytes == 0)
    return cut_row_into(row_nbytes, unit, nbytes)


def cut_row_into(row_nbytes: int, unit: torch.dtype, unit_nbytes: int) -> RowShape:
    """Cut a row into units of the given type."""
    units = row_nbytes // unit_nbytes
    block = min(_MAX_BLOCK, 1 << (units - 1).bit_length())
    return RowShape(unit, unit_nbytes, units, block, num_warps=4 if block >= 256 else 1)
