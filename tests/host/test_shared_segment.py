"""Shared segments: filled once, mapped by all, refused if they hold others. Kills: test_shared_segment_kills."""

import contextlib
import errno
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from leaks import holdings
from other_user import OTHER_UID, needs_other_user, run_as_other
from segment_worker import (
    IDENTITY,
    NBYTES,
    Worker,
    content,
    kill_reapers,
    reapers,
    scratch_folder,
    wait_until,
    wait_until_nothing_is_left,
    worker_starter,
)

from ftw.errors import SharedMemoryError
from ftw.host import file_lock
from ftw.host.memory import HUGE_PAGE_NBYTES, PAGE_NBYTES
from ftw.host.shared import header as segment_layout
from ftw.host.shared import pages as segment_pages
from ftw.host.shared import reaper as segment_reaper
from ftw.host.shared import tmpfs
from ftw.host.shared.segment import SharedSegment, open_segment

UNLIMITED = os.statvfs_result((PAGE_NBYTES, PAGE_NBYTES, 1 << 40, 1 << 40, 1 << 40, 0, 0, 0, 0, 255))


@pytest.fixture
def folder() -> Iterator[Path]:
    with scratch_folder() as path:
        yield path


@pytest.fixture
def start(folder) -> Iterator[Callable[..., Worker]]:
    with worker_starter(folder) as start_worker:
        yield start_worker


@pytest.fixture
def small_tmpfs(tmp_path) -> Iterator[Path]:
    path = tmp_path / "small"
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", path], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("may not mount a tmpfs")
    yield path
    kill_reapers(path)
    wait_until(lambda: subprocess.run(["umount", path], capture_output=True, check=False).returncode == 0)


def fill(view: memoryview) -> None:
    view[:] = content(IDENTITY, len(view))


def fill_never(view: memoryview) -> None:
    pytest.fail("filled a second time")


def opened(folder: Path, nbytes: int = NBYTES, filler: Callable[[memoryview], None] = fill, **options) -> SharedSegment:
    return open_segment(IDENTITY, nbytes, filler, name="table", folder=folder, **options)


def using(folder: Path, *args, **options) -> contextlib.closing[SharedSegment]:
    return contextlib.closing(opened(folder, *args, **options))


def segment_path(folder: Path, nbytes: int = NBYTES) -> Path:
    return segment_layout.SegmentSpec("table", IDENTITY, nbytes, folder).path


@pytest.mark.parametrize("nbytes", [1, PAGE_NBYTES, NBYTES, 2 * HUGE_PAGE_NBYTES, (5 << 20) + 7], ids=str)
@pytest.mark.parametrize("huge_pages", [True, False], ids=["huge", "plain"])
def test_segment_holds_what_was_filled_in(folder, nbytes, huge_pages):
    with (
        using(folder, nbytes, huge_pages=huge_pages) as first,
        using(folder, nbytes, fill_never, huge_pages=huge_pages) as second,
    ):
        assert first.view() == second.view() == content(IDENTITY, nbytes)
        assert (first.nbytes, first.mapped_nbytes) == (nbytes, -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES)
        assert first.address % (HUGE_PAGE_NBYTES if huge_pages and nbytes >= HUGE_PAGE_NBYTES else PAGE_NBYTES) == 0
        second.view()[0] ^= 1
        assert first.view() == second.view() != content(IDENTITY, nbytes)
        assert [path.stat().st_mode & 0o7777 for path in folder.iterdir()] == [0o600]
    wait_until_nothing_is_left(folder)


def test_segment_of_zero_bytes_is_not_shared(folder):
    with using(folder, 0, fill_never) as segment:
        assert (segment.nbytes, segment.mapped_nbytes, segment.address, len(segment.view())) == (0, 0, 0, 0)
        assert not any(folder.iterdir())


def test_segment_close_leaves_views_alone_and_the_name_gone(folder):
    before = holdings(folder)
    segment = opened(folder)
    view = segment.view()
    segment.close()
    segment.close()
    assert not any(folder.iterdir())
    assert segment.address == 0
    assert len(segment.view()) == 0
    assert view == content(IDENTITY, NBYTES)
    view.release()
    assert holdings(folder) <= before
    wait_until_nothing_is_left(folder)


