"""The operator `ftw::lookup`: a lookup that a compiler sees as one opaque step.

    ftw::lookup(Tensor ids, str handle, SymInt first_column, SymInt columns, ScalarType dtype)
        -> Tensor [ids.shape, columns]

The table is no input of it: of a page-locked tensor among its inputs inductor would make a copy, and no CUDA graph. The
operator takes the handle of a live table instead. Which handles are live is state of the whole process, as torch's
own table of operators is. The rows depend on nothing but ids and table, so it may be dropped or done once for two; the
counts of hot rows then miss those lookups, and no row is different for it.

    chosen by the caller    the same in each process, so compiled code may be stored and loaded elsewhere
    none chosen             "#", a number, and the table's name: for this process alone

Columns may be symbols, so one graph serves all layers. The handle is a constant: each table compiles the frame that it
is looked up in once more, and torch takes 8 such (`torch._dynamo.config.recompile_limit`). An exported program would
carry it to where it is another table's, so export is refused.

It is for compiled code, and for ids that a tracer works with: in eager mode the way through torch's dispatcher costs
33 µs a call where the kernel itself costs 9 (H200, 2026-11-29), and eager calls go straight.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ftw.errors import ClosedError, LookupArgumentError, printable
from ftw.kernels import make_out

if TYPE_CHECKING:
    from collections.abc import Callable

_count_modes = torch._C._len_torch_dispatch_stack
_find_transform = torch._C._functorch.peek_interpreter_stack
_is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)


class LooksUp(Protocol):
    """What the operator needs of a table: `ftw.lookup.table_storage.TableStorage`."""

    name: str

    @property
    def is_closed(self) -> bool:
        """Whether its memory has been given back."""

    def look_up(self, ids: torch.Tensor, columns: tuple[int, int]) -> torch.Tensor:
        """Return these columns, `(start, length)`, of the rows of `ids`."""


_OWN = "#"  # begins the handles that nobody has chosen
_live: weakref.WeakValueDictionary[str, LooksUp] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def register(table: LooksUp, handle: str | None = None) -> str:
    """Return the handle by which the operator finds a table for as long as that one lives.

    One that was chosen for a table that is closed may be chosen again.

    Raises:
        LookupArgumentError: The one that was chosen is not allowed, or another table has it.
    """
    if handle is None:
        handle = f"{_OWN}{next(_numbers)} {table.name}"
    elif not isinstance(handle, str) or not handle or handle.startswith(_OWN):
        problem = f"found {handle!r}, a text that does not begin with {_OWN!r} is needed"
        raise LookupArgumentError(f"{printable(table.name)}: handle: {problem}")
    elif is_taken(handle):
        problem = f"found {handle!r}, which another table has; close that one first, or choose another handle"
        raise LookupArgumentError(f"{printable(table.name)}: handle: {problem}")
    _live[handle] = table
    return handle


def is_taken(handle: str) -> bool:
    """Whether a table of this process that is not closed has a handle."""
    table = _live.get(handle)
    return table is not None and not table.is_closed


def is_traced(ids: torch.Tensor) -> bool:
    """Whether ids are no numbers to be read now: fake ones, or those that a tracer or a transform works with."""
    return (
        (type(ids) is not torch.Tensor and type(ids).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__)
        or _count_modes() > 0
        or _find_transform() is not None
    )


def compiled_lookup(
    name: str,
    ids: torch.Tensor,
    handle: str,
    columns: tuple[int, int],
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Look columns, `(start, length)`, of rows up by the operator, which is what compilers and tracers see.

    Raises:
        LookupArgumentError: It is to be exported, or `out` is not what the rows need.
    """
    rows: torch.Tensor = torch.ops.ftw.lookup(ids, handle, *columns, dtype)
    return rows if out is None else make_out(printable(name), ids, columns[1], dtype, out).copy_(rows)


def _lookup(ids: torch.Tensor, handle: str, first_column: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    table = _live.get(handle)
    if table is None:
        problem = "is not in this process, where compiled code looks rows up in it; load it first, under this handle"
        raise ClosedError(f"{printable(handle)}: table: {problem}")
    rows = table.look_up(ids, (first_column, columns))
    if rows.dtype != dtype:
        problem = f"found {dtype}, lookups in this table give {rows.dtype}"
        raise LookupArgumentError(f"{printable(handle)}: dtype: {problem}")
    return rows


def _fake_lookup(
    ids: torch.Tensor,
    handle: str,
    first_column: int,  # noqa: ARG001
    columns: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    if _is_exporting():  # asked here, where nothing is traced: torch 2.11 says yes to whom it compiles
        name = printable(_live[handle].name if handle in _live else handle)
        problem = "found torch.export, which cannot take the table along; torch.compile is what lookups go with"
        raise LookupArgumentError(f"{name}: export: {problem}")
    return ids.new_empty((*ids.shape, columns), dtype=dtype)


def _map_lookup(
    info: Any,  # noqa: ARG001
    in_dims: tuple[int | None, ...],
    ids: torch.Tensor,
    *arguments: Any,
) -> tuple[torch.Tensor, int]:
    ids = ids.movedim(in_dims[0] or 0, 0)  # never None: of the arguments only the ids are mapped
    return torch.ops.ftw.lookup(ids, *arguments), 0


torch.library.define(
    "ftw::lookup",
    "(Tensor ids, str handle, SymInt first_column, SymInt columns, ScalarType dtype) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.impl("ftw::lookup", ("cpu", "cuda"), _lookup)
torch.library.register_fake("ftw::lookup", _fake_lookup)
torch.library.register_vmap("ftw::lookup", _map_lookup)
