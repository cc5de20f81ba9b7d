"""Part of `ftw bench lookup`: rows of tables [32768, 2048] in every packed type, random blocks, decoded to bf16.

Limits: the link, at the copy engine's speed; the plain lookup of the same bytes, which is what their rows' size allows
(`copied_us`); and for a single row the plain lookup of a bf16 table, timed by turns with it (`of_bf16_host`). Peer:
FreeToken, as measured on an H200. On a machine without a GPU the reference is timed beside gguf's own decoder.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, quants

from ftw.ggml_types import PACKED_TYPES, ggml_types_by_name
from ftw.kernels.lookup import lookup
from ftw.kernels.packed_lookup import packed_lookup
from ftw.pinned import PinnedBuffer

from .timing import Quantiles, quantiles, time_graph_us, time_wall_us

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROWS, COLUMNS = 32768, 2048
COUNTS = (1, 16, 512, 8192)
CPU_TYPES, CPU_COUNTS = ("Q4_0", "Q6_K", "IQ2_XS"), (1, 16, 512)
# Microseconds for COUNTS rows in a CUDA graph: FreeToken 0.2.1, tables of this shape in pinned host memory, H200 with
# PCIe 5.0 x16, 2026-11-29. They are no part of this run: compare on such a machine.
FREETOKEN_US = {"Q4_0": (4.20, 5.37, 32.1, 429.0), "Q8_0": (4.50, 5.45, 45.5, 676.0)}
_SAMPLE = 512  # rows that are compared: gguf decodes about as many in a tenth of a second
_CALLS, _TURNS = 50, 60


def gpu_rows(bf16_table: torch.Tensor, device: torch.device, copy_engine: float) -> Iterator[dict[str, Any]]:
    """Time every type beside `bf16_table`, in host memory, no smaller; the copy engine's speed is in GB/s."""
    for name in PACKED_TYPES:
        if name in ggml_types_by_name():
            yield from _rows_of_type(name, bf16_table, device, copy_engine)


