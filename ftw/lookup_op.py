"""The operator `ftw::lookup`: a lookup that a compiler sees as one opaque step.

    ftw::lookup(Tensor ids, int handle, int first_column, int columns, ScalarType dtype) -> Tensor [ids.shape, columns]

The table is no input of it: of a page-locked tensor among its inputs inductor would make a copy, and no CUDA graph. The
operator takes the number of a live table instead. Which numbers are live is state of the whole process, as torch's
own table of operators is. The rows depend on nothing but ids and table, so it may be dropped or done once for two; the
counts of hot rows then miss those lookups, and no row is different for it.

It is for compiled code alone: in eager mode the way through torch's dispatcher costs 33 µs a call where the kernel
itself costs 9 (H200, 2026-11-29), and eager calls go straight.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Protocol

import torch

from ftw.errors import ClosedError


class LooksUp(Protocol):
    """What the operator needs of a table: `ftw.held_table.HeldTable`."""

    def look_up(self, ids: torch.Tensor, columns: tuple[int, int]) -> torch.Tensor:
        """Return these columns, `(start, length)`, of the rows of `ids`."""


_live: weakref.WeakValueDictionary[int, LooksUp] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def register(table: LooksUp) -> int:
    """Return the handle by which the operator finds a table for as long as that one lives."""
    handle = next(_numbers)
    _live[handle] = table
    return handle


def compiled_lookup(
    ids: torch.Tensor, handle: int, first_column: int, columns: int, dtype: torch.dtype
) -> torch.Tensor:
    """Look rows up by the operator, which is what compilers trace."""
    rows: torch.Tensor = torch.ops.ftw.lookup(ids, handle, first_column, columns, dtype)
    return rows


def _lookup(
    ids: torch.Tensor,
    handle: int,
    first_column: int,
    columns: int,
    dtype: torch.dtype,  # noqa: ARG001
) -> torch.Tensor:
    table = _live.get(handle)
    if table is None:
        raise ClosedError(f"table {handle}: is gone, compiled code that looks rows up in it must not outlive it")
    return table.look_up(ids, (first_column, columns))


def _fake_lookup(
    ids: torch.Tensor,
    handle: int,  # noqa: ARG001
    first_column: int,  # noqa: ARG001
    columns: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    return ids.new_empty((*ids.shape, columns), dtype=dtype)


torch.library.define(
    "ftw::lookup",
    "(Tensor ids, int handle, int first_column, int columns, ScalarType dtype) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.impl("ftw::lookup", ("cpu", "cuda"), _lookup)
torch.library.register_fake("ftw::lookup", _fake_lookup)
