"""Tensor equality: do two tensors of checkpoints have the same bytes? Reads as few of them as the answer takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftw.checkpoint import Checkpoint

_FIRST_CHUNK_NBYTES = 64 << 10  # two tensors that differ mostly differ here
_CHUNK_NBYTES = 4 << 20  # of each, and a copy of it
_NUM_SAMPLES = 16  # of as many bytes, that are compared of tensors on the hub


def equal_tensors(checkpoint: Checkpoint, name: str, other: Checkpoint, other_name: str) -> bool:
    """Tell whether two tensors have the same type, shape and bytes; reads both up to the first chunk that differs.

    Of large tensors on the hub, only the first 64 KiB and 16 samples of as much are compared: two weights of a model
    that are not copies differ there.
    """
    left, right = checkpoint.find_tensor(name), other.find_tensor(other_name)
    if not left.is_alike(right):
        return False
    if left.xxh3_64 and right.xxh3_64 and left.xxh3_64 != right.xxh3_64:
        return False
    first = min(_FIRST_CHUNK_NBYTES, left.nbytes)
    heads = [bytearray(first), bytearray(first)]
    checkpoint.read_into(name, heads[0])
    other.read_into(other_name, heads[1])
    if heads[0] != heads[1]:
        return False
    if (checkpoint.is_remote or other.is_remote) and left.nbytes > (_NUM_SAMPLES + 1) * _FIRST_CHUNK_NBYTES:
        return _equal_samples(checkpoint, name, other, other_name)
    pairs = zip(checkpoint.iter_chunks(name, _CHUNK_NBYTES), other.iter_chunks(other_name, _CHUNK_NBYTES), strict=True)
    return all(bytes(mine) == bytes(theirs) for mine, theirs in pairs)


def _equal_samples(checkpoint: Checkpoint, name: str, other: Checkpoint, other_name: str) -> bool:
    """Compare samples that are spread evenly, the last of them at the end."""
    from concurrent.futures import ThreadPoolExecutor

    last = checkpoint.find_tensor(name).nbytes - _FIRST_CHUNK_NBYTES

    def is_equal_at(offset: int) -> bool:
        samples = [bytearray(_FIRST_CHUNK_NBYTES), bytearray(_FIRST_CHUNK_NBYTES)]
        checkpoint.read_into(name, samples[0], offset=offset)
        other.read_into(other_name, samples[1], offset=offset)
        return samples[0] == samples[1]

    with ThreadPoolExecutor(_NUM_SAMPLES) as pool:
        return all(pool.map(is_equal_at, [last * number // _NUM_SAMPLES for number in range(1, _NUM_SAMPLES + 1)]))
