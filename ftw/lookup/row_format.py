"""RowFormat: what a table's rows are and what a lookup makes of them; checked once, so that no lookup has to.

table     rows that follow each other, of ids first_id, first_id + 1, …; then padding that is never read
row       columns elements, or num_slices slices of slice_columns elements, one for each layer
values    looked up in row_dtype, multiplied by scale there, then converted to dtype
"""

from __future__ import annotations

import numbers
from typing import NamedTuple

import torch

from ftw.errors import LookupArgumentError, printable
from ftw.ggml_types import ggml_types_by_name
from ftw.kernels import OUT_DTYPES, check_scale, packed_columns
from ftw.sizes import whole_number

_MAX_ID = torch.iinfo(torch.int64).max


class RowFormat(NamedTuple):
    """A table's shape and types; see the module's table."""

    first_id: int
    rows: int
    columns: int
    dtype: torch.dtype
    row_dtype: torch.dtype
    ggml_type: str | None
    scale: float | None
    num_slices: int | None

    def columns_of(self, name: str, layer: int) -> tuple[int, int]:
        """Return `(start, length)` of a layer's columns.

        Raises:
            LookupArgumentError: There is no such layer.
        """
        if self.num_slices is None:
            problem = f"found {layer!r}, but rows have no slices; num_slices is needed"
            raise LookupArgumentError(f"{printable(name)}: layer: {problem}")
        number = layer if type(layer) is int else whole_number(layer)
        if number is None or not 0 <= number < self.num_slices:
            problem = f"found {layer!r}, allowed are 0 to {self.num_slices - 1}"
            raise LookupArgumentError(f"{printable(name)}: layer: {problem}")
        width = self.columns // self.num_slices
        return number * width, width


def make_row_format(
    name: str,
    table: torch.Tensor,
    dtype: torch.dtype | None,
    ggml_type: str | None,
    vocab_range: tuple[int, int] | None,
    scale: float | None,
    num_slices: int | None,
) -> RowFormat:
    """Return the format of a table's rows; the arguments are those of `ftw.lookup.embedding.HostEmbedding`.

    Raises:
        LookupArgumentError: One of them is not allowed, or does not fit the table.
    """
    subject = printable(name)
    if not isinstance(table, torch.Tensor):
        raise LookupArgumentError(f"{subject}: table: found a {type(table).__name__}, a tensor is needed")
    if table.ndim != 2 or not table.is_contiguous():
        found = f"{list(table.shape)} with strides {list(table.stride())}"
        raise LookupArgumentError(f"{subject}: table: found {found}, contiguous [rows, columns] is needed")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise LookupArgumentError(f"{subject}: dtype: found {dtype!r}, a floating-point dtype of torch is needed")
    num_rows = int(table.shape[0])
    first_id, rows = (0, num_rows) if vocab_range is None else _parse_range(subject, vocab_range, num_rows)
    if ggml_type is None:
        columns, row_dtype = int(table.shape[1]), table.dtype
        dtype = dtype or row_dtype
    else:
        columns = packed_columns(table, ggml_type)
        dtype = dtype or torch.bfloat16
        row_dtype = dtype if dtype in OUT_DTYPES else torch.float32
    if scale is not None:
        scale = _parse_scale(subject, scale, row_dtype)
    if num_slices is not None:
        num_slices = _parse_slices(subject, columns, ggml_type, num_slices)
    return RowFormat(first_id, rows, columns, dtype, row_dtype, ggml_type, scale, num_slices)


def _parse_range(subject: str, vocab_range: object, num_rows: int) -> tuple[int, int]:
    pair = vocab_range if isinstance(vocab_range, (tuple, list)) and len(vocab_range) == 2 else (None, None)
    start, length = (whole_number(value) for value in pair)
    if start is None or length is None or not (0 <= start <= _MAX_ID - length and 0 <= length <= num_rows):
        allowed = f"(start, length) of ids from 0 on, and of at most the table's {num_rows} rows, is needed"
        raise LookupArgumentError(f"{subject}: vocab_range: found {vocab_range!r}, {allowed}")
    return start, length


def _parse_scale(subject: str, scale: object, row_dtype: torch.dtype) -> float:
    if not isinstance(scale, numbers.Real) or isinstance(scale, bool):  # numpy's numbers are of that kind
        raise LookupArgumentError(f"{subject}: scale: found {scale!r}, a number is needed")
    try:
        number = float(scale)
    except OverflowError as error:
        problem = "found a number beyond those of float, one that is finite"
        raise LookupArgumentError(f"{subject}: scale: {problem} in {row_dtype} is needed") from error
    check_scale(subject, number, row_dtype)
    return number


def _parse_slices(subject: str, columns: int, ggml_type: str | None, num_slices: object) -> int:
    number = whole_number(num_slices)
    if number is None or number < 1:
        raise LookupArgumentError(f"{subject}: num_slices: found {num_slices!r}, a number from 1 on is needed")
    if columns % number:
        problem = f"found {number}, rows of {columns} columns cannot be cut into that many equal slices"
        raise LookupArgumentError(f"{subject}: num_slices: {problem}")
    block_size = 1 if ggml_type is None else ggml_types_by_name()[ggml_type].block_size
    if columns // number % block_size:
        problem = f"found {number}, slices of whole blocks of {block_size} are needed for {ggml_type}"
        raise LookupArgumentError(f"{subject}: num_slices: {problem}")
    return number
