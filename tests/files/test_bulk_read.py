"""read_parts: equal bytes whatever lies where, and nothing left over after an error."""

import ctypes
import errno
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inspecting import assert_names_file
from leaks import descriptors
from thread_limit import limit_threads

from ftw import CheckpointError
from ftw.files import parallel_read as bulk_read
from ftw.files import weight_file
from ftw.files.parallel_read import JOB_NBYTES, Part, read_parts
from ftw.files.weight_file import DIRECT_MIN_JOB_NBYTES, WeightFile
from ftw.host.memory import HostMemory

MIB = 1 << 20
NBYTES = 4 * JOB_NBYTES + 777
CONTENT = (bytes(range(251)) * (NBYTES // 251 + 1))[:NBYTES]  # a period prime to every block size

Preadv = Callable[[int, list[memoryview], int], int]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bulk") / "weights.bin"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A file that a test may change."""
    path = tmp_path / "weights.bin"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_file, "is_cached", lambda *arguments: False)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Check that a test leaves no descriptor and no thread, whether or not its reading fails."""
    before = descriptors()
    yield
    assert descriptors() <= before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ftw-read")]


def memory(nbytes: int, shift: int = 0) -> memoryview:
    """Return memory that begins `shift` bytes after a page."""
    return HostMemory(nbytes + shift).view()[shift:]


def read(path: Path, offset: int, nbytes: int, shift: int = 0, num_threads: int | None = None) -> memoryview:
    view = memory(nbytes, shift)
    read_parts([Part(WeightFile(path), offset, view)], num_threads=num_threads)
    return view


def record_preadv(monkeypatch: pytest.MonkeyPatch, change: Callable[[Preadv, int, memoryview, int], int]) -> None:
    real: Preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda descriptor, views, offset: change(real, descriptor, views[0], offset))


def is_direct(descriptor: int) -> bool:
    flags = next(
        line for line in Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines() if line.startswith("flags")
    )
    return bool(int(flags.split()[1], 8) & os.O_DIRECT)


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "not-cached"])
@pytest.mark.parametrize("shift", [0, 1, 8, 512, 4095], ids=lambda shift: f"memory-by-{shift}")
@pytest.mark.parametrize("offset", [0, 8, 4095, 4096, JOB_NBYTES - 1, JOB_NBYTES + 520], ids=str)
@pytest.mark.parametrize(
    "nbytes",
    [0, 1, 5000, DIRECT_MIN_JOB_NBYTES, JOB_NBYTES, 2 * JOB_NBYTES + 1, NBYTES],
    ids=[*"0 1 5000 least job two-jobs".split(), "to-the-end"],
)
def test_bytes_are_equal_wherever_they_lie(
    large: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int, offset: int, shift: int, cached: bool
) -> None:
    monkeypatch.setattr(weight_file, "is_cached", lambda *arguments: cached)
    nbytes = min(nbytes, NBYTES - offset)
    assert read(large, offset, nbytes, shift) == CONTENT[offset : offset + nbytes]


@pytest.mark.parametrize("tail", [0, 1, 777, 778, 4096 + 777, 5000], ids=str)
def test_window_at_the_end_of_a_file_is_read(large: Path, cold: None, tail: int) -> None:
    nbytes = 2 * JOB_NBYTES + 3
    offset = NBYTES - nbytes - tail
    assert read(large, offset, nbytes) == CONTENT[offset : offset + nbytes]


def test_end_at_a_block_is_read(tmp_path: Path, cold: None) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(CONTENT[: 2 * JOB_NBYTES])
    assert read(path, 9, 2 * JOB_NBYTES - 9) == CONTENT[9 : 2 * JOB_NBYTES]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.data())
def test_random_parts_of_several_files_are_equal(large: Path, monkeypatch: pytest.MonkeyPatch, data: Any) -> None:
    cached = data.draw(st.booleans())
    monkeypatch.setattr(weight_file, "is_cached", lambda *arguments: cached)
    files = [WeightFile(large), WeightFile(large)]
    parts = []
    for _ in range(data.draw(st.integers(0, 5))):
        offset = data.draw(st.integers(0, NBYTES))
        nbytes = data.draw(st.one_of(st.integers(0, 9000), st.integers(0, NBYTES))) % (NBYTES - offset + 1)
        view = memory(nbytes, data.draw(st.sampled_from([0, 1, 2, 8, 512, offset % 4096])))
        parts.append(Part(data.draw(st.sampled_from(files)), offset, view))
    read_parts(iter(parts), num_threads=data.draw(st.integers(1, 5)))
    for _, offset, view in parts:
        assert view == CONTENT[offset : offset + len(view)]


def test_parts_leave_the_bytes_around_them(large: Path, cold: None) -> None:
    whole = memory(3 * JOB_NBYTES)
    whole[:] = b"x" * len(whole)
    file = WeightFile(large)
    read_parts([Part(file, 5, whole[7 : 7 + JOB_NBYTES]), Part(file, 100, whole[2 * JOB_NBYTES : -9])])
    assert whole[:7] == b"x" * 7
    assert whole[7 : 7 + JOB_NBYTES] == CONTENT[5 : 5 + JOB_NBYTES]
    assert whole[7 + JOB_NBYTES : 2 * JOB_NBYTES] == b"x" * (JOB_NBYTES - 7)
    assert whole[2 * JOB_NBYTES : -9] == CONTENT[100 : 100 + JOB_NBYTES - 9]
    assert whole[-9:] == b"x" * 9


def test_file_is_opened_once_each_way_and_closed_after_its_last_job(
    large: Path, own: Path, cold: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, real_open, real_close = [], os.open, os.close
    names: dict[int, str] = {}

    def record_open(path: Any, flags: int, *arguments: Any, **keywords: Any) -> int:
        descriptor = real_open(path, flags, *arguments, **keywords)
        names[descriptor] = f"{Path(path).parent.name} {'direct' if flags & os.O_DIRECT else 'buffered'}"
        events.append(f"open {names[descriptor]}")
        return descriptor

    def record_close(descriptor: int) -> None:
        events.append(f"close {names.pop(descriptor)}")
        real_close(descriptor)

    files = [WeightFile(large), WeightFile(own)]
    parts = [Part(files[number % 2], number * MIB + 3, memory(2 * MIB)) for number in range(6)]
    monkeypatch.setattr(os, "open", record_open)
    monkeypatch.setattr(os, "close", record_close)
    read_parts(parts, num_threads=1)
    monkeypatch.undo()
    folders = [path.parent.name for path in (large, own)]
    ways = ["buffered", "direct"]
    assert events == [f"{verb} {folder} {way}" for folder in folders for verb in ("open", "close") for way in ways]


def test_unaligned_bytes_go_around_the_page_cache(large: Path, cold: None, monkeypatch: pytest.MonkeyPatch) -> None:
    direct: list[tuple[int, int]] = []

    def record(real: Preadv, descriptor: int, view: memoryview, offset: int) -> int:
        if is_direct(descriptor):
            direct.append((offset, len(view)))
        return real(descriptor, [view], offset)

    record_preadv(monkeypatch, record)
    read(large, 4096 + 8, 2 * JOB_NBYTES)
    job = JOB_NBYTES
    assert sorted(direct) == [(4096, job + 4096), (4096 + job, job + 4096)]  # the block between is read twice
    direct.clear()
    read(large, 4096 + 8, job - 4096 - 8, shift=8)
    assert direct == [(8192, job - 8192)]


def test_threads_take_jobs_in_turn(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread waits for the other within its job, so one alone would not get on."""
    monkeypatch.setattr(weight_file, "is_cached", lambda *arguments: True)
    meeting = threading.Barrier(2, timeout=600)
    threads = []

    def meet(real: Preadv, descriptor: int, view: memoryview, offset: int) -> int:
        meeting.wait()
        threads.append(threading.get_ident())
        return real(descriptor, [view], offset)

    record_preadv(monkeypatch, meet)
    assert read(large, 0, 4 * JOB_NBYTES, num_threads=2) == CONTENT[: 4 * JOB_NBYTES]
    assert (len(threads), len(set(threads))) == (4, 2)
    assert threading.get_ident() in threads


def test_one_job_runs_in_the_thread_of_the_caller(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()

    def record(real: Preadv, descriptor: int, view: memoryview, offset: int) -> int:
        threads.add(threading.get_ident())
        return real(descriptor, [view], offset)

    record_preadv(monkeypatch, record)
    monkeypatch.setattr(threading.Thread, "start", lambda thread: pytest.fail("a thread was started"))
    read(large, 8, JOB_NBYTES - 8)
    assert threads == {threading.get_ident()}


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP], ids=["EINVAL", "EOPNOTSUPP"])
@pytest.mark.parametrize("shift", [0, 5], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("refuser", ["open", "preadv", "second-preadv"])
def test_file_system_without_direct_io_gives_the_same_bytes(
    large: Path, cold: None, monkeypatch: pytest.MonkeyPatch, refuser: str, shift: int, code: int
) -> None:
    real_open, refused = os.open, []
    calls = iter(range(1000))

    def refuse_open(path: Any, flags: int, *arguments: Any, **keywords: Any) -> int:
        if flags & os.O_DIRECT and refuser == "open":
            refused.append("open")
            raise OSError(code, os.strerror(code), str(path))
        return real_open(path, flags, *arguments, **keywords)

    def refuse(real: Preadv, descriptor: int, view: memoryview, offset: int) -> int:
        if is_direct(descriptor) and (refuser == "preadv" or next(calls)):
            refused.append("preadv")
            raise OSError(code, os.strerror(code))
        return real(descriptor, [view], offset)

    monkeypatch.setattr(os, "open", refuse_open)
    record_preadv(monkeypatch, refuse)
    assert read(large, 4096, 3 * JOB_NBYTES, shift, num_threads=1) == CONTENT[4096 : 4096 + 3 * JOB_NBYTES]
    assert len(refused) == 1  # it is not asked again


@pytest.mark.parametrize("shift", [0, 3], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("nbytes", [1000, 4096, 100_001, MIB + 512], ids=str)
def test_short_reads_are_continued(
    large: Path, cold: None, monkeypatch: pytest.MonkeyPatch, nbytes: int, shift: int
) -> None:
    record_preadv(monkeypatch, lambda real, descriptor, view, offset: real(descriptor, [view[:nbytes]], offset))
    assert read(large, 4096, 5 * MIB + 7, shift) == CONTENT[4096 : 4096 + 5 * MIB + 7]


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "not-cached"])
@pytest.mark.parametrize("shift", [0, 3], ids=["aligned", "unaligned"])
def test_file_that_ends_early_is_refused(
    large: Path, monkeypatch: pytest.MonkeyPatch, shift: int, cached: bool
) -> None:
    monkeypatch.setattr(weight_file, "is_cached", lambda *arguments: cached)
    with pytest.raises(CheckpointError, match=rf"file: ends at byte {NBYTES}, \d+ bytes short") as caught:
        read(large, 2 * JOB_NBYTES, 3 * JOB_NBYTES, shift)
    assert_names_file(caught.value, large)


