"""ShardedEmbedding: a lookup table whose rows are spread over the ranks of a torch.distributed group.

`ftw.loading.table_rows` tells which rank holds which rows. Each looks its own ids up and has zeros for all others; the
sum over the ranks is the whole rows. It is taken of the rows' bits, as integers: there x + 0 is x in every bit, where
floating point would make +0.0 of -0.0 and could change a NaN. The integers are int32 where a row is a multiple of 4
bytes, uint8 otherwise: NCCL and gloo add both, and neither adds int16.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ftw.errors import LookupArgumentError, printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

    from ftw.kernels import HotRowBuffers
    from ftw.lookup.embedding import HostEmbedding
    from ftw.lookup.prefetch import Prefetch
    from ftw.pinned import MemoryReport

_UNIT_NBYTES = 4  # of the integers that are added, where rows consist of whole ones


class ShardedEmbedding(nn.Module):
    """Looks up rows of which each rank of a group holds its own, in a `HostEmbedding`.

    Every rank has to call it with the same ids, in the same order of calls. It can be captured in a CUDA graph with
    NCCL, once the group has communicated on that device, as it has after `ftw.load`.

    Attributes:
        shard: This rank's rows; alone it gives zeros for the ids of other ranks.
        group: The ranks.
        num_embeddings: Rows of all ranks together.
    """

    def __init__(self, shard: HostEmbedding, num_embeddings: int, group: ProcessGroup) -> None:
        super().__init__()
        self.shard = shard
        self.num_embeddings = num_embeddings
        self.group = group

    @property
    def name(self) -> str:
        """The table's tensor."""
        return self.shard.name

    @property
    def embedding_dim(self) -> int:
        """Elements of one row."""
        return self.shard.embedding_dim

    @property
    def vocab_range(self) -> tuple[int, int]:
        """`(start, length)`: this rank holds the rows of the ids start to start + length - 1."""
        return self.shard.vocab_range

    @property
    def dtype(self) -> torch.dtype:
        """Type of the values that a lookup returns."""
        return self.shard.dtype

    @property
    def ggml_type(self) -> str | None:
        """The GGUF type of packed rows; None for a plain table."""
        return self.shard.ggml_type

    @property
    def placement(self) -> str:
        """Where the rows are: "host"."""
        return self.shard.placement

    @property
    def memory(self) -> MemoryReport | None:
        """None; what loading cost stands in `LoadedModel.memory`."""
        return self.shard.memory

    @property
    def table(self) -> torch.Tensor:
        """This rank's rows. Do not use it after the close.

        Raises:
            ClosedError: The memory has been given back.
        """
        return self.shard.table

    @property
    def pinned_nbytes(self) -> int:
        """Bytes that this rank has page-locked for its rows."""
        return self.shard.pinned_nbytes

    @property
    def num_slices(self) -> int | None:
        """Into how many slices, one for each layer, a row is cut; None for rows that are looked up whole."""
        return self.shard.num_slices

    @property
    def scale(self) -> float | None:
        """What rows are multiplied by; None for nothing."""
        return self.shard.scale

    @property
    def hot(self) -> HotRowBuffers | None:
        """This rank's hot rows, as `HostEmbedding.hot`."""
        return self.shard.hot

    def forward(self, ids: torch.Tensor, *, layer: int | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the rows of `ids` on every rank; arguments and errors are those of `HostEmbedding.forward`.

        `out` besides is at an address that is a multiple of 4 where the bytes of a row are.
        """
        if out is not None and not torch.compiler.is_compiling():
            self._check_out(out)
        return self.reduce(self.shard(ids, layer=layer, out=out))

    def set_hot_rows(self, ids: torch.Tensor | Sequence[int]) -> None:
        """Make the rows of these ids, all of them this rank's, its hot ones, as `HostEmbedding.set_hot_rows` does.

        Raises:
            LookupArgumentError: They are not this rank's, or not distinct or too many, or none were asked for.
            ClosedError: The memory has been given back.
        """
        self.shard.set_hot_rows(ids)

    def update_hot_rows(self) -> None:
        """Make this rank's rows that are read most its hot ones; it needs no other rank, and may have no room.

        Raises:
            LookupArgumentError: No hot rows were asked for.
            ClosedError: The memory has been given back.
        """
        self.shard.update_hot_rows()

    def hot_ids(self) -> torch.Tensor:
        """Return the ids whose rows are hot on this rank, as `HostEmbedding.hot_ids` does.

        Raises:
            LookupArgumentError: No hot rows were asked for.
            ClosedError: The memory has been given back.
        """
        return self.shard.hot_ids()

    def prefetch(self, ids: torch.Tensor, *, layer: int | None = None) -> ShardedPrefetch:
        """Start a lookup of this rank's rows on a side stream, as `HostEmbedding.prefetch` does.

        Ranks communicate in the `wait` alone, which they have to call in the same order.
        """
        return ShardedPrefetch(self, self.shard.prefetch(ids, layer=layer))

    def wait(self) -> torch.Tensor:
        """Return the rows of the oldest prefetch that was not waited for.

        Raises:
            LookupArgumentError: There is none.
        """
        return self.reduce(self.shard.wait())

    def drop_prefetches(self) -> None:
        """Forget the prefetches that nobody has waited for; all ranks have to."""
        self.shard.drop_prefetches()

    def reduce(self, rows: torch.Tensor) -> torch.Tensor:
        """Make whole rows, in place, of those that each rank's `shard` has given for the same ids; return them.

        Args:
            rows: Contiguous, `[..., columns]`, of the same shape and dtype on all ranks; at an address that is a
                multiple of 4 where the bytes of a row are.
        """
        if rows.numel() and self.group.size() > 1:
            row_nbytes = rows.shape[-1] * rows.element_size()
            bits = rows.view(torch.uint8 if row_nbytes % _UNIT_NBYTES else torch.int32)
            dist.all_reduce(bits, group=self.group)
        return rows

    def _check_out(self, out: torch.Tensor) -> None:
        """Check what `reduce` needs before any rank waits for the others in it."""
        if not out.ndim or out.shape[-1] * out.element_size() % _UNIT_NBYTES:
            return
        offset = out.storage_offset() * out.element_size()
        if out.data_ptr() % _UNIT_NBYTES or offset % _UNIT_NBYTES:
            problem = f"found address {out.data_ptr()}, {offset} bytes into its storage"
            raise LookupArgumentError(f"{printable(self.name)}: out: {problem}, a multiple of {_UNIT_NBYTES} is needed")

    def close(self) -> None:
        """Give this rank's memory back, once the device has finished; a CUDA graph that reads it must have ended."""
        self.shard.close()

    def extra_repr(self) -> str:
        """Describe the whole table for `repr`."""
        return f"{self.num_embeddings}, {self.embedding_dim}, rank={self.group.rank()}, size={self.group.size()}"

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedEmbedding:
        return ShardedEmbedding(copy.deepcopy(self.shard, memo), self.num_embeddings, self.group)


class ShardedPrefetch(NamedTuple):
    """A prefetch of a `ShardedEmbedding`."""

    embedding: ShardedEmbedding
    own: Prefetch

    def wait(self) -> torch.Tensor:
        """Make the current stream wait for this rank's rows, and return the sum over all ranks.

        Raises:
            LookupArgumentError: They have been waited for already.
        """
        return self.embedding.reduce(self.own.wait())
