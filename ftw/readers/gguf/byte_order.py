"""What has to be rearranged in the blocks of a big-endian GGUF checkpoint.

Two kinds of file call themselves big-endian. llama.cpp on such a machine, and the gguf package's script that converts
a file, turn every field of a packed block around. The gguf package's writer turns arrays of numbers around, but not
packed blocks, nor BF16, which it is given as bytes: those stay little-endian. No key distinguishes the two, so the data
has to, by the halves among them: the scales of blocks, or BF16's elements. The byte of a half that holds its sign and
exponent takes few values, which lie close together; the other one, of mantissa bits, takes all values alike. Where the
second byte that is stored is the one with the exponent, the blocks are little-endian. If the data do not say, so
few or so uniform are they, packed blocks are taken as the package's writer leaves them, and BF16 as other numbers.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from ftw.errors import CheckpointError
from ftw.ggml_types import PACKED_TYPES, WideField, ggml_types_by_name, swapped_block
from ftw.sizes import align_up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ftw.files import WeightFile
    from ftw.tensors import TensorInfo

_MAX_TENSORS = 8
_MAX_SAMPLE_NBYTES = 256 << 10  # of each of them
_MIN_HALVES = 32
_MIN_SPREAD = 16.0  # of mantissa bits, as a standard deviation; evenly spread ones have 37, an exponent's byte below 10
_SWAP_NBYTES = 512 << 10  # at a time, so that a copy stays in the processor's cache
_BFLOAT16 = "BF16"
_WARNING = "the file is big-endian, and its packed blocks do not tell whether they are; they are taken as little-endian"
# The scales of these are not halves, or scattered ones.
_WITHOUT_SCALE = frozenset({"IQ1_M", "MXFP4", "NVFP4"})


class _Sample(NamedTuple):
    """A tensor to look at: a half lies at the byte `offset` of each block of `block_nbytes`."""

    tensor: TensorInfo
    block_nbytes: int
    offset: int


class BlockOrders(NamedTuple):
    """`Reader.block_order` for each type that occurs, by its name; `warning` is empty unless the data did not say."""

    by_type: dict[str, tuple[int, ...] | None]
    warning: str


def read_block_orders(tensors: Iterable[TensorInfo], files: Mapping[str, WeightFile]) -> BlockOrders:
    """Find how the blocks of a big-endian checkpoint have to be rearranged.

    `files` are by the name of the shard. Reads at most 4 MiB.

    Raises:
        CheckpointError: It is not known how a type is to be rearranged.
    """
    by_type: dict[str, list[TensorInfo]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.ggml_type or tensor.dtype, []).append(tensor)
    orders = {name: _order_of(name, found[0], files) for name, found in by_type.items()}
    packed = [sample for name, found in by_type.items() for sample in _samples(name, found)]
    found_order = _order_of_halves(packed, files, are_scales=True)
    if found_order != ">":
        orders.update({name: None for name, found in by_type.items() if found[0].ggml_type})
    halves = [_Sample(tensor, 2, 0) for tensor in by_type.get(_BFLOAT16, ())]
    if _order_of_halves(halves, files, are_scales=False) == "<":
        orders[_BFLOAT16] = None
    is_guess = not found_order and any(sample.tensor.nbytes for sample in packed)
    return BlockOrders(orders, _WARNING if is_guess else "")


def rearrange_blocks(
    view: memoryview, offset: int, order: tuple[int, ...], read: Callable[[int, memoryview], None]
) -> None:
    """Bring stored bytes of a tensor into little-endian order where they lie.

    Args:
        view: The bytes.
        offset: Where they begin in the tensor.
        order: Byte i of a block comes from byte `order[i]` of the stored one.
        read: Fills a view with stored bytes from an offset on: a block that `view` holds a piece of is read once more.
    """
    nbytes, end = len(order), offset + len(view)
    first, last = align_up(offset, nbytes), end // nbytes * nbytes
    if first < last:
        _swap(view[first - offset : last - offset], order)
    for start in {offset // nbytes * nbytes, last}:
        low, high = max(start, offset), min(start + nbytes, end)
        if 0 < high - low < nbytes:
            block = memoryview(bytearray(nbytes))
            read(start, block)
            _swap(block, order)
            view[low - offset : high - offset] = block[low - start : high - start]


def _swap(view: memoryview, order: tuple[int, ...]) -> None:
    import numpy as np

    pairs = [(to, source) for to, source in enumerate(order) if to != source]
    blocks = np.frombuffer(view, np.uint8).reshape(-1, len(order))
    step = max(_SWAP_NBYTES // len(order), 1)
    for start in range(0, len(blocks), step):
        piece = blocks[start : start + step]
        old = piece.copy()
        for to, source in pairs:
            piece[:, to] = old[:, source]


def _order_of(name: str, tensor: TensorInfo, files: Mapping[str, WeightFile]) -> tuple[int, ...] | None:
    order = swapped_block(ggml_types_by_name()[name])
    if order is None:
        problem = f"is {name} in big-endian order, which ftw cannot rearrange"
        raise CheckpointError(files[tensor.shard].path, tensor.name, problem)
    return order if order != tuple(range(len(order))) else None


def _samples(name: str, tensors: list[TensorInfo]) -> list[_Sample]:
    """Return the tensors of a type whose blocks have a scale to be looked at."""
    fields: tuple[WideField, ...] = PACKED_TYPES.get(name, ())
    scale = next((field.offset for field in fields if field.width == 2), None)
    if scale is None or name in _WITHOUT_SCALE:
        return []
    return [_Sample(tensor, ggml_types_by_name()[name].type_size, scale) for tensor in tensors]


def _order_of_halves(samples: list[_Sample], files: Mapping[str, WeightFile], *, are_scales: bool) -> str:
    """Return the byte order of halves, by which byte is clearly the one with the exponent; empty if none is."""
    halves: Counter[tuple[int, int]] = Counter()
    for tensor, block_nbytes, offset in sorted(samples, key=lambda sample: -sample.tensor.nbytes)[:_MAX_TENSORS]:
        nbytes = min(tensor.nbytes, _MAX_SAMPLE_NBYTES // block_nbytes * block_nbytes)
        data = files[tensor.shard].read(tensor.offset, nbytes)
        halves.update(zip(data[offset::block_nbytes], data[offset + 1 :: block_nbytes], strict=True))
    for zero in ((0, 0), (0, 0x80), (0x80, 0)):  # whose exponent is far from all others
        del halves[zero]
    first, second = (_spread([(half[place], count) for half, count in halves.items()]) for place in (0, 1))
    if halves.total() < _MIN_HALVES:
        return ""
    if max(first, second) >= _MIN_SPREAD and min(first, second) * 2 <= max(first, second):
        return "<" if first > second else ">"
    little, big = (_plausible(halves, high) for high in (1, 0))
    if are_scales and max(little, big) > 0.9 and min(little, big) < 0.5:
        return "<" if little > big else ">"
    return ""


def _plausible(halves: Counter[tuple[int, int]], high: int) -> float:
    """Return the share of halves from 2 ** -12 to 2 ** 4, where scales that are all alike lie; of random bits half."""
    good = sum(count for half, count in halves.items() if 3 <= (half[high] >> 2) & 31 < 19)
    return good / (halves.total() or 1)


def _spread(counts: list[tuple[int, int]]) -> float:
    """Return the standard deviation of bytes, without their highest bit, from how often each occurs."""
    total = sum(count for _, count in counts) or 1
    mean = sum((byte & 0x7F) * count for byte, count in counts) / total
    return math.sqrt(sum(((byte & 0x7F) - mean) ** 2 * count for byte, count in counts) / total)
