"""The reference of `ftw.kernels.lookup`: what CPU callers get, and what the kernel is compared with."""

from __future__ import annotations

import torch


def lookup_reference(table: torch.Tensor, ids: torch.Tensor, out: torch.Tensor, first_id: int = 0) -> None:
    """Look up rows of a `[rows, columns]` table into `out`, all on one device; zeros for ids outside the table."""
    rows = table.view(torch.uint8)  # bits, of whatever dtype
    flat = ids.reshape(-1).to(torch.int64)
    target = out.view(torch.uint8).view(flat.numel(), rows.shape[1])
    numbers = flat - first_id  # wraps around for ids far below, which the first condition sorts out
    is_outside = (flat < first_id) | (numbers >= rows.shape[0])
    if not is_outside.any():
        torch.index_select(rows, 0, numbers, out=target)
        return
    target.zero_()
    is_inside = ~is_outside
    target[is_inside] = rows.index_select(0, numbers[is_inside])
