"""HostEmbedding on a GPU: hot rows under captured graphs, compiled models, prefetches, and what an eager call costs."""

import copy
import warnings
from collections.abc import Callable, Iterator
from itertools import cycle, islice

import pytest
import torch
from packed_tables import assert_equal_rows, decoded, pick, random_table
from torch import nn

import ftw
from ftw.lookup.embedding import HostEmbedding
from ftw.pinned import PinnedBuffer

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
ROWS, COLUMNS = 4096, 2048
SLOTS = 256
COUNTS = (1, 16, 512, 8192)  # the last is fetched distinctly


class Made:
    """An embedding over page-locked memory, and the rows that it has to give, on the GPU."""

    def __init__(self, rows: torch.Tensor, table: torch.Tensor, **options: object) -> None:
        buffer = PinnedBuffer(table.nbytes)
        host = torch.frombuffer(buffer.view(), dtype=torch.uint8).view(table.dtype).reshape(table.shape)
        host.copy_(table)
        buffer.pin(DEVICE)
        self.rows = rows.to(DEVICE)
        self.embedding = HostEmbedding(host, buffer=buffer, **options)

    def check(self, found: torch.Tensor, ids: torch.Tensor) -> None:
        torch.cuda.synchronize()
        assert found.device == DEVICE
        assert_equal_rows(found, pick(self.rows, ids, found.dtype))


def plain_table() -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS).to(torch.bfloat16)


def make(**options: object) -> Made:
    table = plain_table()
    return Made(table, table, **options)


def make_packed(name: str, **options: object) -> Made:
    table = random_table(name, ROWS, COLUMNS)
    return Made(decoded(table, name), table, ggml_type=name, **options)


KINDS: dict[str, Callable[..., Made]] = {
    "bf16": make,
    "Q4_0": lambda **options: make_packed("Q4_0", **options),
    "Q6_K": lambda **options: make_packed("Q6_K", **options),
}


@pytest.fixture(params=KINDS)
def hot(request: pytest.FixtureRequest) -> Iterator[Made]:
    made = KINDS[request.param](hot_rows=SLOTS)
    yield made
    made.embedding.close()


@pytest.fixture
def plain() -> Iterator[Made]:
    made = make()
    yield made
    made.embedding.close()


def zipf_ids(count: int, shift: int = 0) -> torch.Tensor:
    """Return ids of which few are frequent, some of them outside the table."""
    ranks = torch.rand(count, device=DEVICE).mul_(7).exp_().long()
    return (ranks * 7 + shift) % (ROWS + 40) - 20


