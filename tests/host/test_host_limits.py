"""What bounds host memory, read from trees that look like /proc and /sys/fs/cgroup."""

import os
import resource
from pathlib import Path

import pytest

from ftw.host.limits import HostLimits, read_host_limits

KI, MI, GI = 1 << 10, 1 << 20, 1 << 30
V1_UNLIMITED = (1 << 63) - 4096
NAMES = {
    "v1": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file"),
    "v2": ("memory.max", "memory.current", "inactive_file", "active_file"),
}


class System:
    """A tree under `folder` that stands for a machine: `proc` for /proc, `root` for /sys/fs/cgroup."""

    def __init__(self, folder: Path) -> None:
        self.proc = folder / "proc"
        self.root = folder / "cgroup"
        write(
            self.proc / "meminfo", f"MemTotal:  {64 << 20} kB\nMemFree:  {1 << 20} kB\nMemAvailable:  {32 << 20} kB\n"
        )
        write(self.proc / "sys/kernel/osrelease", "6.8.0-51-generic\n")

    def is_in(self, *lines: str) -> None:
        """Say which groups the process is in."""
        write(self.proc / "self/cgroup", "".join(f"{line}\n" for line in lines))

    def group(
        self, version: str, path: str, limit: object = None, usage: object = 0, inactive: object = 0, active: object = 0
    ) -> Path:
        """Make a cgroup; without a limit it has the files of a v2 root, which are none of memory's but the stat."""
        limit_name, usage_name, inactive_name, active_name = NAMES[version]
        folder = self.root / path
        write(folder / "cgroup.procs", "1\n")
        # The fields of v1 without "total_" and those of v2 with a longer name must not be taken for the right ones.
        stat = f"anon 1\ninactive_file 7\nactive_file 7\n{inactive_name} {inactive}\n{active_name} {active}\nslab 3\n"
        write(folder / "memory.stat", stat if version == "v1" else stat.replace("inactive_file 7\nactive_file 7\n", ""))
        if limit is not None:
            write(folder / limit_name, f"{limit}\n")
            write(folder / usage_name, f"{usage}\n")
        return folder

    def read(self) -> HostLimits:
        return read_host_limits(proc=self.proc, cgroup_root=self.root)


@pytest.fixture
def system(tmp_path: Path) -> System:
    return System(tmp_path)


def deny() -> str:
    raise PermissionError


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", errors="surrogateescape")


def test_available_is_memavailable_in_bytes(system: System) -> None:
    assert system.read().available == 32 * GI


@pytest.mark.parametrize(
    "text",
    ["", "MemFree: 5 kB\n", "MemAvailable: kB\n", "MemAvailable: -5 kB\n", "MemAvailable: 5 MB\n", "MemAvailable: 5\n",
     "MemAvailable: five kB\n", "XMemAvailable: 5 kB\n", f"MemAvailable: {'9' * 5000} kB\n", "\x00\x01\udcff"],
    ids=["empty", "absent", "no-number", "negative", "unit", "no-unit", "word", "other-field", "endless", "binary"],
)  # fmt: skip
def test_malformed_meminfo_tells_nothing(system: System, text: str) -> None:
    write(system.proc / "meminfo", text)
    assert system.read().available is None


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_room_of_a_group_counts_page_cache_as_free(system: System, version: str) -> None:
    mount, line = {"v1": ("memory/", "4:memory:/app"), "v2": ("", "0::/app")}[version]
    system.is_in(line)
    system.group(version, f"{mount}.")
    system.group(version, f"{mount}app", limit=8 * GI, usage=5 * GI, inactive=2 * GI, active=GI)
    assert system.read().cgroup_free == 6 * GI


@pytest.mark.parametrize(
    ("version", "unlimited"), [("v1", V1_UNLIMITED), ("v1", (1 << 64) - 1), ("v2", "max")], ids=["v1", "v1-64", "v2"]
)
def test_unlimited_group_sets_no_bound(system: System, version: str, unlimited: object) -> None:
    mount, line = {"v1": ("memory/", "4:memory:/app"), "v2": ("", "0::/app")}[version]
    system.is_in(line)
    system.group(version, f"{mount}.", limit=unlimited, usage=GI)
    system.group(version, f"{mount}app", limit=unlimited, usage=GI)
    assert system.read().cgroup_free is None


