"""Rows of a table whose hot ones are read from their copies: the part that the references of lookups share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ftw.kernels.hot import HotRowBuffers


def gather_reference(table: torch.Tensor, rows: torch.Tensor, hot: HotRowBuffers | None) -> torch.Tensor:
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
