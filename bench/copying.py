"""What a conversion cannot beat: the same bytes moved from files to files, by two ways of copying.

Both move whole blocks between page-aligned buffers of huge pages and new files, and sync these; nothing is parsed, no
byte is moved within memory, and no checksum is taken. Which of the two is faster depends on the file system.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from ftw.host import HostMemory
from ftw.sizes import align_up

_JOB_NBYTES = 8 << 20
_STREAM_NBYTES = 16 << 20
_BLOCK_NBYTES = 4096


class Job(NamedTuple):
    """A run of a file, and the descriptors that it is copied between."""

    source: int
    target: int
    offset: int
    nbytes: int


def copy_direct(source: Path, target: Path, num_threads: int = 4) -> None:
    """Copy the files of a folder around the page cache on both sides, by threads that take 8 MiB at a time."""
    target.mkdir()
    descriptors: list[int] = []
    jobs: list[Job] = []
    try:
        for path in sorted(source.iterdir()):
            reading = os.open(path, os.O_RDONLY | os.O_DIRECT)
            descriptors.append(reading)
            writing = os.open(target / path.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o644)
            descriptors.append(writing)
            size = path.stat().st_size
            jobs += [
                Job(reading, writing, place, min(_JOB_NBYTES, size - place)) for place in range(0, size, _JOB_NBYTES)
            ]
        with ThreadPoolExecutor(num_threads) as pool:
            for future in [pool.submit(_run, jobs[number::num_threads]) for number in range(num_threads)]:
                future.result()
        for descriptor in descriptors[1::2]:
            os.fsync(descriptor)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def copy_streaming(source: Path, target: Path) -> None:
    """Copy the files of a folder by buffered reads in order and O_DIRECT writes by a second thread, in two buffers."""
    target.mkdir()
    buffers = [HostMemory(_STREAM_NBYTES) for _ in range(2)]
    with ThreadPoolExecutor(1) as pool:
        for path in sorted(source.iterdir()):
            writing = os.open(target / path.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o644)
            try:
                with path.open("rb", buffering=0) as file:
                    pending = [pool.submit(int) for _ in buffers]
                    for number, offset in enumerate(range(0, path.stat().st_size, _STREAM_NBYTES)):
                        pending[number % 2].result()
                        view = buffers[number % 2].view()
                        count = file.readinto(view)
                        blocks = view[: align_up(count, _BLOCK_NBYTES)]
                        pending[number % 2] = pool.submit(os.pwrite, writing, blocks, offset)
                    for future in pending:
                        future.result()
                os.fsync(writing)
            finally:
                os.close(writing)


def _run(jobs: list[Job]) -> None:
    memory = HostMemory(_JOB_NBYTES)
    for job in jobs:
        view = memory.view()[: align_up(job.nbytes, _BLOCK_NBYTES)]
        os.preadv(job.source, [view], job.offset)
        os.pwrite(job.target, view, job.offset)
