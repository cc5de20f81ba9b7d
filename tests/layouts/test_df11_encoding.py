"""FreeToken's DF11: an independent decoder gives the numbers back, any range equals the whole, memory stays small."""

import heapq
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest

from ftw.errors import CheckpointError
from ftw.layouts.recipes import df11_plan, df11_tensors
from ftw.layouts.recipes.dense_tensor import DenseTensor
from ftw.layouts.recipes.df11_code import MAX_BITS, ExponentCode
from ftw.layouts.recipes.recipe import Run

ROLES = ("low8", "bitstream", "chunk_start", "lut")
WIDTHS = {"U8": "u1", "I32": "<i4", "I64": "<i8"}


def encode(numbers, *, is_by_row, dtype="BF16", read=None):
    """Return a matrix's four tensors by role, and the function that reads the matrix."""
    stored = np.ascontiguousarray(numbers).view(np.uint8).reshape(-1)

    def read_stored(name, view, offset):
        assert name == "m.weight"
        view[:] = stored[offset : offset + len(view)].data

    read = read or read_stored
    matrix = DenseTensor("m.weight", dtype, numbers.shape, Run("m.weight", 0, stored.nbytes), 0)
    inner, chunks = df11_plan.prepare_matrix("source", matrix, is_by_row=is_by_row)
    plan = df11_plan.plan_df11(inner, chunks, read)
    made = df11_tensors.df11_tensors("source", matrix, plan, inner)
    return {tensor.role: tensor for tensor in made}, read


def read_all(tensor, read):
    buffer = bytearray(tensor.recipe.nbytes)
    tensor.recipe.read_into(memoryview(buffer), 0, read)
    return np.frombuffer(buffer, WIDTHS[tensor.dtype])


