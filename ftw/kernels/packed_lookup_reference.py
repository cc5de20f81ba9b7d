"""The reference of `ftw.kernels.packed_lookup`: the gguf package's decoders, one row after another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ftw.kernels.hot_reference import gather_reference

if TYPE_CHECKING:
    from ftw.kernels.hot import HotRowBuffers


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
    packed = gather_reference(table, numbers[is_inside], hot)
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
