"""Reading bytes of a file into fresh host memory: the best ways there are, and `ftw.files.parallel_read` beside them.

Limits: cold the disk around the page cache (`read_direct_window`), warm memcpy out of the page cache (`read_buffered`).
`python -m ftw.bench.reading FOLDER` compares them with ftw's reading of an unaligned table, in interleaved rounds.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import threading
import time
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from ftw.files import DIRECT_ALIGNMENT, Part, WeightFile, read_parts
from ftw.host import HostMemory
from ftw.sizes import align_up

from .timing import SET_CACHE

if TYPE_CHECKING:
    from collections.abc import Callable

JOB_NBYTES = 8 << 20
NUM_THREADS = 2
OFFSET = 123_456_776  # as unaligned as the offsets that safetensors has
NBYTES = 248_320 * 2048 * 2
REPEATS = 7


def read_direct_window(path: Path, offset: int, nbytes: int, num_threads: int = NUM_THREADS) -> memoryview:
    """Return the bytes as a view inside the blocks that they lie in, which O_DIRECT reads into huge pages."""
    start = offset // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT
    view = HostMemory(align_up(offset + nbytes, DIRECT_ALIGNMENT) - start).view()
    _read_jobs(path, os.O_DIRECT, start, view, num_threads)
    return view[offset - start : offset - start + nbytes]


def read_buffered(path: Path, offset: int, nbytes: int, num_threads: int = NUM_THREADS) -> memoryview:
    """Return the bytes, read through the page cache into huge pages."""
    view = HostMemory(nbytes).view()
    _read_jobs(path, 0, offset, view, num_threads)
    return view


def read_in_bulk(path: Path, offset: int, nbytes: int, num_threads: int | None = None) -> memoryview:
    """Return the bytes as ftw reads a table: into huge pages from their beginning on."""
    view = HostMemory(nbytes).view()
    read_parts([Part(WeightFile(path), offset, view)], num_threads=num_threads)
    return view


def _read_jobs(path: Path, flags: int, offset: int, view: memoryview, num_threads: int) -> None:
    """Fill a view by jobs that threads take in turn; the last one may end with the file."""
    descriptor = os.open(path, os.O_RDONLY | flags)
    numbers = count()

    def run() -> None:
        while (start := next(numbers) * JOB_NBYTES) < len(view):
            os.preadv(descriptor, [view[start : start + JOB_NBYTES]], offset + start)

    threads = [threading.Thread(target=run) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(descriptor)


WAYS: dict[str, Callable[[Path, int, int], memoryview]] = {
    "O_DIRECT window": read_direct_window,
    "buffered": read_buffered,
    "ftw": read_in_bulk,
}


def compare(folder: Path, nbytes: int = NBYTES, repeats: int = REPEATS) -> dict[str, dict[str, float]]:
    """Return the median seconds of each way, cold and warm, on a file that is written to `folder` for it."""
    with tempfile.TemporaryDirectory(prefix="ftw-bench-", dir=folder) as name:
        path = Path(name) / "weights.bin"
        piece = os.urandom(JOB_NBYTES)
        with path.open("wb") as file:
            for _ in range((OFFSET + nbytes) // len(piece) + 1):
                file.write(piece)
        return {
            cache: _time_ways(partial(prepare, Path(name)), path, nbytes, repeats)
            for cache, prepare in SET_CACHE.items()
        }


def _time_ways(prepare: Callable[[], None], path: Path, nbytes: int, repeats: int) -> dict[str, float]:
    samples: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(repeats):
        for way, read in WAYS.items():
            prepare()
            start = time.perf_counter()
            view = read(path, OFFSET, nbytes)
            samples[way].append(time.perf_counter() - start)
            del view
    return {way: statistics.median(times) for way, times in samples.items()}


if __name__ == "__main__":
    for cache, medians in compare(Path(sys.argv[1])).items():
        print(cache, {way: round(seconds, 4) for way, seconds in medians.items()})
