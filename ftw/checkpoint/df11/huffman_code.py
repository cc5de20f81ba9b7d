"""Df11Code: the Huffman code of a DF11 module, and decoding of many chunks of its stream side by side.

    stream      codes one after another, the first bit of a byte is its highest
    chunk       8 bytes of the stream; a code belongs to the chunk that it begins in
    gap         bits of a chunk before its first code, 0 to 31
    luts[0]     by the next 8 bits: a symbol, 0 to 239, or 256 - k, and then luts[k] by the 8 bits after them
    luts[-1]    by symbol: bits of its code, 1 to 32

All chunks advance together. A step looks at the next 16 bits of each and takes the codes that these hold whole, up to
eight, from a table with an entry for each 16 bits; a longer code is looked up byte by byte.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from typing import TypeAlias

    from numpy.typing import NDArray

    Bytes: TypeAlias = NDArray[np.uint8]
    Integers: TypeAlias = NDArray[np.int64]
    Words: TypeAlias = NDArray[np.uint64]

CHUNK_BITS = 64
MAX_CODE_BITS = 32
BROKEN_END = 128  # of a chunk with bits that begin no code; other chunks end before
_POINTERS = 240  # a byte of a lookup table from here on is no symbol
_WINDOW_BITS = 16
_NUM_WINDOWS = 1 << _WINDOW_BITS
_STEP_SYMBOLS = 8
_COUNT_BITS = 4  # a step: its number of symbols, above them its number of bits
_STUCK = 0xFFFF  # a step that 16 bits do not tell
_MASKS = np.tri(_STEP_SYMBOLS + 1, _STEP_SYMBOLS, -1, dtype=bool).view(np.uint64).reshape(-1)  # by number of symbols


class Decoded(NamedTuple):
    """What chunks hold: all their symbols, in order; how many each has; in which of its bits its last code ends."""

    symbols: Bytes
    counts: Integers
    ends: Words


class Df11Code:
    """A code, from its `luts` [tables + 1, 256].

    Attributes:
        lengths: By symbol, the bits of its code, 0 where they are none that a code can have.
    """

    def __init__(self, luts: Bytes) -> None:
        nothing = _POINTERS + len(luts) - 1  # a pointer to one table more, which has nothing but such pointers
        tables = luts[:-1].astype(np.int64)
        tables = np.where(tables < _POINTERS, tables, np.minimum(_POINTERS + 256 - tables, nothing))
        self._tables = np.vstack([tables, np.full((1, 256), nothing)])
        self.lengths = np.zeros(nothing + 1, np.int64)
        self.lengths[:_POINTERS] = np.where(luts[-1] <= MAX_CODE_BITS, luts[-1], 0)[:_POINTERS]
        self._steps, self._symbols = self._make_steps()

    def decode(self, words: Words, gaps: Bytes) -> Decoded:
        """Decode chunks that follow each other.

        Args:
            words: The chunks, their first bit the highest, and the one after them.
            gaps: The gap of each chunk.
        """
        high, low = words[:-1], words[1:]
        ends = gaps.astype(np.uint64)
        counts = np.zeros(len(ends), np.int64)
        step_symbols: list[Words] = []
        step_counts: list[Bytes] = []
        while True:
            left = CHUNK_BITS - np.minimum(ends, CHUNK_BITS)
            if not left.any():
                break
            bits = (high << ends) | (low >> left)  # of a word shifted by 64 or more nothing is left
            window = bits >> (CHUNK_BITS - _WINDOW_BITS)
            row = np.minimum(left, _WINDOW_BITS) << _WINDOW_BITS
            step = self._steps.take((row | window).view(np.int64))
            symbols = self._symbols.take(window.view(np.int64))
            if step.max() == _STUCK:
                self._take_long_codes(bits, step, symbols)
            count = (step & ((1 << _COUNT_BITS) - 1)).astype(np.uint8)
            ends += step >> _COUNT_BITS
            counts += count
            step_symbols.append(symbols)
            step_counts.append(count)
        is_symbol = _MASKS.take(np.stack(step_counts, axis=1)).view(bool)
        return Decoded(np.stack(step_symbols, axis=1).view(np.uint8)[is_symbol], counts, ends)

    def _take_long_codes(self, bits: Words, step: NDArray[np.uint16], symbols: Words) -> None:
        """Look up one code, in the 64 bits that come next, for each chunk that is stuck."""
        where = np.flatnonzero(step == _STUCK)
        value = np.full(len(where), _POINTERS)
        for shift in range(CHUNK_BITS - 8, CHUNK_BITS - 8 - MAX_CODE_BITS, -8):
            byte = (bits[where] >> shift & 0xFF).view(np.int64)
            value = np.where(value < _POINTERS, value, self._tables[_pointed(value), byte])
        length = self.lengths[value]
        step[where] = np.where(length > 0, length << _COUNT_BITS | 1, BROKEN_END << _COUNT_BITS)
        symbols.view(np.uint8).reshape(-1, _STEP_SYMBOLS)[where, 0] = value

    def _make_steps(self) -> tuple[NDArray[np.uint16], Words]:
        """Return steps, by the number of bits that are left of the chunk and by window, and symbols, by window."""
        known = self._known_values()
        windows = np.arange(_NUM_WINDOWS)
        ends = np.zeros(_NUM_WINDOWS, np.int64)
        is_code = np.ones(_NUM_WINDOWS, bool)
        symbols = np.zeros((_NUM_WINDOWS, _STEP_SYMBOLS), np.uint8)
        steps = np.full((_WINDOW_BITS + 1, _NUM_WINDOWS), _STUCK, np.uint16)
        steps[0] = 0
        for place in range(_STEP_SYMBOLS):
            rest = np.maximum(_WINDOW_BITS - ends, 0)
            bits = windows << (_WINDOW_BITS - rest) & (_NUM_WINDOWS - 1)
            value = known[0, np.minimum(rest, 8), bits >> 8]
            further = known[_pointed(value), np.clip(rest - 8, 0, 8), bits & 0xFF]
            value = np.where(value < _POINTERS, value, further)
            is_code &= (rest > 0) & (self.lengths[value] > 0)
            symbols[:, place] = value
            begins, ends = ends, np.where(is_code, ends + self.lengths[value], _WINDOW_BITS)
            step = (ends << _COUNT_BITS | place + 1).astype(np.uint16)
            for left in range(1, _WINDOW_BITS + 1):
                np.copyto(steps[left], step, where=is_code & (begins < left))
        return steps.reshape(-1), symbols.view(np.uint64).reshape(-1)

    def _known_values(self) -> Integers:
        """Return values by table, number of bits that are known, and byte; nothing where the other bits matter."""
        known = np.repeat(self._tables[:, None, :], 9, axis=1)
        for bits in range(8):
            groups = self._tables.reshape(len(self._tables), 1 << bits, -1)
            values = np.where((groups == groups[..., :1]).all(axis=-1), groups[..., 0], _POINTERS + len(groups) - 1)
            known[:, bits] = np.repeat(values, 256 >> bits, axis=1)
        return known


def _pointed(value: Integers) -> Integers:
    """Return the table that each value points to; of a symbol, any."""
    return np.maximum(value - _POINTERS, 0)
