"""What lookups ask of their arguments, and where they run."""

from __future__ import annotations

import contextlib

import torch

from ftw.errors import LookupArgumentError

_ID_DTYPES = (torch.int32, torch.int64)
_MAX_ID = torch.iinfo(torch.int64).max


def check_arguments(op: str, table: torch.Tensor, ids: torch.Tensor, first_id: int) -> None:
    """Check a table, ids and the id of the first row; see `ftw.kernels.lookup.lookup`.

    Raises:
        LookupArgumentError: A shape, dtype or device is not allowed.
    """
    if not isinstance(ids, torch.Tensor):
        raise LookupArgumentError(f"{op}: ids: found a {type(ids).__name__}, a tensor is needed")
    if table.ndim != 2 or not table.is_contiguous():
        raise LookupArgumentError(f"{op}: table: found {list(table.shape)}, contiguous [rows, columns] is needed")
    if ids.dtype not in _ID_DTYPES:
        raise LookupArgumentError(f"{op}: ids: found {ids.dtype}, torch.int32 or torch.int64 is needed")
    if table.device.type != "cpu" and table.device != ids.device:
        raise LookupArgumentError(f"{op}: ids: found on {ids.device}, the table is on {table.device}")
    if ids.device.type not in ("cpu", "cuda"):
        raise LookupArgumentError(f"{op}: ids: found on {ids.device}, a CPU, CUDA or ROCm device is needed")
    if not 0 <= first_id <= _MAX_ID:  # what the kernels rely on: an id that is not below it cannot overflow less it
        raise LookupArgumentError(f"{op}: first_id: found {first_id}, allowed are 0 to {_MAX_ID}")


def make_out(op: str, ids: torch.Tensor, columns: int, dtype: torch.dtype, out: torch.Tensor | None) -> torch.Tensor:
    """Return `out` where it is what rows of `ids` need, or a new tensor where it is None.

    Raises:
        LookupArgumentError: It is not.
    """
    shape = (*ids.shape, columns)
    if out is None:
        return torch.empty(shape, dtype=dtype, device=ids.device)
    if out.shape != shape or out.dtype != dtype or out.device != ids.device or not out.is_contiguous():
        found = f"{out.dtype} {list(out.shape)} on {out.device}"
        problem = f"found {found}, contiguous {dtype} {list(shape)} on {ids.device} is needed"
        raise LookupArgumentError(f"{op}: out: {problem}")
    return out


def on_device(ids: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Make the ids' device the current one, at no cost where it is."""
    if ids.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(ids.device)
