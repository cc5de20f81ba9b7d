"""The reference of `ftw.kernels.lookup`: what CPU callers get, and what the kernel is compared with."""

from __future__ import annotations

import torch


def lookup_reference(table: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> None:
    """Look up rows of a `[rows, columns]` table into `out`, all on one device; zeros for ids outside the table."""
    rows = table.view(torch.uint8)  # bits, of whatever dtype
    flat = ids.reshape(-1).to(torch.int64)
    target = out.view(torch.uint8).view(flat.numel(), rows.shape[1])
    is_outside = (flat < 0) | (flat >= rows.shape[0])
    if not is_outside.any():
        torch.index_select(rows, 0, flat, out=target)
        return
    target.zero_()
    is_inside = ~is_outside
    target[is_inside] = rows.index_select(0, flat[is_inside])