def cpu_rows() -> Iterator[dict[str, Any]]:
    """Time the reference of a few types beside gguf's decoder, given the same rows side by side."""
    for name in CPU_TYPES:
        table = torch.randint(0, 256, (ROWS, ggml_types_by_name()[name].row_nbytes(COLUMNS)), dtype=torch.uint8)
        for count in CPU_COUNTS:
            ids = torch.randint(0, ROWS, (count,))
            gathered = table[ids]
            is_equal = _is_equal(packed_lookup(table, ids, name), _decode(gathered, name).to(torch.bfloat16))
            ways: dict[str, Callable[[], object]] = {
                "reference": partial(packed_lookup, table, ids, name),
                "gguf": partial(_decode, gathered, name),
            }
            for way, function in ways.items():
                time = time_wall_us(function, calls=max(1, 64 // count), repeats=5)
                row = {"type": name, "way": way, "ids": count, "eager_us": round(time.median, 2)}
                yield {**row, "rows_equal": is_equal} if way == "reference" else row


def _rows_of_type(
    name: str, bf16_table: torch.Tensor, device: torch.device, copy_engine: float
) -> Iterator[dict[str, Any]]:
    row_nbytes = ggml_types_by_name()[name].row_nbytes(COLUMNS)
    with PinnedBuffer(ROWS * row_nbytes) as buffer:
        table = torch.frombuffer(buffer.view(), dtype=torch.uint8).reshape(ROWS, row_nbytes)
        device_table = torch.randint(0, 256, table.shape, dtype=torch.uint8, device=device)
        table.copy_(device_table)
        buffer.pin(device)
        ids = torch.randint(0, ROWS, (max(COUNTS),), device=device)
        expected = _decode(table[ids[:_SAMPLE].cpu()], name).to(device, torch.bfloat16)
        for number, count in enumerate(COUNTS):
            for way, where in (("host", table), ("gpu", device_table)):
                row = {"type": name, "way": way, "ids": count, **_time(where, ids[:count], name, expected)}
                if way == "host":
                    row.update(_compare(row, number, table, ids, bf16_table, copy_engine))
                yield row
        del table


def _time(table: torch.Tensor, ids: torch.Tensor, name: str, expected: torch.Tensor) -> dict[str, Any]:
    """Compare the rows, of many a sample, then time the lookup."""
    out = torch.full((ids.shape[0], COLUMNS), float("nan"), dtype=torch.bfloat16, device=ids.device)
    function = partial(packed_lookup, table, ids, name, out=out)
    function()
    is_equal = _is_equal(out[:_SAMPLE], expected[: ids.shape[0]])
    graph = time_graph_us(function)
    return {
        "rows_equal": is_equal,
        "graph_us": round(graph.median, 2),
        "graph_p20_us": round(graph.p20, 2),
        "graph_p80_us": round(graph.p80, 2),
        "gb_per_s": round(ids.shape[0] * table.shape[1] / graph.median / 1000, 2),
    }


def _compare(
    row: dict[str, Any],
    number: int,
    table: torch.Tensor,
    table_ids: torch.Tensor,
    bf16_table: torch.Tensor,
    copy_engine: float,
) -> dict[str, Any]:
    """Return what stands beside the timing of a host table: limits and the peer; `table_ids` are enough for all."""
    found: dict[str, Any] = {}
    if row["ids"] == 1:
        out = torch.empty(1, COLUMNS, dtype=torch.bfloat16, device=table_ids.device)
        packed, plain = _time_by_turns(
            lambda number: packed_lookup(table, table_ids[number : number + 1], row["type"], out=out),
            lambda number: lookup(bf16_table, table_ids[number : number + 1], out=out),
        )
        found["of_bf16_host"] = round(packed.median / plain.median, 3)
    if row["ids"] == max(COUNTS):
        found["of_copy_engine"] = round(row["gb_per_s"] / copy_engine, 3)
        copied = torch.empty(row["ids"], table.shape[1], dtype=torch.uint8, device=table_ids.device)
        found["copied_us"] = round(time_graph_us(partial(lookup, table, table_ids, out=copied)).median, 2)
    if row["type"] in FREETOKEN_US:
        found["times_as_fast_as_freetoken"] = round(FREETOKEN_US[row["type"]][number] / row["graph_us"], 2)
    return found


def _time_by_turns(*functions: Callable[[int], object]) -> list[Quantiles]:
    """Time one call of each inside a CUDA graph, in microseconds; by turns, so that a drift is all of theirs.

    The calls of a graph are given their number, so that rows at many places are read.
    """
    graphs = [_capture(function) for function in functions]
    samples: list[list[float]] = [[] for _ in graphs]
    for turn in range(-3, _TURNS):
        for graph, of_graph in zip(graphs, samples, strict=True):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            graph.replay()  # not timed: with nothing queued before it, a replay of so little work varies by a tenth
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn >= 0:
                of_graph.append(start.elapsed_time(end) * 1000 / _CALLS)
    return [quantiles(of_graph) for of_graph in samples]


def _capture(function: Callable[[int], object]) -> torch.cuda.CUDAGraph:
    """Return a graph of `_CALLS` calls."""
    function(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(_CALLS):
            function(number)
    return graph


def _decode(packed: torch.Tensor, name: str) -> torch.Tensor:
    with np.errstate(all="ignore"):  # random blocks have infinite and NaN scales among them
        values = quants.dequantize(packed.numpy(), GGMLQuantizationType[name])
    return torch.from_numpy(np.ascontiguousarray(values))


def _is_equal(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Compare bf16 bit by bit; only which NaN a NaN is may differ."""
    is_same = found.view(torch.int16) == expected.view(torch.int16)
    return bool((is_same | (found.isnan() & expected.isnan())).all())
