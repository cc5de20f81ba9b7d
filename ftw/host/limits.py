"""Host limits: what bounds the host memory of this process, as the system tells it.

    /proc/meminfo               MemAvailable, KiB: free without swapping, page cache that can go included
    /proc/self/cgroup           lines "N:controllers:path" of the process's groups; that of cgroup v2 is "0::path"
    /proc/sys/kernel/osrelease  names Microsoft under WSL
    ulimit -l                   RLIMIT_MEMLOCK; CUDA's driver does not charge it, so it is told and bounds nothing

    of a memory cgroup          v2                           v1
      limit, bytes              memory.max, "max" for none   memory.limit_in_bytes, about 2^63 for none
      use, bytes                memory.current               memory.usage_in_bytes
      page cache, bytes         inactive_file + active_file  total_inactive_file + total_active_file of memory.stat

A source that is missing, unreadable or malformed tells nothing; it is never an error.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ftw.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

_UNLIMITED = 1 << 62  # v1 writes 2^63 rounded down to a page
_BYTES = r"\A\s*(\d{1,20})\s*\Z"  # 20 digits hold every 64-bit number
# NVIDIA's guide says "limited" and no more. Reported: 0.5 GiB (microsoft/WSL#14078), 0.75 to 1 GiB of 62.8 with an
# RTX 3090 (FlashML-org/FreeToken#233), about 1 GiB (NVIDIA/nvidia-docker#1725).
_WSL_NOTE = "WSL lets only a part of the memory be page-locked, on some machines less than 1 GiB"


@dataclass(frozen=True, slots=True)
class HostLimits:
    """What bounds the host memory of this process; None where the system does not tell, or sets no bound.

    Attributes:
        available: Bytes that the machine can give without swapping.
        cgroup_free: Bytes that the tightest of the process's memory cgroups leaves, page cache counted as free.
        memlock: Bytes of 'ulimit -l', for messages.
        is_wsl: The kernel is that of the Windows Subsystem for Linux.
    """

    available: int | None
    cgroup_free: int | None
    memlock: int | None
    is_wsl: bool

    def describe(self) -> str:
        """Return one line for messages that says what is free, and what else stands in the way of page-locking."""
        free = []
        if self.available is not None:
            free.append(f"{format_size(self.available)} of host memory")
        if self.cgroup_free is not None:
            free.append(f"{format_size(self.cgroup_free)} of the cgroup's limit")
        clauses = [f"free are {', '.join(free)}" if free else "how much host memory is free is unknown"]
        if self.memlock is not None:
            clauses.append(f"'ulimit -l' is {format_size(self.memlock)}")
        if self.is_wsl:
            clauses.append(_WSL_NOTE)
        return "; ".join(clauses)


def read_host_limits(*, proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")) -> HostLimits:
    """Read what bounds this process's host memory now."""
    available = _number(_read(proc / "meminfo"), r"^MemAvailable: *(\d{1,15}) kB$")
    return HostLimits(
        available=None if available is None else available * 1024,
        cgroup_free=_read_cgroup_free(proc, cgroup_root),
        memlock=_read_memlock(),
        is_wsl="microsoft" in _read(proc / "sys" / "kernel" / "osrelease").lower(),
    )


def _read_memlock() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if memlock == resource.RLIM_INFINITY else memlock


class _Files(NamedTuple):
    """How a version of cgroups names the files of a group, and the page cache in its memory.stat."""

    limit: str
    usage: str
    cache: tuple[str, str]


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
_V2 = _Files("memory.max", "memory.current", ("inactive_file", "active_file"))


def _read_cgroup_free(proc: Path, root: Path) -> int | None:
    rooms = [_read_room(group, files) for group, files in _iter_groups(proc, root)]
    return min((room for room in rooms if room is not None), default=None)


def _iter_groups(proc: Path, root: Path) -> Iterator[tuple[Path, _Files]]:
    """Yield every folder that may hold a limit of this process; a hybrid system has both versions side by side."""
    for line in _read(proc / "self" / "cgroup").split("\n"):
        if line.count(":") < 2:
            continue
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            mounts, files = [root, root / "unified"], _V2
        elif "memory" in controllers.split(","):
            mounts, files = [root, root / "memory", root / controllers], _V1
        else:
            continue
        # Every cgroup has that file, and the tmpfs that holds the mounts of v1 and of hybrid systems has not.
        mount = next((mount for mount in mounts if os.path.exists(mount / "cgroup.procs")), None)
        if mount is not None:
            yield from ((group, files) for group in _iter_ancestry(mount, path))


def _iter_ancestry(mount: Path, path: str) -> Iterator[Path]:
    """Yield a group and its ancestors up to the mount.

    In a container the path may be the host's, which its mount does not show: the mount is the container's own group.
    """
    names = [name for name in path.split("/") if name]
    if ".." in names or not os.path.isdir(mount.joinpath(*names)):  # Path.is_dir raises where it may not look
        names = []
    for depth in range(len(names), -1, -1):
        yield mount.joinpath(*names[:depth])


def _read_room(group: Path, files: _Files) -> int | None:
    """Return the bytes that a group's limit leaves; None without a limit, or where one of the numbers is missing."""
    limit = _number(_read(group / files.limit), _BYTES)
    if limit is None or limit >= _UNLIMITED:
        return None
    usage = _number(_read(group / files.usage), _BYTES)
    stat = _read(group / "memory.stat")
    inactive, active = (_number(stat, rf"^{name} (\d{{1,20}})$") for name in files.cache)
    if usage is None or inactive is None or active is None:
        return None
    used = max(0, usage - inactive - active)  # the files are read one after the other, so the sum may be off
    return max(0, limit - used)


def _number(text: str, pattern: str) -> int | None:
    match = re.search(pattern, text, re.ASCII | re.MULTILINE)
    return int(match[1]) if match else None


def _read(path: Path) -> str:
    """Return a file's text, empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except (OSError, ValueError):  # ValueError: a NUL in a path
        return ""
