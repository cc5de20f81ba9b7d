"""WeightFile: exact reads by either way, and an error for every file that is not what it was."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from inspecting import assert_names_file
from leaks import descriptors

from ftw import CheckpointError
from ftw.files import weight_file
from ftw.files.weight_file import WeightFile
from ftw.host import file_io
from ftw.host.memory import HUGE_PAGE_NBYTES, PAGE_NBYTES, HostMemory, address_of
from ftw.sizes import align_up

MIB = 1 << 20
CONTENT = (bytes(range(251)) * (9 * MIB // 251 + 1))[: 9 * MIB + 123]  # a period prime to every block size

Preadv = Callable[[int, list[memoryview], int], int]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "weights.bin"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "weights.bin"
    path.write_bytes(CONTENT[:10_000])
    return path


def read(path: Path, offset: int, nbytes: int, shift: int = 0) -> bytes:
    """Read into page-aligned memory, `shift` bytes from its start."""
    view = HostMemory(nbytes + shift).view()[shift:]
    WeightFile(path).read_into(offset, view)
    return bytes(view)


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "not-cached"])
@pytest.mark.parametrize("shift", [0, 1, 512], ids=["memory-aligned", "memory-by-1", "memory-by-512"])
@pytest.mark.parametrize("offset", [0, 4096, 1, 4095, 512], ids=str)
@pytest.mark.parametrize(
    "nbytes",
    [0, 1, 4096, 4 * MIB - 1, 4 * MIB, 4 * MIB + 1, 8 * MIB + 4096, 9 * MIB + 123 - 4096],
    ids=str,
)
def test_direct_and_buffered_reads_give_equal_bytes(
    large: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int, offset: int, shift: int, cached: bool
) -> None:
    monkeypatch.setattr(weight_file, "is_cached", lambda *arguments: cached)
    assert read(large, offset, nbytes, shift) == CONTENT[offset : offset + nbytes]


def test_large_aligned_read_goes_around_the_page_cache(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_file, "is_cached", lambda *arguments: False)
    opened, real_open = [], os.open

    def record(path: Any, flags: int, *arguments: Any, **keywords: Any) -> int:
        opened.append(bool(flags & os.O_DIRECT))
        return real_open(path, flags, *arguments, **keywords)

    monkeypatch.setattr(os, "open", record)
    assert read(large, 0, 4 * MIB) == CONTENT[: 4 * MIB]
    assert opened == [False, True]
    read(large, 0, 4 * MIB - 1)
    read(large, 1, 4 * MIB)
    read(large, 0, 4 * MIB, shift=1)
    assert opened == [False, True, False, False, False]
    assert read(large, 1, 4 * MIB, shift=4097) == CONTENT[1 : 4 * MIB + 1]  # alike modulo 4096: whole blocks lie within
    assert opened == [False, True, False, False, False, False, True]


@pytest.mark.parametrize("refuser", ["open", "preadv"])
def test_file_system_without_direct_io_gives_the_same_bytes(
    large: Path, monkeypatch: pytest.MonkeyPatch, refuser: str
) -> None:
    monkeypatch.setattr(weight_file, "is_cached", lambda *arguments: False)
    real_open, real_preadv = os.open, os.preadv
    direct: set[int] = set()

    def refuse_open(path: Any, flags: int, *arguments: Any, **keywords: Any) -> int:
        if flags & os.O_DIRECT and refuser == "open":
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))
        descriptor = real_open(path, flags, *arguments, **keywords)
        (direct.add if flags & os.O_DIRECT else direct.discard)(descriptor)
        return descriptor

    def refuse_preadv(descriptor: int, views: list[memoryview], offset: int) -> int:
        if descriptor in direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_preadv(descriptor, views, offset)

    monkeypatch.setattr(os, "open", refuse_open)
    monkeypatch.setattr(os, "preadv", refuse_preadv)
    assert read(large, 4096, 5 * MIB + 3) == CONTENT[4096 : 4096 + 5 * MIB + 3]
    assert bool(direct) is (refuser == "preadv")


@pytest.mark.parametrize("fails", ["buffered", "direct", "open"])
def test_error_of_the_disk_names_the_file(large: Path, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    monkeypatch.setattr(weight_file, "is_cached", lambda *arguments: fails == "buffered")
    real_open = os.open

    def fail(*arguments: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def fail_direct(path: Any, flags: int, *arguments: Any, **keywords: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real_open(path, flags, *arguments, **keywords)

    if fails == "open":
        monkeypatch.setattr(os, "open", fail_direct)
    else:
        monkeypatch.setattr(os, "preadv", fail)
    before = descriptors()
    with pytest.raises(OSError, match="Input/output error") as caught:
        read(large, 0, 4 * MIB)
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(large))
    assert descriptors() <= before


@pytest.mark.parametrize("nbytes", [1, 1000, 4096], ids=str)
@pytest.mark.parametrize("wanted", [10_000, 5 * MIB + 7], ids=["buffered", "direct"])
def test_short_reads_are_continued(large: Path, monkeypatch: pytest.MonkeyPatch, wanted: int, nbytes: int) -> None:
    if nbytes == 1 and wanted > MIB:
        nbytes = 100_001  # one byte at a time would take five million calls
    monkeypatch.setattr(weight_file, "is_cached", lambda *arguments: False)
    real: Preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda descriptor, views, offset: real(descriptor, [views[0][:nbytes]], offset))
    assert read(large, 4096, wanted) == CONTENT[4096 : 4096 + wanted]


def test_read_returns_the_bytes_at_an_offset(small: Path) -> None:
    file = WeightFile(small)
    assert (file.path, file.nbytes) == (small, 10_000)
    assert file.read(9_990, 10) == CONTENT[9_990:10_000]
    assert file.read(10_000, 0) == b""


@pytest.mark.parametrize(("offset", "nbytes"), [(9_999, 2), (10_000, 1), (20_000, 5)], ids=["across", "at", "past"])
def test_read_past_the_end_is_refused(small: Path, offset: int, nbytes: int) -> None:
    short = offset + nbytes - 10_000
    with pytest.raises(CheckpointError, match=f"file: ends at byte 10000, {short} bytes short") as caught:
        WeightFile(small).read(offset, nbytes)
    assert_names_file(caught.value, small)


def test_direct_read_past_the_end_is_refused(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_file, "is_cached", lambda *arguments: False)
    with pytest.raises(
        CheckpointError, match=f"file: ends at byte {len(CONTENT)}, {8 * MIB - (MIB + 123)} bytes short"
    ):
        read(large, 8 * MIB, 8 * MIB)


def shrink(path: Path) -> None:
    os.truncate(path, 9_999)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(CONTENT[:10_000])
    status = path.stat()
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)


def rewrite(path: Path) -> None:
    status = path.stat()
    path.write_bytes(bytes(10_000))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


@pytest.mark.parametrize("change", [shrink, grow, replace, rewrite], ids=lambda change: change.__name__)
def test_file_that_changed_since_its_header_was_read_is_refused(small: Path, change: Callable[[Path], None]) -> None:
    file = WeightFile(small)
    file.read(0, 8)
    change(small)
    with pytest.raises(CheckpointError, match="file: changed while it was being read") as caught:
        file.read(0, 8)
    assert_names_file(caught.value, small)


@pytest.mark.parametrize("change", [shrink, grow, rewrite], ids=lambda change: change.__name__)
def test_file_that_changes_during_a_read_is_refused(
    small: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    real: Preadv = os.preadv

    def read_then_change(descriptor: int, views: list[memoryview], offset: int) -> int:
        count = real(descriptor, [views[0][:4096]], offset)
        if not offset:
            change(small)
        return count

    file = WeightFile(small)
    monkeypatch.setattr(os, "preadv", read_then_change)
    with pytest.raises(CheckpointError, match=r"changed while it was being read|ends at byte 9999, 1 bytes short"):
        file.read(0, 10_000)


def test_file_that_is_gone_is_an_error_of_the_operating_system(small: Path) -> None:
    file = WeightFile(small)
    small.unlink()
    with pytest.raises(FileNotFoundError):
        file.read(0, 8)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="file: is missing") as caught:
        WeightFile(tmp_path / "none.bin")
    assert_names_file(caught.value, tmp_path / "none.bin")


@pytest.mark.parametrize("kind", ["folder", "pipe", "below-a-file", "dangling-link"])
def test_path_that_is_no_file_is_refused(small: Path, kind: str) -> None:
    path = small.with_name("other")
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "below-a-file":
        path = small / "other"
    else:
        path.symlink_to("nowhere")
    with pytest.raises(CheckpointError, match=r"file: is (missing|not a regular file)") as caught:
        WeightFile(path)
    assert_names_file(caught.value, path)


def test_link_to_a_file_is_read(small: Path) -> None:
    link = small.with_name("link")
    link.symlink_to(small)
    assert WeightFile(link).read(0, 5) == CONTENT[:5]


def test_reads_leave_no_descriptor_open(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_file, "is_cached", lambda *arguments: False)
    before = descriptors()
    read(large, 0, 5 * MIB)
    with pytest.raises(CheckpointError):
        read(large, 4096, 16 * MIB)
    assert descriptors() <= before


def test_kernel_without_cachestat_is_taken_as_not_cached(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_io, "_CACHESTAT", 100_000)
    with large.open("rb") as file:
        assert file_io.is_cached(file.fileno(), 0, 4 * MIB) is False


@pytest.mark.parametrize("nbytes", [0, 1, PAGE_NBYTES, PAGE_NBYTES + 1, HUGE_PAGE_NBYTES + 1], ids=str)
def test_host_memory_is_aligned_zeroed_and_no_longer_than_its_pages(nbytes: int) -> None:
    memory = HostMemory(nbytes)
    view = memory.view()
    assert (len(view), memory.mapped_nbytes) == (nbytes, align_up(nbytes, PAGE_NBYTES))
    assert memory.address % PAGE_NBYTES == 0
    assert memory.address == address_of(view)
    assert view.tobytes() == bytes(nbytes)
    view[:] = b"x" * nbytes
    memory.close()
    assert view.tobytes() == b"x" * nbytes  # a view outlives the close
    assert (memory.address, len(memory.view())) == (0, 0)


@pytest.mark.parametrize(
    ("nbytes", "expected"), [(0, 0), (1, 4096), (4096, 4096), (4097, 8192), (1 << 70, 1 << 70)], ids=str
)
def test_align_up_rounds_to_the_next_multiple(nbytes: int, expected: int) -> None:
    assert align_up(nbytes, 4096) == expected


def test_file_that_may_not_be_looked_at_is_an_error_of_the_operating_system(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> os.stat_result:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "stat", refuse)
    with pytest.raises(PermissionError, match="Permission denied"):
        WeightFile(small)
