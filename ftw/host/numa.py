"""NUMA: on which memory node pages are put, and on which they lie.

A table that a GPU reads belongs on the node that the GPU hangs on: from another node each read crosses the link between
the processors too. Pages are bound to the node where its free memory and page cache hold them: only a binding makes the
kernel give up page cache there, instead of going elsewhere. Where they don't fit, the node is but preferred: a binding
would end in the out-of-memory killer.

    mbind(2)        where pages that are not yet touched will come from
    move_pages(2)   without targets: on which node each page lies
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import re
from collections import Counter
from pathlib import Path

from ftw.host.libc import libc_function

SYSFS = Path("/sys")
_NODES = "devices/system/node"
_SYSCALLS = {"x86_64": {"mbind": 237, "move_pages": 279}, "aarch64": {"mbind": 235, "move_pages": 239}}
_PREFERRED, _BIND, _INTERLEAVE = 1, 2, 3
_MASK_BITS = 1024  # nodes that a mask can name, more than any kernel is built for
_RESERVE_NBYTES = 256 << 20  # of a node, left to others
_MAX_SAMPLES = 4096
_LINE = re.compile(r"Node\s+\d+\s+(MemFree|Active\(file\)|Inactive\(file\)):\s+(\d+)\s+kB")


def memory_nodes(sysfs: Path = SYSFS) -> tuple[int, ...]:
    """Return the nodes that have memory, one of them or none where the machine is not divided."""
    try:
        text = (sysfs / _NODES / "has_memory").read_text(encoding="ascii")
    except OSError:
        return ()
    nodes: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        nodes.extend(range(int(first), int(last or first) + 1))
    return tuple(nodes)


def node_of_pci_device(address: str, sysfs: Path = SYSFS) -> int | None:
    """Return the node of a PCI device, such as "0000:06:00.0"; None where there is one node, or none is known."""
    if len(memory_nodes(sysfs)) < 2:
        return None
    try:
        node = int((sysfs / "bus/pci/devices" / address / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def place_pages(address: int, nbytes: int, node: int, sysfs: Path = SYSFS) -> str:
    """Have the pages of a fresh mapping come from a node; return "bind", "preferred", or "default" if that is refused.

    Containers may refuse it (Docker does without CAP_SYS_NICE).
    """
    has_room = _room_of_node(node, sysfs) >= nbytes + _RESERVE_NBYTES
    is_set = _set_policy(address, nbytes, _BIND if has_room else _PREFERRED, (node,))
    return ("bind" if has_room else "preferred") if is_set else "default"


def spread_pages(address: int, nbytes: int, sysfs: Path = SYSFS) -> str:
    """Have the pages of a fresh mapping come from all nodes in turn; return "interleave", or "default"."""
    nodes = memory_nodes(sysfs)
    is_set = len(nodes) > 1 and _set_policy(address, nbytes, _INTERLEAVE, nodes)
    return "interleave" if is_set else "default"


def count_pages_by_node(address: int, nbytes: int) -> dict[int, int]:
    """Return how many pages lie on each node, of at most 4096 that are spread evenly; those never touched are left out.

    Empty where the kernel does not tell.
    """
    number = _syscall_number("move_pages")
    num_pages = -(-nbytes // mmap.PAGESIZE)
    if not num_pages or number is None:
        return {}
    step = -(-num_pages // _MAX_SAMPLES)
    places = range(0, num_pages, step)
    pages = (ctypes.c_void_p * len(places))(*(address + place * mmap.PAGESIZE for place in places))
    status = (ctypes.c_int * len(places))()
    if _syscall(number, 0, len(places), pages, None, status, 0):
        return {}
    return dict(Counter(node for node in status if node >= 0))


def _room_of_node(node: int, sysfs: Path) -> int:
    """Return the free bytes of a node, its page cache among them; 0 where that cannot be read."""
    try:
        text = (sysfs / _NODES / f"node{node}" / "meminfo").read_text(encoding="ascii")
    except OSError:
        return 0
    return sum(int(kib) for _, kib in _LINE.findall(text)) * 1024


def _set_policy(address: int, nbytes: int, mode: int, nodes: tuple[int, ...]) -> bool:
    number = _syscall_number("mbind")
    if number is None or not nbytes:
        return False
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (_MASK_BITS // bits))()
    for node in nodes:
        mask[node // bits] |= 1 << node % bits
    # The kernel takes one bit less than it is told.
    return _syscall(number, address, nbytes, mode, mask, _MASK_BITS + 1, 0) == 0


def _syscall_number(name: str) -> int | None:
    return _SYSCALLS.get(platform.machine(), {}).get(name)


def _syscall(number: int, *arguments: object) -> int:
    wide = (ctypes.c_ulong(value) if isinstance(value, int) else value for value in arguments)
    return libc_function("syscall")(ctypes.c_long(number), *wide)
