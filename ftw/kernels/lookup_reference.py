"""The reference of `ftw.kernels.lookup`: what CPU callers get, and what the kernel is compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ftw.kernels.hot_reference import gather_reference

if TYPE_CHECKING:
    from ftw.kernels.hot import HotRowBuffers


def lookup_reference(
    table: torch.Tensor,
    ids: torch.Tensor,
    out: torch.Tensor,
    first_id: int = 0,
    *,
    columns: tuple[int, int] | None = None,
    scale: float | None = None,
    hot: HotRowBuffers | None = None,
) -> None:
    """Look up rows of a `[rows, columns]` table into `out`, all on one device; zeros for ids outside the table."""
    rows = table.view(torch.uint8)  # bits, of whatever dtype
    flat = ids.reshape(-1).to(torch.int64)
    target = out.view(torch.uint8).view(flat.numel(), -1)
    numbers = flat - first_id  # wraps around for ids far below, which the first condition sorts out
    is_outside = (flat < first_id) | (numbers >= rows.shape[0])
    if columns is None and scale is None and hot is None and not is_outside.any():
        torch.index_select(rows, 0, numbers, out=target)
        return
    is_inside = ~is_outside
    found = gather_reference(rows, numbers[is_inside], hot).view(table.dtype)
    if columns is not None:
        found = found[:, columns[0] : columns[0] + columns[1]].contiguous()
    if scale is not None:
        found *= torch.tensor(scale, dtype=found.dtype, device=found.device)
    target.zero_()
    target[is_inside] = found.view(torch.uint8)
