"""Df11Plan: how a matrix's numbers are shared out among the chunks of FreeToken's DF11, and how long their codes are.

A table of rows has a chunk for each row. Any other matrix has G = ceil(n / 256) chunks, chunk j with the numbers
j, j + G, j + 2G … Chunks that follow each other make a band, 8 MiB of the matrix, of which the exponents are coded
at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ftw.errors import CheckpointError
from ftw.layouts.recipes.dense_tensor import FLOATS, cast_to
from ftw.layouts.recipes.df11_code import NUM_SYMBOLS, ExponentCode
from ftw.layouts.recipes.recipe import read_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TypeAlias

    from numpy.typing import NDArray

    from ftw.layouts.recipes.dense_tensor import DenseTensor
    from ftw.layouts.recipes.df11_code import Bytes, Integers
    from ftw.layouts.recipes.recipe import Read, Recipe

    Numbers: TypeAlias = NDArray[np.uint16]

_CHUNK = 256  # numbers of an interleaved chunk, at most
_BAND = 4 << 20  # numbers of a band of chunks
_CODED_AT_ONCE = 1 << 16  # numbers: what is made of them stays in a cache of the processor
_STEP = 2 << 20  # numbers that are counted at a time
_PADDING_WORDS = 2


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
    for start in range(0, chunks.size, _STEP):
        stop = min(start + _STEP, chunks.size)
        exponents = _exponents(read_numbers(inner, start, stop, read))
        for band, first, last in chunks.iter_runs(start, stop):
            counts[band] += np.bincount(exponents[first - start : last - start], minlength=NUM_SYMBOLS)
    code = ExponentCode(counts.sum(axis=0))
    ends = np.cumsum(counts @ code.lengths.astype(np.int64))
    return Df11Plan(chunks, code, np.append(0, ends))


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


def iter_symbols(inner: Recipe, chunks: Chunks, band: int, read: Read) -> Iterator[Bytes]:
    """Yield the exponents of a band's chunks, those of some chunks at a time.

    They are `[chunks, numbers]` of a table of rows, else `[numbers, chunks]`; there the last chunks may be one number
    shorter than the others.
    """
    first, last = band * chunks.band, min((band + 1) * chunks.band, chunks.num_chunks)
    step = max(_CODED_AT_ONCE // chunks.longest, 1)
    if chunks.is_by_row:
        for start in range(first, last, step):
            stop = min(start + step, last)
            numbers = read_numbers(inner, start * chunks.longest, stop * chunks.longest, read)
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
            row[: stop - start] = _exponents(read_numbers(inner, start, stop, read))
    return across


def read_numbers(inner: Recipe, first: int, last: int, read: Read) -> Numbers:
    """Return BF16 numbers of a matrix as little-endian integers."""
    return read_bytes(inner, 2 * first, 2 * (last - first), read).view("<u2")


def _exponents(numbers: Numbers) -> Bytes:
    return (numbers >> 7).astype(np.uint8)  # the sign is cut off
