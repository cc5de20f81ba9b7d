"""HostEmbedding: a lookup table that stays where it is, in host memory, while its rows are read from the GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ftw.errors import printable
from ftw.lookup.hot_rows import check_hot_ids, count_slots, make_hot_rows
from ftw.lookup.lookup_op import compiled_lookup
from ftw.lookup.prefetch import Prefetch, PrefetchQueue
from ftw.lookup.row_format import make_row_format
from ftw.lookup.table_storage import TableStorage
from ftw.lookup.warm_up import INDEX_DTYPES, warm_up_lookups
from ftw.pinned import resolve_device

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from ftw.kernels import HotRowBuffers
    from ftw.pinned import MemoryReport, PinnedBuffer


class HostEmbedding(nn.Module):
    """Looks up rows of a table in host memory, or, with `placement` "gpu", of one on the device.

    The table is neither a parameter nor a buffer: moving, casting or saving a surrounding module leaves it alone.
    Copies of the module, those by `copy.deepcopy` too, share the table, its memory and its hot rows: closing one closes
    all. It cannot be pickled. Rows need no gradient.

    `torch.compile` sees a lookup as one step, `ftw::lookup`, which takes part in CUDA graphs; `ftw.lookup.lookup_op`
    says how. So do other tracers, `torch.vmap`, and fake and meta ids. `torch.export` is refused.

    Attributes:
        name: The table's tensor.
        memory: What putting the table there cost; None where that was not measured, or stands in `LoadedModel.memory`.
        placement: "host" or "gpu".
        ggml_type: The GGUF type of packed rows, such as "Q4_0"; None for a plain table.
    """

    def __init__(
        self,
        table: torch.Tensor,
        *,
        name: str = "table",
        dtype: torch.dtype | None = None,
        buffer: PinnedBuffer | None = None,
        placement: str = "host",
        ggml_type: str | None = None,
        vocab_range: tuple[int, int] | None = None,
        hot_rows: int | None = None,
        hot_bytes: int | str | None = None,
        scale: float | None = None,
        num_slices: int | None = None,
        device: torch.device | str | None = None,
        handle: str | None = None,
    ) -> None:
        """Wrap a table.

        Args:
            table: `[rows, columns]`, contiguous; on the device, or in host memory that the device can read. Of packed
                rows uint8 `[rows, row_bytes]`.
            name: For messages.
            dtype: Of the rows that a lookup returns; None for the table's own, of a packed one bfloat16. Converted as
                torch converts; packed rows are decoded in float32 first, and rounded once.
            buffer: The memory that the table lies in; this module then owns it.
            placement: "gpu" for a table among the device's weights; it is what `placement` tells.
            ggml_type: The GGUF type of packed rows, a key of `ftw.ggml_types.PACKED_TYPES`; None for a plain table.
            vocab_range: `(start, length)` of a shard of the vocabulary: the table's first `length` rows are those of
                the ids start to start + length - 1, what follows is padding that is never read, and every other id
                gives a row of zeros, so that the sum over all shards is the whole table's. None for ids from 0 on.
            hot_rows: For how many rows there is room in device memory, at most all; None or 0 for none. Which ones
                `set_hot_rows` says, or `update_hot_rows` learns. Each row of the table costs 8 bytes there besides.
                Lookups on a CPU read the table itself and only count.
            hot_bytes: The same as the size of that room, in bytes or as text such as "64MiB".
            scale: Multiplies rows, as the models do that have one: a plain table's in its own dtype, before they are
                converted to `dtype`, a packed one's once they are decoded to that. The scale is rounded to the same
                type, and the product once more.
            num_slices: Cuts rows for `layer`.
            device: Where the hot rows live; None for the current GPU where the table is page-locked, else the CPU.
            handle: By which compiled code finds the table. Choose one, the same in each process, if such code is stored
                on disk; None for one that is right in this process alone. No two tables that are open may have one.

        Raises:
            LookupArgumentError: The table is no contiguous matrix, `dtype` no floating-point type of torch, or the
                table does not hold whole blocks of `ggml_type`, or there is no such type, or `vocab_range` is longer
                than the table; or its rows cannot be scaled or cut as is asked for, or it shall have hot rows and is
                on the device; or `handle` is not allowed, or another table has it.
            DeviceError: torch has no such device.
        """
        super().__init__()
        self._reader = None if device is None else resolve_device(device)
        row_format = make_row_format(name, table, dtype, ggml_type, vocab_range, scale, num_slices)
        table = table if vocab_range is None else table[: row_format.rows]
        num_slots = count_slots(name, table, hot_rows, hot_bytes)
        hot = make_hot_rows(name, table, num_slots, device) if num_slots else None
        self.name = name
        self.memory: MemoryReport | None = None
        self.placement = placement
        self.ggml_type = ggml_type
        self._format = row_format
        self._storage = TableStorage(
            name, table, row_format, buffer, hot, is_hot_asked=num_slots is not None, handle=handle
        )
        self._prefetches = PrefetchQueue(name, self._storage.side_streams)

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            advice = "table is the tensor; keep it on the GPU for a model that reads its weight"
            raise AttributeError(f"{printable(self.name)}: weight: a table in host memory has none, {advice}")
        return super().__getattr__(name)

    @property
    def num_embeddings(self) -> int:
        """Rows of the table; of a shard those of its ids, without padding."""
        return self._format.rows

    @property
    def vocab_range(self) -> tuple[int, int]:
        """`(start, length)`: the table holds the rows of the ids start to start + length - 1."""
        return self._format.first_id, self._format.rows

    @property
    def embedding_dim(self) -> int:
        """Elements of one whole row."""
        return self._format.columns

    @property
    def dtype(self) -> torch.dtype:
        """Type of the values that a lookup returns."""
        return self._format.dtype

    @property
    def scale(self) -> float | None:
        """What rows are multiplied by; None for nothing."""
        return self._format.scale

    @property
    def num_slices(self) -> int | None:
        """Into how many slices of equal width a row is cut, one for each layer; None for rows that are not."""
        return self._format.num_slices

    @property
    def table(self) -> torch.Tensor:
        """The table itself, as it was given, not a copy; of a shard without its padding. Do not use it after the close.

        Raises:
            ClosedError: The memory has been given back.
        """
        return self._storage.table

    @property
    def pinned_nbytes(self) -> int:
        """Page-locked bytes: the table's, rounded up to whole pages; 0 on a CPU-only machine."""
        return self._storage.pinned_nbytes

    @property
    def handle(self) -> str:
        """By which compiled code finds the table."""
        return self._storage.handle

    @property
    def hot(self) -> HotRowBuffers | None:
        """The hot rows as the kernels take them: their slots, the rows, the counts; None without any, or closed."""
        hot_rows = self._storage.hot_rows
        return None if hot_rows is None else hot_rows.hot

    def forward(self, ids: torch.Tensor, *, layer: int | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the rows of `ids`: `ids.shape + (embedding_dim,)`, on the ids' device, on its current stream.

        Args:
            ids: int32 or int64, of any shape, on the GPU or the CPU. An id outside the table gives a row of zeros.
            layer: Of a row that is cut into `num_slices` this slice alone, `ids.shape + (embedding_dim / num_slices,)`.
            out: Contiguous, of that shape and the module's `dtype`, on the ids' device; filled and returned.

        Raises:
            LookupArgumentError: The ids have another dtype, or lie on a device that the table is not on; there is no
                such layer; `out` is not what the rows need; the lookup is to be exported.
            ClosedError: The memory has been given back.
        """
        columns = None if layer is None else self._format.columns_of(self.name, layer)
        if not torch.compiler.is_compiling():
            return self._storage.look_up(ids, columns, out)
        row_format = self._format
        columns = columns or (0, row_format.columns)
        return compiled_lookup(self.name, ids, self._storage.handle, columns, row_format.dtype, out)

    def warm_up(
        self,
        max_ids: int,
        *,
        dtypes: Sequence[torch.dtype] = INDEX_DTYPES,
        device: torch.device | str | None = None,
    ) -> None:
        """Compile all kernels that lookups of up to `max_ids` ids may run, captured or not, and the hot rows' own.

        Call it before serving: a kernel that is compiled later makes a request wait. The ids are outside of the table,
        so no row is read, and nothing counted or changed. On a CPU there is nothing to compile. Left out are those for
        an `out` at an address that is not a multiple of 16.

        Args:
            max_ids: The most ids of one lookup, such as the tokens of the largest batch.
            dtypes: Of the ids that will be looked up.
            device: Whose kernels; None for that of the table, or that it was made for, or the current GPU.

        Raises:
            LookupArgumentError: `max_ids` is no number from 1 on, or one of `dtypes` is not int32 or int64.
            DeviceError: torch has no such device.
            ClosedError: The memory has been given back.
        """
        where = self._reader_of(device)
        warm_up_lookups(self._storage, self._format, max_ids, dtypes, where)

    def refill(self) -> AbstractContextManager[torch.Tensor]:
        """Return a context that gives the table to be written: `with embedding.refill() as rows: rows.copy_(new)`.

        It begins when the device has finished all lookups, and ends when all is written. Lookups after it give the new
        rows, replays of CUDA graphs that were captured before among them; the same ids stay hot. No other thread may
        look up meanwhile. Rows of a shard's padding are not part of `rows`.

        Raises:
            LookupArgumentError: Other processes share the table (`share="node"`).
            ClosedError: The memory has been given back.
        """
        return self._storage.refill(self._reader)

    def set_hot_rows(self, ids: torch.Tensor | Sequence[int]) -> None:
        """Make the rows of these ids the hot ones, and no others; on the current stream, as `update_hot_rows`.

        Args:
            ids: Distinct ids of the table's rows, in one dimension, at most as many as there is room for.

        Raises:
            LookupArgumentError: They are not, or no hot rows were asked for.
            ClosedError: The memory has been given back.
        """
        hot_rows = self._storage.open_hot_rows()
        num_slots = 0 if hot_rows is None else hot_rows.num_slots
        numbers = check_hot_ids(self.name, ids, *self.vocab_range, num_slots)
        if hot_rows is not None:
            self._storage.side_streams.join()
            hot_rows.set(numbers)

    def update_hot_rows(self) -> None:
        """Make the rows that lookups have read most often the hot ones, then halve all counts.

        Call it between steps, on the stream of the lookups: what is queued there before sees the old set, what comes
        after the new one, replays of graphs captured before among them. Lookups on other streams are the caller's to
        order; prefetches of this module and its copies are ordered here. The host does not wait. Rows that are never
        looked up stay out, and a row leaves only where another one takes its place. Halving makes the set follow a
        stream that changes. Where there is room for no row there is nothing to do.

        Peak device memory: 12 bytes for each row of the table and 80 for each hot one, for the moment.

        Raises:
            LookupArgumentError: No hot rows were asked for.
            ClosedError: The memory has been given back.
        """
        hot_rows = self._storage.open_hot_rows()
        if hot_rows is not None:
            self._storage.side_streams.join()
            hot_rows.update()

    def hot_ids(self) -> torch.Tensor:
        """Return the ids whose rows are hot, in order: int64 on the CPU, as `set_hot_rows` takes them. The host waits.

        Raises:
            LookupArgumentError: No hot rows were asked for.
            ClosedError: The memory has been given back.
        """
        hot_rows = self._storage.open_hot_rows()
        if hot_rows is None:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        return hot_rows.row_numbers() + self._format.first_id

    def prefetch(self, ids: torch.Tensor, *, layer: int | None = None) -> Prefetch:
        """Start a lookup on a side stream; the rows come from the `wait` of what is returned, or from `wait` here.

        On a CPU it is done at once. It begins after what is queued on the current stream, and leaves `ids` alone until
        it is done, as the caller has to. In a CUDA graph, start it and wait for it in the same capture. Compiled code
        has its own order of lookups: do not prefetch there.

        Raises:
            LookupArgumentError: The ids, or the layer, are not allowed.
            ClosedError: The memory has been given back.
        """
        columns = None if layer is None else self._format.columns_of(self.name, layer)
        return self._prefetches.start(lambda ids: self._storage.look_up(ids, columns), ids)

    def wait(self) -> torch.Tensor:
        """Return the rows of the oldest prefetch that was not waited for; the current stream waits, the host does not.

        Raises:
            LookupArgumentError: There is none.
        """
        return self._prefetches.wait()

    def drop_prefetches(self) -> None:
        """Forget the prefetches that nobody has waited for, as after a step that failed before its `wait`.

        The next `wait` would return the rows of the oldest of them. In a CUDA graph they have to be waited for.
        """
        self._prefetches.drop()

    def _reader_of(self, device: torch.device | str | None) -> torch.device:
        """Return the device whose kernels read the table."""
        if device is not None:
            return resolve_device(device)
        if self._storage.table.is_cuda:
            return self._storage.table.device
        if self._reader is not None:
            return self._reader
        return resolve_device(None if torch.cuda.is_available() and self._storage.table.is_pinned() else "cpu")

    def close(self) -> None:
        """Give the memory back, once the device has finished.

        No other thread may be looking up, and a CUDA graph that reads the table must not run any more.
        """
        self._storage.close()

    def extra_repr(self) -> str:
        """Describe the table for `repr`."""
        packed = f", ggml_type={self.ggml_type!r}" if self.ggml_type else ""
        packed += f", vocab_range={self.vocab_range}" if self._format.first_id else ""
        return f"{self.num_embeddings}, {self.embedding_dim}, dtype={self.dtype}, placement={self.placement!r}{packed}"
