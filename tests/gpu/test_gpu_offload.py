"""Offloading from a GPU: its memory given back and measured, rows equal, and nothing changed by what fails."""

import gc
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from packed_tables import assert_equal_rows, expected, random_table
from torch import nn
from vocab_parallel import VocabParallelEmbedding

import ftw
from ftw.offloading import offloader
from ftw.pinned import PinnedBuffer, tensor_over

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
GIB = 1 << 30
ROWS, COLUMNS = 1 << 18, 2048  # 1 GiB of bf16


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Leave no memory of one test to the next."""
    torch.manual_seed(0)
    yield
    gc.collect()
    torch.cuda.empty_cache()


def on_gpu(rows: int = ROWS, columns: int = COLUMNS) -> nn.Embedding:
    table = torch.empty(rows, columns, dtype=torch.bfloat16, device=DEVICE)
    table.view(torch.int16).random_(-(1 << 15), 1 << 15)
    return nn.Embedding.from_pretrained(table)


def bits(rows: torch.Tensor) -> torch.Tensor:
    return rows.contiguous().view(torch.int16)


@pytest.mark.alone
def test_a_gibibyte_is_freed_and_nothing_is_taken_meanwhile() -> None:
    module = on_gpu()
    ids = torch.randint(0, ROWS, (4096,), device=DEVICE)
    wanted = bits(module(ids))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(DEVICE)
    free, allocated = torch.cuda.mem_get_info(DEVICE)[0], torch.cuda.memory_allocated(DEVICE)
    host = ftw.offload(module)
    assert torch.cuda.max_memory_allocated(DEVICE) == allocated
    assert torch.cuda.memory_allocated(DEVICE) == allocated - GIB
    assert torch.cuda.mem_get_info(DEVICE)[0] - free >= 0.99 * GIB
    assert host.memory is not None
    assert host.memory.freed_bytes >= 0.99 * GIB
    assert host.memory.pinned_bytes == {"weight": GIB}
    assert host.table.is_pinned()
    assert torch.equal(bits(host(ids)), wanted)
    assert module.weight.device.type == "cpu"
    assert module.weight.data_ptr() == host.table.data_ptr()
    host.close()


@pytest.mark.parametrize("columns", [33, 1000, 2048])
def test_rows_are_equal_eager_and_in_a_graph(columns: int) -> None:
    module = on_gpu(4099, columns)
    table = bits(module.weight.data).clone()
    host = ftw.offload(module)
    ids = torch.zeros(7, 9, dtype=torch.int64, device=DEVICE)
    host(ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = host(ids)
    for _ in range(3):
        ids.copy_(torch.randint(0, 4099, ids.shape, device=DEVICE))
        assert torch.equal(bits(host(ids)), table[ids])
        out.zero_()
        graph.replay()
        assert torch.equal(bits(out), table[ids])
    del graph
    host.close()


def test_table_written_on_another_stream_is_copied_complete() -> None:
    module = on_gpu(4096, 2048)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        module.weight.data.fill_(3)
    host = ftw.offload(module)
    assert (host.table == 3).all()
    host.close()


def test_table_of_odd_size_in_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloader, "_CHUNK_NBYTES", 10_001)
    module = on_gpu(1009, 33)
    before = bits(module.weight.data).cpu()
    host = ftw.offload(module)
    assert torch.equal(bits(host.table), before)
    assert host.memory is not None
    assert host.memory.pinned_bytes == {"weight": -(-1009 * 66 // 4096) * 4096}
    host.close()


def test_packed_table_is_ready_to_be_captured() -> None:
    table, ids = random_table("IQ3_S", 64, 512), torch.tensor([0, 63, 64])
    on_device = ids.to(DEVICE)
    # The kernel is compiled by a table of another embedding; what the type needs on the device, offload has put there.
    ftw.offload(table.to(DEVICE), ggml_type="IQ3_S")(on_device)
    host = ftw.offload(table.to(DEVICE), ggml_type="IQ3_S")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = host(on_device)
    graph.replay()
    torch.cuda.synchronize()
    assert_equal_rows(out.cpu(), expected(table, ids, "IQ3_S", torch.bfloat16))
    del graph


def test_shard_reads_its_own_rows_alone() -> None:
    table = torch.randn(1010, 64).bfloat16()
    ids = torch.arange(-3, 1030, device=DEVICE)
    total = torch.zeros(len(ids), 64, dtype=torch.bfloat16, device=DEVICE)
    for rank in range(4):
        module = VocabParallelEmbedding(1010, 64, tp_rank=rank, tp_size=4).load(table).to(DEVICE)
        wanted = module(ids)
        host = ftw.offload(module)
        assert torch.equal(host(ids), wanted)
        total += host(ids)
        extremes = torch.tensor([torch.iinfo(torch.int64).min + offset for offset in (0, 256, 512)], device=DEVICE)
        assert not host(extremes).count_nonzero()
    assert torch.equal(total[3:1013].cpu(), table)


@pytest.mark.alone
def test_tied_head_is_refused_and_no_memory_moves() -> None:
    model = nn.ModuleDict({"embed": on_gpu(65536), "lm_head": nn.Linear(1, 1, bias=False)})
    model["lm_head"].weight = model["embed"].weight
    torch.cuda.empty_cache()
    free, address = torch.cuda.mem_get_info(DEVICE)[0], model["embed"].weight.data_ptr()
    with pytest.raises(ftw.NotEligibleError, match=r"held by lm_head\.weight of ModuleDict"):
        ftw.offload(model["embed"])
    assert torch.cuda.mem_get_info(DEVICE)[0] == free
    assert model["embed"].weight.data_ptr() == address


@pytest.mark.parametrize(
    "alias",
    [lambda weight: weight.detach()[5:], lambda weight: weight.untyped_storage(), torch.utils.dlpack.to_dlpack],
    ids=["rows", "storage", "dlpack"],
)
def test_table_held_elsewhere_is_refused_and_left_alone(alias: object) -> None:
    module = on_gpu(65536)
    before, address = bits(module.weight.data).clone(), module.weight.data_ptr()
    kept = alias(module.weight)
    pinned = ftw.memory.snapshot(DEVICE).host_pinned
    with pytest.raises(ftw.NotEligibleError, match="held by"):
        ftw.offload(module)
    assert ftw.memory.snapshot(DEVICE).host_pinned == pinned
    assert module.weight.data_ptr() == address
    assert torch.equal(bits(module.weight.data), before)
    del kept


def test_refusing_driver_leaves_the_module_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    module = on_gpu(4096)
    before, address = bits(module.weight.data).clone(), module.weight.data_ptr()

    def refuse(buffer: PinnedBuffer, device: torch.device) -> None:
        raise ftw.PinError("refused")

    monkeypatch.setattr(PinnedBuffer, "pin", refuse)
    with pytest.raises(ftw.PinError):
        ftw.offload(module)
    assert module.weight.data_ptr() == address
    assert torch.equal(bits(module.weight.data), before)
    assert torch.equal(bits(module(torch.arange(9, device=DEVICE))), before[:9])


def test_offloading_during_a_capture_is_refused_and_the_capture_goes_on() -> None:
    module = on_gpu(64, 64)
    values = torch.zeros(8, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values += 1
        with pytest.raises(ftw.NotEligibleError, match="a CUDA graph is being captured"):
            ftw.offload(module)
    graph.replay()
    torch.cuda.synchronize()
    assert values.tolist() == [1.0] * 8
    assert module.weight.device == DEVICE


def test_cpu_table_is_read_by_the_current_gpu() -> None:
    module = nn.Embedding(100, 64)
    before = module.weight.detach().clone()
    host = ftw.offload(module)
    assert host.table.is_pinned()
    assert torch.equal(host(torch.arange(100, device=DEVICE)).cpu(), before)
    host.close()


def test_gpu_table_for_the_cpu_is_not_pinned() -> None:
    module = on_gpu(100, 64)
    before = bits(module.weight.data).cpu()
    host = ftw.offload(module, device="cpu")
    assert not host.table.is_pinned()
    assert torch.equal(bits(host(torch.arange(100))), before)


@pytest.mark.alone
def test_copy_runs_at_the_copy_engines_speed() -> None:
    """Generous, since the machine may be shared."""
    source = on_gpu().weight.data
    with PinnedBuffer(GIB) as buffer:
        buffer.pin(DEVICE)
        rows = partial(tensor_over, buffer.view(), source.dtype, source.shape)
        at_once = seconds_of(lambda: rows().copy_(source, non_blocking=True))
        in_chunks = seconds_of(lambda: offloader.copy_to_host(source, rows()))
    print(f"{GIB / at_once / 1e9:.1f} GB/s at once, {GIB / in_chunks / 1e9:.1f} in chunks")
    assert in_chunks < 1.5 * at_once


def seconds_of(copy: Callable[[], object]) -> float:
    """Measure the second of two runs."""
    copy()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    copy()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000
