"""Blocks of a big-endian GGUF, brought into order where they lie."""

import tracemalloc

import numpy as np

from ftw.ggml_types import ggml_types_by_name, swapped_block
from ftw.readers.gguf import rearrange_blocks


def test_rearranging_takes_no_second_buffer() -> None:
    numbers = np.arange(8 << 20, dtype="<u4")
    table = bytearray(numbers.astype(">u4").tobytes())
    order = swapped_block(ggml_types_by_name()["F32"])
    assert order is not None
    blocks_read_again: list[int] = []
    tracemalloc.start()
    try:
        rearrange_blocks(memoryview(table), 0, order, lambda offset, view: blocks_read_again.append(offset))
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert table == numbers.tobytes()
    assert not blocks_read_again
