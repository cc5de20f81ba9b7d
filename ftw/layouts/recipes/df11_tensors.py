"""DF11 of FreeToken's layout: a BF16 matrix of n numbers as four tensors, made range by range.

    low8         U8 [n]            sign << 7 | mantissa
    bitstream    I32 [words]       Huffman codes of the exponents, chunk after chunk, and two words of zeros
    chunk_start  I32 or I64 [G]    the bit at which each chunk's codes begin
    lut          I32 [4096]        `df11_code`

The exponents are counted once, when the tensors are planned (`df11_plan`): that says how long the stream is, and where
in it each band of chunks begins. To make a range, the bands that it touches are coded again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ftw.errors import CheckpointError
from ftw.layouts.recipes.dense_tensor import DenseTensor
from ftw.layouts.recipes.df11_code import MAX_BITS, Packer
from ftw.layouts.recipes.df11_plan import iter_symbols, read_numbers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftw.layouts.recipes.df11_code import Words
    from ftw.layouts.recipes.df11_plan import Df11Plan
    from ftw.layouts.recipes.recipe import Read, Recipe

_STEP = 2 << 20  # numbers that are read at a time where they lie together
_MAX_I32 = 2**31 - 1


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
        for start in range(0, len(view), _STEP):
            stop = min(start + _STEP, len(view))
            pairs = read_numbers(self.inner, offset + start, offset + stop, read).view(np.uint8).reshape(-1, 2)
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
                for part in iter_symbols(self.inner, chunks, band, read)
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
        for symbols in iter_symbols(self.inner, self.plan.chunks, band, read):
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
