"""Shared segments in forked children, dropped without a close, and what is asked before their pages are made."""

import errno
import gc
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from leaks import descriptors
from segment_worker import (
    IDENTITY,
    NBYTES,
    content,
    environment,
    scratch_folder,
    wait_until,
    wait_until_nothing_is_left,
)
from thread_limit import limit_threads

from ftw.errors import PinError, SharedMemoryError
from ftw.host import file_lock
from ftw.host.memory import HUGE_PAGE_NBYTES, PAGE_NBYTES
from ftw.host.shared import pages as segment_pages
from ftw.host.shared import segment as shared_segment
from ftw.host.shared.segment import SharedSegment, open_segment


@pytest.fixture
def folder() -> Iterator[Path]:
    with scratch_folder() as path:
        yield path


def fill(view: memoryview) -> None:
    view[:] = content(IDENTITY, len(view))


def opened(folder: Path, nbytes: int = NBYTES, **options) -> SharedSegment:
    return open_segment(IDENTITY, nbytes, fill, name="table", folder=folder, **options)


def run(script: str, folder: Path) -> None:
    """Run a script with `folder`, `open_one`, and `fork`, which returns what ends its child."""
    start = """
import os, sys
from pathlib import Path
from ftw.host.shared.segment import open_segment
folder = Path(sys.argv[1])

def open_one(fill=lambda view: None):
    return open_segment("a", 5, fill, name="table", folder=folder)

def fork():
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    os.close(reader)
    def end():
        os.close(writer)
        os.waitpid(child, 0)
    return end
"""
    subprocess.run([sys.executable, "-c", start + script, folder], env=environment(), check=True, timeout=600)


def test_segment_closed_by_a_forked_child_stays_its_parents(folder: Path) -> None:
    run(
        """
segment = open_one()
if not os.fork():
    segment.close()
    os._exit(0)
os.wait()
assert segment.path.exists()
segment.close()
assert not segment.path.exists()
""",
        folder,
    )


def test_segment_whose_filling_fails_is_free_for_others_while_a_forked_child_lives(folder: Path) -> None:
    run(
        """
from ftw.host.shared.file import open_segment_file
from ftw.host.shared.header import SegmentSpec

def fail(view):
    global end, other
    other = open_segment_file(SegmentSpec("table", "a", 5, folder))
    end = fork()
    raise OSError("disk")

try:
    open_one(fail)
except OSError:
    pass
assert other.wait_to_fill()
other.close()
end()
""",
        folder,
    )
    wait_until_nothing_is_left(folder)


def test_segment_that_is_closed_is_free_for_others_while_a_forked_child_lives(folder: Path) -> None:
    """Attach as one who had opened the file before it lost its name, and takes a shared lock then."""
    run(
        """
from ftw.host import file_lock
segment = open_one()
late = os.open(segment.path, os.O_RDWR)
end = fork()
segment.close()
assert not any(folder.iterdir())
file_lock.lock_shared(late, 0)
end()
""",
        folder,
    )


def test_segment_that_another_fills_is_waited_for_and_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    fills, goes_on = threading.Event(), threading.Event()

    def fill_late(view: memoryview) -> None:
        fills.set()
        goes_on.wait(600)
        fill(view)

    segments: list[SharedSegment] = []
    filler = threading.Thread(
        target=lambda: segments.append(open_segment(IDENTITY, NBYTES, fill_late, name="table", folder=folder))
    )
    with caplog.at_level(logging.INFO, "ftw"):
        filler.start()
        fills.wait(600)
        assert "waits" not in caplog.text
        waiter = threading.Thread(target=lambda: segments.append(opened(folder)))
        waiter.start()
        wait_until(lambda: "table: waits for another process to fill it" in caplog.text)
        goes_on.set()
        filler.join()
        waiter.join()
    for segment in segments:
        segment.close()
    assert len(segments) == 2
    wait_until_nothing_is_left(folder)


def test_segment_that_is_dropped_is_given_back_when_it_is_collected(folder: Path) -> None:
    before = descriptors()
    segment = opened(folder)
    view = segment.view()
    assert len(descriptors() - before) == 1
    del segment
    gc.collect()
    assert descriptors() <= before
    assert view == content(IDENTITY, NBYTES)
    wait_until_nothing_is_left(folder)


def test_room_is_asked_of_the_host_by_who_fills_for_the_pages_that_are_missing(folder: Path) -> None:
    asked: list[int] = []
    segment = opened(folder, check_room=asked.append)
    opened(folder, check_room=lambda nbytes: pytest.fail("asked for room")).close()
    segment.close()
    assert asked == [4 * PAGE_NBYTES]


def test_pages_that_an_earlier_filler_made_need_no_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def fill_after_a_failure(view: memoryview) -> None:
        second.append(opened(folder, check_room=asked.append))
        fill(view)

    second: list[SharedSegment] = []
    monkeypatch.setattr(file_lock, "lock_exclusive", lambda descriptor, byte: None)  # as if the first had been killed
    first = open_segment(IDENTITY, NBYTES, fill_after_a_failure, name="table", folder=folder)
    first.close()
    second[0].close()
    assert asked == [0]


def test_host_without_room_leaves_nothing(folder: Path) -> None:
    before = descriptors()

    def refuse(nbytes: int) -> None:
        raise PinError(f"{nbytes} are too many")

    with pytest.raises(PinError, match="16384 are too many"):
        opened(folder, check_room=refuse)
    assert descriptors() <= before
    wait_until_nothing_is_left(folder)


def test_addresses_that_are_not_to_be_had_are_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(shared_segment, "SharedPages", refuse)
    with pytest.raises(
        SharedMemoryError, match=f"table: {NBYTES} bytes cannot be mapped: Cannot allocate memory; .*ulimit -v"
    ):
        opened(folder)
    wait_until_nothing_is_left(folder)


@pytest.mark.parametrize("limit", [0, 1], ids=["none", "one"])
def test_pages_are_made_without_threads_that_cannot_be_started(
    folder: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(segment_pages, "_PIECE_NBYTES", HUGE_PAGE_NBYTES)
    limit_threads(monkeypatch, limit)
    segment = opened(folder, 9 << 20)
    assert segment.path.stat().st_blocks * 512 == (9 << 20) + PAGE_NBYTES
    assert segment.view() == content(IDENTITY, 9 << 20)
    segment.close()


def test_pages_come_from_all_nodes_by_who_fills(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spread: list[tuple[int, int]] = []

    def spread_pages(address: int, nbytes: int) -> str:
        spread.append((address, nbytes))
        return "interleave"

    monkeypatch.setattr(segment_pages, "spread_pages", spread_pages)
    first, second = opened(folder), opened(folder)
    assert spread == [(first.address, 4 * PAGE_NBYTES)]
    assert (first.numa_policy, second.numa_policy) == ("interleave", "default")
    first.close()
    second.close()
    assert opened(folder, 0).numa_policy == "default"


def test_first_pages_of_huge_ones_come_from_all_nodes_in_turn(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel interleaves by a page's place in the file, and makes a huge page where the page in it lies."""
    touched: list[int] = []
    madvise = segment_pages._madvise

    def record(address: int, nbytes: int, advice: int) -> int:
        if advice == segment_pages._POPULATE_WRITE and nbytes == PAGE_NBYTES:
            touched.append(address // PAGE_NBYTES)
        return madvise(address, nbytes, advice)

    monkeypatch.setattr(segment_pages, "_madvise", record)
    segment = opened(folder, 8 << 20)
    first = segment.address // PAGE_NBYTES
    assert [page - first for page in touched] == [0, 513, 1026, 1539]
    segment.close()
