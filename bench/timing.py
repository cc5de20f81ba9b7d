"""Timing: medians of device work inside a CUDA graph or eager, and of host work by the wall clock."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

T = TypeVar("T")


class Quantiles(NamedTuple):
    """Median, 20th and 80th percentile of repeated timings."""

    median: float
    p20: float
    p80: float


def quantiles(samples: list[float]) -> Quantiles:
    """Return the quantiles of at least one sample."""
    if len(samples) == 1:
        return Quantiles(samples[0], samples[0], samples[0])
    cuts = statistics.quantiles(samples, n=10, method="inclusive")
    return Quantiles(statistics.median(samples), cuts[1], cuts[7])


def time_graph_us(function: Callable[[], object], *, per_graph: int = 20, repeats: int = 25) -> Quantiles:
    """Time one call inside a CUDA graph, in microseconds: a graph of `per_graph` calls is replayed and divided."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(per_graph):
            function()
    return Quantiles(*(value / per_graph for value in time_device_us(graph.replay, repeats=repeats)))


def time_device_us(function: Callable[[], object], *, repeats: int = 25) -> Quantiles:
    """Time the device work that one call queues, by events around it, in microseconds."""
    for _ in range(3):
        function()
    samples = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        function()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1000)
    return quantiles(samples)


def time_wall_us(function: Callable[[], object], *, calls: int = 50, repeats: int = 9) -> Quantiles:
    """Time one eager call by the wall clock, in microseconds, the device's work included."""
    is_gpu = torch.cuda.is_available()
    samples = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        for _ in range(calls):
            function()
        if is_gpu:
            torch.cuda.synchronize()
        samples.append((time.perf_counter() - start) / calls * 1e6)
    return quantiles(samples[1:])


def time_queueing_us(function: Callable[[], object], *, calls: int = 200, repeats: int = 15) -> Quantiles:
    """Time what one call costs the host, in microseconds: the device works through the queue outside of the time."""
    samples = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        samples.append((time.perf_counter() - start) / calls * 1e6)
    return quantiles(samples[1:])


def time_interleaved_ms(
    ways: Mapping[str, Callable[[], object]], *, rounds: int, before: Callable[[int], object]
) -> dict[str, list[float]]:
    """Time calls in turn, in milliseconds, `rounds` samples of each; `before` prepares each outside of the time.

    Which comes first changes with every round, so that a drift of the clock rates falls on all alike. On a GPU the
    device's work is timed, and everything is queued at once; replays of graphs do not wait for the host then, but eager
    work does whose kernels are shorter than their launches.
    """
    is_gpu = torch.cuda.is_available()
    names = list(ways)
    marks: dict[str, list[tuple[Any, Any]]] = {name: [] for name in names}
    for number in range(-1, rounds):
        for name in rotated(names, number):
            before(max(number, 0))
            start = _mark(is_gpu=is_gpu)
            ways[name]()
            if number >= 0:
                marks[name].append((start, _mark(is_gpu=is_gpu)))
    if not is_gpu:
        return {name: [(end - start) * 1000 for start, end in pairs] for name, pairs in marks.items()}
    torch.cuda.synchronize()
    return {name: [start.elapsed_time(end) for start, end in pairs] for name, pairs in marks.items()}


def rotated(items: Sequence[T], number: int) -> list[T]:
    """Return items in their order, from that of a number on; the first follows the last."""
    turn = number % len(items)
    return [*items[turn:], *items[:turn]]


def _mark(*, is_gpu: bool) -> Any:
    """Return this moment: an event of the current stream, or seconds of the wall clock."""
    if not is_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def time_seconds(function: Callable[[], object], *, repeats: int, before: Callable[[], object]) -> Quantiles:
    """Time a long call by the wall clock, in seconds; `before` prepares each repeat outside of the time."""
    samples = []
    for _ in range(repeats):
        before()
        start = time.perf_counter()
        function()
        samples.append(time.perf_counter() - start)
    return quantiles(samples)


def drop_from_page_cache(folder: Path) -> None:
    """Make the files of a folder cold, as far as the kernel takes the advice."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def fill_page_cache(folder: Path) -> None:
    """Make the files of a folder warm, by reading them."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                while file.read(16 << 20):
                    pass


SET_CACHE: dict[str, Callable[[Path], None]] = {"cold": drop_from_page_cache, "warm": fill_page_cache}
