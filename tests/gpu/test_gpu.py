"""What only a GPU can show: rows out of page-locked host memory, graphs, streams, and the device's memory."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from builders import llama_config, write_checkpoint

import ftw
from ftw.kernels.lookup import lookup
from ftw.pinned import PinnedBuffer

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
ROWS = 4099
COUNTS = (1, 2, 16, 255, 8192)
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int8]
TABLE = "model.embed_tokens.weight"


class Tables:
    """The same random bits in page-locked host memory and on the GPU."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        nbytes = columns * torch.empty(0, dtype=dtype).element_size()
        self.buffer = PinnedBuffer(rows * nbytes)
        bits = torch.frombuffer(self.buffer.view(), dtype=torch.uint8).reshape(rows, nbytes)
        bits.random_(0, 256)
        self.buffer.pin(DEVICE)
        self.host = bits.view(dtype)
        self.gpu = bits.to(DEVICE).view(dtype)

    def expected(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of the GPU table, by torch, as bytes; zeros for ids outside."""
        flat = ids.reshape(-1).to(DEVICE, torch.int64)
        is_inside = (flat >= 0) & (flat < self.gpu.shape[0])
        rows = self.gpu.view(torch.uint8)[flat.clamp(0, self.gpu.shape[0] - 1)]
        return rows * is_inside[:, None]


@pytest.fixture(params=[2048, 2560, 2880, 1000, 33], scope="module")
def columns(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."), scope="module")
def tables(request: pytest.FixtureRequest, columns: int) -> Iterator[Tables]:
    made = Tables(ROWS, columns, request.param)
    yield made
    del made.host
    made.buffer.close()


def random_ids(count: int, id_dtype: torch.dtype) -> torch.Tensor:
    """Return ids on the GPU, about one in twenty of them outside the table."""
    return torch.randint(-ROWS // 40, ROWS + ROWS // 40, (count,), device=DEVICE, dtype=id_dtype)


def assert_rows(found: torch.Tensor, tables: Tables, ids: torch.Tensor) -> None:
    expected = tables.expected(ids)
    assert torch.equal(found.view(torch.uint8).reshape(expected.shape), expected)


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_host_rows_equal_gpu_rows_eager(tables: Tables, id_dtype: torch.dtype) -> None:
    for count in COUNTS:
        ids = random_ids(count, id_dtype)
        assert_rows(lookup(tables.host, ids), tables, ids)
        assert_rows(lookup(tables.gpu, ids), tables, ids)


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_host_rows_equal_gpu_rows_after_graph_replay(tables: Tables, id_dtype: torch.dtype) -> None:
    for count in COUNTS:
        ids = random_ids(count, id_dtype)
        lookup(tables.host, ids)  # compiled outside of the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = lookup(tables.host, ids)
        for _ in range(3):
            ids.copy_(random_ids(count, id_dtype))
            out.view(torch.uint8).fill_(0xA5)
            graph.replay()
            assert_rows(out, tables, ids)


@pytest.fixture
def small() -> Iterator[Tables]:
    made = Tables(ROWS, 64, torch.bfloat16)
    yield made
    del made.host
    made.buffer.close()


def test_ids_of_any_shape_and_strides(small: Tables) -> None:
    ids = random_ids(600, torch.int64).reshape(20, 30)
    for view in (ids, ids.T, ids[::3, ::2], ids[:0], ids[0, 0]):
        found = lookup(small.host, view)
        assert found.shape == (*view.shape, 64)
        assert found.device == DEVICE
        if view.numel():
            assert_rows(found, small, view)


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_ids_far_outside_the_table_give_zeros(small: Tables, id_dtype: torch.dtype) -> None:
    extremes = torch.iinfo(id_dtype)
    ids = [-1, 0, ROWS - 1, ROWS, -ROWS, extremes.min, extremes.max, extremes.min + 1, extremes.max // 2]
    tensor = torch.tensor(ids, dtype=id_dtype, device=DEVICE)
    found = lookup(small.host, tensor)
    torch.cuda.synchronize()
    assert_rows(found, small, tensor)
    assert not found[[0, 3, 4, 5, 6, 7, 8]].view(torch.uint8).count_nonzero()


def test_lookup_runs_on_the_current_stream(small: Tables) -> None:
    """Queue the ids on a side stream behind a long wait; a lookup on any other stream would read them too early."""
    ids = torch.zeros(512, dtype=torch.int64, device=DEVICE)
    wanted = random_ids(512, torch.int64)
    lookup(small.host, ids)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        ids.copy_(wanted)
        found = lookup(small.host, ids)
    stream.synchronize()
    assert_rows(found, small, wanted)


def test_cpu_ids_give_cpu_rows(small: Tables) -> None:
    ids = random_ids(50, torch.int32).cpu()
    found = lookup(small.host, ids)
    assert found.device.type == "cpu"
    assert_rows(found.to(DEVICE), small, ids)


def test_cpu_ids_for_a_gpu_table_are_refused(small: Tables) -> None:
    with pytest.raises(ftw.LookupArgumentError, match="the table is on cuda:0"):
        lookup(small.gpu, torch.tensor([0]))


def test_table_beyond_two_gigabytes_is_addressed_in_64_bits() -> None:
    rows, columns = 1_100_000, 1024
    with PinnedBuffer(rows * columns * 2) as buffer:
        table = torch.frombuffer(buffer.view(), dtype=torch.int16).reshape(rows, columns)
        table[-1] = torch.arange(columns, dtype=torch.int16)
        buffer.pin(DEVICE)
        found = lookup(table, torch.tensor([rows - 1, rows], device=DEVICE)).cpu()
        assert torch.equal(found[0], torch.arange(columns, dtype=torch.int16))
        assert not found[1].count_nonzero()
        del table


def test_pinned_memory_is_seen_as_pinned_until_close() -> None:
    buffer = PinnedBuffer(3 * 4096 + 1)
    tensor = torch.frombuffer(buffer.view(), dtype=torch.uint8)
    assert not tensor.is_pinned()
    buffer.pin(DEVICE)
    assert tensor.is_pinned()
    assert buffer.pinned_nbytes == 4 * 4096
    buffer.close()
    assert not tensor.is_pinned()


def test_refused_registration_leaves_no_error_behind() -> None:
    with PinnedBuffer(4096) as buffer:
        buffer.pin(DEVICE)
        buffer.pinned_nbytes = 0  # forget it, so that the driver is asked a second time and refuses
        with pytest.raises(ftw.PinError, match="4096 bytes"):
            buffer.pin(DEVICE)
        buffer.pinned_nbytes = 4096
        assert torch.ones(8, device=DEVICE).sum().item() == 8
        torch.cuda.synchronize()


class FreeMemoryWatch:
    """Polls the driver's free memory from a thread and keeps the least that it saw."""

    def __enter__(self) -> "FreeMemoryWatch":
        self.least = torch.cuda.mem_get_info(DEVICE)[0]
        self.samples = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _poll(self) -> None:
        while not self._stop.is_set():
            self.least = min(self.least, torch.cuda.mem_get_info(DEVICE)[0])
            self.samples += 1
            time.sleep(0.0005)


@pytest.fixture(scope="module")
def big_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untied checkpoint whose table takes 256 MiB, and whose other weights are small."""
    generator = torch.Generator().manual_seed(3)
    rows, columns = 65536, 2048
    table = torch.randint(-(1 << 15), 1 << 15, (rows, columns), dtype=torch.int16, generator=generator)
    tensors = {
        TABLE: table.view(torch.bfloat16),
        "lm_head.weight": torch.ones(65536, 1),
        "model.norm.weight": torch.ones(9),
    }
    folder = tmp_path_factory.mktemp("big") / "safetensors"
    return write_checkpoint(folder, tensors, llama_config(vocab_size=rows, hidden_size=columns))


@pytest.mark.alone
@pytest.mark.parametrize("format_name", ["safetensors", "ftw"])
def test_loading_to_the_host_never_takes_the_tables_vram(
    big_checkpoint: Path, tmp_path: Path, format_name: str
) -> None:
    source = big_checkpoint
    if format_name == "ftw":
        source = tmp_path / "ftw"
        ftw.convert(big_checkpoint, source, embed="host")
    torch.zeros(1, device=DEVICE)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(DEVICE)
    free, allocated = torch.cuda.mem_get_info(DEVICE)[0], torch.cuda.memory_allocated(DEVICE)
    with FreeMemoryWatch() as watch, ftw.load(source, embed="host", device=DEVICE) as model:
        ids = torch.randint(0, 65536, (1024,), device=DEVICE)
        found = model.embedding(ids)
        weights = dict(model.weights())
        torch.cuda.synchronize()
        assert model.memory.pinned_bytes == {TABLE: 65536 * 2048 * 2}
        with ftw.open_checkpoint(big_checkpoint) as checkpoint:
            expected = torch.empty(65536, 2048, dtype=torch.int16)
            checkpoint.read_into(TABLE, expected.numpy())
        assert torch.equal(found.view(torch.int16).cpu(), expected[ids.cpu()])
    assert set(weights) == {"lm_head.weight", "model.norm.weight"}
    # The rows looked up take 4 MiB, the allocator takes segments of up to 20 MiB; the table would take 256.
    assert torch.cuda.max_memory_allocated(DEVICE) - allocated < 8 << 20
    assert watch.samples > 20
    assert free - watch.least < 48 << 20


@pytest.fixture
def odd_checkpoint(tmp_path: Path) -> Path:
    """An untied checkpoint whose table is no multiple of a page: 1009 rows of 66 bytes."""
    table = torch.randint(-(1 << 15), 1 << 15, (1009, 33), dtype=torch.int16).view(torch.bfloat16)
    tensors = {TABLE: table, "lm_head.weight": torch.ones(1009, 33, dtype=torch.bfloat16)}
    return write_checkpoint(tmp_path / "odd", tensors, llama_config(vocab_size=1009, hidden_size=33))


def test_loaded_table_is_pinned_to_the_page_and_given_back(odd_checkpoint: Path) -> None:
    with ftw.load(odd_checkpoint, embed="host", device=DEVICE) as model:
        assert model.memory.pinned_bytes == {TABLE: -(-1009 * 66 // 4096) * 4096}
        table = model.embedding.table
        assert table.is_pinned()
    assert not table.is_pinned()


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float16], ids=str)
def test_loaded_embedding_replays_in_a_graph(odd_checkpoint: Path, dtype: torch.dtype | None) -> None:
    with ftw.load(odd_checkpoint, embed="host", device=DEVICE, dtype=dtype) as model:
        table = model.embedding.table.to(DEVICE)
        ids = torch.zeros(7, 9, dtype=torch.int64, device=DEVICE)
        model.embedding(ids)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model.embedding(ids)
        assert out.dtype == (dtype or torch.bfloat16)
        for _ in range(3):
            ids.copy_(torch.randint(0, 1009, ids.shape, device=DEVICE))
            out.zero_()
            graph.replay()
            expected = table[ids].to(out.dtype)
            assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))
        del graph


@pytest.mark.parametrize("embed", ["gpu", "auto"])
def test_embedding_that_stays_is_looked_up_on_the_gpu(tmp_path: Path, embed: str) -> None:
    table = torch.randn(64, 8).to(torch.bfloat16)
    source = write_checkpoint(tmp_path / "tied", {TABLE: table}, llama_config(tie_word_embeddings=True))
    with ftw.load(source, embed=embed, device=DEVICE) as model:
        ids = torch.tensor([3, 63, 64], device=DEVICE)
        found = model.embedding(ids).cpu()
        assert model.embedding.table.device == DEVICE
        assert model.embedding.placement == "gpu"
        assert dict(model.weights())[TABLE].data_ptr() == model.embedding.table.data_ptr()
    assert torch.equal(found[:2], table[[3, 63]])
    assert not found[2].count_nonzero()


def test_closed_model_gives_the_hosts_memory_back(big_checkpoint: Path) -> None:
    before = ftw.memory.snapshot(DEVICE).host_resident
    with ftw.load(big_checkpoint, embed="host", device=DEVICE) as model:
        model.embedding(torch.tensor([1], device=DEVICE))
        assert ftw.memory.snapshot(DEVICE).host_resident - before > 240 << 20
    assert ftw.memory.snapshot(DEVICE).host_resident - before < 32 << 20


def test_weights_stream_to_the_gpu_unchanged(big_checkpoint: Path) -> None:
    with (
        ftw.load(big_checkpoint, embed="gpu", device=DEVICE) as model,
        ftw.open_checkpoint(big_checkpoint) as checkpoint,
    ):
        for name, tensor in model.weights():
            expected = bytearray(checkpoint.tensors[name].nbytes)
            checkpoint.read_into(name, expected)
            assert tensor.device == DEVICE
            assert bytes(tensor.cpu().reshape(-1).view(torch.uint8).numpy()) == bytes(expected)


@pytest.mark.alone
def test_memory_snapshot_sees_the_device() -> None:
    before = ftw.memory.snapshot(DEVICE)
    block = torch.empty(64 << 20, dtype=torch.uint8, device=DEVICE)
    after = ftw.memory.snapshot(DEVICE)
    assert after.device_allocated - before.device_allocated >= block.nbytes
    assert before.device_free - after.device_free >= 0
