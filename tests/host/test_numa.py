"""NUMA: the nodes that the kernel lists, the policies that are asked for, and the pages that are counted."""

import mmap
from pathlib import Path

import pytest

from ftw.host import numa
from ftw.host.memory import HostMemory

MIB = 1 << 20
MEMINFO = """
Node 1 MemTotal:       65923512 kB
Node 1 MemFree:          {free} kB
Node 1 Active(file):     {active} kB
Node 1 Inactive(file):   {inactive} kB
Node 1 FilePages:      12345678 kB
"""


def sysfs(root: Path, has_memory: str | None = "0-1\n", free: int = 0, active: int = 0, inactive: int = 0) -> Path:
    folder = root / "devices/system/node/node1"
    folder.mkdir(parents=True)
    if has_memory is not None:
        (folder.parent / "has_memory").write_text(has_memory)
    (folder / "meminfo").write_text(MEMINFO.format(free=free, active=active, inactive=inactive))
    return root


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, tuple[int, ...]]]:
    """Record mode and nodes of each policy instead of setting it."""
    made: list[tuple[int, tuple[int, ...]]] = []

    def record(address: int, nbytes: int, mode: int, nodes: tuple[int, ...]) -> bool:
        made.append((mode, nodes))
        return True

    monkeypatch.setattr(numa, "_set_policy", record)
    return made


@pytest.mark.parametrize(
    ("text", "nodes"),
    [("0\n", (0,)), ("0-3\n", (0, 1, 2, 3)), ("0,2-3,8\n", (0, 2, 3, 8)), (None, ()), ("\n", ())],
    ids=["one", "range", "list", "not-told", "none"],
)
def test_memory_nodes_are_those_that_the_kernel_lists(tmp_path: Path, text: str | None, nodes: tuple[int, ...]) -> None:
    assert numa.memory_nodes(sysfs(tmp_path, text)) == nodes


@pytest.mark.parametrize(
    ("kib", "policy", "mode"),
    [
        ({"free": 300 << 10}, "bind", 2),
        ({"free": 100 << 10, "active": 100 << 10, "inactive": 100 << 10}, "bind", 2),
        ({"free": 200 << 10}, "preferred", 1),
        ({}, "preferred", 1),
    ],
    ids=["free", "page-cache-gives-way", "too-little", "nothing"],
)
def test_pages_are_bound_only_where_the_node_has_room(
    tmp_path: Path, calls: list[tuple[int, tuple[int, ...]]], kib: dict[str, int], policy: str, mode: int
) -> None:
    assert numa.place_pages(0, 16 * MIB, 1, sysfs(tmp_path, **kib)) == policy
    assert calls == [(mode, (1,))]


def test_refused_policy_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "_syscall", lambda number, *arguments: -1)
    assert numa.place_pages(4096, 4096, 1, sysfs(tmp_path, free=1 << 20)) == "default"
    assert numa.count_pages_by_node(4096, 4096) == {}


def test_spread_pages_come_from_all_nodes(tmp_path: Path, calls: list[tuple[int, tuple[int, ...]]]) -> None:
    assert numa.spread_pages(0, MIB, sysfs(tmp_path)) == "interleave"
    assert calls == [(3, (0, 1))]


def test_one_node_needs_no_spreading(tmp_path: Path, calls: list[tuple[int, tuple[int, ...]]]) -> None:
    assert numa.spread_pages(0, MIB, sysfs(tmp_path, "0\n")) == "default"
    assert calls == []


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_mask_names_the_nodes_bit_by_bit(monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    made = []
    monkeypatch.setattr(numa.platform, "machine", lambda: machine)
    monkeypatch.setattr(numa, "_syscall", lambda *arguments: made.append(arguments) or 0)
    assert numa._set_policy(8192, 4096, 3, (0, 3, 64))
    number, address, nbytes, mode, mask, bits, flags = made[0]
    assert number == {"x86_64": 237, "aarch64": 235}[machine]
    assert (address, nbytes, mode, bits, flags) == (8192, 4096, 3, 1025, 0)
    assert list(mask)[:3] == [0b1001, 1, 0]


def test_unknown_processor_leaves_pages_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa.platform, "machine", lambda: "riscv64")
    assert not numa._set_policy(4096, 4096, 2, (0,))
    assert numa.count_pages_by_node(4096, 4096) == {}


def test_pages_of_this_process_are_found_on_its_nodes() -> None:
    if numa._syscall_number("move_pages") is None or not numa.memory_nodes():
        pytest.skip("no NUMA in this kernel, or a processor whose calls are not known")
    memory = HostMemory(64 * mmap.PAGESIZE)
    assert numa.count_pages_by_node(memory.address, memory.nbytes) == {}
    memory.view()[: 8 * mmap.PAGESIZE] = bytes(8 * mmap.PAGESIZE)
    found = numa.count_pages_by_node(memory.address, memory.nbytes)
    assert sum(found.values()) == 8
    assert set(found) <= set(numa.memory_nodes())


def test_large_memory_is_counted_by_samples() -> None:
    if numa._syscall_number("move_pages") is None or not numa.memory_nodes():
        pytest.skip("no NUMA in this kernel, or a processor whose calls are not known")
    memory = HostMemory(64 * MIB)
    memory.view()[:] = bytes(64 * MIB)
    assert sum(numa.count_pages_by_node(memory.address, memory.nbytes).values()) == 4096


def test_node_without_a_number_is_not_known(tmp_path: Path) -> None:
    root = sysfs(tmp_path)
    assert numa.node_of_pci_device("0000:01:00.0", root) is None
    device = root / "bus/pci/devices/0000:01:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("none\n")
    assert numa.node_of_pci_device("0000:01:00.0", root) is None
