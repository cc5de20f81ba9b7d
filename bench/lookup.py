"""`ftw bench lookup`: rows of tables in host memory, plain, distinct and with hot rows, beside tables on the GPU.

    plain          every id crosses the link
    distinct       every distinct id crosses it once
    auto           what `HostEmbedding` does: one of the two, by the number of ids
    hot 32MiB      the most used rows in VRAM, as many as take that many bytes
    gpu            the same kernel on a table in VRAM
    index_select   torch's, on a plain table in VRAM
    cpu            the CPU gathers the rows' bytes, and one copy takes them over; packed ones are not decoded

Limit: the link, at the speed of the copy engine in the same run; a plain lookup cannot be faster, the others cross it
less often. Every way's rows are compared first. Every packed type is timed by `ftw.bench.packed_lookup`, under the key
"packed"; eager calls and a shifting distribution stand under "calls" and "learning". On a machine without a GPU the CPU
reference is timed beside torch's own embedding.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F

from ftw.ggml_types import ggml_types_by_name
from ftw.kernels.lookup import lookup
from ftw.kernels.packed_lookup import packed_lookup
from ftw.lookup import HostEmbedding
from ftw.pinned import PinnedBuffer

from . import packed_lookup as packed_bench
from .ids import Ids
from .lookup_calls import measure_calls, measure_learning
from .timing import time_device_us, time_graph_us, time_wall_us

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

COUNTS = (1, 16, 512, 8192)
DISTRIBUTIONS = ("uniform", "zipf")
HOT = ("32MiB", "64MiB")
_COPY_NBYTES = 512 << 20


class Table(NamedTuple):
    """A table to look up: bf16, or of a packed type."""

    name: str
    rows: int
    columns: int

    @property
    def ggml_type(self) -> str | None:
        """The packed type, None for bf16."""
        return None if self.name == "bf16" else self.name

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row."""
        known = self.ggml_type and ggml_types_by_name()[self.ggml_type]
        return known.row_nbytes(self.columns) if known else self.columns * 2


TABLES = (
    Table("bf16", 151_936, 2048),
    Table("bf16", 248_320, 2560),
    *(Table(name, 151_936, 2048) for name in ("Q4_0", "Q8_0", "Q4_K", "Q6_K", "NVFP4")),
)


def run(tables: tuple[Table, ...] = TABLES, *, with_packed: bool = True) -> dict[str, Any]:
    """Time 1 to 8192 uniform and Zipf ids in each table, eager and in a CUDA graph."""
    if not torch.cuda.is_available():
        return {"rows": list(_cpu_rows()), "packed": list(packed_bench.cpu_rows())}
    device = torch.device("cuda", torch.cuda.current_device())
    result: dict[str, Any] = {"copy_engine_gb_per_s": _copy_engine(device), "rows": []}
    for table in tables:
        with PinnedBuffer(table.rows * table.row_nbytes) as buffer:
            host = torch.frombuffer(buffer.view(), dtype=torch.uint8).reshape(table.rows, table.row_nbytes)
            on_gpu = _random(table, device)
            host.copy_(on_gpu)
            buffer.pin(device)
            if table.ggml_type is None:
                host, on_gpu = host.view(torch.bfloat16), on_gpu.view(torch.bfloat16)
            result["rows"] += _rows_of(table, host, on_gpu, result["copy_engine_gb_per_s"])
            if table is tables[0]:
                result["calls"] = measure_calls(host, on_gpu)
                result["learning"] = measure_learning(host, device)
                if with_packed:
                    result["packed"] = list(packed_bench.gpu_rows(host, device, result["copy_engine_gb_per_s"]))
            del host, on_gpu
    return result


def _random(table: Table, device: torch.device) -> torch.Tensor:
    """Return random bytes on the device; of bf16 those of normal values."""
    if table.ggml_type:
        return torch.randint(0, 256, (table.rows, table.row_nbytes), dtype=torch.uint8, device=device)
    values = torch.empty(table.rows, table.columns, dtype=torch.bfloat16, device=device).normal_()
    return values.view(torch.uint8)


