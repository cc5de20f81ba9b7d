"""HostEmbedding: a lookup table that stays where it is, in host memory, while its rows are read from the GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from ftw.errors import ClosedError, LookupArgumentError
from ftw.kernels.lookup import lookup
from ftw.kernels.packed_lookup import OUT_DTYPES, packed_columns, packed_lookup

if TYPE_CHECKING:
    from ftw.memory import MemoryReport
    from ftw.pinned import PinnedBuffer

_MAX_ID = torch.iinfo(torch.int64).max


class HostEmbedding(nn.Module):
    """Looks up rows of a table in host memory, or, with `placement` "gpu", of one on the device.

    The table is neither a parameter nor a buffer: moving, casting or saving a surrounding module leaves it alone.

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

        Raises:
            LookupArgumentError: The table is no matrix, `dtype` no floating-point type of torch, or the table does not
                hold whole blocks of `ggml_type`, or there is no such type, or `vocab_range` is longer than the table.
        """
        super().__init__()
        if table.ndim != 2:
            raise LookupArgumentError(f"{name}: table: found {list(table.shape)}, [rows, columns] is needed")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise LookupArgumentError(f"{name}: dtype: found {dtype!r}, a floating-point dtype of torch is needed")
        if vocab_range is not None:
            _check_vocab_range(name, table, vocab_range)
            table = table[: vocab_range[1]]
        self.name = name
        self.memory: MemoryReport | None = None
        self.placement = placement
        self.ggml_type = ggml_type
        self._table: torch.Tensor | None = table
        self._dtype = dtype or (table.dtype if ggml_type is None else torch.bfloat16)
        self._buffer = buffer
        columns = int(table.shape[1]) if ggml_type is None else packed_columns(table, ggml_type)
        self._shape = (int(table.shape[0]), columns)
        self._first_id = vocab_range[0] if vocab_range is not None else 0

    @property
    def num_embeddings(self) -> int:
        """Rows of the table; of a shard those of its ids, without padding."""
        return self._shape[0]

    @property
    def vocab_range(self) -> tuple[int, int]:
        """`(start, length)`: the table holds the rows of the ids start to start + length - 1."""
        return self._first_id, self._shape[0]

    @property
    def embedding_dim(self) -> int:
        """Elements of one row."""
        return self._shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Type of the values that a lookup returns."""
        return self._dtype

    @property
    def table(self) -> torch.Tensor:
        """The table itself, as it was given, not a copy; of a shard without its padding. Do not use it after the close.

        Raises:
            ClosedError: The memory has been given back.
        """
        if self._table is None:
            raise ClosedError(f"{self.name}: table: its memory has been given back")
        return self._table

    @property
    def pinned_nbytes(self) -> int:
        """Page-locked bytes: the table's, rounded up to whole pages; 0 on a CPU-only machine."""
        return self._buffer.pinned_nbytes if self._buffer is not None else 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of `ids`: `ids.shape + (embedding_dim,)`, on the ids' device, on its current stream.

        Args:
            ids: int32 or int64, of any shape, on the GPU or the CPU. An id outside the table gives a row of zeros.

        Raises:
            LookupArgumentError: The ids have another dtype, or lie on a device that the table is not on.
            ClosedError: The memory has been given back.
        """
        if self.ggml_type is None:
            rows = lookup(self.table, ids, first_id=self._first_id)
        else:
            decoded = self._dtype if self._dtype in OUT_DTYPES else torch.float32
            rows = packed_lookup(self.table, ids, self.ggml_type, dtype=decoded, first_id=self._first_id)
        return rows if rows.dtype == self._dtype else rows.to(self._dtype)

    def close(self) -> None:
        """Give the memory back, once the device has finished. A CUDA graph that reads it must not run any more."""
        self._table = None
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            buffer.close()

    def extra_repr(self) -> str:
        """Describe the table for `repr`."""
        packed = f", ggml_type={self.ggml_type!r}" if self.ggml_type else ""
        packed += f", vocab_range={self.vocab_range}" if self._first_id else ""
        return f"{self.num_embeddings}, {self.embedding_dim}, dtype={self._dtype}, placement={self.placement!r}{packed}"


def _check_vocab_range(name: str, table: torch.Tensor, vocab_range: tuple[int, int]) -> None:
    start, length = vocab_range
    if not (0 <= start <= _MAX_ID - length and 0 <= length <= table.shape[0]):
        allowed = f"(start, length) of ids from 0 on, and of at most the table's {table.shape[0]} rows, is needed"
        raise LookupArgumentError(f"{name}: vocab_range: found {vocab_range}, {allowed}")
