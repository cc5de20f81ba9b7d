"""The references of lookups, slow and obvious: what CPU callers get, and what the kernels are compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

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
    found = _gather(rows, numbers[is_inside], hot).view(table.dtype)
    if columns is not None:
        found = found[:, columns[0] : columns[0] + columns[1]].contiguous()
    if scale is not None:
        found *= torch.tensor(scale, dtype=found.dtype, device=found.device)
    target.zero_()
    target[is_inside] = found.view(torch.uint8)


def packed_lookup_reference(
    table: torch.Tensor,
    ids: torch.Tensor,
    out: torch.Tensor,
    ggml_type: str,
    first_id: int = 0,
    *,
    columns: tuple[int, int] | None = None,
    scale: float | None = None,
    hot: HotRowBuffers | None = None,
) -> None:
    """Look up and decode rows of a uint8 `[rows, row_bytes]` table into `out`; zeros for ids outside the table."""
    from gguf import GGMLQuantizationType, quants

    flat = ids.reshape(-1).to(torch.int64)
    target = out.view(flat.numel(), -1).zero_()
    numbers = flat - first_id  # wraps around for ids far below, which the first condition sorts out
    is_inside = (flat >= first_id) & (numbers < table.shape[0])
    packed = _gather(table, numbers[is_inside], hot)
    if not packed.shape[0]:
        return
    with np.errstate(all="ignore"):  # infinite and NaN scales are decoded like any other
        values = quants.dequantize(packed.numpy(), GGMLQuantizationType[ggml_type])
    found = torch.from_numpy(np.ascontiguousarray(values)).to(out.dtype)
    if columns is not None:
        found = found[:, columns[0] : columns[0] + columns[1]]
    if scale is not None:
        found = found * torch.tensor(scale, dtype=found.dtype, device=found.device)
    target[is_inside] = found


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
