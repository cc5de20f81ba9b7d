"""EagerLookup: lookups in one table as Python calls them, with as little Python as can be.

    first of its kind    arguments checked, kernels planned, compiled and launched by `ftw.kernels`
    all like it          the cached launch, with new ids and a new output
    ids of a tracer      `ftw::lookup`, which a tracer sees as one step

On which way it goes no row depends. Whatever the table alone settles is settled when this is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ftw.errors import LookupArgumentError, printable
from ftw.kernels import (
    LOOKUP,
    PACKED_LOOKUP,
    LaunchCache,
    LookupOptions,
    check_dense,
    is_dense,
    make_out,
    prefers_distinct,
)
from ftw.lookup.lookup_op import compiled_lookup, is_traced

if TYPE_CHECKING:
    from collections.abc import Hashable

    from ftw.lookup.row_format import RowFormat
    from ftw.lookup.table_storage import TableStorage

_ALIGNMENT = 16  # what Triton compiles addresses apart by; units of rows are no wider


class EagerLookup:
    """Looks rows of a table up; call it."""

    def __init__(self, storage: TableStorage, row_format: RowFormat) -> None:
        """Take a table out of its storage, which is not kept, as it keeps this."""
        self._name = printable(storage.name)
        self._handle = storage.handle
        self._table = storage.table
        self._format = row_format
        self._hot_rows = storage.hot_rows
        self._whole = 0, row_format.columns
        self._is_on_host = self._table.device.type == "cpu"
        self._is_direct = row_format.dtype == row_format.row_dtype  # no conversion is left for torch
        self._cache = LaunchCache()
        self._operation = LOOKUP if row_format.ggml_type is None else PACKED_LOOKUP
        self._options = LookupOptions(
            row_format.first_id,
            scale=row_format.scale,
            ggml_type=row_format.ggml_type or "",
            dtype=row_format.row_dtype,
        )

    def __call__(
        self, ids: torch.Tensor, columns: tuple[int, int] | None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return rows as `ftw.lookup.embedding.HostEmbedding.forward` does, of all columns or of `(start, length)`.

        Raises:
            LookupArgumentError: `ids` or `out` are not allowed.
        """
        if not isinstance(ids, torch.Tensor):
            raise LookupArgumentError(f"{self._name}: ids: found a {type(ids).__name__}, a tensor is needed")
        row_format = self._format
        if columns == self._whole:
            columns = None  # the whole row, for which the kernels are simpler
        target = out if self._is_direct else None
        key = self._key(ids, columns, target) if ids.is_cuda else None
        cached = None if key is None else self._cache.find(key)
        if cached is not None:
            width = row_format.columns if columns is None else columns[1]
            rows = make_out(self._name, ids, width, row_format.row_dtype, target)
            cached.launch(ids.data_ptr(), rows.data_ptr())
        elif is_dense(ids) and (ids.is_meta or is_traced(ids)):
            return compiled_lookup(self._name, ids, self._handle, columns or self._whole, row_format.dtype, out)
        else:
            rows = self._first(key, ids, columns, target)
        if self._is_direct:
            return rows
        return make_out(self._name, ids, rows.shape[-1], row_format.dtype, out).copy_(rows)

    def _key(self, ids: torch.Tensor, columns: tuple[int, int] | None, out: torch.Tensor | None) -> Hashable:
        """Return what a launch for these depends on; None if this lookup cannot be cached."""
        if is_traced(ids) or not is_dense(ids):
            return None
        count, device = ids.numel(), ids.get_device()
        if self._is_distinct(count) or not ids.is_contiguous() or device != torch._C._cuda_getDevice():
            return None  # ids on a GPU have initialised CUDA, which torch.cuda.current_device would ask for again
        out_offset = 0 if out is None else out.data_ptr() % _ALIGNMENT  # torch's own memory is aligned
        return count, columns, ids.data_ptr() % _ALIGNMENT, out_offset, ids.dtype, device

    def _first(
        self, key: Hashable, ids: torch.Tensor, columns: tuple[int, int] | None, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Look up with all checks, then keep the launch if there is a key for it."""
        check_dense(self._name, ids)
        is_cuda, hot_rows = ids.is_cuda, self._hot_rows
        if hot_rows is not None and hot_rows.device != ids.device:
            hot_rows = None
        options = self._options._replace(
            columns=columns,
            hot=hot_rows.hot if hot_rows is not None and is_cuda else None,
            is_distinct=is_cuda and self._is_distinct(ids.numel()),
        )
        rows, launches = self._operation.run(self._table, ids, out, options, self._cache.launcher)
        if hot_rows is not None and not is_cuda:
            hot_rows.count(ids, options.first_id)
        if key is not None and launches:
            self._cache.keep(key, launches[0], ids, rows)
        return rows

    def _is_distinct(self, count: int) -> bool:
        """Whether so many ids are fetched distinctly: by shape alone, so that a captured graph stays right."""
        row_nbytes = self._format.columns * self._format.row_dtype.itemsize
        return self._is_on_host and prefers_distinct(
            count, num_rows=self._table.shape[0], out_nbytes=count * row_nbytes, has_hot=self._hot_rows is not None
        )
