"""Reading many bytes of files straight into memory that the caller owns, by parallel aligned reads.

Parts are cut into jobs of 4 MiB, where huge pages end in memory, so that no two threads touch one first. A few threads
take them one after another, across the borders of parts and files; `OpenFile` chooses how each job is read. A
destination that does not lie in memory as the bytes do in the file is filled through one bounce buffer for each thread:
peak memory beside the destination is 4 MiB a thread.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections import Counter, deque
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from ftw.files.weight_file import DIRECT_ALIGNMENT, OpenFile, WeightFile
from ftw.host import HUGE_PAGE_NBYTES, HostMemory, address_of, count_processors

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# Jobs of 2 to 8 MiB were alike; cached bytes took 1.3 of the time by jobs of 16 (2 cores, 2026-11-30).
JOB_NBYTES = 4 << 20
_MIN_DEFAULT_THREADS, _MAX_DEFAULT_THREADS = 6, 8
_MAX_THREADS = 64


class Part(NamedTuple):
    """Bytes of a file from `offset` on, as many as `view` is long: a writable view of bytes to read them into."""

    file: WeightFile
    offset: int
    view: memoryview


def default_num_threads() -> int:
    """Return how many threads read unless told otherwise: as many as there are processors, but 6 to 8.

    A thread waits for the disk or moves bytes. Cold, 0.95 GiB at an unaligned offset took 1.06 to 1.20 of the time of
    O_DIRECT without a copy by 2 threads, 1.02 to 1.14 by 4, 0.98 to 1.12 by 6 (2 busy cores, virtual disk; 2026-11-30).
    """
    return min(max(count_processors(), _MIN_DEFAULT_THREADS), _MAX_DEFAULT_THREADS)


def parse_num_threads(value: int | None) -> int:
    """Return how many threads read where a caller asks for `value`, `default_num_threads` for None.

    Raises:
        ValueError: It is no number of threads.
    """
    if value is None:
        return default_num_threads()
    count = operator.index(value) if hasattr(value, "__index__") and not isinstance(value, bool) else 0
    if not 1 <= count <= _MAX_THREADS:
        raise ValueError(f"num_threads is {value!r}, 1 to {_MAX_THREADS} are allowed, or None")
    return count


def read_parts(parts: Iterable[Part], *, num_threads: int | None = None) -> None:
    """Fill the view of each part, in no particular order; views must not overlap.

    The caller's thread is one of the threads, `default_num_threads` for None; where the system lets no more be started,
    those there are go on. The first error ends the reading: what
    the views hold then is undefined, and no thread, descriptor or bounce buffer is left. Parts of files on the hub are
    read after the others, one by one.

    Raises:
        CheckpointError: A file ends before, or has changed since it was first seen.
        OSError: The disk fails; it names the file.
        ValueError: `num_threads` is not from 1 to 64.
    """
    num_threads = parse_num_threads(num_threads)
    parts = [part for part in parts if part.view]
    numbers: dict[WeightFile, int] = {}
    local = [part for part in parts if isinstance(part.file, WeightFile)]
    local.sort(key=lambda part: numbers.setdefault(part.file, len(numbers)))  # so that few files are open at a time
    jobs = [job for part in local for job in _cut(part)]
    _run(_Jobs(jobs), min(num_threads, len(jobs)))
    for part in parts:
        if part.file not in numbers:
            part.file.read_into(part.offset, part.view)


def _cut(part: Part) -> Iterator[Part]:
    first = JOB_NBYTES - address_of(part.view) % HUGE_PAGE_NBYTES
    for low, high in pairwise((0, *range(first, len(part.view), JOB_NBYTES), len(part.view))):
        yield Part(part.file, part.offset + low, part.view[low:high])


def _run(jobs: _Jobs, num_threads: int) -> None:
    """Run jobs in this thread and `num_threads - 1` others; none of them is left at the end."""
    try:
        if num_threads < 2:
            jobs.run()
            return
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(num_threads - 1, "ftw-read") as pool:
            others = []
            try:
                with contextlib.suppress(RuntimeError):  # no further thread can be started ("ulimit -u", "pids.max")
                    for _ in range(num_threads - 1):
                        others.append(pool.submit(jobs.run))
                jobs.run()
                while others:  # emptied: an error that a future here held on to would keep itself and the views alive
                    others.pop().result()
            finally:
                jobs.drop()
    finally:
        jobs.close()


class _Bounce:
    """Memory of one thread for the blocks of a job, mapped when it is first asked for."""

    def __init__(self) -> None:
        self._memory: HostMemory | None = None

    def view(self) -> memoryview:
        """Return it, writable."""
        if self._memory is None:
            self._memory = HostMemory(JOB_NBYTES + 2 * DIRECT_ALIGNMENT)
        return self._memory.view()

    def close(self) -> None:
        """Give it back."""
        if self._memory is not None:
            self._memory.close()


class _Jobs:
    """Jobs that threads take from the front, and the files of those that are running.

    A file is open from its first job to the end of its last one, and checked at both for being what it was.
    """

    def __init__(self, jobs: list[Part]) -> None:
        self._waiting = deque(jobs)
        self._num_left = Counter(job.file for job in jobs)
        self._open: dict[WeightFile, OpenFile] = {}
        self._lock = threading.Lock()

    def run(self) -> None:
        """Do jobs until none is left; an error leaves none to the other threads."""
        bounce = _Bounce()
        try:
            while self._waiting:
                self._do_next(bounce)
        finally:
            self.drop()
            bounce.close()

    def drop(self) -> None:
        """Drop the jobs that have not begun."""
        with self._lock:
            self._waiting.clear()

    def close(self) -> None:
        """Close what an error left open; no thread may be running."""
        while self._open:
            self._open.popitem()[1].close()

    def _do_next(self, bounce: _Bounce) -> None:
        with self._lock:
            if not self._waiting:
                return
            file, offset, view = self._waiting.popleft()
            if file not in self._open:
                self._open[file] = OpenFile(file)
            opened = self._open[file]
        opened.read_into(offset, view, bounce.view)
        with self._lock:
            self._num_left[file] -= 1
            is_last = not self._num_left[file]
        if is_last:
            opened.check_unchanged()
            self._open.pop(file).close()