@pytest.mark.parametrize(
    ("limits", "room"),
    [
        ({"a": 8 * GI, "a/b": 6 * GI, "a/b/c": 7 * GI}, 5 * GI),
        ({"a": 2 * GI, "a/b": 6 * GI, "a/b/c": 7 * GI}, GI),
        ({"a": "max", "a/b": "max", "a/b/c": 4 * GI}, 3 * GI),
        ({"a": 4 * GI, "a/b": "max", "a/b/c": "max"}, 3 * GI),
        ({".": 3 * GI, "a": 4 * GI, "a/b": 4 * GI, "a/b/c": 4 * GI}, 2 * GI),
        ({"a": 8 * GI, "a/b": 8 * GI, "a/b/c": 8 * GI, "a/b/c/d": GI, "a/other": GI}, 7 * GI),
    ],
    ids=["middle", "top", "own", "only-top", "mount", "not-children-nor-siblings"],
)
def test_smallest_room_among_the_ancestors_counts(system: System, limits: dict[str, object], room: int) -> None:
    system.is_in("0::/a/b/c")
    system.group("v2", ".")
    for path, limit in limits.items():
        system.group("v2", path, limit=limit, usage=GI)
    assert system.read().cgroup_free == room


@pytest.mark.parametrize(
    ("mount", "line"),
    [
        ("memory", "4:memory:/app"),
        ("memory", "4:cpu,memory:/app"),
        ("cpu,memory", "4:cpu,memory:/app"),
        (".", "4:memory:/app"),
    ],
    ids=["own-mount", "symlink-of-a-shared-mount", "shared-mount", "root"],
)
def test_v1_controller_is_found_wherever_it_is_mounted(system: System, mount: str, line: str) -> None:
    system.is_in("9:name=systemd:/app", "8:cpuset:/app", line)
    system.group("v1", mount, limit=V1_UNLIMITED, usage=GI)
    system.group("v1", f"{mount}/app", limit=3 * GI, usage=GI)
    assert system.read().cgroup_free == 2 * GI


@pytest.mark.parametrize(
    ("v1", "v2", "room"),
    [(4 * GI, None, 3 * GI), (V1_UNLIMITED, None, None), (V1_UNLIMITED, 5 * GI, 4 * GI), (4 * GI, 2 * GI, GI)],
    ids=["v1-limits", "none-limits", "v2-limits", "both-limit"],
)
def test_hybrid_mounts_are_both_read(system: System, v1: int, v2: int | None, room: int | None) -> None:
    system.is_in("4:memory:/api/x", "1:cpu:/", "0::/y")
    system.group("v1", "memory", limit=V1_UNLIMITED, usage=2 * GI)
    system.group("v1", "memory/api", limit=V1_UNLIMITED, usage=2 * GI)
    system.group("v1", "memory/api/x", limit=v1, usage=GI)
    system.group("v2", "unified")
    system.group("v2", "unified/y", limit=v2, usage=GI)
    assert system.read().cgroup_free == room


def test_group_called_unified_of_a_v2_system_is_no_mount(system: System) -> None:
    system.is_in("0::/app")
    system.group("v2", ".")
    system.group("v2", "app", limit=4 * GI)
    system.group("v2", "unified", limit=GI)
    assert system.read().cgroup_free == 4 * GI


@pytest.mark.parametrize(
    "path",
    ["/", "/docker/0123abc", "/kubepods/pod1/gone (deleted)", "/../../other", "/inner/../..", "/x\x00y",
     "/" + "n" * 300, "/not\udcffutf8"],
    ids=["root", "docker", "deleted", "outside", "dots", "nul", "long-name", "bytes"],
)  # fmt: skip
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_path_that_the_mount_does_not_show_leaves_the_mounts_own_group(system: System, version: str, path: str) -> None:
    mount = {"v1": "memory", "v2": "."}[version]
    system.is_in({"v1": f"4:memory:{path}", "v2": f"0::{path}"}[version])
    system.group(version, mount, limit=4 * GI, usage=GI)
    system.group(version, f"{mount}/docker", limit=GI, usage=GI)  # a container inside this one, of the same path
    system.group(version, f"{mount}/../outside", limit=1, usage=0)
    assert system.read().cgroup_free == 3 * GI


@pytest.mark.parametrize(
    ("field", "text"),
    [
        (field, text)
        for field in ("memory.max", "memory.current", "memory.stat")
        for text in ("", "x", "-1", "1e9", "1 2", "9" * 5000)
    ],
    ids=lambda value: value if len(value) < 20 else "endless",
)
def test_group_with_a_malformed_file_tells_nothing(system: System, field: str, text: str) -> None:
    system.is_in("0::/app/worker")
    system.group("v2", ".")
    system.group("v2", "app", limit=4 * GI, usage=GI)
    group = system.group("v2", "app/worker", limit=2 * GI, usage=GI)
    assert system.read().cgroup_free == GI
    write(group / field, text)
    assert system.read().cgroup_free == 3 * GI


