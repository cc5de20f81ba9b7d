"""TableLayout: what a table's rows are and what a lookup makes of them; checked once, so that no lookup has to.

table     rows that follow each other, of ids first_id, first_id + 1, …; then padding that is never read
row       columns elements, or num_slices slices of slice_columns elements, one for each layer
values    looked up in row_dtype, multiplied by scale there, then converted to dtype
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ftw.errors import LookupArgumentError
from ftw.ggml_types import ggml_types_by_name
from ftw.kernels.arguments import check_scale
from ftw.kernels.packed_lookup import OUT_DTYPES, packed_columns

_MAX_ID = torch.iinfo(torch.int64).max


class TableLayout(NamedTuple):
    """A table's shape and types; see the module's table."""

    first_id: int
    rows: int
    columns: int
    dtype: torch.dtype
    row_dtype: torch.dtype
    ggml_type: str | None
    scale: float | None
    num_slices: int | None

    def columns_of(self, name: str, layer: int | None) -> tuple[int, int]:
        """Return `(start, length)` of a layer's columns; of the whole row where `layer` is None.

        Raises:
            LookupArgumentError: There is no such layer.
        """
        if layer is None:
            return 0, self.columns
        if self.num_slices is None:
            raise LookupArgumentError(f"{name}: layer: found {layer!r}, but rows have no slices; num_slices is needed")
        if not isinstance(layer, int) or not 0 <= layer < self.num_slices:
            raise LookupArgumentError(f"{name}: layer: found {layer!r}, allowed are 0 to {self.num_slices - 1}")
        width = self.columns // self.num_slices
        return layer * width, width


def make_layout(
    name: str,
    table: torch.Tensor,
    dtype: torch.dtype | None,
    ggml_type: str | None,
    vocab_range: tuple[int, int] | None,
    scale: float | None,
    num_slices: int | None,
) -> TableLayout:
    """Return the layout of a table; the arguments are those of `ftw.embedding.HostEmbedding`.

    Raises:
        LookupArgumentError: One of them is not allowed, or does not fit the table.
    """
    if table.ndim != 2:
        raise LookupArgumentError(f"{name}: table: found {list(table.shape)}, [rows, columns] is needed")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise LookupArgumentError(f"{name}: dtype: found {dtype!r}, a floating-point dtype of torch is needed")
    if vocab_range is not None:
        _check_vocab_range(name, table, vocab_range)
    first_id, rows = vocab_range or (0, int(table.shape[0]))
    if ggml_type is None:
        columns, row_dtype = int(table.shape[1]), table.dtype
        dtype = dtype or row_dtype
    else:
        columns = packed_columns(table, ggml_type)
        dtype = dtype or torch.bfloat16
        row_dtype = dtype if dtype in OUT_DTYPES else torch.float32
    if scale is not None:
        scale = _check_scale(name, scale, row_dtype)
    if num_slices is not None:
        _check_slices(name, columns, ggml_type, num_slices)
    return TableLayout(first_id, rows, columns, dtype, row_dtype, ggml_type, scale, num_slices)


def _check_vocab_range(name: str, table: torch.Tensor, vocab_range: tuple[int, int]) -> None:
    start, length = vocab_range
    if not (0 <= start <= _MAX_ID - length and 0 <= length <= table.shape[0]):
        allowed = f"(start, length) of ids from 0 on, and of at most the table's {table.shape[0]} rows, is needed"
        raise LookupArgumentError(f"{name}: vocab_range: found {vocab_range}, {allowed}")


def _check_scale(name: str, scale: float, row_dtype: torch.dtype) -> float:
    if not isinstance(scale, (int, float)) or isinstance(scale, bool):
        raise LookupArgumentError(f"{name}: scale: found {scale!r}, a number is needed")
    check_scale(name, scale, row_dtype)
    return float(scale)


def _check_slices(name: str, columns: int, ggml_type: str | None, num_slices: int) -> None:
    if not isinstance(num_slices, int) or isinstance(num_slices, bool) or num_slices < 1:
        raise LookupArgumentError(f"{name}: num_slices: found {num_slices!r}, a number from 1 on is needed")
    if columns % num_slices:
        problem = f"found {num_slices}, rows of {columns} columns cannot be cut into that many equal slices"
        raise LookupArgumentError(f"{name}: num_slices: {problem}")
    block_size = 1 if ggml_type is None else ggml_types_by_name()[ggml_type].block_size
    if columns // num_slices % block_size:
        problem = f"found {num_slices}, slices of whole blocks of {block_size} are needed for {ggml_type}"
        raise LookupArgumentError(f"{name}: num_slices: {problem}")