def _rows_of(table: Table, host: torch.Tensor, on_gpu: torch.Tensor, copy_engine: float) -> Iterator[dict[str, Any]]:
    source = Ids(table.rows, on_gpu.device)
    embeddings = {}
    for size in HOT:
        embedding = HostEmbedding(host, ggml_type=table.ggml_type, hot_bytes=size, device=on_gpu.device)
        assert embedding.hot is not None
        embedding.set_hot_rows(source.by_rank[: embedding.hot.rows.shape[0]])
        embeddings[f"hot {size}"] = embedding
    embeddings["auto"] = HostEmbedding(host, ggml_type=table.ggml_type)
    for count in COUNTS:
        for distribution in DISTRIBUTIONS:
            ids = source.draw(distribution, count)
            out = torch.empty(count, table.columns, dtype=torch.bfloat16, device=ids.device)
            ways = _ways(table, host, on_gpu, ids, out)
            ways.update({name: partial(embedding, ids, out=out) for name, embedding in embeddings.items()})
            expected = _look_up(table, on_gpu, ids).clone()
            head = {"table": f"{table.name} [{table.rows}, {table.columns}]", "ids": count, "drawn": distribution}
            for way, function in ways.items():
                figures = _time(function, out if way != "cpu" else None, expected, is_graph=way != "cpu")
                if way == "plain" and count == max(COUNTS):
                    rate = count * table.row_nbytes / figures["graph_us"] / 1000
                    figures["of_copy_engine"] = round(rate / copy_engine, 3)
                yield {**head, "distinct": int(ids.unique().numel()), "way": way, **figures}


def _ways(
    table: Table, host: torch.Tensor, on_gpu: torch.Tensor, ids: torch.Tensor, out: torch.Tensor
) -> dict[str, Callable[[], Any]]:
    cpu_ids = ids.cpu()
    gathered = torch.empty(ids.shape[0], host.shape[1], dtype=host.dtype, pin_memory=True)
    arrived = torch.empty_like(gathered, device=ids.device)

    def gather_and_copy() -> torch.Tensor:
        torch.index_select(host, 0, cpu_ids, out=gathered)
        return arrived.copy_(gathered, non_blocking=True)

    ways: dict[str, Callable[[], Any]] = {
        "plain": lambda: _look_up(table, host, ids, out),
        "distinct": lambda: _look_up(table, host, ids, out, is_distinct=True),
        "gpu": lambda: _look_up(table, on_gpu, ids, out),
    }
    if table.ggml_type is None:
        ways["index_select"] = lambda: torch.index_select(on_gpu, 0, ids, out=out)
    return {**ways, "cpu": gather_and_copy}


def _look_up(
    table: Table, where: torch.Tensor, ids: torch.Tensor, out: torch.Tensor | None = None, *, is_distinct: bool = False
) -> torch.Tensor:
    if table.ggml_type is None:
        return lookup(where, ids, out=out, is_distinct=is_distinct)
    return packed_lookup(where, ids, table.ggml_type, out=out, is_distinct=is_distinct)


def _time(
    function: Callable[[], Any], out: torch.Tensor | None, expected: torch.Tensor, *, is_graph: bool
) -> dict[str, Any]:
    """Compare the rows where `out` is given, then time the call."""
    figures: dict[str, Any] = {}
    if out is not None:
        out.fill_(float("nan"))
        function()
        same = (out.view(torch.int16) == expected.view(torch.int16)) | (out.isnan() & expected.isnan())
        figures["rows_equal"] = bool(same.all())
    if is_graph:
        graph = time_graph_us(function, repeats=15)
        figures["graph_us"] = round(graph.median, 2)
        figures.update(graph_p20_us=round(graph.p20, 2), graph_p80_us=round(graph.p80, 2))
    figures["eager_us"] = round(time_wall_us(function, calls=20, repeats=5).median, 2)
    return figures


def _copy_engine(device: torch.device) -> float:
    """Measure the copy engine, host to device, in GB/s."""
    with PinnedBuffer(_COPY_NBYTES) as buffer:
        source = torch.frombuffer(buffer.view(), dtype=torch.uint8).fill_(1)
        buffer.pin(device)
        target = torch.empty(_COPY_NBYTES, dtype=torch.uint8, device=device)
        time = time_device_us(partial(target.copy_, source, non_blocking=True), repeats=11)
        del source
    return round(_COPY_NBYTES / time.median / 1000, 2)


def _cpu_rows() -> Iterator[dict[str, Any]]:
    rows, columns = TABLES[0].rows // 4, TABLES[0].columns
    table = torch.randn(rows, columns).to(torch.bfloat16)
    embedding = HostEmbedding(table)
    for count in COUNTS:
        ids = torch.randint(0, rows, (count,))
        ways: dict[str, Callable[[], torch.Tensor]] = {
            "reference": partial(embedding, ids),
            "torch": partial(F.embedding, ids, table),
        }
        for way, function in ways.items():
            is_equal = torch.equal(function().view(torch.int16), table[ids].view(torch.int16))
            time = time_wall_us(function)
            yield {"way": way, "ids": count, "rows_equal": is_equal, "eager_us": round(time.median, 2)}
