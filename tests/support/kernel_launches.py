"""Lookups by their kernels alone, without the wrappers' checks; Triton's interpreter runs them if there is no GPU."""

from typing import Any

import torch

from ftw.kernels.launching import Launch, Launcher, launch_all
from ftw.kernels.lookup import LOOKUP
from ftw.kernels.operation import LookupOptions
from ftw.kernels.packed_lookup import PACKED_LOOKUP


def plan(
    table: torch.Tensor, ids: torch.Tensor, out: torch.Tensor, ggml_type: str | None = None, **options: Any
) -> list[Launch]:
    """Return the launches of a lookup of plain rows, or of packed ones of a type."""
    operation = LOOKUP if ggml_type is None else PACKED_LOOKUP
    return operation.plan(table, ids, out, LookupOptions(ggml_type=ggml_type or "", **options))


def launch(
    table: torch.Tensor,
    ids: torch.Tensor,
    out: torch.Tensor,
    ggml_type: str | None = None,
    *,
    launcher: Launcher | None = None,
    **options: Any,
) -> None:
    """Look rows up into `out`; a scale has to be rounded already."""
    launch_all(plan(table, ids, out, ggml_type, **options), launcher, ids.device.index)
