"""Df11Blocks: the blocks of a DF11 stream, decoded to bf16. `ftw.checkpoint.df11` has the layout of what is stored.

    element    bit 7 of its sign_mantissa | symbol of its code, 8 bits | bits 6 to 0 of its sign_mantissa

Blocks are held against their numbers of elements, the end of each chunk against the gap of the next one, and the last
code against the end of the stream. What follows the last element is not looked at: dfloat11 fills its last byte up with
the beginning of one more code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import numpy as np

from ftw.checkpoint.df11.huffman_code import BROKEN_END, CHUNK_BITS, Df11Code
from ftw.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import TypeAlias

    from ftw.checkpoint.df11.huffman_code import Bytes, Decoded, Integers
    from ftw.tensors import TensorInfo

    Read: TypeAlias = Callable[[str, memoryview, int], None]

# Blocks that are decoded together: by 8 one core made 250 MB/s of bf16, by 16 285, by 32 and 64 310 (a busy AMD EPYC,
# 2026-11-30).
_BATCH = 32
_CHUNK_NBYTES = CHUNK_BITS // 8
_BLOCK_CHUNKS = 512
_BLOCK_NBYTES = _BLOCK_CHUNKS * _CHUNK_NBYTES
_BLOCK_GAPS_NBYTES = 5 * _BLOCK_CHUNKS // 8
_EIGHT_GAPS_NBYTES = 5
_BYTE_PLACES = np.arange(32, -1, -8).astype(np.uint64)
_GAP_PLACES = np.arange(35, -1, -5).astype(np.uint64)


class Df11Blocks:
    """The blocks of one module, whose `parts` have the sizes that they need.

    Raises:
        CheckpointError: Its output_positions cannot be right.
    """

    def __init__(self, source: str, parts: Mapping[str, TensorInfo], read: Read) -> None:
        self._source = source
        self._parts = parts
        self._num_elements = parts["sign_mantissa"].nbytes
        self._num_bits = 8 * parts["encoded_exponent"].nbytes
        self._positions = self._read_positions(read)
        self._code = Df11Code(self._read("luts", 0, parts["luts"].nbytes, read).reshape(-1, 256))

    def read_into(self, view: memoryview, offset: int, read: Read) -> None:
        """Fill a view, not empty, with the bytes of the elements from byte `offset` on.

        Raises:
            CheckpointError: The stream, its gaps and the positions contradict one another.
        """
        first, last = offset // 2, -(-(offset + len(view)) // 2)
        begin = int(np.searchsorted(self._positions, first, "right")) - 1
        end = int(np.searchsorted(self._positions, last, "left"))
        for block in range(begin, end, _BATCH):
            stop = min(block + _BATCH, end)
            symbols = self._decode(block, stop, read)
            start = int(self._positions[block])
            low, high = max(start, first), min(int(self._positions[stop]), last)
            decoded = _join(self._read("sign_mantissa", low, high - low, read), symbols[low - start : high - start])
            piece = view[max(2 * low - offset, 0) : 2 * high - offset]
            skipped = max(offset - 2 * low, 0)  # the first byte of an element, where the view begins with its second
            piece[:] = decoded[skipped : skipped + len(piece)].data

    def _decode(self, begin: int, stop: int, read: Read) -> Bytes:
        """Return the symbols of blocks, and behind those of the last one what may be none."""
        nbytes = (stop - begin) * _BLOCK_NBYTES
        stored = self._read("encoded_exponent", begin * _BLOCK_NBYTES, nbytes + _CHUNK_NBYTES, read)
        num_chunks = -(-min(len(stored), nbytes) // _CHUNK_NBYTES)
        padded = np.zeros((num_chunks + 1) * _CHUNK_NBYTES, np.uint8)
        padded[: len(stored)] = stored
        gaps = self._read_gaps(begin, stop, read)
        decoded = self._code.decode(padded.view(">u8").astype(np.uint64), gaps[:num_chunks])
        ends = self._positions[begin] + np.cumsum(decoded.counts)  # by chunk, of its elements
        self._check_chunks(begin * _BLOCK_CHUNKS, decoded, gaps, ends)
        self._check_blocks(begin, stop, decoded.counts)
        if self._positions[begin] < self._positions[stop] == self._num_elements:
            self._check_end(begin, decoded, gaps, ends)
        return decoded.symbols

    def _check_chunks(self, first: int, decoded: Decoded, gaps: Bytes, ends: Integers) -> None:
        """Check that each chunk ends where the next one's first code begins, as long as elements follow."""
        if first == 0 and gaps[0]:
            self._fail("gaps", f"the first code begins at bit {gaps[0]}, bit 0 is needed")
        compared = min(len(ends), len(gaps) - 1)
        follows = CHUNK_BITS + gaps[1 : compared + 1].astype(np.uint64)
        is_wrong = (ends < self._num_elements)[:compared] & (decoded.ends[:compared] != follows)
        if not is_wrong.any():
            return
        chunk = int(is_wrong.argmax())
        where = f"bytes {_CHUNK_NBYTES * (first + chunk)} to {_CHUNK_NBYTES * (first + chunk + 1) - 1}"
        if decoded.ends[chunk] >= BROKEN_END:
            self._fail("encoded_exponent", f"{where} hold bits that are no code, those of luts are allowed")
        found = f"the codes of {where} end {int(decoded.ends[chunk]) - CHUNK_BITS} bits behind them"
        self._fail("encoded_exponent", f"{found}, gaps say {gaps[chunk + 1]}")

    def _check_blocks(self, begin: int, stop: int, counts: Integers) -> None:
        """Check how many codes each block has; the last one of all may have more than elements."""
        found = np.add.reduceat(counts, np.arange(0, len(counts), _BLOCK_CHUNKS))
        needed = np.diff(self._positions[begin : stop + 1])
        is_wrong = found != needed
        if stop == len(self._positions) - 1:
            is_wrong[-1] = found[-1] < needed[-1]
        if is_wrong.any():
            block = int(is_wrong.argmax())
            problem = f"block {begin + block} has {found[block]} codes, output_positions say {needed[block]}"
            self._fail("encoded_exponent", problem)

    def _check_end(self, begin: int, decoded: Decoded, gaps: Bytes, ends: Integers) -> None:
        """Check that the code of the last element lies in the stream."""
        chunk = int(np.searchsorted(ends, self._num_elements))
        past = int(ends[chunk]) - self._num_elements
        stop = int(decoded.counts[: chunk + 1].sum())
        codes = decoded.symbols[stop - int(decoded.counts[chunk]) : stop - past]
        end = (begin * _BLOCK_CHUNKS + chunk) * CHUNK_BITS + int(gaps[chunk]) + int(self._code.lengths[codes].sum())
        if end > self._num_bits:
            self._fail("encoded_exponent", f"its last code ends at bit {end}, it has {self._num_bits}")

    def _read_positions(self, read: Read) -> Integers:
        """Return the element that begins each block first, and the number of elements."""
        stored = self._read("output_positions", 0, self._parts["output_positions"].nbytes, read)
        positions: Integers = stored.view("<u4").astype(np.int64)
        if len(positions) == -(-self._num_bits // (8 * _BLOCK_NBYTES)):  # a last block in which no code begins
            positions = np.append(positions, positions[-1])
        steps = np.diff(positions)
        if positions[0] != 0 or positions[-1] != self._num_elements:
            found = f"go from {positions[0]} to {positions[-1]}"
            self._fail("output_positions", f"{found}, 0 and the {self._num_elements} elements are needed")
        if steps.min() < 0 or steps.max() > 8 * _BLOCK_NBYTES:
            block = int(((steps < 0) | (steps > 8 * _BLOCK_NBYTES)).argmax())
            allowed = f"0 to {8 * _BLOCK_NBYTES} are allowed"
            self._fail("output_positions", f"tell of {steps[block]} elements in block {block}, {allowed}")
        return positions

    def _read_gaps(self, begin: int, stop: int, read: Read) -> Bytes:
        """Return the gap of each chunk of some blocks, and of the next chunks where there are any."""
        nbytes = (stop - begin) * _BLOCK_GAPS_NBYTES + _EIGHT_GAPS_NBYTES
        stored = self._read("gaps", begin * _BLOCK_GAPS_NBYTES, nbytes, read)
        eights = (stored.reshape(-1, _EIGHT_GAPS_NBYTES).astype(np.uint64) << _BYTE_PLACES).sum(axis=1, keepdims=True)
        gaps: Bytes = (eights >> _GAP_PLACES & 31).astype(np.uint8).reshape(-1)
        return gaps

    def _read(self, suffix: str, offset: int, nbytes: int, read: Read) -> Bytes:
        """Read bytes of a part, as many as there are from `offset` on."""
        part = self._parts[suffix]
        data = np.empty(min(nbytes, part.nbytes - offset), np.uint8)
        read(part.name, data.data, offset)
        return data

    def _fail(self, suffix: str, problem: str) -> NoReturn:
        raise CheckpointError(self._source, self._parts[suffix].name, problem)


def _join(sign_mantissa: Bytes, exponents: Bytes) -> Bytes:
    """Return the bytes of bf16 elements."""
    elements = sign_mantissa.astype("<u2")
    elements *= 0x101
    elements &= 0x807F
    shifted = exponents.astype("<u2")
    shifted <<= 7
    elements |= shifted
    return elements.view(np.uint8)