@pytest.mark.parametrize("field", ["memory.max", "memory.current", "memory.stat"])
@pytest.mark.parametrize("how", ["missing", "folder", "unreadable"])
def test_group_without_a_file_tells_nothing(
    system: System, monkeypatch: pytest.MonkeyPatch, field: str, how: str
) -> None:
    system.is_in("0::/app")
    file = system.group("v2", ".", limit=4 * GI) / field
    assert system.read().cgroup_free == 4 * GI
    if how == "unreadable":  # root reads what has no permissions, so the kernel's answer is made up
        read = Path.read_text
        monkeypatch.setattr(Path, "read_text", lambda path, **how: deny() if path == file else read(path, **how))
    else:
        file.unlink()
    if how == "folder":
        file.mkdir()
    assert system.read().cgroup_free is None


@pytest.mark.parametrize(
    ("usage", "inactive", "active", "room"),
    [(6 * GI, 0, 0, 0), (6 * GI, 0, 3 * GI, GI), (GI, GI, GI, 4 * GI)],
    ids=["over-the-limit", "over-it-by-cache", "cache-read-later"],
)
def test_room_lies_between_nothing_and_the_limit(
    system: System, usage: int, inactive: int, active: int, room: int
) -> None:
    system.is_in("0::/")
    system.group("v2", ".", limit=4 * GI, usage=usage, inactive=inactive, active=active)
    assert system.read().cgroup_free == room


@pytest.mark.parametrize(
    "text",
    ["", "\n\n", "0", "0:", "0:/", "::", "x:y:z", "4:memor:/", "4:memory", "1:cpu:/", "\x00", "\udcff:\udcff:\udcff"],
    ids=ascii,
)
def test_malformed_list_of_groups_tells_nothing(system: System, text: str) -> None:
    write(system.proc / "self/cgroup", text)
    system.group("v2", ".", limit=GI)
    system.group("v1", "memory", limit=GI)
    assert system.read().cgroup_free is None


def test_malformed_line_does_not_hide_the_others(system: System) -> None:
    system.is_in("junk", "0:", "0::/")
    system.group("v2", ".", limit=GI)
    assert system.read().cgroup_free == GI


def test_nothing_at_all_tells_nothing(tmp_path: Path) -> None:
    limits = read_host_limits(proc=tmp_path / "none", cgroup_root=tmp_path / "none")
    assert (limits.available, limits.cgroup_free, limits.is_wsl) == (None, None, False)


@pytest.mark.parametrize(
    ("soft", "memlock"), [(8 * MI, 8 * MI), (0, 0), (resource.RLIM_INFINITY, None)], ids=["some", "none", "unlimited"]
)
def test_memlock_is_the_soft_limit(
    system: System, monkeypatch: pytest.MonkeyPatch, soft: int, memlock: int | None
) -> None:
    limits = {resource.RLIMIT_MEMLOCK: (soft, 99 * MI)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    assert system.read().memlock == memlock


@pytest.mark.parametrize(
    ("release", "is_wsl"),
    [
        ("5.15.167.4-microsoft-standard-WSL2", True), ("4.4.0-19041-Microsoft", True), ("6.8.0-51-generic", False),
        ("6.18.0-wsl-like", False), ("", False),
    ],
    ids=["wsl2", "wsl1", "linux", "no-microsoft", "empty"],
)  # fmt: skip
def test_wsl_is_known_by_its_kernel(system: System, release: str, is_wsl: bool) -> None:
    write(system.proc / "sys/kernel/osrelease", f"{release}\n")
    assert system.read().is_wsl is is_wsl


@pytest.mark.parametrize(
    ("limits", "line"),
    [
        (HostLimits(12 * GI, None, None, False), "free are 12.00 GiB of host memory"),
        (
            HostLimits(12 * GI, 4 * GI, 8 * MI, False),
            "free are 12.00 GiB of host memory, 4.00 GiB of the cgroup's limit; 'ulimit -l' is 8.00 MiB",
        ),
        (HostLimits(None, 0, 64 * KI, False), "free are 0 B of the cgroup's limit; 'ulimit -l' is 64.00 KiB"),
        (HostLimits(None, None, None, False), "how much host memory is free is unknown"),
        (
            HostLimits(GI, None, None, True),
            "free are 1.00 GiB of host memory; "
            "WSL lets only a part of the memory be page-locked, on some machines less than 1 GiB",
        ),
    ],
    ids=["available", "all-of-linux", "cgroup", "nothing", "wsl"],
)
def test_describe_tells_what_applies(limits: HostLimits, line: str) -> None:
    assert limits.describe() == line


def test_this_machine_has_sane_limits() -> None:
    limits = read_host_limits()
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert limits.available is not None
    assert 0 < limits.available <= physical
    assert limits.cgroup_free is None or 0 <= limits.cgroup_free < 1 << 62
    assert limits.describe().startswith("free are ")
