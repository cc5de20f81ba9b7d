"""Row lookup: out[i, :] = table[ids[i] - first_id, :] where 0 <= ids[i] - first_id < rows, else zeros.

    table   [rows, columns]     host memory that the device can read, or device memory
    ids     any shape           int32 or int64, on the CPU or on the device
    first_id                    id of the table's first row: 0, or where a shard of the vocabulary begins
    columns (start, length)     part of each row that is wanted, such as one layer's slice of a per-layer embedding
    scale                       what values are multiplied by: rounded to their dtype, as is the product, once
    hot                         copies of rows on the device, read in place of the table's: `ftw.kernels.hot`
    out     ids.shape + [columns], of the table's dtype, on the ids' device

Bits are copied, never converted, so every dtype is equal to the table to the last bit, NaN payloads included; scaled
values equal torch's product with a tensor of one element, but for which NaN a NaN is. The limit for a table in host
memory is the link: 55.2 GB/s on an H200 with PCIe 5.0 x16 (copy engine, 2026-11-29). What is faster than it does not
cross it: hot rows, and each of several equal ids but one (`ftw.kernels.distinct`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ftw.errors import LookupArgumentError
from ftw.kernels.arguments import check_arguments
from ftw.kernels.distinct import make_owners, plan_distinct
from ftw.kernels.launching import Launch
from ftw.kernels.operation import LookupOptions, Operation
from ftw.kernels.reference import lookup_reference
from ftw.kernels.row_tiling import tile_row, tile_row_by

if TYPE_CHECKING:
    from ftw.kernels.hot import HotRowBuffers
    from ftw.kernels.launching import Launcher

_OPTIONS = {num_warps: (("num_warps", num_warps), ("enable_fp_fusion", False)) for num_warps in (1, 4)}


def lookup(
    table: torch.Tensor,
    ids: torch.Tensor,
    *,
    first_id: int = 0,
    columns: tuple[int, int] | None = None,
    scale: float | None = None,
    hot: HotRowBuffers | None = None,
    is_distinct: bool = False,
    out: torch.Tensor | None = None,
    launcher: Launcher | None = None,
) -> torch.Tensor:
    """Look up rows; an id outside the table gives a row of zeros.

    Runs on the ids' device, there on its current stream, and can be captured in a CUDA graph. For CPU ids the table has
    to be in host memory.

    Args:
        table: `[rows, columns]`, contiguous. For ids on a device: memory of that device, or page-locked host memory.
        ids: int32 or int64, of any shape and strides.
        first_id: Id of the first row, not negative.
        columns: `(start, length)` of each row; None for all of it.
        scale: Finite and not zero; None for rows as they are. With one the table is float32, bfloat16 or float16.
        hot: Copies of rows on the ids' device.
        is_distinct: Fetch each distinct row once, which takes 4 bytes of device memory for each row of the table while
            it runs. Worth it where `prefers_distinct` says so.
        out: Contiguous, `ids.shape + (length,)`, of the table's dtype, on the ids' device; made where it is None.
        launcher: Keeps what has been compiled, so that later calls cost less; None to ask Triton each time.

    Raises:
        LookupArgumentError: An argument has a shape, dtype or device that is not allowed.
    """
    options = LookupOptions(first_id, columns, scale, hot, is_distinct)
    return LOOKUP.run(table, ids, out, options, launcher)[0]


def _check(
    table: torch.Tensor, ids: torch.Tensor, out: torch.Tensor | None, options: LookupOptions
) -> tuple[LookupOptions, torch.Tensor]:
    check_arguments("lookup", table, ids, options.first_id)
    return options.check("lookup", table, ids, out, columns=table.shape[1], dtype=table.dtype)


def plan_launches(table: torch.Tensor, ids: torch.Tensor, out: torch.Tensor, options: LookupOptions) -> list[Launch]:
    """Return the launches that look rows up on the ids' device; the arguments have been checked.

    Raises:
        LookupArgumentError: Values that are to be scaled lie at addresses that are not a multiple of their size.
    """
    from ftw.kernels.jit.lookup_triton import lookup_kernel

    ids = ids.contiguous()
    owners = make_owners(table, ids) if options.is_distinct else None
    num_rows, num_columns = table.shape
    element_nbytes = table.element_size()
    slots, hot_rows, counts = options.hot or (None, None, None)
    if options.columns is not None:
        start, length = options.columns
        table = table[:, start : start + length]
        hot_rows = None if hot_rows is None else hot_rows[:, start : start + length]
    row_nbytes = num_columns * element_nbytes
    out_nbytes = table.shape[1] * element_nbytes
    alignment = row_nbytes | table.data_ptr() | out.data_ptr()
    if hot_rows is not None:
        alignment |= hot_rows.data_ptr()
    if options.scale is None:
        tiling = tile_row(out_nbytes, alignment)
    elif alignment % element_nbytes:
        problem = f"found values at addresses that are no multiple of {element_nbytes}, which are not scaled"
        raise LookupArgumentError(f"lookup: table: {problem}")
    else:
        tiling = tile_row_by(out_nbytes, table.dtype, element_nbytes)
    fetch = Launch(
        kernel=lookup_kernel,
        grid=(ids.numel(), -(-tiling.units // tiling.block), 1),
        arguments=(
            table,
            ids,
            out,
            slots,
            hot_rows,
            counts,
            owners,
            options.first_id,
            num_rows,
            row_nbytes // tiling.unit_nbytes,
            None if options.columns is None else tiling.units,
            options.scale,
        ),
        constants=(tiling.block,),
        options=_OPTIONS[tiling.num_warps],
        views=((0, tiling.unit), (2, tiling.unit), (4, tiling.unit)),
    )
    return [fetch] if owners is None else plan_distinct(fetch, ids, owners, out, first_id=options.first_id)


LOOKUP = Operation(_check, plan_launches, lookup_reference)
