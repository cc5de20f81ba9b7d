"""Hot rows, distinct ids, counts, scales and parts of rows on a GPU: the compiled kernels, eager and in graphs."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hot_tables import HotTable, assert_same, make_hot, random_rows, values_of
from packed_tables import random_table

from ftw.ggml_types import ggml_types_by_name
from ftw.kernels.distinct import prefers_distinct
from ftw.kernels.hot import HotRowBuffers
from ftw.kernels.launching import Launcher
from ftw.kernels.lookup import lookup
from ftw.kernels.packed_lookup import packed_lookup, prepare
from ftw.pinned import PinnedBuffer

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
ROWS = 509
COUNTS = (1, 16, 300, 5000)
KINDS = ["bf16", "fp8", "odd", "Q4_0", "Q6_K", "MXFP4"]
OPTIONS: list[dict[str, Any]] = [{}, {"scale": -0.37}, {"first_id": 17}, {"columns": (256, 512), "scale": 45.25}]


class Case:
    """A table in page-locked memory and on the GPU, a third of its rows hot; the values that it holds on the GPU."""

    def __init__(self, kind: str) -> None:
        self.ggml_type = kind if kind in ggml_types_by_name() else None
        if self.ggml_type is not None:
            whole = random_table(kind, ROWS, 1024)
            prepare(kind, DEVICE)
        else:
            dtype = torch.float8_e4m3fn if kind == "fp8" else torch.bfloat16
            whole = random_rows(ROWS, 33 if kind == "odd" else 1024, dtype)
        made: HotTable = make_hot(whole, torch.randperm(ROWS)[: ROWS // 3].tolist())
        self.buffer = PinnedBuffer(whole.nbytes)
        self.host = torch.frombuffer(self.buffer.view(), dtype=torch.uint8).view(ROWS, -1).view(whole.dtype)
        self.host.view(torch.uint8).copy_(made.table.view(torch.uint8))
        self.buffer.pin(DEVICE)
        self.gpu = made.table.to(DEVICE)
        assert made.hot.counts is not None
        self.counts = made.hot.counts.to(DEVICE)
        self.hot = HotRowBuffers(made.hot.slots.to(DEVICE), made.hot.rows.to(DEVICE), self.counts)
        values = torch.bfloat16 if self.ggml_type is not None else whole.dtype
        self.values = values_of(whole, self.ggml_type, values).to(DEVICE)

    def close(self) -> None:
        torch.cuda.synchronize()
        del self.host
        self.buffer.close()

    def fits(self, options: dict[str, Any]) -> bool:
        """Whether rows are wide enough for a part, and of a dtype that is scaled."""
        is_wide = "columns" not in options or self.values.shape[1] == 1024
        return is_wide and ("scale" not in options or self.values.dtype == torch.bfloat16)

    def look_up(self, table: torch.Tensor, ids: torch.Tensor, **options: Any) -> torch.Tensor:
        options.setdefault("hot", self.hot)
        if self.ggml_type is None:
            return lookup(table, ids, **options)
        return packed_lookup(table, ids, self.ggml_type, **options)

    def check(self, found: torch.Tensor, ids: torch.Tensor, options: dict[str, Any]) -> None:
        """Compare with torch's own rows and product, on the GPU."""
        flat = ids.reshape(-1).to(torch.int64) - options.get("first_id", 0)
        is_inside = (flat >= 0) & (flat < ROWS)
        start, length = options.get("columns", (0, self.values.shape[1]))
        nbytes = length * self.values.element_size()
        bits = self.values[:, start : start + length].contiguous().view(torch.uint8)
        rows = bits[flat.clamp(0, ROWS - 1)].view(self.values.dtype)
        if "scale" in options:
            rows = rows * torch.tensor(options["scale"], dtype=rows.dtype, device=DEVICE)
        wanted = rows.view(torch.uint8).masked_fill(~is_inside[:, None], 0)
        is_exact = self.ggml_type is None and "scale" not in options
        wanted = wanted.view(-1, nbytes).view(self.values.dtype).view(*ids.shape, length)
        assert_same(found, wanted, is_exact=is_exact)

    def check_counts(self, *all_ids: torch.Tensor, first_id: int = 0) -> None:
        """Compare counts with those of all ids since the last check, and begin again."""
        flat = torch.cat([ids.reshape(-1).to(torch.int64) for ids in all_ids]) - first_id
        flat = flat[(flat >= 0) & (flat < ROWS)]
        assert torch.equal(self.counts.to(torch.int64), torch.bincount(flat, minlength=ROWS))
        self.counts.zero_()