def test_segment_close_spares_what_has_its_name_by_then(folder):
    with using(folder) as segment:
        segment.path.unlink()
        segment.path.write_bytes(b"another")
    assert segment.path.read_bytes() == b"another"


def test_segment_leaks_no_descriptor_mapping_thread_or_zombie(folder):
    before = holdings(folder)
    for _ in range(5):
        with using(folder), using(folder), contextlib.suppress(SharedMemoryError):
            opened(folder, NBYTES + 1)
        with pytest.raises(ZeroDivisionError):
            opened(folder, filler=lambda view: 1 // 0)
    assert holdings(folder) <= before
    wait_until_nothing_is_left(folder)
    assert not [path for path in Path("/proc").glob("[0-9]*/stat") if is_zombie_of_ours(path)]


def is_zombie_of_ours(path: Path) -> bool:
    try:
        state, parent = path.read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state == "Z" and int(parent) == os.getpid()


def test_segment_is_filled_once_for_eight_processes(folder, start):
    workers = [start() for _ in range(8)]
    assert sorted(worker.line("waits") for worker in workers) == ["open 0"] * 7 + ["open 1"]
    assert len(list(folder.iterdir())) == 1
    wait_until(lambda: len(reapers(folder)) == 1)  # those who were slower to make it end theirs
    for worker in workers:
        worker.finish()
    wait_until_nothing_is_left(folder)


def test_segment_is_filled_once_for_eight_threads(folder):
    fillings = []
    barrier = threading.Barrier(8)

    def open_one(_: int) -> bytes:
        barrier.wait()
        with using(folder, filler=lambda view: (fillings.append(1), fill(view))) as segment:
            barrier.wait()
            return bytes(segment.view())

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(open_one, range(8))) == {content(IDENTITY, NBYTES)}
    assert len(fillings) == 1
    wait_until_nothing_is_left(folder)


def test_segment_takes_memory_once_for_two_processes(folder, start):
    workers = [start(nbytes=64 << 20) for _ in range(2)]
    shares = []
    for worker in workers:
        assert worker.line("waits").startswith("open")
    for worker in workers:
        mapping = Path(f"/proc/{worker.pid}/smaps").read_text().partition(str(folder))[2]
        shares.append(int(re.search(r"^Pss: +(\d+) kB", mapping, re.MULTILINE)[1]))
        assert int(re.search(r"^Rss: +(\d+) kB", mapping, re.MULTILINE)[1]) == 64 << 10
    assert abs(sum(shares) - (64 << 10)) < 64


def test_segment_that_is_removed_while_somebody_attaches_is_made_anew(folder, monkeypatch):
    first = opened(folder)
    lock_shared = file_lock.lock_shared

    def lock_late(descriptor: int, byte: int) -> None:
        first.close()
        lock_shared(descriptor, byte)

    monkeypatch.setattr(file_lock, "lock_shared", lock_late)
    fillings = []
    with using(folder, filler=lambda view: (fillings.append(1), fill(view))) as second:
        assert fillings == [1]
        assert second.path.exists()
    wait_until_nothing_is_left(folder)


def test_segment_that_another_made_first_is_attached_to(folder, monkeypatch):
    others = []
    link = os.link

    def link_late(*args, **kwargs) -> None:
        monkeypatch.undo()
        others.append(opened(folder))
        link(*args, **kwargs)

    before = holdings(folder)
    monkeypatch.setattr(os, "link", link_late)
    with using(folder, filler=fill_never) as second, contextlib.closing(others[0]) as other:
        assert second.view() == other.view()
        wait_until(lambda: len(reapers(folder)) == 1)  # that of the file without a name ends
    assert holdings(folder) <= before
    wait_until_nothing_is_left(folder)


def test_segments_of_other_identities_lie_beside_each_other(folder):
    other = open_segment("b", NBYTES, fill, name="table", folder=folder)
    with using(folder) as one, contextlib.closing(other):
        assert one.path != other.path
        assert len(list(folder.iterdir())) == 2
    wait_until_nothing_is_left(folder)


