"""What lookups ask of their arguments, and where they run."""

from __future__ import annotations

import contextlib
import functools
import math

import torch

from ftw.errors import LookupArgumentError

SCALED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ID_DTYPES = (torch.int32, torch.int64)
_MAX_ID = torch.iinfo(torch.int64).max
_MAX_POSITION = torch.iinfo(torch.int32).max


def check_arguments(op: str, table: torch.Tensor, ids: torch.Tensor, first_id: int) -> None:
    """Check a table, ids and the id of the first row; see `ftw.kernels.lookup.lookup`.

    Raises:
        LookupArgumentError: A shape, dtype or device is not allowed.
    """
    if not isinstance(ids, torch.Tensor):
        raise LookupArgumentError(f"{op}: ids: found a {type(ids).__name__}, a tensor is needed")
    check_dense(op, ids)
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


def is_dense(ids: torch.Tensor) -> bool:
    """Tell whether ids are neither sparse nor nested: of those, shape or strides cannot even be asked for."""
    return ids.layout is torch.strided and not ids.is_nested


def check_dense(op: str, ids: torch.Tensor) -> None:
    """Check that ids are neither sparse nor nested.

    Raises:
        LookupArgumentError: They are.
    """
    if not is_dense(ids):
        found = "a nested tensor" if ids.is_nested else f"a tensor with the layout {ids.layout}"
        raise LookupArgumentError(f"{op}: ids: found {found}, a dense one is needed")


def check_columns(op: str, columns: tuple[int, int], num_columns: int, block_size: int = 1) -> int:
    """Return the length of `columns`, `(start, length)` within a row of `num_columns`.

    Raises:
        LookupArgumentError: They are not in the row, or no whole blocks of `block_size` values.
    """
    start, length = columns
    if not (0 <= start <= start + length <= num_columns) or start % block_size or length % block_size:
        blocks = f", in whole blocks of {block_size}," if block_size > 1 else ""
        allowed = f"(start, length) within the row's {num_columns}{blocks} is needed"
        raise LookupArgumentError(f"{op}: columns: found {columns}, {allowed}")
    return length


def check_scale(op: str, scale: float, dtype: torch.dtype) -> float:
    """Return a scale as values of `dtype` are multiplied by it: rounded to that dtype, as torch would round it.

    Raises:
        LookupArgumentError: The scale is zero or not finite in that dtype, or values of the dtype are not scaled.
    """
    if dtype not in SCALED_DTYPES:
        allowed = ", ".join(map(str, SCALED_DTYPES))
        raise LookupArgumentError(f"{op}: scale: found rows of {dtype}, scaled are {allowed}")
    rounded = _rounded_scale(float(scale), dtype)
    if not rounded or not math.isfinite(rounded):
        needed = f"a number that is finite and not zero in {dtype} is needed"
        raise LookupArgumentError(f"{op}: scale: found {scale}, {needed}")
    return rounded


@functools.lru_cache(maxsize=256)
def _rounded_scale(scale: float, dtype: torch.dtype) -> float:
    return torch.tensor(scale, dtype=dtype, device="cpu").item()


def check_distinct(op: str, ids: torch.Tensor) -> None:
    """Check that positions of ids fit into the 32 bits in which distinct ones are elected.

    Raises:
        LookupArgumentError: There are too many.
    """
    if ids.numel() > _MAX_POSITION:
        problem = f"found {ids.numel()} ids, at most {_MAX_POSITION} are fetched distinctly"
        raise LookupArgumentError(f"{op}: ids: {problem}")


def make_out(op: str, ids: torch.Tensor, columns: int, dtype: torch.dtype, out: torch.Tensor | None) -> torch.Tensor:
    """Return `out` where it is what rows of `ids` need, or a new tensor where it is None.

    Raises:
        LookupArgumentError: It is not.
    """
    shape = (*ids.shape, columns)
    if out is None:
        return torch.empty(shape, dtype=dtype, device=ids.device)
    if not isinstance(out, torch.Tensor):
        raise LookupArgumentError(f"{op}: out: found a {type(out).__name__}, a tensor is needed")
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
