"""Hot rows: copies of a table's most used rows in the device's memory, which lookups read in place of the table's.

    slots    int32 [rows]                  where in `rows` a row's copy lies, -1 for a cold row, which has none
    rows     [slots, columns or row_bytes]  of the table's dtype; packed rows stay packed
    counts   int32 [rows]                  lookups add 1 for every id that they read; None where nobody counts

All three lie on the ids' device, and their addresses never change, so that a captured CUDA graph sees what is written
to them between replays.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ftw.errors import LookupArgumentError

ROWS_ALIGNMENT = 16


class HotRowBuffers(NamedTuple):
    """Hot rows of one table; see the module."""

    slots: torch.Tensor
    rows: torch.Tensor
    counts: torch.Tensor | None = None


def check_hot(op: str, hot: HotRowBuffers, table: torch.Tensor, ids: torch.Tensor) -> None:
    """Check hot rows against the table and the ids of a lookup; what the slots say is not looked at.

    Raises:
        LookupArgumentError: A shape, dtype or device is not allowed, or the copies are not aligned.
    """
    for name, tensor in (("slots", hot.slots), ("counts", hot.counts)):
        if tensor is not None and not _is(tensor, (table.shape[0],), torch.int32, ids.device):
            _refuse(op, name, tensor, f"torch.int32 [{table.shape[0]}] on {ids.device}")
    columns = table.shape[1]
    if not _is(hot.rows, (hot.rows.shape[0], columns), table.dtype, ids.device):
        _refuse(op, "rows", hot.rows, f"{table.dtype} [slots, {columns}] on {ids.device}")
    if hot.rows.data_ptr() % ROWS_ALIGNMENT:
        problem = f"found at address {hot.rows.data_ptr()}, a multiple of {ROWS_ALIGNMENT} is needed"
        raise LookupArgumentError(f"{op}: hot: rows: {problem}")


def _is(tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
    return tensor.shape == shape and tensor.dtype == dtype and tensor.device == device and tensor.is_contiguous()


def _refuse(op: str, name: str, tensor: torch.Tensor, needed: str) -> None:
    found = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
    raise LookupArgumentError(f"{op}: hot: {name}: found {found}, contiguous {needed} is needed")