def test_segment_check_is_asked_by_those_who_did_not_fill(folder):
    asked = []
    with using(folder, check=asked.append):
        assert not asked
        with using(folder, filler=fill_never, check=lambda view: asked.append(bytes(view))):
            assert asked == [content(IDENTITY, NBYTES)]


def test_segment_check_that_raises_closes_the_segment(folder):
    def refuse(view: memoryview) -> None:
        raise SharedMemoryError("other bytes")

    with using(folder):
        before = holdings(folder)
        with pytest.raises(SharedMemoryError, match="other bytes"):
            opened(folder, filler=fill_never, check=refuse)
        assert holdings(folder) <= before
    wait_until_nothing_is_left(folder)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt], ids=lambda error: error.__name__)
def test_segment_fill_that_raises_leaves_nothing(folder, error):
    def fail(view: memoryview) -> None:
        view[:5] = b"wrong"
        raise error("broken")

    with pytest.raises(error, match="broken"):
        opened(folder, filler=fail)
    wait_until_nothing_is_left(folder)


def test_segment_fill_that_raises_is_followed_by_the_next_one(folder, start):
    waiter = []

    def fail(view: memoryview) -> None:
        view[:5] = b"wrong"
        waiter.append(start())
        assert waiter[0].line() == "waits"
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        opened(folder, filler=fail)
    assert waiter[0].line() == "open 1"
    waiter[0].finish()


def header_of(**changes) -> bytes:
    values = {"magic": b"FTWTABLE", "version": 1, "state": 1, "nbytes": NBYTES, "identity": IDENTITY.encode()} | changes
    identity = values.pop("identity")
    return segment_layout._HEADER.pack(*values.values(), len(identity)) + identity


