"""The checksums of a tensor that an index records, taken while its bytes pass.

xxh3_64   of every tensor: tells of accidents; whoever wants to makes other bytes of the same checksum
sha256    where it is asked for, or the source records it: nobody can do that with this one
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

import xxhash

if TYPE_CHECKING:
    from ftw.conversion.writing.shard_plan import ShardPlan
    from ftw.tensors import TensorInfo


class Checksums(NamedTuple):
    """What an index records of a tensor's bytes, in hexadecimal; `sha256` is None where it is not wanted."""

    xxh3_64: str
    sha256: str | None = None

    def find_difference(self, tensor: TensorInfo) -> str:
        """Return how these differ from those that a source records of its tensor; "" if they do not."""
        if tensor.xxh3_64 not in (None, self.xxh3_64):
            return f"checksum of what was read is {self.xxh3_64}, its index says {tensor.xxh3_64}"
        if tensor.sha256 not in (None, self.sha256):
            return f"SHA-256 of what was read is {self.sha256}, its index says {tensor.sha256}"
        return ""


class TensorHasher:
    """Takes the checksums of the tensors of a plan, one after another."""

    def __init__(self, shard_plan: ShardPlan) -> None:
        self._shard_plan = shard_plan
        self._xxh3 = xxhash.xxh3_64()
        self._sha256 = hashlib.sha256()

    def update(self, tensor: TensorInfo, view: memoryview) -> None:
        """Take the next bytes of a tensor."""
        self._xxh3.update(view)
        if self._shard_plan.wants_sha256(tensor):
            self._sha256.update(view)

    def end(self, tensor: TensorInfo) -> Checksums:
        """Return the checksums of a tensor whose bytes have all been taken, and begin the next one."""
        found = Checksums(self._xxh3.hexdigest())
        self._xxh3.reset()
        if self._shard_plan.wants_sha256(tensor):
            found = found._replace(sha256=self._sha256.hexdigest())
            self._sha256 = hashlib.sha256()
        return found
