"""Row lookup: out[i, :] = table[ids[i] - first_id, :] where 0 <= ids[i] - first_id < rows, else zeros.

    table   [rows, columns]     host memory that the device can read, or device memory
    ids     any shape           int32 or int64, on the CPU or on the device
    first_id                    id of the table's first row: 0, or where a shard of the vocabulary begins
    out     ids.shape + [columns], of the table's dtype, on the ids' device

Bits are copied, never converted, so every dtype is equal to the table to the last bit, NaN payloads included. The limit
for a table in host memory is the link: 55.2 GB/s on an H200 with PCIe 5.0 x16 (copy engine, 2026-11-29).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ftw.kernels.arguments import check_arguments, make_out, on_device
from ftw.kernels.lookup_reference import lookup_reference

_UNITS: tuple[tuple[int, torch.dtype], ...] = ((4, torch.int32), (2, torch.int16), (1, torch.uint8))
_MAX_BLOCK = 2048


class _Shape(NamedTuple):
    """How a lookup is cut into programs: one for each row and `block` units of it."""

    unit: torch.dtype
    units: int
    block: int
    num_warps: int


def lookup(
    table: torch.Tensor, ids: torch.Tensor, *, first_id: int = 0, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Look up rows; an id outside the table gives a row of zeros.

    Runs on the ids' device, there on its current stream, and can be captured in a CUDA graph. For CPU ids the table has
    to be in host memory.

    Args:
        table: `[rows, columns]`, contiguous. For ids on a device: memory of that device, or page-locked host memory.
        ids: int32 or int64, of any shape and strides.
        first_id: Id of the first row, not negative.
        out: Contiguous, `ids.shape + (columns,)`, of the table's dtype, on the ids' device; made where it is None.

    Raises:
        LookupArgumentError: An argument has a shape, dtype or device that is not allowed.
    """
    check_arguments("lookup", table, ids, first_id)
    out = make_out("lookup", ids, table.shape[1], table.dtype, out)
    if not out.numel():
        return out
    if ids.device.type == "cpu":
        lookup_reference(table, ids, out, first_id)
        return out
    with on_device(ids):
        launch(table, ids, out, first_id)
    return out


def launch(table: torch.Tensor, ids: torch.Tensor, out: torch.Tensor, first_id: int = 0) -> None:
    """Launch the Triton kernel on the current stream; the arguments have been checked."""
    from ftw.kernels.lookup_triton import lookup_kernel

    shape = _plan(table, out)
    rows = out.numel() // table.shape[1]
    lookup_kernel[(rows, -(-shape.units // shape.block))](
        table_ptr=table.view(shape.unit),
        ids_ptr=ids.contiguous(),
        out_ptr=out.view(shape.unit),
        first_id=first_id,
        table_rows=table.shape[0],
        row_units=shape.units,
        BLOCK=shape.block,
        num_warps=shape.num_warps,
    )


def _plan(table: torch.Tensor, out: torch.Tensor) -> _Shape:
    """Cut rows into the widest units that they and both addresses are a multiple of."""
    row_nbytes = table.shape[1] * table.element_size()
    alignment = row_nbytes | table.data_ptr() | out.data_ptr()
    nbytes, unit = next((nbytes, unit) for nbytes, unit in _UNITS if alignment % nbytes == 0)
    units = row_nbytes // nbytes
    block = min(_MAX_BLOCK, 1 << (units - 1).bit_length())
    return _Shape(unit, units, block, num_warps=4 if block >= 256 else 1)