@pytest.fixture(params=KINDS, scope="module")
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    made = Case(request.param)
    yield made
    made.close()


@pytest.fixture
def plain() -> Iterator[Case]:
    made = Case("bf16")
    yield made
    made.close()


def random_ids(count: int, id_dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return ids on the GPU, many of them equal and some outside."""
    spread = torch.randint(-9, ROWS + 30, (count,), device=DEVICE)
    few = torch.randint(0, 5, (count,), device=DEVICE)
    return torch.where(torch.rand(count, device=DEVICE) < 0.5, few, spread).to(id_dtype)


@pytest.mark.parametrize("is_distinct", [False, True], ids=["each", "distinct"])
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "scaled", "shard", "part"])
def test_rows_and_counts_eager_and_replayed(case: Case, options: dict[str, Any], is_distinct: bool) -> None:
    if not case.fits(options):
        pytest.skip("not for this table")
    first_id = options.get("first_id", 0)
    for table in (case.host, case.gpu):
        for count in COUNTS:
            ids = random_ids(count, torch.int64 if count % 16 else torch.int32)
            case.counts.zero_()
            case.check(case.look_up(table, ids, is_distinct=is_distinct, **options), ids, options)
            case.check_counts(ids, first_id=first_id)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = case.look_up(table, ids, is_distinct=is_distinct, **options)
            case.counts.zero_()
            for _ in range(3):
                ids.copy_(random_ids(count))
                out.view(torch.uint8).fill_(0xA5)
                graph.replay()
                case.check(out, ids, options)
                case.check_counts(ids, first_id=first_id)
            del graph


def test_rows_without_hot_ones(case: Case) -> None:
    """The hot rows' places in the table are poison, so they are put back for once."""
    is_hot = case.hot.slots >= 0
    whole = case.gpu.view(torch.uint8).clone()
    whole[is_hot] = case.hot.rows.view(torch.uint8)[case.hot.slots[is_hot].long()]
    whole = whole.view(case.gpu.dtype)
    for options in OPTIONS:
        if case.fits(options):
            for is_distinct in (False, True):
                ids = random_ids(700)
                found = case.look_up(whole, ids, hot=None, is_distinct=is_distinct, **options)
                case.check(found, ids, options)


def test_rows_without_counts(case: Case) -> None:
    ids = random_ids(77)
    case.counts.zero_()
    case.check(case.look_up(case.host, ids, hot=case.hot._replace(counts=None)), ids, {})
    assert not case.counts.count_nonzero()


def test_launched_directly(case: Case) -> None:
    """Sizes, addresses and options by turns, so that a wrong compiled kernel would be taken."""
    launcher = Launcher()
    storage = torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE)
    for _ in range(3):
        for options in OPTIONS:
            for count, offset in ((1, 0), (16, 2), (1, 2), (2000, 0)) if case.fits(options) else ():
                ids = random_ids(2 * count)[count:]
                length = options.get("columns", (0, case.values.shape[1]))[1]
                nbytes = min(count, 16) * length * case.values.element_size()
                out = None
                if count <= 16:
                    out = storage[offset : offset + nbytes].view(case.values.dtype).view(count, length)
                is_distinct = count == 2000
                found = case.look_up(case.host, ids, is_distinct=is_distinct, launcher=launcher, out=out, **options)
                case.check(found, ids, options)
    graph, ids = torch.cuda.CUDAGraph(), random_ids(16)
    case.look_up(case.host, ids, launcher=launcher)
    with torch.cuda.graph(graph):
        found = case.look_up(case.host, ids, launcher=launcher)
    ids.copy_(random_ids(16))
    graph.replay()
    case.check(found, ids, {})
    del graph


