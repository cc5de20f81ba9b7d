"""Packed rows on a GPU: the compiled kernel in host and device memory, eager and in graphs, beside the gguf package."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf_builder import Blocks, write_gguf
from packed_tables import TYPES, assert_equal_rows, decoded, dtype_name, pick, random_table, special_table

import ftw
from ftw.ggml_types import ggml_types_by_name
from ftw.kernels.codebooks import codebook
from ftw.kernels.packed_lookup import packed_lookup, prepare
from ftw.lookup.embedding import HostEmbedding
from ftw.pinned import PinnedBuffer

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
ROWS = 61
COUNTS = (1, 16, 65, 300)  # up to 64 rows are cut into shorter runs
# Of the six pairs these three: compiling all of them for every type would take a minute more.
PAIRS = [(torch.bfloat16, torch.int64), (torch.float32, torch.int32), (torch.float16, torch.int64)]
DIFFERENT_TYPES = ["Q4_0", "Q6_K", "IQ2_XXS", "MXFP4"]


class PackedTables:
    """The same packed rows in page-locked host memory and on the GPU, `offset` bytes after an aligned address."""

    def __init__(self, packed: torch.Tensor, name: str, offset: int = 0) -> None:
        self.name = name
        self.buffer = PinnedBuffer(packed.nbytes + offset)
        self.host = torch.frombuffer(self.buffer.view(), dtype=torch.uint8)[offset:].reshape(packed.shape)
        self.host.copy_(packed)
        self.buffer.pin(DEVICE)
        self.gpu = torch.empty(packed.nbytes + offset, dtype=torch.uint8, device=DEVICE)[offset:].view(packed.shape)
        self.gpu.copy_(packed)
        self.rows = decoded(packed, name).to(DEVICE)

    def __enter__(self) -> "PackedTables":
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize()
        del self.host
        self.buffer.close()

    def check(self, found: torch.Tensor, ids: torch.Tensor) -> None:
        assert found.device == DEVICE
        assert_equal_rows(found, pick(self.rows, ids, found.dtype))


def random_ids(count: int, id_dtype: torch.dtype) -> torch.Tensor:
    """Return ids on the GPU, about one in ten of them outside the table."""
    return torch.randint(-ROWS // 20, ROWS + ROWS // 20, (count,), device=DEVICE, dtype=id_dtype)


@pytest.mark.parametrize(("dtype", "id_dtype"), PAIRS, ids=dtype_name)
@pytest.mark.parametrize("name", TYPES)
def test_rows_equal_gguf(name: str, dtype: torch.dtype, id_dtype: torch.dtype) -> None:
    """Eager first, which compiles; then in a graph, replayed with other ids."""
    with PackedTables(random_table(name, ROWS, 2048), name) as tables:
        for count in COUNTS:
            for table in (tables.host, tables.gpu):
                ids = random_ids(count, id_dtype)
                tables.check(packed_lookup(table, ids, name, dtype=dtype), ids)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    out = packed_lookup(table, ids, name, dtype=dtype)
                for _ in range(2):
                    ids.copy_(random_ids(count, id_dtype))
                    out.view(torch.uint8).fill_(0xA5)
                    graph.replay()
                    tables.check(out, ids)
                del graph


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=dtype_name)
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64], ids=dtype_name)
@pytest.mark.parametrize("name", DIFFERENT_TYPES)
def test_ids_far_outside_the_table_give_positive_zeros(name: str, id_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """Also where the first row, which the kernel decodes in their stead, is not finite."""
    packed = random_table(name, ROWS, 2048)
    packed[0] = 0xFF
    extremes = torch.iinfo(id_dtype)
    outside = [-1, ROWS, -ROWS, extremes.min, extremes.max, extremes.min + 1, extremes.max // 2]
    with PackedTables(packed, name) as tables:
        for ids in (outside, outside * 3):
            for table in (tables.host, tables.gpu):
                found = packed_lookup(table, torch.tensor(ids, dtype=id_dtype, device=DEVICE), name, dtype=dtype)
                assert not found.view(torch.uint8).count_nonzero()


@pytest.mark.parametrize("name", TYPES)
def test_special_scales_equal_gguf(name: str) -> None:
    packed = special_table(name, 2048)
    with PackedTables(packed, name) as tables:
        ids = torch.arange(-20, packed.shape[0] + 1, device=DEVICE)
        for dtype in (torch.bfloat16, torch.float16):
            tables.check(packed_lookup(tables.host, ids, name, dtype=dtype), ids)
        few = torch.arange(packed.shape[0], device=DEVICE, dtype=torch.int32)
        for part in few.split(16):
            tables.check(packed_lookup(tables.gpu, part, name, dtype=torch.float32), part)


@pytest.mark.parametrize("name", TYPES)
def test_rows_of_any_width_equal_gguf(name: str) -> None:
    """Powers of two and others; multiples of 16 bytes and others, which Triton compiles apart."""
    block_size = ggml_types_by_name()[name].block_size
    others = [5120, 768] if block_size == 256 else [2880, 96] if block_size == 32 else [2880, 192]
    for columns in (256, 8192, *others):
        with PackedTables(random_table(name, ROWS, columns), name) as tables:
            for count in (1, 17) if columns == 256 else (17,):
                ids = random_ids(count, torch.int64)
                tables.check(packed_lookup(tables.host, ids, name), ids)


@pytest.mark.parametrize("offset", [1, 2, 4])
@pytest.mark.parametrize("name", DIFFERENT_TYPES)
def test_table_and_output_that_are_not_aligned(name: str, offset: int) -> None:
    with PackedTables(random_table(name, ROWS, 512), name, offset) as tables:
        assert tables.gpu.data_ptr() % 8 == tables.host.data_ptr() % 8 == offset
        for count in (3, 40):
            ids = random_ids(count, torch.int64)
            storage = torch.full((count * 1024 + 64,), 0xA5, dtype=torch.uint8, device=DEVICE)
            for table in (tables.host, tables.gpu):
                for start in (32, 34):
                    storage.fill_(0xA5)
                    out = storage[start : start + count * 1024].view(torch.bfloat16).view(count, 512)
                    assert packed_lookup(table, ids, name, out=out) is out
                    tables.check(out, ids)
                    assert (storage[:start] == 0xA5).all()
                    assert (storage[start + count * 1024 :] == 0xA5).all()


@pytest.fixture
def small() -> Iterator[PackedTables]:
    with PackedTables(random_table("Q4_K", ROWS, 256), "Q4_K") as made:
        yield made


def test_ids_of_any_shape_and_strides(small: PackedTables) -> None:
    ids = random_ids(600, torch.int64).reshape(20, 30)
    for view in (ids, ids.T, ids[::3, ::2], ids[0, 1:], ids[:0], ids[0, 0]):
        found = packed_lookup(small.host, view, "Q4_K")
        assert found.shape == (*view.shape, 256)
        small.check(found, view)


def test_table_of_one_row_equals_gguf() -> None:
    with PackedTables(random_table("Q8_0", 1, 256), "Q8_0") as tables:
        for ids in (torch.tensor([0], device=DEVICE), torch.arange(-9, 9, device=DEVICE)):
            for table in (tables.host, tables.gpu):
                tables.check(packed_lookup(table, ids, "Q8_0"), ids)


def test_lookup_runs_on_the_current_stream(small: PackedTables) -> None:
    """Queue the ids on a side stream behind a long wait; a lookup on any other stream would read them too early."""
    ids = torch.zeros(512, dtype=torch.int64, device=DEVICE)
    wanted = random_ids(512, torch.int64)
    packed_lookup(small.host, ids, "Q4_K")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        ids.copy_(wanted)
        found = packed_lookup(small.host, ids, "Q4_K")
    stream.synchronize()
    small.check(found, wanted)


def test_cpu_ids_give_cpu_rows(small: PackedTables) -> None:
    ids = random_ids(50, torch.int32).cpu()
    found = packed_lookup(small.host, ids, "Q4_K")
    assert found.device.type == "cpu"
    small.check(found.to(DEVICE), ids)


def test_cpu_ids_for_a_gpu_table_are_refused(small: PackedTables) -> None:
    with pytest.raises(ftw.LookupArgumentError, match="the table is on cuda:0"):
        packed_lookup(small.gpu, torch.tensor([0]), "Q4_K")


def test_table_beyond_two_gigabytes_is_addressed_in_64_bits() -> None:
    rows = 1_000_000
    packed = random_table("Q8_0", 1, 2048)
    table = torch.empty(rows, packed.shape[1], dtype=torch.uint8, device=DEVICE)
    table[-1] = packed[0].to(DEVICE)
    found = packed_lookup(table, torch.tensor([rows - 1, rows], device=DEVICE), "Q8_0")
    assert_equal_rows(found[0], decoded(packed, "Q8_0")[0].to(torch.bfloat16))
    assert not found[1].count_nonzero()


def test_output_beyond_two_gigabytes_is_addressed_in_64_bits() -> None:
    packed = random_table("Q4_0", 2, 8192)
    ids = torch.zeros(270_000, dtype=torch.int32, device=DEVICE)
    ids[-1] = 1
    found = packed_lookup(packed.to(DEVICE), ids, "Q4_0")
    rows = decoded(packed, "Q4_0").to(torch.bfloat16)
    assert_equal_rows(found[[0, -2, -1]], rows[[0, 0, 1]])


def test_prepared_lookup_is_captured_without_a_call_before() -> None:
    """No other test compiles for IQ3_S, float16 and int32 ids; its codebook is forgotten."""
    codebook.cache_clear()
    with PackedTables(random_table("IQ3_S", ROWS, 1024), "IQ3_S") as tables:
        ids = torch.zeros(300, dtype=torch.int32, device=DEVICE)
        prepare("IQ3_S", DEVICE)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = packed_lookup(tables.host, ids, "IQ3_S", dtype=torch.float16)
        ids.copy_(random_ids(300, torch.int32))
        graph.replay()
        tables.check(out, ids)
        del graph


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.float32, torch.float64], ids=dtype_name)
@pytest.mark.parametrize("name", ["Q4_0", "IQ4_XS"])
def test_embedding_of_packed_rows_replays_in_a_graph(name: str, dtype: torch.dtype | None) -> None:
    with PackedTables(random_table(name, ROWS, 2048), name) as tables:
        embedding = HostEmbedding(tables.host, ggml_type=name, dtype=dtype)
        ids = random_ids(63, torch.int64).reshape(7, 9)
        found = embedding(ids)
        assert found.dtype == embedding.dtype == (dtype or torch.bfloat16)
        tables.check(found, ids)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = embedding(ids)
        for _ in range(3):
            ids.copy_(random_ids(63, torch.int64).reshape(7, 9))
            out.zero_()
            graph.replay()
            tables.check(out, ids)
        del graph, embedding


@pytest.mark.parametrize("embed", ["host", "gpu"])
@pytest.mark.parametrize("dtype", [None, torch.float32], ids=dtype_name)
def test_loaded_gguf_is_captured_without_a_call_before(tmp_path: Path, embed: str, dtype: torch.dtype | None) -> None:
    """A checkpoint whose table is IQ1_S, with int32 ids and a width that no other test has."""
    columns = 1536
    packed = random_table("IQ1_S", ROWS, columns)
    tensors = {
        "token_embd.weight": Blocks(packed.numpy(), GGMLQuantizationType.IQ1_S),
        "output.weight": np.ones((ROWS, columns), dtype=np.float16),
    }
    source = write_gguf(tmp_path / "model.gguf", tensors)
    codebook.cache_clear()
    rows = decoded(packed, "IQ1_S").to(DEVICE)
    with ftw.load(source, embed=embed, device=DEVICE, dtype=dtype) as model:
        embedding = model.embedding
        assert (embedding.placement, embedding.ggml_type) == (embed, "IQ1_S")
        assert embedding.table.is_pinned() == (embed == "host")
        ids = torch.zeros(33, dtype=torch.int32, device=DEVICE)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = embedding(ids)
        for _ in range(2):
            ids.copy_(random_ids(33, torch.int32))
            graph.replay()
            assert_equal_rows(out, pick(rows, ids, dtype or torch.bfloat16))
        del graph, embedding