def capture(function: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    function()  # compiled outside of the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function()
    return graph, out


# Hot rows


def test_hot_rows_live_on_the_gpu(hot: Made) -> None:
    assert hot.embedding.hot is not None
    assert {tensor.device for tensor in hot.embedding.hot if tensor is not None} == {DEVICE}
    assert hot.embedding.hot.rows.dtype == hot.embedding.table.dtype


def test_graphs_captured_once_see_every_set(hot: Made) -> None:
    inputs = [zipf_ids(count) for count in COUNTS]
    graphs = [capture(lambda ids=ids: hot.embedding(ids)) for ids in inputs]
    for step in range(12):
        for ids, (graph, out) in zip(inputs, graphs, strict=True):
            ids.copy_(zipf_ids(ids.numel(), shift=step // 4 * 1000))
            out.fill_(float("nan"))
            graph.replay()
            hot.check(out, ids)
            hot.check(hot.embedding(ids), ids)
        if step % 3 == 2:
            hot.embedding.set_hot_rows(torch.randperm(ROWS)[:SLOTS])
        else:
            hot.embedding.update_hot_rows()
        assert 0 < hot.embedding.hot_ids().numel() <= SLOTS


def test_slots_hold_the_tables_bytes_after_every_change(hot: Made) -> None:
    assert hot.embedding.hot is not None
    slots, rows, _ = hot.embedding.hot
    for shift in (0, 0, 500, 500, 3000):
        hot.embedding(zipf_ids(4000, shift))
        hot.embedding.update_hot_rows()
        numbers = hot.embedding.hot_ids()
        places = slots[numbers.to(DEVICE)].long()
        assert torch.equal((slots >= 0).nonzero()[:, 0].cpu(), numbers)
        assert places.unique().numel() == numbers.numel()
        assert torch.equal(rows[places].cpu().view(torch.uint8), hot.embedding.table[numbers].view(torch.uint8))


def test_graph_counts_what_it_reads(hot: Made) -> None:
    assert hot.embedding.hot is not None
    counts = hot.embedding.hot.counts
    assert counts is not None
    for count in COUNTS:
        ids = zipf_ids(count)
        graph, _ = capture(lambda ids=ids: hot.embedding(ids))
        counts.zero_()
        for _ in range(3):
            graph.replay()
        inside = ids[(ids >= 0) & (ids < ROWS)]
        assert torch.equal(counts, 3 * torch.bincount(inside, minlength=ROWS).int())


def test_learnt_set_follows_a_stream_that_shifts() -> None:
    made = make(hot_rows=SLOTS)
    ids = zipf_ids(2048)
    graph, out = capture(lambda: made.embedding(ids))
    rates: dict[int, float] = {}
    for shift in (0, 2000):
        for _ in range(8):
            ids.copy_(zipf_ids(2048, shift))
            graph.replay()
            made.check(out, ids)
            made.embedding.update_hot_rows()
        ids.copy_(zipf_ids(2048, shift))
        assert made.embedding.hot is not None
        rates[shift] = float((made.embedding.hot.slots[ids.clamp(0, ROWS - 1)] >= 0).float().mean())
    assert rates[0] > 0.6
    assert rates[2000] > 0.95 * rates[0]
    made.embedding.close()


def test_update_never_waits_for_the_device(hot: Made) -> None:
    hot.embedding(zipf_ids(512))
    hot.embedding.update_hot_rows()
    ids = zipf_ids(512)
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its check a prototype
        try:
            torch.cuda.set_sync_debug_mode("error")
            hot.embedding.update_hot_rows()
            rows = hot.embedding(ids)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    hot.check(rows, ids)


def test_update_can_be_captured(hot: Made) -> None:
    ids = zipf_ids(512)

    def step() -> torch.Tensor:
        rows = hot.embedding(ids)
        hot.embedding.update_hot_rows()
        return rows

    graph, out = capture(step)
    for shift in (0, 700, 1400):
        ids.copy_(zipf_ids(512, shift))
        graph.replay()
        hot.check(out, ids)


def test_lookups_queued_before_an_update_are_right(hot: Made) -> None:
    """The update is queued while the lookup still waits for its turn."""
    ids = zipf_ids(8192)
    hot.embedding(ids)
    hot.embedding.update_hot_rows()
    torch.cuda.synchronize()
    for shift in (0, 999):
        torch.cuda._sleep(20_000_000)
        found = [hot.embedding(ids)]
        hot.embedding(zipf_ids(8192, shift))
        hot.embedding.update_hot_rows()
        found.append(hot.embedding(ids))
        for rows in found:
            hot.check(rows, ids)


def test_cpu_ids_go_past_the_hot_rows(hot: Made) -> None:
    ids = zipf_ids(100).cpu()
    hot.embedding.set_hot_rows([1, 2, 3])
    rows = hot.embedding(ids)
    assert rows.device.type == "cpu"
    assert_equal_rows(rows, pick(hot.rows.cpu(), ids, rows.dtype))


def test_hot_rows_of_a_gpu_table_are_refused() -> None:
    with pytest.raises(ftw.LookupArgumentError, match="hot rows: found a table on cuda:0"):
        HostEmbedding(torch.zeros(4, 4, device=DEVICE), hot_rows=2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layer", [None, 1], ids=["whole", "layer"])
def test_scales_and_slices_with_hot_rows(kind: str, layer: int | None) -> None:
    made = KINDS[kind](hot_rows=SLOTS, scale=45.25, num_slices=4)
    scale = torch.tensor(45.25, dtype=torch.bfloat16, device=DEVICE)
    for count in (*COUNTS, *COUNTS):
        ids = zipf_ids(count)
        wanted = pick(made.rows, ids, torch.bfloat16) * scale
        if layer is not None:
            wanted = wanted[:, 512:1024].contiguous()
        for _ in range(2):
            assert_equal_rows(made.embedding(ids, layer=layer), wanted)
        made.embedding.update_hot_rows()
    made.embedding.close()


# Compiled models


class Model(nn.Module):
    def __init__(self, embedding: HostEmbedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return (self.embedding(ids + 1).float() * 2 + 1).relu()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # inductor's own
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_model_equals_the_eager_one(hot: Made, mode: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = Model(hot.embedding)
    fast = torch.compile(model, mode=mode, fullgraph=True, dynamic=False)
    for count in (16, 2048):
        fast(zipf_ids(count))
    for count in (16, 2048, 16, 2048, 16):
        ids = zipf_ids(count, shift=count)
        wanted = model(ids)
        torch.compiler.cudagraph_mark_step_begin()
        found = fast(ids).clone()
        torch.cuda.synchronize()
        assert torch.equal(found.isnan(), wanted.isnan())
        assert torch.equal(found.nan_to_num(), wanted.nan_to_num())
        hot.embedding.update_hot_rows()
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
    torch._dynamo.reset()


def test_surrounding_module_moves_without_the_table(plain: Made) -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(DEVICE)
    model = nn.Sequential(plain.embedding)
    copied = copy.deepcopy(model).to(DEVICE).half()
    assert torch.cuda.memory_allocated(DEVICE) == before
    assert copied.state_dict() == {}
    ids = zipf_ids(100)
    plain.check(copied(ids), ids)


# Prefetches


def test_prefetch_runs_beside_the_current_stream(plain: Made) -> None:
    ids = zipf_ids(512)
    plain.embedding(ids)
    torch.cuda.synchronize()
    handle = plain.embedding.prefetch(ids)
    torch.cuda._sleep(400_000_000)
    assert handle._done is not None
    handle._done.synchronize()
    assert not torch.cuda.current_stream().query()  # the sleep goes on: the lookup did not wait for it
    plain.check(handle.wait(), ids)


def test_prefetch_begins_after_its_ids_are_written(plain: Made) -> None:
    ids = torch.zeros(512, dtype=torch.int64, device=DEVICE)
    plain.embedding(ids)
    wanted = zipf_ids(512)
    torch.cuda._sleep(100_000_000)
    ids.copy_(wanted)
    plain.embedding.prefetch(ids)
    plain.check(plain.embedding.wait(), wanted)


def test_prefetched_rows_are_not_handed_out_again(plain: Made) -> None:
    """Rows and ids are dropped and their sizes asked for at once, on either stream, while the work is queued."""
    for _ in range(20):
        wanted, found = [], []
        for _ in range(4):
            ids = zipf_ids(600)
            wanted.append(ids.clone())
            handle = plain.embedding.prefetch(ids)
            del ids
            torch.full((600,), 7, dtype=torch.int64, device=DEVICE)
            found.append(handle.wait() + 0)
            torch.full((600, COLUMNS), 3.0, dtype=torch.bfloat16, device=DEVICE)
        for rows, ids in zip(found, wanted, strict=True):
            plain.check(rows, ids)


def test_prefetch_dropped_without_a_wait_does_no_harm(plain: Made) -> None:
    for _ in range(10):
        made = copy.deepcopy(plain.embedding)
        made.prefetch(zipf_ids(8192))
        del made
        ids = zipf_ids(8192)
        plain.check(plain.embedding(ids), ids)


def test_prefetch_is_captured(hot: Made) -> None:
    inputs = [zipf_ids(16), zipf_ids(2048)]

    def step() -> tuple[torch.Tensor, ...]:
        for ids in inputs:
            hot.embedding.prefetch(ids)
        work = torch.ones(64, device=DEVICE) * 2
        return (*(hot.embedding.wait() for _ in inputs), work)

    graph, (*found, work) = capture(step)
    for shift in (0, 50, 100):
        for ids in inputs:
            ids.copy_(zipf_ids(ids.numel(), shift))
        graph.replay()
        for rows, ids in zip(found, inputs, strict=True):
            hot.check(rows, ids)
        assert bool((work == 2).all())
        hot.embedding.update_hot_rows()


def test_update_waits_for_prefetches(hot: Made) -> None:
    for shift in range(5):
        ids = zipf_ids(8192, 100 * shift)
        hot.embedding.prefetch(ids)
        hot.embedding.update_hot_rows()
        hot.check(hot.embedding.wait(), ids)


def test_update_waits_for_prefetches_of_copies(hot: Made) -> None:
    copied = copy.deepcopy(hot.embedding)
    for shift in range(5):
        ids = zipf_ids(8192, 100 * shift)
        copied.prefetch(ids)
        hot.embedding.update_hot_rows()
        hot.check(copied.wait(), ids)


def test_update_waits_for_what_another_stream_has_waited_for(hot: Made) -> None:
    other = torch.cuda.Stream()
    for shift in range(5):
        ids = zipf_ids(8192, 100 * shift)
        handle = hot.embedding.prefetch(ids)
        with torch.cuda.stream(other):
            rows = handle.wait()
        hot.embedding.update_hot_rows()
        torch.cuda.current_stream().wait_stream(other)
        hot.check(rows, ids)


def test_update_is_captured_after_a_prefetch_outside(hot: Made) -> None:
    ids = zipf_ids(64)
    hot.embedding.update_hot_rows()  # compiles what a capture could not
    hot.embedding.prefetch(ids)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        hot.embedding.update_hot_rows()
    graph.replay()
    hot.embedding.update_hot_rows()
    hot.check(hot.embedding.wait(), ids)
    hot.check(hot.embedding(ids), ids)


# Eager calls


def test_lookups_like_one_before_are_right(hot: Made) -> None:
    """Of the same number, with other alignments, dtypes, shapes and outputs."""
    storage = torch.empty(70, dtype=torch.int64, device=DEVICE)
    room = torch.empty(64 * COLUMNS + 8, dtype=torch.bfloat16, device=DEVICE)
    for _ in range(2):
        for offset, out_offset in islice(zip(cycle((0, 1)), cycle((0, 1, 2, 4, 8)), strict=False), 10):
            for id_dtype in (torch.int64, torch.int32):
                ids = storage.view(id_dtype)[offset : offset + 64].copy_(zipf_ids(64))
                out = room[out_offset : out_offset + 64 * COLUMNS].view(64, COLUMNS)
                hot.check(hot.embedding(ids, out=out), ids)
                hot.check(hot.embedding(ids), ids)
                hot.check(hot.embedding(ids.view(8, 8)).view(64, COLUMNS), ids)
                hot.check(hot.embedding(ids.view(8, 8).T).reshape(64, COLUMNS), ids.view(8, 8).T.reshape(-1))


def test_lookups_like_one_before_check_out(plain: Made) -> None:
    ids = zipf_ids(16)
    for _ in range(2):
        plain.embedding(ids)
        with pytest.raises(ftw.LookupArgumentError, match=r"out: .* is needed"):
            plain.embedding(ids, out=torch.empty(16, COLUMNS - 1, dtype=torch.bfloat16, device=DEVICE))


def test_other_current_stream_is_taken(plain: Made) -> None:
    ids = torch.zeros(16, dtype=torch.int64, device=DEVICE)
    plain.embedding(ids)
    plain.embedding(ids)
    wanted = zipf_ids(16)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        ids.copy_(wanted)
        found = plain.embedding(ids)
    stream.synchronize()
    plain.check(found, wanted)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_other_current_device_is_left_alone(plain: Made) -> None:
    ids = zipf_ids(16)
    with torch.cuda.device(1):
        for _ in range(2):
            plain.check(plain.embedding(ids), ids)
    for _ in range(2):
        rows = plain.embedding(ids.to("cuda:1"))
        assert rows.device == torch.device("cuda", 1)
        plain.check(rows.to(DEVICE), ids)
