"""The references of lookups, slow and obvious: what CPU callers get, and what the kernels are compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from ftw.kernels.hot import HotRowBuffers
    from ftw.kernels.operation import LookupOptions


def lookup_reference(table: torch.Tensor, ids: torch.Tensor, out: torch.Tensor, options: LookupOptions) -> None:
    """Look up rows of a `[rows, columns]` table into `out`, all on one device; zeros for ids outside the table."""
    rows = table.view(torch.uint8)  # bits, of whatever dtype
    numbers, is_inside = _find_rows(ids, options.first_id, rows.shape[0])
    target = out.view(torch.uint8).view(numbers.numel(), -1)
    if options.columns is None and options.scale is None and options.hot is None and is_inside.all():
        torch.index_select(rows, 0, numbers, out=target)
        return
    found = _gather(rows, numbers[is_inside], options.hot).view(table.dtype)
    target.zero_()
    target[is_inside] = _cut_and_scale(found, options).view(torch.uint8)


def packed_lookup_reference(table: torch.Tensor, ids: torch.Tensor, out: torch.Tensor, options: LookupOptions) -> None:
    """Look up rows of a uint8 `[rows, row_bytes]` table and decode them into `out`, as the gguf package does."""
    from gguf import GGMLQuantizationType, quants

    numbers, is_inside = _find_rows(ids, options.first_id, table.shape[0])
    target = out.view(numbers.numel(), -1).zero_()
    packed = _gather(table, numbers[is_inside], options.hot)
    if not packed.shape[0]:
        return
    with np.errstate(all="ignore"):  # infinite and NaN scales are decoded like any other
        values = quants.dequantize(packed.numpy(), GGMLQuantizationType[options.ggml_type])
    found = torch.from_numpy(np.ascontiguousarray(values)).to(out.dtype)
    target[is_inside] = _cut_and_scale(found, options)


def _find_rows(ids: torch.Tensor, first_id: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows' numbers, int64 `[ids]`, and which of them are inside the table."""
    flat = ids.reshape(-1).to(torch.int64)
    numbers = flat - first_id  # wraps around for ids far below, which the first condition sorts out
    return numbers, (flat >= first_id) & (numbers < num_rows)


def _gather(table: torch.Tensor, rows: torch.Tensor, hot: HotRowBuffers | None) -> torch.Tensor:
    """Return rows of a `[rows, row_bytes]` table, given by number and none of them outside, and count them."""
    if hot is None:
        return table.index_select(0, rows)
    if hot.counts is not None:
        hot.counts.index_add_(0, rows, torch.ones_like(rows, dtype=hot.counts.dtype))
    slots = hot.slots[rows]
    is_hot = slots >= 0
    found = torch.empty(rows.numel(), table.shape[1], dtype=torch.uint8, device=table.device)
    found[is_hot] = hot.rows.view(torch.uint8)[slots[is_hot]]
    found[~is_hot] = table[rows[~is_hot]]
    return found


def _cut_and_scale(rows: torch.Tensor, options: LookupOptions) -> torch.Tensor:
    """Return the columns that are wanted, times the scale; `rows`, contiguous, may be changed."""
    if options.columns is not None:
        start, length = options.columns
        rows = rows[:, start : start + length].contiguous()
    if options.scale is not None:
        rows *= torch.tensor(options.scale, dtype=rows.dtype, device=rows.device)  # in place, so the strides stay
    return rows
