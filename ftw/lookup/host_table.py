"""HostTable: a table in host memory that is filled later, for engines that make parameters first and load them then.

allocate    HostTable(rows, columns, dtype=…)       nothing of it is touched or page-locked yet
hand out    table.rows                              what an engine's parameter is made of, and its loader fills
finish      embedding = table.finish()              page-locked where it is; the embedding owns the memory
refill      with embedding.refill() as rows: …      other weights in the same place, which captured graphs see
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftw.errors import ClosedError, LookupArgumentError, printable
from ftw.lookup.embedding import HostEmbedding
from ftw.pinned import PinnedBuffer, check_pin_budget, resolve_device, tensor_over
from ftw.sizes import parse_nbytes, whole_number

if TYPE_CHECKING:
    import torch


class HostTable:
    """A table in host memory, until `finish` makes the module of it that looks its rows up.

    Attributes:
        name: For messages.
        device: Whose kernels will read it.
        nbytes: Of the table.
    """

    def __init__(
        self,
        rows: int,
        columns: int,
        *,
        dtype: torch.dtype,
        name: str = "table",
        device: torch.device | str | None = None,
        max_pinned_bytes: int | str | None = None,
        huge_pages: bool = True,
    ) -> None:
        """Take the memory; its rows are zeros until they are filled.

        Args:
            rows: Of the table, or of this rank's shard of it, padding included.
            columns: Elements of a row.
            dtype: Of the table; rows are looked up in it.
            name: For messages.
            device: Whose kernels will read it; None for the current GPU, or the CPU on a machine without one.
            max_pinned_bytes: Page-locked bytes that it may bring this process to, as bytes or as a size such as "8GiB";
                None for what the host has available.
            huge_pages: Ask for pages of 2 MiB; on some kernels their allocation is slow.

        Raises:
            LookupArgumentError: `rows` or `columns` is no number from 0 on.
            PinError: Host memory does not take it, or `max_pinned_bytes` does not allow it.
            DeviceError: torch has no such device.
            ValueError: `max_pinned_bytes` is no size.
        """
        shape = whole_number(rows), whole_number(columns)
        if any(number is None or number < 0 for number in shape):
            problem = f"found {rows!r} rows and {columns!r} columns, numbers from 0 on are needed"
            raise LookupArgumentError(f"{printable(name)}: table: {problem}")
        self.name = name
        self.device = resolve_device(device)
        self.nbytes = rows * columns * dtype.itemsize
        check_pin_budget({name: self.nbytes}, "host table", parse_nbytes("max_pinned_bytes", max_pinned_bytes))
        buffer = PinnedBuffer(self.nbytes, name=name, device=self.device, huge_pages=huge_pages)
        self._buffer: PinnedBuffer | None = buffer
        self._rows = tensor_over(buffer.view(), dtype, (rows, columns))

    @property
    def rows(self) -> torch.Tensor:
        """The table, `[rows, columns]`, in host memory, to be filled; valid until `finish` or `close`.

        Raises:
            ClosedError: It is finished (`embedding.table` is the tensor, `embedding.refill()` writes it), or closed.
        """
        self._take()
        return self._rows

    def view(self) -> memoryview:
        """Return the same memory as bytes, for what reads files into it.

        Raises:
            ClosedError: It is finished, or closed.
        """
        return self._take().view()

    def finish(
        self,
        *,
        vocab_range: tuple[int, int] | None = None,
        hot_bytes: int | str | None = None,
        scale: float | None = None,
        handle: str | None = None,
    ) -> HostEmbedding:
        """Page-lock the table as it is, and return the module that looks rows up and owns the memory.

        If that fails the table stays as it is, and may be finished otherwise, or closed.

        Args:
            vocab_range: `(start, length)` of the ids of a shard, if lookups are given ids of the whole vocabulary; None
                for ids from 0 on, as engines give that make them local to a shard.
            hot_bytes: As in `HostEmbedding`.
            scale: As in `HostEmbedding`.
            handle: As in `HostEmbedding`.

        Raises:
            LookupArgumentError: An option is not allowed.
            PinError: The driver refused to page-lock it.
            ClosedError: It is finished, or closed.
        """
        buffer = self._take()
        buffer.pin(self.device)
        embedding = HostEmbedding(
            self._rows,
            name=self.name,
            buffer=buffer,
            vocab_range=vocab_range,
            hot_bytes=hot_bytes,
            scale=scale,
            device=self.device,
            handle=handle,
        )
        self._buffer = None
        self._rows = self._rows[:0]
        return embedding

    def close(self) -> None:
        """Give the memory back, unless it is finished; then the embedding's `close` does so."""
        buffer, self._buffer = self._buffer, None
        self._rows = self._rows[:0]
        if buffer is not None:
            buffer.close()

    def _take(self) -> PinnedBuffer:
        if self._buffer is None:
            raise ClosedError(
                f"{printable(self.name)}: table: is finished or closed, and cannot be filled here any more"
            )
        return self._buffer