TABLE = bytes(-(-NBYTES // PAGE_NBYTES) * PAGE_NBYTES)
FOREIGN = {
    "identity": (
        TABLE + header_of(identity=b"another\n").ljust(PAGE_NBYTES, b"\0"),
        rf"holds {NBYTES} bytes of another",
    ),
    "not-utf8": (TABLE + header_of(identity=b"\xff").ljust(PAGE_NBYTES, b"\0"), rf"holds {NBYTES} bytes of "),
    "nbytes": (
        TABLE + header_of(nbytes=NBYTES + 1).ljust(PAGE_NBYTES, b"\0"),
        rf"holds {NBYTES + 1} bytes of {IDENTITY},",
    ),
    "version": (TABLE + header_of(version=2).ljust(PAGE_NBYTES, b"\0"), "no table of this version of ftw"),
    "magic": (TABLE + header_of(magic=b"garbages").ljust(PAGE_NBYTES, b"\0"), "no table of this version of ftw"),
    "garbage": (os.urandom(len(TABLE) + PAGE_NBYTES), "no table of this version of ftw"),
    "truncated": ((TABLE + header_of().ljust(PAGE_NBYTES, b"\0"))[:-PAGE_NBYTES], "no table of this version of ftw"),
    "short": (b"FTW", "holds 3 bytes that are no table"),
    "empty": (b"", "holds 0 bytes that are no table"),
    "longer": (
        bytes(PAGE_NBYTES) + TABLE + header_of().ljust(PAGE_NBYTES, b"\0"),
        "a file of 24576 bytes instead of 20480",
    ),
}


@pytest.mark.parametrize("case", FOREIGN, ids=str)
def test_segment_refuses_a_file_that_holds_something_else(folder, case):
    data, message = FOREIGN[case]
    path = write_segment(folder, data)
    check_refused(folder, message)
    assert path.read_bytes() == data


def write_segment(folder: Path, data: bytes) -> Path:
    path = segment_path(folder)
    path.write_bytes(data)
    path.chmod(0o600)
    return path


def check_refused(folder: Path, message: str) -> None:
    before = holdings(folder)
    with pytest.raises(SharedMemoryError, match=message) as caught:
        opened(folder, filler=fill_never)
    text = str(caught.value)
    assert text.startswith(f"{segment_path(folder)}: table: ")
    assert text.isprintable()
    assert holdings(folder) <= before


@pytest.mark.parametrize("kind", ["symlink", "folder", "pipe"], ids=str)
def test_segment_refuses_what_is_no_file(folder, kind):
    path = segment_path(folder)
    if kind == "symlink":
        (folder / "elsewhere").write_bytes(b"")
        path.symlink_to(folder / "elsewhere")
    elif kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    problem = "is not a regular file" if kind == "pipe" else "cannot be opened: .*; remove it, or load with share=None"
    check_refused(folder, problem)
    assert os.path.lexists(path)


def test_segment_refuses_a_file_of_another_user(folder, monkeypatch):
    with using(folder) as segment:
        owner = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
        segment.path.rename(segment_path(folder))
        check_refused(folder, f"belongs to user {owner}, only a file of user {owner + 1} is trusted; .*share=None")
        segment_path(folder).rename(segment.path)


COMPLETE = TABLE + header_of().ljust(PAGE_NBYTES, b"\0")


@pytest.mark.parametrize("mode", [0o644, 0o666, 0o660, 0o700, 0o4600], ids=oct)
def test_segment_that_others_may_open_is_refused(folder, mode):
    write_segment(folder, COMPLETE).chmod(mode)
    check_refused(folder, f"has mode {mode:o}, only a file of mode 600 is trusted; remove it")


def test_segment_with_a_second_name_is_refused(folder):
    os.link(write_segment(folder, COMPLETE), folder / "second")
    check_refused(folder, "has 2 names, only a file of one name is trusted; remove it")


def test_process_whose_user_stands_for_all_others_shares_nothing(folder, monkeypatch):
    """As root of no container of its own sees them: the kernel shows the users of the host by one number."""
    overflow = int(Path("/proc/sys/kernel/overflowuid").read_text())
    monkeypatch.setattr(os, "geteuid", lambda: overflow)
    left = folder / f"ftw-{overflow}-{0:032x}"
    left.write_bytes(b"")
    left.chmod(0o600)
    check_refused(folder, f"runs as user {overflow}, which stands for all users that have no number here, so nobody's")
    assert left.exists()


def test_overflow_id_is_known_where_the_system_does_not_tell_it(folder, monkeypatch):
    monkeypatch.setattr(segment_layout, "_OVERFLOW_UID", str(folder / "absent"))
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    check_refused(folder, "this process runs as user 65534,")


def test_segment_whose_name_is_removed_while_somebody_opens_it_is_made_anew(folder, monkeypatch):
    """It has no name then, which is no reason for distrust."""
    real = os.open

    def open_and_remove(path, *args, **options):
        descriptor = real(path, *args, **options)
        if path == segment_path(folder):
            monkeypatch.setattr(os, "open", real)
            path.unlink()
        return descriptor

    write_segment(folder, COMPLETE)
    monkeypatch.setattr(os, "open", open_and_remove)
    with using(folder) as segment:
        assert bytes(segment.view()) == content(IDENTITY, NBYTES)


@needs_other_user
def test_segment_that_another_user_planted_under_the_name_is_refused(folder):
    folder.chmod(0o1777)
    run_as_other(
        "import os; from pathlib import Path; path = Path(sys.argv[1]); path.write_bytes(bytes.fromhex(sys.argv[2]));"
        "path.chmod(0o600)",
        str(segment_path(folder)),
        COMPLETE.hex(),
    )
    check_refused(folder, f"belongs to user {OTHER_UID}, only a file of user {os.geteuid()} is trusted")


def test_segment_refuses_a_folder_on_a_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(tmpfs, "_MAGIC", 1)  # even where the disk of the tests is a tmpfs
    check_refused(tmp_path, "its folder is not on a tmpfs")
    assert not any(tmp_path.iterdir())


def test_segment_refuses_a_folder_that_is_not_there(tmp_path):
    check_refused(tmp_path / "absent", "its folder cannot be opened: No such file")


def test_segment_refuses_an_endless_identity(folder):
    with pytest.raises(SharedMemoryError, match="its identity has 5000 bytes, 4068 are allowed"):
        open_segment("x" * 5000, NBYTES, fill_never, name="table", folder=folder)
    wait_until_nothing_is_left(folder)


def test_segment_that_cannot_fit_is_refused_before_it_is_made(small_tmpfs):
    with pytest.raises(SharedMemoryError, match=r"needs 4\.00 MiB of shared memory, 3\.00 MiB free.*--shm-size"):
        opened(small_tmpfs, 4 << 20, fill_never)
    assert not any(small_tmpfs.iterdir())


@pytest.mark.parametrize("huge_pages", [True, False], ids=["huge", "plain"])
@pytest.mark.parametrize("kernel", ["new", "old"], ids=str)
def test_segment_that_runs_out_of_pages_is_an_error_and_no_signal(small_tmpfs, monkeypatch, kernel, huge_pages):
    if kernel == "old":
        monkeypatch.setattr(segment_pages, "_madvise", lambda address, nbytes, advice: errno.EINVAL)
    found = os.statvfs(small_tmpfs)
    answers = [UNLIMITED, UNLIMITED, found]
    monkeypatch.setattr(os, "fstatvfs", lambda descriptor: answers.pop(0))
    with pytest.raises(SharedMemoryError, match=r"needs 4\.00 MiB of shared memory, 3\.00 MiB free"):
        opened(small_tmpfs, 4 << 20, fill_never, huge_pages=huge_pages)
    wait_until_nothing_is_left(small_tmpfs)
    wait_until(
        lambda: os.statvfs(small_tmpfs).f_bavail == found.f_bavail
    )  # the reaper's end closes its descriptor last


def test_segment_whose_header_does_not_fit_is_an_error(small_tmpfs, monkeypatch):
    (small_tmpfs / "full").write_bytes(bytes(3 << 20))
    answers = [UNLIMITED, os.statvfs(small_tmpfs)]
    monkeypatch.setattr(os, "fstatvfs", lambda descriptor: answers.pop(0))
    with pytest.raises(SharedMemoryError, match=r"needs 20\.00 KiB of shared memory, 0 B free"):
        opened(small_tmpfs, filler=fill_never)
    assert [path.name for path in small_tmpfs.iterdir()] == ["full"]


def test_segment_fits_a_tmpfs_to_the_last_page(small_tmpfs):
    nbytes = (3 << 20) - PAGE_NBYTES
    with using(small_tmpfs, nbytes) as segment:
        assert segment.view() == content(IDENTITY, nbytes)
        assert os.statvfs(small_tmpfs).f_bavail == 0
        with using(small_tmpfs, nbytes, fill_never) as second:
            assert second.view() == segment.view()
    wait_until_nothing_is_left(small_tmpfs)


def test_segment_on_an_old_kernel_is_filled_all_the_same(folder, monkeypatch):
    monkeypatch.setattr(segment_pages, "_madvise", lambda address, nbytes, advice: errno.EINVAL)
    with using(folder, 5 << 20) as segment:
        assert segment.path.stat().st_blocks * 512 == (5 << 20) + PAGE_NBYTES
        assert segment.view() == content(IDENTITY, 5 << 20)


@pytest.mark.parametrize(
    ("executable", "problem"),
    [("", "no Python interpreter"), ("/bin/false", "ended with status 1"), ("/absent", "No such file")],
    ids=["unknown", "failing", "absent"],
)
def test_segment_without_a_reaper_warns_and_is_removed_by_its_last_user(
    folder, monkeypatch, caplog, executable, problem
):
    monkeypatch.setattr(sys, "executable", executable)
    with caplog.at_level(logging.WARNING, "ftw"):
        first, second = opened(folder), opened(folder, filler=fill_never)
    assert {record.name for record in caplog.records} == {"ftw"}
    assert problem in caplog.text
    first.close()
    assert len(list(folder.iterdir())) == 1
    second.close()
    assert not any(folder.iterdir())


def test_segment_of_a_frozen_program_starts_none_of_it(folder, monkeypatch, caplog):
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(segment_reaper.subprocess, "run", fill_never)
    with using(folder):
        assert "no Python interpreter" in caplog.text
    assert not any(folder.iterdir())
