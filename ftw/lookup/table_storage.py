"""TableStorage: a table, the memory that it lies in, and its hot rows, which a module and its copies share.

Closed once, it is closed for all of them. A copy of it is the same object, so no table is ever copied; it cannot be
pickled.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ftw.errors import ClosedError, LookupArgumentError, printable
from ftw.lookup.eager_lookup import EagerLookup
from ftw.lookup.lookup_op import register
from ftw.lookup.prefetch import SideStreams

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftw.lookup.hot_rows import HotRows
    from ftw.lookup.row_format import RowFormat
    from ftw.pinned import PinnedBuffer


class TableStorage:
    """A table until its close.

    Attributes:
        name: The table's tensor.
        hot_rows: Those of its rows that lie in device memory; None where there are none, and after the close.
        side_streams: Where prefetches read it.
        handle: By which `ftw::lookup` finds the table.
    """

    def __init__(
        self,
        name: str,
        table: torch.Tensor,
        row_format: RowFormat,
        buffer: PinnedBuffer | None = None,
        hot_rows: HotRows | None = None,
        *,
        is_hot_asked: bool = False,
        handle: str | None = None,
    ) -> None:
        """Hold a table; `is_hot_asked` where it shall have hot rows, though there may be room for none.

        Raises:
            LookupArgumentError: The handle that was chosen is not allowed, or another table has it.
        """
        self.name = name
        self.hot_rows = hot_rows
        self.side_streams = SideStreams()
        self.handle = register(self, handle)
        self._is_hot_asked = is_hot_asked
        self._table: torch.Tensor | None = table
        self._lookup: EagerLookup | None = EagerLookup(self, row_format)
        self._buffer = buffer

    @property
    def table(self) -> torch.Tensor:
        """The table: `[rows, columns]`, or of packed rows uint8 `[rows, row_bytes]`.

        Raises:
            ClosedError: The memory has been given back.
        """
        if self._table is None:
            raise self._closed()
        return self._table

    @property
    def is_closed(self) -> bool:
        """Whether the memory has been given back."""
        return self._table is None

    @property
    def pinned_nbytes(self) -> int:
        """Page-locked bytes; 0 on a CPU-only machine and after the close."""
        return self._buffer.pinned_nbytes if self._buffer is not None else 0

    def look_up(
        self, ids: torch.Tensor, columns: tuple[int, int] | None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return rows as `ftw.lookup.embedding.HostEmbedding.forward` does, of all columns or of `(start, length)`.

        Raises:
            LookupArgumentError: `ids` or `out` are not allowed.
            ClosedError: The memory has been given back.
        """
        lookup = self._lookup
        if lookup is None:
            raise self._closed()
        return lookup(ids, columns, out)

    def open_hot_rows(self) -> HotRows | None:
        """Return the hot rows; None where they were asked for, but there is room for none.

        Raises:
            LookupArgumentError: They were not asked for.
            ClosedError: The memory has been given back.
        """
        if self._table is None:
            raise self._closed()
        if not self._is_hot_asked:
            problem = "hot rows: there are none, make the module with hot_rows or hot_bytes"
            raise LookupArgumentError(f"{printable(self.name)}: {problem}")
        return self.hot_rows

    @contextlib.contextmanager
    def refill(self, reader: torch.device | None) -> Iterator[torch.Tensor]:
        """Hand the table out to be written, as `ftw.lookup.embedding.HostEmbedding.refill` does.

        Raises:
            LookupArgumentError: Other processes share the table.
            ClosedError: The memory has been given back.
        """
        table, hot_rows = self.table, self.hot_rows
        if self._buffer is not None and self._buffer.is_shared:
            problem = "is shared by the processes of this host, whose hot rows would keep the old rows; load it anew"
            raise LookupArgumentError(f"{printable(self.name)}: table: {problem}")
        self.side_streams.join()
        numbers = None
        if hot_rows is not None:
            numbers = hot_rows.row_numbers()
            hot_rows.set(numbers[:0])
        _synchronize(table, reader)  # no kernel reads the table while it is written
        try:
            yield table
        finally:
            _synchronize(table, reader)  # what a device has written is there
            if hot_rows is not None and numbers is not None:
                hot_rows.set(numbers)

    def close(self) -> None:
        """Give the memory back, once the device has finished; the second time there is nothing to do."""
        self._table = self._lookup = None
        hot_rows, self.hot_rows = self.hot_rows, None
        buffer, self._buffer = self._buffer, None
        try:
            if hot_rows is not None:
                hot_rows.synchronize()  # lookups on other streams than the rows were made on may still read them
        finally:
            if buffer is not None:
                buffer.close()

    def _closed(self) -> ClosedError:
        return ClosedError(f"{printable(self.name)}: table: its memory has been given back")

    def __deepcopy__(self, memo: dict[int, Any]) -> TableStorage:
        return self

    def __reduce__(self) -> NoReturn:
        what = f"{printable(self.name)}: table: is memory of this process, which cannot be pickled"
        raise TypeError(f"{what}; save the state dict of its model instead")


def _synchronize(table: torch.Tensor, reader: torch.device | None) -> None:
    """Wait for the device that reads a table; there is none to wait for if CUDA was never used."""
    device = table.device if table.is_cuda else reader
    if torch.cuda.is_initialized() and (device is None or device.type == "cuda"):
        torch.cuda.synchronize(device)
