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
from ftw.kernels.arguments import check_arguments, check_columns, check_distinct, check_scale, make_out, on_device
from ftw.kernels.distinct import make_owners, plan_distinct
from ftw.kernels.hot import check_hot
from ftw.kernels.launching import Launch, launch_all
from ftw.kernels.reference import lookup_reference
from ftw.kernels.row_tiling import cut_row, cut_row_into

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
    check_arguments("lookup", table, ids, first_id)
    length = table.shape[1]
    if columns is not None:
        length = check_columns("lookup", columns, length)
    if scale is not None:
        scale = check_scale("lookup", scale, table.dtype)
    if hot is not None:
        check_hot("lookup", hot, table, ids)
    if is_distinct:
        check_distinct("lookup", ids)
    out = make_out("lookup", ids, length, table.dtype, out)
    if not out.numel():
        return out
    if ids.device.type == "cpu":
        lookup_reference(table, ids, out, first_id, columns=columns, scale=scale, hot=hot)
        return out
    with on_device(ids):
        launch(
            table, ids, out, first_id, columns=columns, scale=scale, hot=hot, is_distinct=is_distinct, launcher=launcher
        )
    return out


def launch(
    table: torch.Tensor,
    ids: torch.Tensor,
    out: torch.Tensor,
    first_id: int = 0,
    *,
    columns: tuple[int, int] | None = None,
    scale: float | None = None,
    hot: HotRowBuffers | None = None,
    is_distinct: bool = False,
    launcher: Launcher | None = None,
) -> None:
    """Launch the Triton kernels on the current stream; the arguments have been checked, the scale is rounded."""
    ids = ids.contiguous()
    owners = make_owners(table, ids) if is_distinct else None
    fetch = plan_launch(table, ids, out, first_id, columns=columns, scale=scale, hot=hot, owners=owners)
    launches = [fetch] if owners is None else plan_distinct(fetch, ids, owners, out, first_id=first_id)
    launch_all(launches, launcher, ids.device.index)


def plan_launch(
    table: torch.Tensor,
    ids: torch.Tensor,
    out: torch.Tensor,
    first_id: int = 0,
    *,
    columns: tuple[int, int] | None = None,
    scale: float | None = None,
    hot: HotRowBuffers | None = None,
    owners: torch.Tensor | None = None,
) -> Launch:
    """Return the launch that looks up rows of contiguous ids; with `owners` those alone that their positions own.

    Raises:
        LookupArgumentError: Values that are to be scaled lie at addresses that are not a multiple of their size.
    """
    from ftw.kernels.jit.lookup_triton import lookup_kernel

    num_rows, num_columns = table.shape
    element_nbytes = table.element_size()
    slots, hot_rows, counts = (None, None, None) if hot is None else hot
    if columns is not None:
        table = table[:, columns[0] : columns[0] + columns[1]]
        hot_rows = None if hot_rows is None else hot_rows[:, columns[0] : columns[0] + columns[1]]
    row_nbytes = num_columns * element_nbytes
    out_nbytes = table.shape[1] * element_nbytes
    alignment = row_nbytes | table.data_ptr() | out.data_ptr()
    if hot_rows is not None:
        alignment |= hot_rows.data_ptr()
    if scale is None:
        shape = cut_row(out_nbytes, alignment)
    elif alignment % element_nbytes:
        problem = f"found values at addresses that are no multiple of {element_nbytes}, which are not scaled"
        raise LookupArgumentError(f"lookup: table: {problem}")
    else:
        shape = cut_row_into(out_nbytes, table.dtype, element_nbytes)
    return Launch(
        kernel=lookup_kernel,
        grid=(ids.numel(), -(-shape.units // shape.block), 1),
        arguments=(
            table,
            ids,
            out,
            slots,
            hot_rows,
            counts,
            owners,
            first_id,
            num_rows,
            row_nbytes // shape.unit_nbytes,
            None if columns is None else shape.units,
            scale,
        ),
        constants=(shape.block,),
        options=_OPTIONS[shape.num_warps],
        views=((0, shape.unit), (2, shape.unit), (4, shape.unit)),
    )
