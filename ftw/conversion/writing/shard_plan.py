"""ShardPlan: where the tensors of an FTW lie in its region, which shards cut the region, in which chunks it is written.

region   tensors one after another, each at a multiple of 4096, zeros up to the next one
shard    a part of the region that is one file
chunk    bytes of one shard that go through memory at once, with the part of each tensor in it
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ftw.readers import ALIGNMENT, SHARD_NAME
from ftw.sizes import align_up

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ftw.tensors import TensorInfo

DEFAULT_SHARD_LIMIT = 8 << 30


class Shard(NamedTuple):
    """One file of the region; `offset` is where it begins in the region."""

    name: str
    offset: int
    nbytes: int


class ChunkPart(NamedTuple):
    """`nbytes` bytes of a tensor from its byte `offset` on; in the chunk they begin at its byte `start`."""

    tensor: TensorInfo
    offset: int
    start: int
    nbytes: int

    @property
    def is_last(self) -> bool:
        """Whether the tensor ends with it."""
        return self.offset + self.nbytes == self.tensor.nbytes


class Chunk(NamedTuple):
    """Whole blocks of one shard, `nbytes` from its byte `offset` on; what no part covers is zero."""

    shard: int
    offset: int
    nbytes: int
    parts: tuple[ChunkPart, ...]


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """Where everything goes: tensors with their offsets in the region, and the shards that cut it.

    With `has_sha256` the index gets the SHA-256 of each tensor, otherwise of those alone whose source records it.
    """

    tensors: tuple[TensorInfo, ...]
    shards: tuple[Shard, ...]
    shard_limit: int
    has_sha256: bool = False

    @property
    def total_bytes(self) -> int:
        """Length of the region, padding included."""
        return sum(shard.nbytes for shard in self.shards)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, padding left out."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def wants_sha256(self, tensor: TensorInfo) -> bool:
        """Tell whether the index gets a tensor's SHA-256."""
        return self.has_sha256 or tensor.sha256 is not None

    def start_of(self, number: int) -> int:
        """Return where a tensor begins in the region; of the number after the last, where the region ends."""
        return self.tensors[number].offset if number < len(self.tensors) else self.total_bytes

    def nbytes_before(self, number: int) -> int:
        """Return the bytes of the tensors before one, padding left out."""
        return sum(tensor.nbytes for tensor in self.tensors[:number])


class _Cut(NamedTuple):
    """How bytes follow those of the last shard.

    Attributes:
        is_new: Whether they begin a new shard.
        num_full: Shards that are full then and that another follows.
        held: What the last one holds then.
    """

    is_new: bool
    num_full: int
    held: int


def count_shards(tensors: Iterable[TensorInfo], shard_limit: int) -> int:
    """Return how many shards `plan_shards` would plan, without planning one: a sparse file may need 2^50."""
    count, held = 0, 0
    for tensor in tensors:
        is_new, num_full, held = _cut(held, align_up(tensor.nbytes, ALIGNMENT), shard_limit)
        count += is_new + num_full
    return count + bool(held)


def plan_shards(
    tensors: Iterable[TensorInfo], shard_limit: int = DEFAULT_SHARD_LIMIT, *, has_sha256: bool = False
) -> ShardPlan:
    """Place tensors one after another, each at a multiple of 4096.

    A tensor that fits into a shard is never split: if it does not fit into the rest of the current one, that shard
    stays shorter. A larger tensor begins where the region ends and spans as many shards as it needs.

    Args:
        tensors: In the order in which they are to lie.
        shard_limit: The most bytes of one shard, a multiple of 4096.
        has_sha256: Record the SHA-256 of each tensor.
    """
    placed: list[TensorInfo] = []
    lengths: list[int] = [0]
    offset = 0
    for tensor in tensors:
        padded = align_up(tensor.nbytes, ALIGNMENT)
        is_new, num_full, held = _cut(lengths[-1], padded, shard_limit)
        if is_new:
            lengths.append(0)
        lengths[-1:] = [*[shard_limit] * num_full, held]
        placed.append(tensor._replace(offset=offset, shard=""))
        offset += padded
    shards: list[Shard] = []
    start = 0
    for number, nbytes in enumerate(lengths if offset else ()):
        shards.append(Shard(SHARD_NAME.format(number), start, nbytes))
        start += nbytes
    return ShardPlan(tuple(placed), tuple(shards), shard_limit, has_sha256)


def _cut(held: int, nbytes: int, shard_limit: int) -> _Cut:
    is_new = held > 0 and held + nbytes > shard_limit >= nbytes
    total = nbytes + (0 if is_new else held)
    num_full = max(total - 1, 0) // shard_limit  # one that is just full is the last one
    return _Cut(is_new, num_full, total - num_full * shard_limit)


def iter_write_chunks(shard_plan: ShardPlan, chunk_nbytes: int, first: int = 0) -> Iterator[Chunk]:
    """Yield the region in order, from the tensor with the number `first` on, in chunks of at most `chunk_nbytes`.

    Tensors without bytes that nothing follows come last, in a chunk without bytes.
    """
    position, number, done = shard_plan.start_of(first), first, 0
    for shard_number, shard in enumerate(shard_plan.shards):
        end = shard.offset + shard.nbytes
        while position < end:
            limit = min(position + chunk_nbytes, end)
            parts: list[ChunkPart] = []
            place = position
            while place < limit and number < len(shard_plan.tensors):
                tensor = shard_plan.tensors[number]
                nbytes = min(tensor.nbytes - done, limit - place)
                parts.append(ChunkPart(tensor, done, place - position, nbytes))
                place, done = align_up(place + nbytes, ALIGNMENT), done + nbytes
                if parts[-1].is_last:
                    number, done = number + 1, 0
            yield Chunk(shard_number, position - shard.offset, limit - position, tuple(parts))
            position = limit
    if number < len(shard_plan.tensors):
        yield Chunk(0, 0, 0, tuple(ChunkPart(tensor, 0, 0, 0) for tensor in shard_plan.tensors[number:]))
