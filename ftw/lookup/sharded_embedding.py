"""ShardedEmbedding: a lookup table whose rows are spread over the ranks of a torch.distributed group.

`ftw.loading.table_rows` tells which rank holds which rows. Each looks its own ids up and has zeros for all others; the
sum over the ranks is the whole rows. It is taken of the rows' bits, as integers: there x + 0 is x in every bit, where
floating point would make +0.0 of -0.0 and could change a NaN. The integers are int32 where a row is a multiple of 4
bytes, uint8 otherwise: NCCL and gloo add both, and neither adds int16.
"""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ftw.errors import LookupArgumentError, printable
from ftw.lookup.embedding import HostEmbedding
from ftw.lookup.prefetch import PrefetchQueue

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_UNIT_NBYTES = 4  # of the integers that are added, where rows consist of whole ones


class ShardedEmbedding(HostEmbedding):
    """Looks up rows of which each rank of a group holds its own, in a `HostEmbedding`, with which it shares all.

    Every rank has to call it with the same ids, in the same order of calls. It can be captured in a CUDA graph with
    NCCL, once the group has communicated on that device, as it has after `ftw.load`. For a prefetch ranks communicate
    in the `wait` alone, which they have to call in the same order; and all of them drop prefetches, or none.

    The table, its page-locked bytes and its hot rows are this rank's own, and so is the close. Ids that
    `set_hot_rows` takes are this rank's; updating its hot rows needs no other rank.

    Attributes:
        group: The ranks.
    """

    def __init__(self, shard: HostEmbedding, num_embeddings: int, group: ProcessGroup) -> None:
        nn.Module.__init__(self)
        self.name, self.memory = shard.name, shard.memory
        self.placement, self.ggml_type = shard.placement, shard.ggml_type
        self.group = group
        self._num_embeddings = num_embeddings
        self._shard = (shard,)  # a tuple, so that it is no submodule
        self._format = shard._format
        self._reader = shard._reader
        self._storage = shard._storage
        finish = functools.partial(_add_up, group=group)
        self._prefetches = PrefetchQueue(shard.name, self._storage.side_streams, finish)

    @property
    def shard(self) -> HostEmbedding:
        """This rank's rows; alone it gives zeros for the ids of other ranks."""
        return self._shard[0]

    @property
    def num_embeddings(self) -> int:
        """Rows of all ranks together."""
        return self._num_embeddings

    def forward(self, ids: torch.Tensor, *, layer: int | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the rows of `ids` on every rank; arguments and errors are those of `HostEmbedding.forward`.

        `out` besides is at an address that is a multiple of 4 where the bytes of a row are.
        """
        if out is not None and not torch.compiler.is_compiling():
            self._check_out(out)
        return self.reduce(super().forward(ids, layer=layer, out=out))

    def reduce(self, rows: torch.Tensor) -> torch.Tensor:
        """Make whole rows, in place, of those that each rank's `shard` has given for the same ids; return them.

        Args:
            rows: Contiguous, `[..., columns]`, of the same shape and dtype on all ranks; at an address that is a
                multiple of 4 where the bytes of a row are.
        """
        return _add_up(rows, self.group)

    def extra_repr(self) -> str:
        """Describe the whole table for `repr`."""
        return f"{super().extra_repr()}, rank={self.group.rank()}, size={self.group.size()}"

    def _check_out(self, out: torch.Tensor) -> None:
        """Check what `reduce` needs before any rank waits for the others in it."""
        if not out.ndim or out.shape[-1] * out.element_size() % _UNIT_NBYTES:
            return
        offset = out.storage_offset() * out.element_size()
        if out.data_ptr() % _UNIT_NBYTES or offset % _UNIT_NBYTES:
            problem = f"found address {out.data_ptr()}, {offset} bytes into its storage"
            raise LookupArgumentError(f"{printable(self.name)}: out: {problem}, a multiple of {_UNIT_NBYTES} is needed")

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedEmbedding:
        return ShardedEmbedding(copy.deepcopy(self.shard, memo), self.num_embeddings, self.group)


def _add_up(rows: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    if rows.numel() and group.size() > 1:
        row_nbytes = rows.shape[-1] * rows.element_size()
        bits = rows.view(torch.uint8 if row_nbytes % _UNIT_NBYTES else torch.int32)
        dist.all_reduce(bits, group=group)
    return rows