def rewrite(path: Path) -> None:
    """Write other bytes in place: a file that is emptied first is short for those who read it meanwhile."""
    status = path.stat()
    with path.open("r+b") as file:
        file.write(bytes(NBYTES))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def shrink(path: Path) -> None:
    os.truncate(path, NBYTES - 1)


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(CONTENT)
    other.replace(path)


@pytest.mark.parametrize("change", [rewrite, shrink, replace], ids=lambda change: change.__name__)
def test_file_that_has_changed_is_refused(own: Path, cold: None, change: Callable[[Path], None]) -> None:
    file = WeightFile(own)
    change(own)
    with pytest.raises(CheckpointError, match="file: changed while it was being read") as caught:
        read_parts([Part(file, 1, memory(3 * JOB_NBYTES))])
    assert_names_file(caught.value, own)


@pytest.mark.parametrize("change", [rewrite, shrink], ids=lambda change: change.__name__)
@pytest.mark.parametrize("shift", [0, 3], ids=["aligned", "unaligned"])
def test_file_that_changes_meanwhile_is_refused(
    own: Path, cold: None, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None], shift: int
) -> None:
    def read_then_change(real: Preadv, descriptor: int, view: memoryview, offset: int) -> int:
        count = real(descriptor, [view], offset)
        if offset >= 2 * JOB_NBYTES - 4096:  # of the last job
            change(own)
        return count

    record_preadv(monkeypatch, read_then_change)
    with pytest.raises(CheckpointError, match="file: changed while it was being read"):
        read(own, 0, 3 * JOB_NBYTES, shift)


