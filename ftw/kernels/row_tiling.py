"""RowTiling: how a row is cut into units, the widest integers that it and its addresses are multiples of."""

from __future__ import annotations

from typing import NamedTuple

import torch

_UNITS: tuple[tuple[int, torch.dtype], ...] = ((4, torch.int32), (2, torch.int16), (1, torch.uint8))
_MAX_BLOCK = 2048


class RowTiling(NamedTuple):
    """A program copies `block` units of a row, `units` in all."""

    unit: torch.dtype
    unit_nbytes: int
    units: int
    block: int
    num_warps: int


def tile_row(row_nbytes: int, alignment: int) -> RowTiling:
    """Tile a row of so many bytes; `alignment` is the addresses and strides that units have to fit, or-ed together."""
    alignment |= row_nbytes
    nbytes, unit = next((nbytes, unit) for nbytes, unit in _UNITS if alignment % nbytes == 0)
    return tile_row_by(row_nbytes, unit, nbytes)


def tile_row_by(row_nbytes: int, unit: torch.dtype, unit_nbytes: int) -> RowTiling:
    """Tile a row by units of the given type."""
    units = row_nbytes // unit_nbytes
    block = min(_MAX_BLOCK, 1 << (units - 1).bit_length())
    return RowTiling(unit, unit_nbytes, units, block, num_warps=4 if block >= 256 else 1)
