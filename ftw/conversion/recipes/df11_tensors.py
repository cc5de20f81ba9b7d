"""DF11 of FreeToken's layout: a BF16 matrix of n numbers as four tensors, made range by range.

    low8         U8 [n]            sign << 7 | mantissa
    bitstream    I32 [words]       Huffman codes of the exponents, chunk after chunk, and two words of zeros
    chunk_start  I32 or I64 [G]    the bit at which each chunk's codes begin
    lut          I32 [4096]        `df11_code`

A table of rows has a chunk for each row, and counts bits in 64 bits. Any other matrix has G = ceil(n / 256) chunks,
chunk j with the numbers j, j + G, j + 2G …

The exponents are counted once, when the tensors are planned: that says how long the stream is, and where in it each
band of chunks begins. To make a range, the bands that it touches are coded again, 8 MiB of the matrix at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ftw.conversion.recipes.dense_tensor import FLOATS, DenseTensor, cast_to
from ftw.conversion.recipes.df11_code import MAX_BITS, NUM_SYMBOLS, ExponentCode, Packer
from ftw.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftw.conversion.recipes.df11_code import Bytes, Integers, Words
    from ftw.conversion.recipes.recipe import Read, Recipe

_CHUNK = 256  # numbers of an interleaved chunk, at most
_BAND = 4 << 20  # numbers of a band of chunks
_PACKED_AT_ONCE = 1 << 16  # numbers: what is made of them stays in a cache of the processor
_STEP = 4 << 20  # bytes that are read at a time where they lie together
_PADDING_WORDS = 2
_MAX_I32 = 2**31 - 1


class Chunks(NamedTuple):
    """How the numbers of a matrix are shared out among chunks, and chunks among bands.

    Attributes:
        size: Numbers of the matrix.
        num_chunks: How many chunks there are.
        is_by_row: Whether a chunk's numbers lie together; otherwise they are `num_chunks` apart.
    """

    size: int
    num_chunks: int
    is_by_row: bool

    @property
    def longest(self) -> int:
        """Numbers of the longest chunk."""
        return -(-self.size // self.num_chunks)

    @property
    def band(self) -> int:
        """Chunks of a band."""
        return max(_BAND // self.longest, 1)

    @property
    def num_bands(self) -> int:
        """How many bands there are."""
        return -(-self.num_chunks // self.band)

    def iter_runs(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Yield the bands of the numbers `first` to `last`: a band, and its numbers that lie together."""
        row = self.longest * self.num_chunks if self.is_by_row else self.num_chunks
        width = self.band * (self.longest if self.is_by_row else 1)
        while first < last:
            column = first % row
            end = min(first - column + min((column // width + 1) * width, row), last)
            yield column // width, first, end
            first = end


class Df11Plan(NamedTuple):
    """What planning finds out about a matrix.

    Attributes:
        chunks: Its chunks.
        code: The code of its exponents.
        band_starts: The bit at which each band begins, and that at which the last one ends.
    """

    chunks: Chunks
    code: ExponentCode
    band_starts: Integers

    @property
    def num_words(self) -> int:
        """32-bit words of the stream."""
        return -(-int(self.band_starts[-1]) // 32) + _PADDING_WORDS


def plan_df11(inner: Recipe, chunks: Chunks, read: Read) -> Df11Plan:
    """Count the exponents of a matrix, which is read once."""
    counts = np.zeros((chunks.num_bands, NUM_SYMBOLS), np.int64)
    step = _STEP // 2
    for start in range(0, chunks.size, step):
        stop = min(start + step, chunks.size)
        exponents = _exponents(_read_numbers(inner, start, stop, read))
        for band, first, last in chunks.iter_runs(start, stop):
            counts[band] += np.bincount(exponents[first - start : last - start], minlength=NUM_SYMBOLS)
    code = ExponentCode(counts.sum(axis=0))
    ends = np.cumsum(counts @ code.lengths.astype(np.int64))
    return Df11Plan(chunks, code, np.append(0, ends))


@dataclass(frozen=True, slots=True)
class _Df11Recipe:
    """What the four recipes share: of which BF16 numbers they are made, and the plan."""

    inner: Recipe
    plan: Df11Plan

    def iter_sources(self) -> Iterator[str]:
        """Yield those of the matrix."""
        return self.inner.iter_sources()


@dataclass(frozen=True, slots=True)
class Low8(_Df11Recipe):
    """The signs and mantissas."""

    @property
    def nbytes(self) -> int:
        """One for each number."""
        return self.plan.chunks.size

    def read_into(self, view: memoryview, offset: int, read: Read) -> None:
        """Read numbers, take eight bits of each."""
        for start in range(0, len(view), _STEP // 2):
            stop = min(start + _STEP // 2, len(view))
            pairs = _read_numbers(self.inner, offset + start, offset + stop, read).view(np.uint8).reshape(-1, 2)
            view[start:stop] = (pairs[:, 0] & 0x7F | pairs[:, 1] & 0x80).data


@dataclass(frozen=True, slots=True)
class LookupTable(_Df11Recipe):
    """The lookup table."""

    @property
    def nbytes(self) -> int:
        """Four for each entry."""
        return 4 << MAX_BITS

    def read_into(self, view: memoryview, offset: int, read: Read) -> None:  # noqa: ARG002
        """Make all of it."""
        view[:] = self.plan.code.lookup_table().astype("<i4").view(np.uint8)[offset : offset + len(view)].data


@dataclass(frozen=True, slots=True)
class ChunkStarts(_Df11Recipe):
    """Where the chunks begin."""

    @property
    def width(self) -> int:
        """Bytes of one number."""
        return 8 if self.plan.chunks.is_by_row else 4

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return self.width * self.plan.chunks.num_chunks

    def read_into(self, view: memoryview, offset: int, read: Read) -> None:
        """Count the bits of each chunk of the bands that are touched."""
        chunks = self.plan.chunks
        end = offset + len(view)
        for band in range(offset // self.width // chunks.band, (end - 1) // self.width // chunks.band + 1):
            lengths = self.plan.code.lengths
            sizes = [
                np.add.reduce(lengths.take(part), axis=int(chunks.is_by_row), dtype=np.int64)
                for part in _iter_symbols(self.inner, chunks, band, read)
            ]
            starts = np.cumsum(np.append(self.plan.band_starts[band], np.concatenate(sizes)[:-1]))
            made = starts.astype(f"<i{self.width}").view(np.uint8)
            begin = band * chunks.band * self.width
            low, high = max(begin, offset), min(begin + len(made), end)
            view[low - offset : high - offset] = made[low - begin : high - begin].data


@dataclass(frozen=True, slots=True)
class BitStream(_Df11Recipe):
    """The codes."""

    @property
    def nbytes(self) -> int:
        """Four for each word."""
        return 4 * self.plan.num_words

    def read_into(self, view: memoryview, offset: int, read: Read) -> None:
        """Code the bands that are touched."""
        target = np.frombuffer(view, np.uint8)
        target[:] = 0
        first, last = offset // 8 * 64, -(-(offset + len(view)) // 8) * 64  # bits: bands may share a 64-bit word
        starts = self.plan.band_starts
        begin = max(int(np.searchsorted(starts, first, "right")) - 1, 0)
        for band in range(begin, min(int(np.searchsorted(starts, last, "left")), len(starts) - 1)):
            for place, words in self._iter_packed(band, read):
                made = words.astype(">u8").view(">u4").astype("<u4").view(np.uint8)
                low, high = max(place, offset), min(place + len(made), offset + len(view))
                if low < high:
                    target[low - offset : high - offset] |= made[low - place : high - place]

    def _iter_packed(self, band: int, read: Read) -> Iterator[tuple[int, Words]]:
        """Yield the bits of a band's chunks, some at a time: the byte at which their first word stands, and words."""
        packer = Packer(self.plan.code)
        bit = int(self.plan.band_starts[band])
        for symbols in _iter_symbols(self.inner, self.plan.chunks, band, read):
            is_by_row = self.plan.chunks.is_by_row
            groups = packer.group(symbols.reshape(-1) if is_by_row else symbols)
            words, num_bits = packer.place(groups if is_by_row else groups.T.reshape(-1), bit % 64)
            yield bit // 64 * 8, words
            bit += num_bits


def df11_tensors(source: str, tensor: DenseTensor, plan: Df11Plan, inner: Recipe) -> list[DenseTensor]:
    """Return the four tensors of a matrix, under the name of its module.

    Raises:
        CheckpointError: Its stream is longer than 32 bits can count, and it is no table of rows.
    """
    if not plan.chunks.is_by_row and plan.band_starts[-1] > _MAX_I32:
        problem = f"its exponents take {int(plan.band_starts[-1])} bits, FreeToken counts up to {_MAX_I32}"
        raise CheckpointError(source, tensor.origin, problem)
    starts = ChunkStarts(inner, plan)
    made: list[tuple[str, str, int, Recipe]] = [
        ("low8", "U8", plan.chunks.size, Low8(inner, plan)),
        ("bitstream", "I32", plan.num_words, BitStream(inner, plan)),
        ("chunk_start", "I64" if plan.chunks.is_by_row else "I32", plan.chunks.num_chunks, starts),
        ("lut", "I32", 1 << MAX_BITS, LookupTable(inner, plan)),
    ]
    return [
        DenseTensor(f"{tensor.module}.{role}", dtype, (size,), recipe, tensor.position)
        for role, dtype, size, recipe in made
    ]


def prepare_matrix(source: str, tensor: DenseTensor, *, is_by_row: bool) -> tuple[Recipe, Chunks]:
    """Return how the BF16 numbers of a matrix are made, and its chunks.

    Raises:
        CheckpointError: It is no matrix of plain numbers.
    """
    if tensor.dtype not in FLOATS or len(tensor.shape) != 2 or 0 in tensor.shape:
        found = f"is {tensor.dtype} {list(tensor.shape)}"
        problem = f"{found}; FreeToken stores it as DF11, which takes a matrix of BF16, F16 or F32"
        raise CheckpointError(source, tensor.origin, problem)
    rows, columns = tensor.shape
    count = rows * columns
    return cast_to(tensor, "BF16").recipe, Chunks(count, rows if is_by_row else -(-count // _CHUNK), is_by_row)


def _iter_symbols(inner: Recipe, chunks: Chunks, band: int, read: Read) -> Iterator[Bytes]:
    """Yield the exponents of a band's chunks, those of some chunks at a time.

    They are `[chunks, numbers]` of a table of rows, else `[numbers, chunks]`; there the last chunks may be one number
    shorter than the others.
    """
    first, last = band * chunks.band, min((band + 1) * chunks.band, chunks.num_chunks)
    step = max(_PACKED_AT_ONCE // chunks.longest, 1)
    if chunks.is_by_row:
        for start in range(first, last, step):
            stop = min(start + step, last)
            numbers = _read_numbers(inner, start * chunks.longest, stop * chunks.longest, read)
            yield _exponents(numbers).reshape(-1, chunks.longest)
        return
    across = _read_across(inner, chunks, first, last, read)
    num_long = min(max(chunks.size - (chunks.longest - 1) * chunks.num_chunks - first, 0), last - first)
    for low, high, length in ((0, num_long, chunks.longest), (num_long, last - first, chunks.longest - 1)):
        for start in range(low, high, step):
            yield across[:length, start : min(start + step, high)]


def _read_across(inner: Recipe, chunks: Chunks, first: int, last: int, read: Read) -> Bytes:
    """Return the exponents of interleaved chunks as `[numbers, chunks]`; what a shorter chunk lacks is undefined."""
    across = np.empty((chunks.longest, last - first), np.uint8)
    for number, row in enumerate(across):
        start = number * chunks.num_chunks + first
        stop = min(start + last - first, chunks.size)
        if start < stop:
            row[: stop - start] = _exponents(_read_numbers(inner, start, stop, read))
    return across


def _read_numbers(inner: Recipe, first: int, last: int, read: Read) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    """Return BF16 numbers of a matrix as little-endian integers."""
    stored = np.empty(2 * (last - first), np.uint8)
    inner.read_into(stored.data, 2 * first, read)
    return stored.view("<u2")


def _exponents(numbers: np.ndarray[tuple[int], np.dtype[np.uint16]]) -> Bytes:
    return (numbers >> 7).astype(np.uint8)  # the sign is cut off
