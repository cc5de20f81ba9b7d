"""EagerLookup: lookups in one table as Python calls them, with as little Python as can be.

    first of its kind    arguments checked, kernels planned, compiled and launched by `ftw.kernels`
    all like it          the kept launch, with new ids and a new output
    ids of a tracer      `ftw::lookup`, which a tracer sees as one step

On which way it goes no row depends. Whatever the table alone settles is settled when this is made.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ftw.errors import LookupArgumentError, printable
from ftw.kernels import LaunchCache, check_dense, check_scale, is_dense, make_out, prefers_distinct
from ftw.kernels import lookup as plain
from ftw.kernels import packed_lookup as packed
from ftw.lookup.lookup_op import compiled_lookup, is_traced

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from ftw.kernels import Launch
    from ftw.lookup.hot_rows import HotRows
    from ftw.lookup.row_format import RowFormat

_ALIGNMENT = 16  # what Triton compiles addresses apart by; units of rows are no wider


class EagerLookup:
    """Looks rows of a table up; call it."""

    def __init__(
        self, name: str, table: torch.Tensor, row_format: RowFormat, hot_rows: HotRows | None, handle: int
    ) -> None:
        """Take a table whose number for `ftw::lookup` is `handle`."""
        self._name = printable(name)
        self._handle = handle
        self._table = table
        self._layout = row_format
        self._hot_rows = hot_rows
        self._hot = None if hot_rows is None else hot_rows.hot
        self._hot_device = None if hot_rows is None else hot_rows.device
        self._whole = 0, row_format.columns
        self._is_on_host = table.device.type == "cpu"
        self._is_direct = row_format.dtype == row_format.row_dtype  # no conversion is left for torch
        self._kept = LaunchCache()
        # Plans take it rounded, as the wrappers round it.
        scale = None if row_format.scale is None else check_scale(self._name, row_format.scale, row_format.row_dtype)
        self._look_up: Callable[..., torch.Tensor]
        self._plan: Callable[..., Launch]
        if row_format.ggml_type is None:
            self._look_up = partial(plain.lookup, first_id=row_format.first_id, scale=row_format.scale)
            self._plan = partial(plain.plan_launch, first_id=row_format.first_id, scale=scale)
        else:
            of_type: dict[str, Any] = {"ggml_type": row_format.ggml_type, "first_id": row_format.first_id}
            self._look_up = partial(packed.packed_lookup, dtype=row_format.row_dtype, scale=row_format.scale, **of_type)
            self._plan = partial(packed.plan_launch, scale=scale, **of_type)

    def __call__(
        self, ids: torch.Tensor, columns: tuple[int, int] | None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return rows as `ftw.lookup.embedding.HostEmbedding.forward` does, of all columns or of `(start, length)`.

        Raises:
            LookupArgumentError: `ids` or `out` are not allowed.
        """
        if not isinstance(ids, torch.Tensor):
            raise LookupArgumentError(f"{self._name}: ids: found a {type(ids).__name__}, a tensor is needed")
        row_format = self._layout
        if columns == self._whole:
            columns = None  # the whole row, for which the kernels are simpler
        target = out if self._is_direct else None
        key = self._key(ids, columns, target) if ids.is_cuda else None
        kept = None if key is None else self._kept.find(key)
        if kept is not None:
            width = row_format.columns if columns is None else columns[1]
            rows = make_out(self._name, ids, width, row_format.row_dtype, target)
            kept.launch(ids.data_ptr(), rows.data_ptr())
        elif is_dense(ids) and (ids.is_meta or is_traced(ids)):
            return compiled_lookup(self._name, ids, self._handle, columns or self._whole, row_format.dtype, out)
        else:
            rows = self._first(key, ids, columns, target)
        if self._is_direct:
            return rows
        return make_out(self._name, ids, rows.shape[-1], row_format.dtype, out).copy_(rows)

    def _key(self, ids: torch.Tensor, columns: tuple[int, int] | None, out: torch.Tensor | None) -> Hashable:
        """Return what a launch for these depends on; None where it is not one launch that can be kept."""
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
        """Look up with all checks, then keep the launch where there is a key for it."""
        check_dense(self._name, ids)
        hot = self._hot if self._hot_device == ids.device and ids.is_cuda else None
        rows = self._look_up(
            self._table,
            ids,
            columns=columns,
            hot=hot,
            is_distinct=ids.is_cuda and self._is_distinct(ids.numel()),
            out=out,
            launcher=self._kept.launcher,
        )
        if self._hot_rows is not None and self._hot_device == ids.device and not ids.is_cuda:
            self._hot_rows.count(ids, self._layout.first_id)
        if key is not None and rows.numel() and self._table.shape[0]:
            self._kept.keep(key, self._plan(self._table, ids, rows, columns=columns, hot=hot), ids, rows)
        return rows

    def _is_distinct(self, count: int) -> bool:
        """Whether so many ids are fetched distinctly: by shape alone, so that a captured graph stays right."""
        row_nbytes = self._layout.columns * self._layout.row_dtype.itemsize
        return self._is_on_host and prefers_distinct(
            count, num_rows=self._table.shape[0], out_nbytes=count * row_nbytes, has_hot=self._hot is not None
        )
