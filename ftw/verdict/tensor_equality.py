"""TensorEquality: do two tensors of a checkpoint have the same bytes? However many are compared, each is read twice.

Two tensors that differ mostly do so in their first 64 KiB, of which a digest is kept. What is alike there is compared
up to the first chunk that differs, the first time; a tensor that is compared again is read once more, whole, for a
digest that is kept too. So the work grows with the tensors, not with their pairs. Of a sparse file they may have any
size, so from a size on that no model has, they are compared by samples.

Two matrices of different float types are compared as a loader would cast them, up to the first values that differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from ftw.checkpoint import Checkpoint
    from ftw.tensors import TensorInfo

_FIRST_CHUNK_NBYTES = 64 << 10  # two tensors that differ mostly differ here
_CHUNK_NBYTES = 4 << 20  # of each, and a copy of it
_NUM_SAMPLES = 16  # of as many bytes as the first chunk, where tensors are not compared whole
_MAX_CAST = 64  # pairs of different types; a model has one, a hostile checkpoint thousands
_CAST = {"F32": 4, "BF16": 2, "F16": 2}  # types that a loader casts to one another, and their bytes
_MAX_NBYTES = 64 << 30  # that are compared whole, of all tensors of a checkpoint; the largest pair of a model has 5 GiB


class TensorEquality:
    """Compares tensors of one checkpoint, and remembers digests of those that it has read."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._first: dict[str, bytes] = {}
        self._whole: dict[tuple[str, bool], bytes] = {}  # by the name, and whether of samples
        self._compared: set[str] = set()
        self._nbytes_left = _MAX_NBYTES
        self._num_cast = 0

    def is_equal(self, name: str, other_name: str) -> bool:
        """Return whether two tensors have the same type, shape and bytes.

        Of large tensors on the hub, and of those beyond 64 GiB of one checkpoint, only the first 64 KiB and 16 samples
        of as much are compared: two weights of a model that are not copies differ there.
        """
        left, right = self._checkpoint.find_tensor(name), self._checkpoint.find_tensor(other_name)
        if not left.is_alike(right):
            return False
        if left.xxh3_64 and right.xxh3_64 and left.xxh3_64 != right.xxh3_64:
            return False
        if self._digest_of_first(name) != self._digest_of_first(other_name):
            return False
        if left.nbytes <= _FIRST_CHUNK_NBYTES:
            return True
        is_known = not self._compared.isdisjoint((name, other_name))
        self._compared.update((name, other_name))
        is_sampled = self._is_sampled(left.nbytes)
        if is_known or is_sampled:
            return self._digest(name, is_sampled=is_sampled) == self._digest(other_name, is_sampled=is_sampled)
        chunks = (self._checkpoint.iter_chunks(tensor, _CHUNK_NBYTES) for tensor in (name, other_name))
        return all(bytes(mine) == bytes(theirs) for mine, theirs in zip(*chunks, strict=True))

    def is_equal_as(self, dtype: str, name: str, other_name: str) -> bool:
        """Return whether two float matrices hold the same values once both are cast to `dtype`, as a loader does.

        Of large ones samples are compared, as by `is_equal`; after many pairs the first values alone, which then
        have to differ if the two do.
        """
        tensors = [self._checkpoint.find_tensor(one) for one in (name, other_name)]
        if tensors[0].shape != tensors[1].shape or not {dtype, *(one.dtype for one in tensors)} <= _CAST.keys():
            return False
        num_elements = tensors[0].nbytes // _CAST[tensors[0].dtype]
        count = _FIRST_CHUNK_NBYTES // max(_CAST.values())
        starts = list(range(0, num_elements, count))
        self._num_cast += 1
        if self._num_cast > _MAX_CAST:
            starts = starts[:1]
        if len(starts) > _NUM_SAMPLES and self._is_sampled(max(one.nbytes for one in tensors)):
            starts = [starts[len(starts) * number // _NUM_SAMPLES] for number in range(_NUM_SAMPLES)] + starts[-1:]
        return all(
            self._cast_elements(tensors[0], dtype, start, min(count, num_elements - start))
            == self._cast_elements(tensors[1], dtype, start, min(count, num_elements - start))
            for start in starts
        )

    def _cast_elements(self, tensor: TensorInfo, dtype: str, start: int, count: int) -> bytes:
        import numpy as np

        stored = bytearray(count * _CAST[tensor.dtype])
        self._checkpoint.read_into(tensor.name, stored, offset=start * _CAST[tensor.dtype])
        if tensor.dtype == dtype:
            return bytes(stored)
        if tensor.dtype == "BF16":
            floats = (np.frombuffer(stored, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            floats = np.frombuffer(stored, "<f2" if tensor.dtype == "F16" else "<f4").astype(np.float32)
        if dtype != "BF16":
            with np.errstate(over="ignore"):
                return floats.astype("<f2" if dtype == "F16" else "<f4").tobytes()
        bits = floats.view(np.uint32)  # to the nearest, ties to the even one
        return (bits + (0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes()

    def _is_sampled(self, nbytes: int) -> bool:
        """Return whether two tensors of a size are compared by samples; count them, if they are compared whole."""
        if nbytes <= (_NUM_SAMPLES + 1) * _FIRST_CHUNK_NBYTES:
            return False
        if self._checkpoint.is_remote or 2 * nbytes > self._nbytes_left:
            return True
        self._nbytes_left -= 2 * nbytes
        return False

    def _digest_of_first(self, name: str) -> bytes:
        if name not in self._first:
            first = bytearray(min(_FIRST_CHUNK_NBYTES, self._checkpoint.find_tensor(name).nbytes))
            self._checkpoint.read_into(name, first, offset=0)
            self._first[name] = xxhash.xxh3_128_digest(first)
        return self._first[name]

    def _digest(self, name: str, *, is_sampled: bool) -> bytes:
        if (name, is_sampled) not in self._whole:
            hasher = xxhash.xxh3_128()
            pieces = self._samples(name) if is_sampled else self._checkpoint.iter_chunks(name, _CHUNK_NBYTES)
            for piece in pieces:
                hasher.update(piece)
            self._whole[name, is_sampled] = hasher.digest()
        return self._whole[name, is_sampled]

    def _samples(self, name: str) -> list[bytearray]:
        """Read samples that are spread evenly, the last of them at the end."""
        from concurrent.futures import ThreadPoolExecutor

        last = self._checkpoint.find_tensor(name).nbytes - _FIRST_CHUNK_NBYTES

        def read_at(offset: int) -> bytearray:
            sample = bytearray(_FIRST_CHUNK_NBYTES)
            self._checkpoint.read_into(name, sample, offset=offset)
            return sample

        with ThreadPoolExecutor(_NUM_SAMPLES) as pool:
            offsets = [last * number // _NUM_SAMPLES for number in range(1, _NUM_SAMPLES + 1)]
            return list(pool.map(read_at, offsets))
