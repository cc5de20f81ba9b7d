import mmap
import re

import pytest

from ftw import host_memory
from ftw.host_memory import HUGE_PAGE_NBYTES, HostMemory

MIB = 1 << 20


def mapping_kib(address: int, key: str) -> int:
    """Return what /proc/self/smaps says of the mapping that begins at an address."""
    with open("/proc/self/smaps", encoding="utf-8", errors="replace") as file:
        entries = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", file.read())
    entry = next(entry for entry in entries if entry.startswith(f"{address:x}-"))
    return int(re.search(rf"(?m)^{key}:\s+(\d+) kB$", entry)[1])


@pytest.mark.parametrize("nbytes", [HUGE_PAGE_NBYTES, 5 * MIB + 5, 64 * MIB], ids=str)
def test_large_memory_begins_at_a_huge_page(nbytes: int) -> None:
    with_huge, without = HostMemory(nbytes), HostMemory(nbytes, huge_pages=False)
    assert with_huge.address % HUGE_PAGE_NBYTES == 0
    assert without.address % mmap.PAGESIZE == 0
    assert with_huge.mapped_nbytes == without.mapped_nbytes == -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def test_huge_pages_end_where_whole_ones_do() -> None:
    memory = HostMemory(5 * MIB + 5)
    memory.view()[:] = b"x" * memory.nbytes
    assert mapping_kib(memory.address + 4 * MIB, "AnonHugePages") == 0
    assert mapping_kib(memory.address + 4 * MIB, "Rss") == 1028
    with open("/sys/kernel/mm/transparent_hugepage/enabled", encoding="ascii") as file:
        if "[never]" not in file.read():
            assert mapping_kib(memory.address, "AnonHugePages") == 4096


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
