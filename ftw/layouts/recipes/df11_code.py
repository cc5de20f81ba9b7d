"""ExponentCode: the Huffman code of a DF11 tensor of FreeToken's layout, and its codes one after another as bits.

    symbol        the 8 bits of a BF16 number's exponent
    code          1 to 12 bits, canonical: shorter ones first, of the same length by symbol
    lookup table  by the next 12 bits: symbol << 8 | length of its code; 0 where no code begins so
    stream        the first bit is the highest of the first 32-bit word

This is not the format of dfloat11's own checkpoints, which `ftw.checkpoint.df11` reads.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import TypeAlias

    from numpy.typing import NDArray

    Bytes: TypeAlias = NDArray[np.uint8]
    Integers: TypeAlias = NDArray[np.int64]
    Words: TypeAlias = NDArray[np.uint64]

MAX_BITS = 12
NUM_SYMBOLS = 256
_BITS, _BITS_MASK = np.uint64(6), np.uint64(63)  # how many bits the codes of four symbols have: up to 48


class ExponentCode:
    """The code for symbols that occur so often.

    Attributes:
        lengths: By symbol, the bits of its code, 0 for one that does not occur.
        codes: By symbol, the code.
    """

    def __init__(self, counts: Sequence[int] | Integers) -> None:
        occurring = {symbol: int(count) for symbol, count in enumerate(counts) if count}
        self.lengths = np.zeros(NUM_SYMBOLS, np.uint8)
        self.codes = np.zeros(NUM_SYMBOLS, np.uint32)
        for symbol, length in _limited_lengths(occurring).items():
            self.lengths[symbol] = length
        code = previous = 0
        for symbol in sorted(occurring, key=lambda symbol: (self.lengths[symbol], symbol)):
            length = int(self.lengths[symbol])
            code <<= length - previous if previous else 0
            self.codes[symbol] = code
            code, previous = code + 1, length

    def lookup_table(self) -> NDArray[np.int32]:
        """Return the lookup table `[4096]`."""
        table = np.zeros(1 << MAX_BITS, np.int32)
        for symbol in np.flatnonzero(self.lengths):
            length = int(self.lengths[symbol])
            first = int(self.codes[symbol]) << (MAX_BITS - length)
            table[first : first + (1 << (MAX_BITS - length))] = int(symbol) << 8 | length
        return table


class Packer:
    """Puts codes one after another: first those of up to four symbols in a group, `code << 6 | bits`."""

    def __init__(self, code: ExponentCode) -> None:
        self._singles = code.codes.astype(np.uint64) << _BITS | code.lengths
        self._pairs = _join(self._singles[None, :], self._singles[:, None]).reshape(-1)  # [second symbol, first symbol]

    def group(self, symbols: Bytes) -> Words:
        """Return groups of symbols, which stand one after another on axis 0; the last group may have fewer."""
        paired = len(symbols) & ~1
        pairs = self._pairs.take(symbols[0:paired:2] | symbols[1:paired:2].astype(np.uint16) << np.uint16(8))
        if len(symbols) > paired:
            pairs = np.concatenate([pairs, self._singles.take(symbols[paired:])])
        whole = len(pairs) & ~1
        groups = _join(pairs[0:whole:2], pairs[1:whole:2])
        return np.concatenate([groups, pairs[whole:]]) if len(pairs) > whole else groups

    @staticmethod
    def place(groups: Words, first_bit: int) -> tuple[Words, int]:
        """Return groups one after another in 64-bit words, the highest bit first, and how many bits they are.

        They begin at bit `first_bit`, below 64, of the first word; the other bits are zeros. A group has at most 48
        bits, so one begins in each word, and only the last that does goes on into the next word.
        """
        bits = groups & _BITS_MASK
        ends = np.cumsum(bits)
        begins = ends - bits + np.uint64(first_bit)
        numbers, shifts = begins >> np.uint64(6), begins & np.uint64(63)
        high = groups >> _BITS << np.uint64(64) - bits
        first = np.append(0, np.flatnonzero(numbers[1:] != numbers[:-1]) + 1)
        last = np.append(first[1:] - 1, len(groups) - 1)
        words = np.zeros(len(first) + 1, np.uint64)
        words[:-1] = np.bitwise_or.reduceat(high >> shifts, first)
        words[1:] |= high[last] << np.uint64(1) << (np.uint64(63) - shifts[last])
        return words, int(ends[-1])


def _join(first: Words, second: Words) -> Words:
    """Return codes with others behind them, both with the number of their bits below them."""
    codes = first & ~_BITS_MASK
    joined: Words = (codes << (second & _BITS_MASK)) + second + (first ^ codes)
    return joined


def _limited_lengths(counts: Mapping[int, int]) -> dict[int, int]:
    """Return code lengths of 12 bits at most: rare symbols are counted as 2, then 4, 8 … until none is longer."""
    floor = 1
    while True:
        lengths = _huffman_lengths({symbol: max(count, floor) for symbol, count in counts.items()})
        if max(lengths.values(), default=0) <= MAX_BITS:
            return lengths
        floor *= 2


def _huffman_lengths(counts: Mapping[int, int]) -> dict[int, int]:
    """Return the length of each symbol's code; of equal counts, the older one is joined first."""
    if len(counts) == 1:
        return dict.fromkeys(counts, 1)
    heap = [(count, age, [symbol]) for age, (symbol, count) in enumerate(sorted(counts.items()))]
    heapq.heapify(heap)
    lengths = dict.fromkeys(counts, 0)
    age = len(heap)
    while len(heap) > 1:
        (count, _, below), (more, _, others) = heapq.heappop(heap), heapq.heappop(heap)
        below += others
        for symbol in below:
            lengths[symbol] += 1
        heapq.heappush(heap, (count + more, age, below))
        age += 1
    return lengths