def test_swapped_rows_are_seen_by_a_captured_graph(case: Case) -> None:
    ids = random_ids(300)
    case.look_up(case.host, ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.look_up(case.host, ids)
    kept = case.hot.slots.clone()
    order = torch.randperm(case.hot.rows.shape[0], device=DEVICE)
    copies = case.hot.rows.view(torch.uint8)
    copies.copy_(copies[order.argsort()])  # what lay at slot s now lies at order[s]
    case.hot.slots.copy_(torch.where(kept >= 0, order[kept.clamp(min=0).long()].int(), -1))
    graph.replay()
    case.check(out, ids, {})
    del graph


def test_distinct_lookups_on_two_streams_at_once(plain: Case) -> None:
    """Neither sees the other's owners, though both look the same rows up, again and again."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    all_ids = [random_ids(4096) for _ in streams]
    torch.cuda.synchronize()
    found: list[list[torch.Tensor]] = [[], []]
    for _ in range(20):
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[number].append(plain.look_up(plain.host, all_ids[number], is_distinct=True))
    torch.cuda.synchronize()
    for ids, of_stream in zip(all_ids, found, strict=True):
        for rows in of_stream:
            plain.check(rows, ids, {})


def test_distinct_lookups_in_two_graphs_replayed_at_once(plain: Case) -> None:
    streams, all_ids = [torch.cuda.Stream() for _ in range(2)], [random_ids(4096) for _ in range(2)]
    plain.look_up(plain.host, all_ids[0], is_distinct=True)
    graphs, outs = [], []
    for ids in all_ids:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            outs.append(plain.look_up(plain.host, ids, is_distinct=True))
    for _ in range(10):
        for ids, out in zip(all_ids, outs, strict=True):
            ids.copy_(random_ids(4096))
            out.view(torch.uint8).fill_(0xA5)
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for ids, out in zip(all_ids, outs, strict=True):
            plain.check(out, ids, {})
    del graphs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_scale_of_every_value_of_two_bytes(dtype: torch.dtype) -> None:
    table = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16, device=DEVICE).view(64, 1024).view(dtype)
    ids = torch.arange(64, device=DEVICE)
    for scale in (45.254834, -0.3, 1e-4, 6e4):
        wanted = table * torch.tensor(scale, dtype=dtype, device=DEVICE)
        assert_same(lookup(table, ids, scale=scale), wanted, is_exact=False)


def test_scale_of_float32_is_rounded_once() -> None:
    table = random_rows(64, 1024, torch.float32).to(DEVICE)
    ids = torch.arange(64, device=DEVICE)
    for scale in (45.254834, -0.3, 1e-30, 3e38):
        wanted = table * torch.tensor(scale, device=DEVICE)
        assert_same(lookup(table, ids, scale=scale), wanted, is_exact=False)


def zipf_ids(count: int) -> torch.Tensor:
    """Return ids on the GPU that occur as words of a text do: the n-th most frequent row 1 / n times as often."""
    weights = 1.0 / torch.arange(1, ROWS + 1, dtype=torch.float32)
    return torch.randperm(ROWS)[torch.multinomial(weights, count, replacement=True)].to(DEVICE)


def test_many_distinct_ids_beside_hot_rows(case: Case) -> None:
    """So many that lookups choose it by themselves."""
    ids = zipf_ids(70_000)
    assert prefers_distinct(ids.numel(), num_rows=ROWS, out_nbytes=0, has_hot=True)
    case.counts.zero_()
    case.check(case.look_up(case.host, ids, is_distinct=True), ids, {})
    case.check_counts(ids)


def test_distinct_lookup_sees_a_set_that_changes_between_replays(case: Case) -> None:
    """Every row has a copy; those that are poison in the table are always hot, the others by turns."""
    was_hot = case.hot.slots >= 0
    copies = case.gpu.view(torch.uint8).clone()
    copies[was_hot] = case.hot.rows.view(torch.uint8)[case.hot.slots[was_hot].long()]
    all_slots = torch.arange(ROWS, dtype=torch.int32, device=DEVICE)
    hot = HotRowBuffers(torch.where(was_hot, all_slots, -1), copies.view(case.gpu.dtype), torch.zeros_like(all_slots))
    ids = zipf_ids(70_000)
    case.look_up(case.host, ids, hot=hot, is_distinct=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.look_up(case.host, ids, hot=hot, is_distinct=True)
    for share in (0.0, 0.5, 1.0, 0.3, 0.0):
        is_hot = was_hot | (torch.rand(ROWS, device=DEVICE) < share)
        hot.slots.copy_(torch.where(is_hot, all_slots, -1))
        ids.copy_(zipf_ids(70_000))
        out.view(torch.uint8).fill_(0xA5)
        graph.replay()
        case.check(out, ids, {})
    del graph


def test_all_ids_equal_and_all_outside(plain: Case) -> None:
    for token in (3, -1, ROWS):
        ids = torch.full((8192,), token, device=DEVICE)
        plain.check(plain.look_up(plain.host, ids, is_distinct=True), ids, {})
        plain.check_counts(ids)
