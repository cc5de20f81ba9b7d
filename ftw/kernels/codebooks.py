"""Codebooks of GGUF's packed types: what the indices in their blocks stand for, out of the gguf package.

IQ1_*, IQ2_*, IQ3_*   [entries, 8 or 4]: a run of values for each index
IQ4_*, *FP4           [16]: a value for each nibble
"""

from __future__ import annotations

import functools
from typing import Any

import torch

_SHARED = {"IQ4_XS": "IQ4_NL"}


@functools.cache
def codebook(name: str, device: torch.device) -> torch.Tensor | None:
    """Return the codebook of a type as int8 on a device, None for a type without one; 16 KiB at most, kept."""
    from gguf import quants

    decoder: Any = getattr(quants, _SHARED.get(name, name))
    if getattr(decoder, "kvalues", None) is not None:
        return torch.tensor(decoder.kvalues, dtype=torch.int8, device=device)
    decoder.init_grid()
    if decoder.grid is None:
        return None
    return torch.from_numpy(decoder.grid).to(torch.int8).flatten().to(device)
