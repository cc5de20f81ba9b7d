"""Host memory: where it begins, which of it are huge pages, and what there is without any."""

import mmap

import pytest
from smaps import kib, read_mappings

from ftw.host import memory as host_memory
from ftw.host.memory import HUGE_PAGE_NBYTES, HostMemory

MIB = 1 << 20


@pytest.mark.parametrize("nbytes", [HUGE_PAGE_NBYTES, 5 * MIB + 5, 64 * MIB], ids=str)
def test_large_memory_begins_at_a_huge_page(nbytes: int) -> None:
    with_huge, without = HostMemory(nbytes), HostMemory(nbytes, huge_pages=False)
    assert with_huge.address % HUGE_PAGE_NBYTES == 0
    assert without.address % mmap.PAGESIZE == 0
    assert with_huge.mapped_nbytes == without.mapped_nbytes == -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def test_huge_pages_end_where_whole_ones_do() -> None:
    """Whether the kernel finds huge pages is its own affair: the two are asked for by "hg", and none by "nh"."""
    memory = HostMemory(5 * MIB + 5)
    memory.view()[:] = b"x" * memory.nbytes
    mappings = read_mappings()
    whole, end = mappings[memory.address], mappings[memory.address + 4 * MIB]
    assert ("hg" in whole["VmFlags"].split(), "nh" in end["VmFlags"].split()) == (True, True)
    assert (kib(whole["Size"]), kib(whole["Rss"]), kib(end["Rss"])) == (4096, 4096, 1028)
    assert kib(end["AnonHugePages"]) == 0


def test_kernel_without_huge_pages_holds_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(mmap.mmap):
        def madvise(self, *arguments: int) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(host_memory.mmap, "mmap", Refusing)
    memory = HostMemory(4 * MIB + 1)
    memory.view()[-1:] = b"x"
    assert len(memory.view()) == 4 * MIB + 1


def test_empty_memory_has_no_mapping() -> None:
    memory = HostMemory(0, numa_node=0)
    assert (memory.address, memory.mapped_nbytes, len(memory.view())) == (0, 0, 0)


def test_memory_that_is_not_there_is_a_memory_error() -> None:
    with pytest.raises((OSError, MemoryError)):
        HostMemory(1 << 60)