def test_file_that_is_replaced_before_its_direct_opening_is_refused(
    own: Path, cold: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def replace_first(path: Any, flags: int, *arguments: Any, **keywords: Any) -> int:
        if flags & os.O_DIRECT:
            replace(own)
        return real_open(path, flags, *arguments, **keywords)

    monkeypatch.setattr(os, "open", replace_first)
    with pytest.raises(CheckpointError, match="file: changed while it was being read"):
        read(own, 3, 3 * JOB_NBYTES)
    monkeypatch.undo()


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "not-cached"])
@pytest.mark.parametrize("shift", [0, 3], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("num_threads", [1, 2, 4], ids="{}-threads".format)
@pytest.mark.parametrize("nth", [1, 2, 4], ids="read-{}".format)
def test_error_of_the_disk_names_the_file_and_leaves_nothing(
    large: Path, monkeypatch: pytest.MonkeyPatch, nth: int, num_threads: int, shift: int, cached: bool
) -> None:
    monkeypatch.setattr(weight_file, "is_cached", lambda *arguments: cached)
    bounces: list[weakref.ref[Any]] = []

    class Recorded(HostMemory):
        def view(self) -> memoryview:
            bounces.append(weakref.ref(super().view().obj))
            return super().view()

    monkeypatch.setattr(bulk_read, "HostMemory", Recorded)
    calls, real = iter(range(1, 1000)), os.preadv

    def fail(descriptor: int, views: list[memoryview], offset: int) -> int:
        if next(calls) == nth:
            views.clear()  # the real one would not stand in the traceback
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, views, offset)

    monkeypatch.setattr(os, "preadv", fail)
    threads = set(threading.enumerate())
    with pytest.raises(OSError, match="Input/output error") as caught:
        read(large, 0, 4 * JOB_NBYTES, shift, num_threads)
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(large))
    assert set(threading.enumerate()) <= threads
    assert num_threads > 1 or next(calls) == nth + 1  # jobs that had not begun were dropped
    assert bool(bounces) is (shift != 0 and not cached)
    assert not [bounce for bounce in bounces if bounce() is not None]


