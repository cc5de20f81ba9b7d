"""The reference of `ftw.kernels.lookup`: what CPU callers get, and what the kernel is compared with."""

from __future__ import annotations

import torch


def lookup_reference(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Look up rows on the table's device; an id outside the table gives a row of zeros."""
    rows = table.view(torch.uint8).reshape(table.shape[0], -1)  # bits, of whatever dtype
    flat = ids.reshape(-1).to(torch.int64)
    is_inside = (flat >= 0) & (flat < table.shape[0])
    out = torch.zeros((flat.numel(), rows.shape[1]), dtype=torch.uint8, device=ids.device)
    out[is_inside] = rows.index_select(0, flat[is_inside])
    return out.view(table.dtype).reshape(*ids.shape, table.shape[1])