def decode(tensors, read):
    """Return the numbers, bit by bit as FreeToken's documents say, and nothing of the encoder's."""
    low8, words, starts, table = (read_all(tensors[role], read) for role in ROLES)
    bits = "".join(f"{int(word) & 0xFFFFFFFF:032b}" for word in words)
    is_by_row = tensors["chunk_start"].dtype == "I64"
    numbers = np.empty(len(low8), np.uint16)
    rows = -(-len(low8) // len(starts))
    for chunk, bit in enumerate(starts.tolist()):
        for number in range(rows):
            place = chunk * rows + number if is_by_row else number * len(starts) + chunk
            if place < len(low8):
                entry = int(table[int(bits[bit : bit + MAX_BITS], 2)])
                low = int(low8[place])
                numbers[place] = low >> 7 << 15 | entry >> 8 << 7 | low & 0x7F
                bit += entry & 0xFF
    return numbers


def numbers_of(kind, shape):
    generator = np.random.default_rng(5)
    if kind == "weights":
        return (generator.normal(0, 0.02, shape).astype(np.float32).view(np.uint32) >> 16).astype("<u2")
    if kind == "any":
        return generator.integers(0, 1 << 16, shape, dtype=np.uint16)
    return np.full(shape, 0x3F80, "<u2")


@pytest.mark.parametrize("is_by_row", [False, True], ids=["chunks", "rows"])
@pytest.mark.parametrize("kind", ["weights", "any", "equal"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (1, 257), (2, 256), (17, 33), (64, 65)], ids=str)
def test_decoding_gives_the_numbers_back(kind, shape, is_by_row):
    numbers = numbers_of(kind, shape)
    tensors, read = encode(numbers, is_by_row=is_by_row)
    np.testing.assert_array_equal(decode(tensors, read), numbers.reshape(-1))


def test_tensors_have_the_sizes_that_freetoken_expects():
    tensors, _ = encode(numbers_of("weights", (33, 100)), is_by_row=False)
    rows, _ = encode(numbers_of("weights", (33, 100)), is_by_row=True)
    assert {role: (made.dtype, made.shape) for role, made in tensors.items() if role != "bitstream"} == {
        "low8": ("U8", (3300,)),
        "chunk_start": ("I32", (13,)),
        "lut": ("I32", (4096,)),
    }
    assert (rows["chunk_start"].dtype, rows["chunk_start"].shape) == ("I64", (33,))
    assert tensors["bitstream"].recipe.nbytes == 4 * tensors["bitstream"].shape[0]


@pytest.mark.parametrize("is_by_row", [False, True], ids=["chunks", "rows"])
def test_any_range_equals_the_whole_whatever_the_bands_are(is_by_row, monkeypatch):
    numbers = numbers_of("any", (130, 70))
    tensors, read = encode(numbers, is_by_row=is_by_row)
    whole = {role: read_all(tensors[role], read).tobytes() for role in ROLES}
    for name, size in (("_BAND", 1000), ("_CODED_AT_ONCE", 300), ("_STEP", 256)):
        monkeypatch.setattr(df11_plan, name, size)
    monkeypatch.setattr(df11_tensors, "_STEP", 256)
    banded, read = encode(numbers, is_by_row=is_by_row)
    generator = np.random.default_rng(1)
    for role in ROLES:
        assert read_all(banded[role], read).tobytes() == whole[role]
        for _ in range(20):
            start, stop = sorted(generator.integers(0, len(whole[role]), 2).tolist())
            part = bytearray(stop + 1 - start)
            banded[role].recipe.read_into(memoryview(part), start, read)
            assert part == whole[role][start : stop + 1]


def slow_lengths(counts):
    """Return code lengths by a heap of whole trees."""
    heap = [(count, age, symbol) for age, (symbol, count) in enumerate(sorted(counts.items()))]
    heapq.heapify(heap)
    for age in range(len(heap), 2 * len(heap) - 1):
        first, second = heapq.heappop(heap), heapq.heappop(heap)
        heapq.heappush(heap, (first[0] + second[0], age, (first[2], second[2])))

    def walk(tree, depth):
        return {tree: depth} if isinstance(tree, int) else walk(tree[0], depth + 1) | walk(tree[1], depth + 1)

    return walk(heap[0][2], 0)


def test_codes_are_those_of_huffman_and_canonical():
    counts = {3: 50, 7: 50, 8: 1, 9: 20, 200: 20, 255: 1}
    code = ExponentCode([counts.get(symbol, 0) for symbol in range(256)])
    expected = slow_lengths(counts)
    assert {symbol: int(code.lengths[symbol]) for symbol in counts} == expected
    ordered = sorted(counts, key=lambda symbol: (expected[symbol], symbol))
    texts = [f"{int(code.codes[symbol]):0{expected[symbol]}b}" for symbol in ordered]
    assert texts == sorted(texts)
    assert not any(later.startswith(text) for text, later in pairwise(texts))


def test_codes_of_rare_exponents_are_no_longer_than_12_bits():
    fibonacci = [1, 1]
    while len(fibonacci) < 20:
        fibonacci.append(fibonacci[-1] + fibonacci[-2])
    assert max(slow_lengths(dict(enumerate(fibonacci))).values()) > MAX_BITS
    floors = [{symbol: max(count, floor) for symbol, count in enumerate(fibonacci)} for floor in (2, 4, 8, 16, 32, 64)]
    expected = next(found for found in map(slow_lengths, floors) if max(found.values()) <= MAX_BITS)
    code = ExponentCode([*fibonacci, *[0] * 236])
    assert dict(enumerate(code.lengths[:20].tolist())) == expected
    assert (code.lookup_table() != 0).all()  # whatever 12 bits come next, a code begins them


def test_a_lone_exponent_has_a_code_of_one_bit():
    code = ExponentCode([0] * 9 + [4] + [0] * 246)
    assert (code.lookup_table()[:2048] == (9 << 8 | 1)).all()
    assert not code.lookup_table()[2048:].any()


@pytest.mark.parametrize("is_by_row", [False, True], ids=["chunks", "rows"])
def test_memory_stays_small_for_a_matrix_of_any_size(is_by_row):
    shape = (48 << 10, 512)  # 48 MiB, of which no more than a part is there at a time
    pattern = numbers_of("weights", (4 << 20,)).view(np.uint8)

    def read(_name, view, offset):
        start = offset % (4 << 20)
        view[:] = pattern[start : start + len(view)].data

    matrix = DenseTensor("m.weight", "BF16", shape, Run("m.weight", 0, 2 * shape[0] * shape[1]), 0)
    inner, chunks = df11_plan.prepare_matrix("source", matrix, is_by_row=is_by_row)
    tracemalloc.start()
    try:
        plan = df11_plan.plan_df11(inner, chunks, read)
        stream = df11_tensors.BitStream(inner, plan)
        buffer = bytearray(1 << 20)
        stream.read_into(memoryview(buffer), stream.nbytes // 2, read)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert any(buffer)
    assert peak < 24 << 20


@pytest.mark.parametrize(
    ("dtype", "shape", "found"),
    [("F8_E4M3", (4, 8), "F8_E4M3 [4, 8]"), ("BF16", (32,), "BF16 [32]"), ("BF16", (4, 0), "BF16 [4, 0]")],
    ids=["scaled", "vector", "empty"],
)
def test_what_is_no_matrix_of_plain_numbers_is_refused(dtype, shape, found):
    tensor = DenseTensor("m.weight", dtype, shape, Run("m.weight", 0, 32), 0)
    with pytest.raises(CheckpointError) as caught:
        df11_plan.prepare_matrix("source", tensor, is_by_row=False)
    assert str(caught.value) == (
        f"source: m.weight: is {found}; FreeToken stores it as DF11, which takes a matrix of BF16, F16 or F32"
    )


def test_a_stream_that_32_bits_cannot_count_is_refused(monkeypatch):
    monkeypatch.setattr(df11_tensors, "_MAX_I32", 3000)
    with pytest.raises(CheckpointError, match=r"^source: m\.weight: its exponents take \d+ bits, FreeToken counts up"):
        encode(numbers_of("weights", (30, 100)), is_by_row=False)
    assert encode(numbers_of("weights", (30, 100)), is_by_row=True)[0].keys() == set(ROLES)