def test_error_of_another_thread_is_raised_here(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caller = threading.get_ident()
    has_failed = threading.Event()

    def fail_elsewhere(real: Preadv, descriptor: int, view: memoryview, offset: int) -> int:
        if threading.get_ident() == caller:
            assert has_failed.wait(600)
            return real(descriptor, [view], offset)
        has_failed.set()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    record_preadv(monkeypatch, fail_elsewhere)
    with pytest.raises(OSError, match="Input/output error"):
        read(large, 0, 4 * JOB_NBYTES, num_threads=2)


@pytest.mark.parametrize("shift", [0, 3], ids=["aligned", "unaligned"])
def test_interrupt_ends_the_reading(large: Path, cold: None, monkeypatch: pytest.MonkeyPatch, shift: int) -> None:
    caller = threading.get_ident()
    is_interrupted = threading.Event()

    def interrupt(real: Preadv, descriptor: int, view: memoryview, offset: int) -> int:
        if threading.get_ident() == caller:
            is_interrupted.set()
            raise KeyboardInterrupt
        assert is_interrupted.wait(600)  # or it might have done all jobs before the caller came
        return real(descriptor, [view], offset)

    record_preadv(monkeypatch, interrupt)
    threads = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        read(large, 0, 4 * JOB_NBYTES, shift, num_threads=2)
    assert set(threading.enumerate()) <= threads


def test_error_does_not_keep_the_views_alive(large: Path, cold: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(real: Preadv, descriptor: int, view: memoryview, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    record_preadv(monkeypatch, fail)
    mapping = []

    def read_and_fail() -> None:
        view = memory(4 * JOB_NBYTES, 3)
        mapping.append(weakref.ref(view.obj))
        with pytest.raises(OSError, match="Input/output error") as caught:
            read_parts([Part(WeightFile(large), 0, view)])
        del caught

    import gc

    gc.disable()
    try:
        read_and_fail()
        assert mapping[0]() is None
    finally:
        gc.enable()


def test_file_on_the_hub_reads_by_itself(large: Path) -> None:
    def fill(offset: int, view: memoryview) -> None:
        view[:] = bytes([offset]) * len(view)

    remote = cast("WeightFile", SimpleHubFile(fill))
    views = [memory(9), memory(JOB_NBYTES + 1), memory(3), memory(0)]
    read_parts(
        [
            Part(remote, 7, views[0]),
            Part(WeightFile(large), 7, views[1]),
            Part(remote, 8, views[2]),
            Part(remote, 9, views[3]),
        ]
    )
    assert (bytes(views[0]), bytes(views[2])) == (b"\7" * 9, b"\x08" * 3)
    assert views[1] == CONTENT[7 : 8 + JOB_NBYTES]


class SimpleHubFile(SimpleNamespace):
    def __init__(self, read_into: Callable[[int, memoryview], None]) -> None:
        super().__init__(read_into=read_into)

    __hash__ = object.__hash__


@pytest.mark.parametrize(("processors", "expected"), [(1, 6), (7, 7), (128, 8)], ids=str)
def test_number_of_threads_follows_the_processors(
    monkeypatch: pytest.MonkeyPatch, processors: int, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(processors)))
    assert bulk_read.default_num_threads() == expected


@pytest.mark.parametrize("num_threads", [0, -1, 65, True, 1.5, "2", np.int64(0), np.int64(10_000)], ids=repr)
def test_number_of_threads_is_a_whole_number_of_at_least_one(large: Path, num_threads: Any) -> None:
    with pytest.raises(ValueError, match=r"num_threads is .*, 1 to 64 are allowed, or None"):
        read(large, 0, 10, num_threads=num_threads)


def test_number_of_threads_may_be_of_numpy(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_read, "JOB_NBYTES", 4096)
    asked: list[int] = []
    monkeypatch.setattr(bulk_read, "_run", lambda jobs, num_threads: asked.append(num_threads))
    read(large, 0, 1 << 20, num_threads=cast("int", np.int64(64)))
    assert asked == [64]


@pytest.mark.parametrize("limit", [0, 1], ids=["none", "one"])
def test_threads_that_cannot_be_started_are_done_without(
    large: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    limit_threads(monkeypatch, limit)
    assert read(large, 0, NBYTES, num_threads=4) == CONTENT


def test_moving_bytes_lets_other_threads_run() -> None:
    """`ctypes.memmove` is a function that releases the interpreter's lock, as `PYFUNCTYPE` would not."""
    assert not ctypes.memmove._flags_ & 4  # FUNCFLAG_PYTHONAPI


MEMORY_SCRIPT = """
import sys
from pathlib import Path
from ftw.files import weight_file
from ftw.files.parallel_read import Part, read_parts
from ftw.host.memory import HostMemory

def peak_nbytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))

weight_file.is_cached = lambda *arguments: False
file, nbytes = weight_file.WeightFile(Path(sys.argv[1])), 256 << 20
read_parts([Part(file, 3, memoryview(bytearray(100)))])
before = peak_nbytes()
view = HostMemory(nbytes).view()
read_parts([Part(file, 4104, view)], num_threads=6)
print(peak_nbytes() - before - nbytes, view[-1])
"""


def test_peak_memory_is_that_of_the_destination_and_the_bounce_buffers(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    with path.open("wb") as file:
        file.truncate(4104 + (256 << 20))
        file.seek(-1, os.SEEK_END)
        file.write(b"\5")
    result = subprocess.run(
        [sys.executable, "-c", MEMORY_SCRIPT, str(path)], capture_output=True, text=True, check=True
    )
    extra, last = map(int, result.stdout.split())
    assert last == 5
    assert extra <= 32 * MIB
