"""`ftw bench lookup`: rows of a bf16 table [151936, 2048] by way of host memory, beside the copy engine and the GPU.

Limit: the link. A host table can at best be read at the copy engine's speed, which is measured in the same run. On a
machine without a GPU the CPU reference is timed beside torch's own embedding. Rows of packed tables are timed by
`ftw.bench.packed_lookup`, under the key "packed".
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from ftw.embedding import HostEmbedding
from ftw.kernels.lookup import lookup
from ftw.pinned import PinnedBuffer

from . import packed_lookup
from .timing import time_device_us, time_graph_us, time_wall_us

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROWS, COLUMNS = 151936, 2048
COUNTS = (1, 16, 512, 8192)
_COPY_NBYTES = 512 << 20


def run() -> dict[str, Any]:
    """Time lookups of 1 to 8192 uniform ids; every way's rows are compared with the table's first."""
    if not torch.cuda.is_available():
        return {"rows": list(_cpu_rows()), "packed": list(packed_lookup.cpu_rows())}
    device = torch.device("cuda", torch.cuda.current_device())
    with PinnedBuffer(ROWS * COLUMNS * 2) as buffer:
        table = torch.frombuffer(buffer.view(), dtype=torch.bfloat16).reshape(ROWS, COLUMNS)
        device_table = torch.randn(ROWS, COLUMNS, device=device).to(torch.bfloat16)
        table.copy_(device_table)
        buffer.pin(device)
        copy_engine = _copy_engine(buffer, device)
        rows = [row for count in COUNTS for row in _gpu_rows(table, device_table, count, copy_engine)]
        del device_table
        packed = list(packed_lookup.gpu_rows(table, device, copy_engine))
        del table
    return {"copy_engine_gb_per_s": copy_engine, "rows": rows, "packed": packed}


def _gpu_rows(
    table: torch.Tensor, device_table: torch.Tensor, count: int, copy_engine: float
) -> Iterator[dict[str, Any]]:
    device = device_table.device
    ids = torch.randint(0, ROWS, (count,), device=device)
    cpu_ids = ids.cpu()
    out = torch.empty(count, COLUMNS, dtype=table.dtype, device=device)
    gathered = torch.empty(count, COLUMNS, dtype=table.dtype, pin_memory=True)

    def gather_and_copy() -> torch.Tensor:
        torch.index_select(table, 0, cpu_ids, out=gathered)
        return out.copy_(gathered, non_blocking=True)

    ways = {
        "host": lambda: lookup(table, ids, out=out),
        "gpu": lambda: lookup(device_table, ids, out=out),
        "index_select": lambda: torch.index_select(device_table, 0, ids, out=out),
        "cpu_gather_and_copy": gather_and_copy,
    }
    expected = device_table[ids]
    for way, function in ways.items():
        out.fill_(float("nan"))
        function()
        torch.cuda.synchronize()
        is_equal = torch.equal(out.view(torch.int16), expected.view(torch.int16))
        graph = None if way == "cpu_gather_and_copy" else time_graph_us(function)
        eager = time_wall_us(function)
        row: dict[str, Any] = {"way": way, "ids": count, "rows_equal": is_equal, "eager_us": round(eager.median, 2)}
        if graph is not None:
            rate = count * COLUMNS * table.element_size() / graph.median / 1000
            row.update(
                graph_us=round(graph.median, 2),
                graph_p20_us=round(graph.p20, 2),
                graph_p80_us=round(graph.p80, 2),
                gb_per_s=round(rate, 2),
            )
            if way == "host":
                row["of_copy_engine"] = round(rate / copy_engine, 3)
        yield row


def _copy_engine(buffer: PinnedBuffer, device: torch.device) -> float:
    """Measure the copy engine, host to device, in GB/s."""
    source = torch.frombuffer(buffer.view()[:_COPY_NBYTES], dtype=torch.uint8)
    target = torch.empty(_COPY_NBYTES, dtype=torch.uint8, device=device)
    time = time_device_us(lambda: target.copy_(source, non_blocking=True), repeats=11)
    return round(_COPY_NBYTES / time.median / 1000, 2)


def _cpu_rows() -> Iterator[dict[str, Any]]:
    table = torch.randn(ROWS // 4, COLUMNS).to(torch.bfloat16)
    embedding = HostEmbedding(table)
    for count in COUNTS:
        ids = torch.randint(0, table.shape[0], (count,))
        ways: dict[str, Callable[[], torch.Tensor]] = {
            "reference": partial(embedding, ids),
            "torch": partial(F.embedding, ids, table),
        }
        for way, function in ways.items():
            is_equal = torch.equal(function().view(torch.int16), table[ids].view(torch.int16))
            time = time_wall_us(function)
            yield {"way": way, "ids": count, "rows_equal": is_equal, "eager_us": round(time.median, 2)}
