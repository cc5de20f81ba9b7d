import gc
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_driver import GPU, FakeDriver
from places import SUPPORT
from smaps import kib, read_mappings

import ftw
from ftw.host.limits import HostLimits
from ftw.host.memory import HostMemory
from ftw.pinned import PinnedBuffer
from ftw.pinned import buffer as pinned

CPU = torch.device("cpu")


@pytest.fixture
def no_synchronize(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Let tests without a GPU act as if there were one; records the devices that were waited for."""
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    return waited


@pytest.mark.parametrize("nbytes", [1, mmap.PAGESIZE, mmap.PAGESIZE + 1, (2 << 20) + 5, 5 << 20])
def test_buffer_is_of_exact_size_and_page_aligned(nbytes: int) -> None:
    with PinnedBuffer(nbytes) as buffer:
        assert len(buffer.view()) == nbytes
        assert buffer.address % mmap.PAGESIZE == 0
        buffer.view()[:] = b"\x5a" * nbytes
        assert bytes(buffer.view()) == b"\x5a" * nbytes


@pytest.mark.parametrize("nbytes", [1, 4096, 4097, 5 << 20])
def test_pinned_bytes_are_the_size_rounded_up_to_one_page(nbytes: int, no_synchronize: list[torch.device]) -> None:
    driver = FakeDriver()
    with PinnedBuffer(nbytes, driver=driver.as_driver()) as buffer:
        address = buffer.address
        assert buffer.pinned_nbytes == 0
        buffer.pin(GPU)
        assert buffer.pinned_nbytes == -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        assert driver.calls == [("register", address, buffer.pinned_nbytes)]


def test_close_waits_and_unregisters_before_the_memory_goes(
    no_synchronize: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = FakeDriver()
    order: list[str] = []

    def unregister(address: int) -> int:
        order.append("unregister")
        return driver.unregister(address)

    buffer = PinnedBuffer(4096, driver=driver.as_driver()._replace(unregister=unregister))
    buffer.pin(GPU)
    address, close = buffer.address, HostMemory.close
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append("synchronize"))
    monkeypatch.setattr(HostMemory, "close", lambda memory: (order.append("unmap"), close(memory))[1])
    buffer.close()
    assert order == ["synchronize", "unregister", "unmap"]
    assert driver.calls[-1] == ("unregister", address)
    assert buffer.pinned_nbytes == 0
    buffer.close()
    assert driver.calls.count(("unregister", address)) == 1


def test_pin_twice_registers_once(no_synchronize: list[torch.device]) -> None:
    driver = FakeDriver()
    with PinnedBuffer(10, driver=driver.as_driver()) as buffer:
        buffer.pin(GPU)
        buffer.pin(GPU)
        assert len(driver.calls) == 1


def test_empty_buffer_is_never_registered(no_synchronize: list[torch.device]) -> None:
    driver = FakeDriver()
    with PinnedBuffer(0, driver=driver.as_driver()) as buffer:
        buffer.pin(GPU)
        assert len(buffer.view()) == 0
    assert driver.calls == []


def test_cpu_needs_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "load_driver", lambda: pytest.fail("asked for a driver"))
    with PinnedBuffer(10) as buffer:
        buffer.pin(CPU)
        assert buffer.pinned_nbytes == 0


def test_refused_registration_names_the_bytes_and_leaves_the_memory_usable(no_synchronize: list[torch.device]) -> None:
    with PinnedBuffer(4097, driver=FakeDriver(code=2).as_driver()) as buffer:
        with pytest.raises(ftw.PinError, match=r"8192 bytes\): out of memory \(2\)") as caught:
            buffer.pin(GPU)
        assert len(str(caught.value).splitlines()) == 1
        assert isinstance(caught.value, MemoryError)
        buffer.view()[:1] = b"x"
        assert buffer.pinned_nbytes == 0


def resident_kib(addresses: range) -> int:
    """Return what is resident of the mappings that begin at these addresses."""
    return sum(kib(mapping["Rss"]) for start, mapping in read_mappings().items() if start in addresses)


def test_close_returns_the_memory() -> None:
    buffer = PinnedBuffer(64 << 20)
    buffer.view()[:] = bytes(64 << 20)
    addresses = range(buffer.address, buffer.address + (64 << 20))
    assert resident_kib(addresses) == 64 << 10
    buffer.close()
    assert resident_kib(addresses) < 8 << 10  # another may have taken the place of it


def test_a_view_outlives_the_buffer() -> None:
    buffer = PinnedBuffer(1 << 20)
    view = buffer.view()
    view[:] = os.urandom(1 << 20)
    content = bytes(view)
    buffer.close()
    assert bytes(view) == content


def test_device_pointer_is_the_drivers_translation(no_synchronize: list[torch.device]) -> None:
    with PinnedBuffer(4097, driver=FakeDriver().as_driver()) as buffer:
        with pytest.raises(ftw.ClosedError, match="there is none, pin it first"):
            _ = buffer.device_pointer
        buffer.pin(GPU)
        assert buffer.device_pointer == buffer.address + (1 << 40)
    with pytest.raises(ftw.ClosedError):
        _ = buffer.device_pointer


def test_device_pointer_that_the_driver_does_not_tell_is_an_error(no_synchronize: list[torch.device]) -> None:
    driver = FakeDriver()
    with PinnedBuffer(1, name="wte.weight", driver=driver.as_driver()) as buffer:
        buffer.pin(GPU)
        driver.code = 1
        with pytest.raises(ftw.PinError, match=r"^wte.weight: page-locked memory: no address: out of memory \(1\)$"):
            _ = buffer.device_pointer


def test_device_pointer_of_an_empty_buffer_is_zero() -> None:
    with PinnedBuffer(0) as buffer:
        buffer.pin(GPU)
        assert buffer.device_pointer == 0


def test_refusal_names_the_table_what_is_free_and_what_to_do(
    no_synchronize: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = HostLimits(available=3 << 30, cgroup_free=1 << 30, memlock=8 << 20, is_wsl=True)
    monkeypatch.setattr(pinned, "read_host_limits", lambda: limits)
    buffer = PinnedBuffer(5 << 20, name="model.embed\ntokens", driver=FakeDriver(code=2).as_driver())
    with buffer, pytest.raises(ftw.PinError) as caught:
        buffer.pin(GPU)
    message = str(caught.value)
    assert message.startswith(r"model.embed\ntokens: page-locked memory: cuda:0 refused to page-lock 5.00 MiB")
    for part in ("3.00 GiB of host memory", "1.00 GiB of the cgroup", "'ulimit -l' is 8.00 MiB", "WSL", "embed 'gpu'"):
        assert part in message
    assert len(message.splitlines()) == 1


def test_count_of_pinned_bytes_follows_buffers(no_synchronize: list[torch.device]) -> None:
    before = pinned.count_pinned_bytes()
    one, other = (PinnedBuffer(nbytes, driver=FakeDriver().as_driver()) for nbytes in (1, 4097))
    assert pinned.count_pinned_bytes() == before
    one.pin(GPU)
    other.pin(GPU)
    assert pinned.count_pinned_bytes() == before + 3 * 4096
    one.close()
    one.close()
    assert pinned.count_pinned_bytes() == before + 2 * 4096
    other.close()
    assert pinned.count_pinned_bytes() == before


def test_count_of_pinned_bytes_takes_torchs_own_in(monkeypatch: pytest.MonkeyPatch) -> None:
    before = pinned.count_pinned_bytes()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "host_memory_stats", lambda: {"allocated_bytes.current": 7 << 20}, raising=False)
    assert pinned.count_pinned_bytes() == before + (7 << 20)


def test_refused_buffer_does_not_count(no_synchronize: list[torch.device]) -> None:
    before = pinned.count_pinned_bytes()
    with PinnedBuffer(4096, driver=FakeDriver(code=2).as_driver()) as buffer, pytest.raises(ftw.PinError):
        buffer.pin(GPU)
    assert pinned.count_pinned_bytes() == before


def test_dropped_buffer_is_given_back_when_it_is_collected(no_synchronize: list[torch.device]) -> None:
    before, driver = pinned.count_pinned_bytes(), FakeDriver()
    buffer = PinnedBuffer(4096, driver=driver.as_driver())
    buffer.pin(GPU)
    address = buffer.address
    del buffer
    gc.collect()
    assert driver.calls[-1] == ("unregister", address)
    assert no_synchronize == [GPU, GPU]
    assert pinned.count_pinned_bytes() == before


def test_failed_wait_still_gives_the_memory_back(
    no_synchronize: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = FakeDriver()
    buffer = PinnedBuffer(4096, driver=driver.as_driver())
    buffer.pin(GPU)

    def fail(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        buffer.close()
    assert [call[0] for call in driver.calls] == ["register", "unregister"]
    assert buffer.address == 0


def test_failed_release_is_an_error_that_names_the_table(no_synchronize: list[torch.device]) -> None:
    driver = FakeDriver()
    buffer = PinnedBuffer(4096, name="wte", driver=driver.as_driver()._replace(unregister=lambda address: 713))
    buffer.pin(GPU)
    with pytest.raises(ftw.PinError, match=r"^wte: .* not released by cuda:0: out of memory \(713\)$"):
        buffer.close()
    assert buffer.address == 0


def test_pages_come_from_the_gpus_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "numa_node_of", lambda device: 0)
    with PinnedBuffer(3 << 20, device=GPU) as buffer:
        assert buffer.numa_policy in ("bind", "preferred", "default")  # the last in a container that refuses it
        buffer.view()[:] = bytes(3 << 20)
        nodes = buffer.numa_nodes()
        assert sum(nodes.values()) in (0, 768)  # 0 where the kernel does not tell
    assert PinnedBuffer(4096).numa_policy == "default"


def test_memory_that_is_not_to_be_had_is_an_error_that_names_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "read_host_limits", lambda: HostLimits(3 << 30, None, None, is_wsl=False))
    with pytest.raises(ftw.PinError) as caught:
        PinnedBuffer(1 << 62, name="wte\n")
    message = str(caught.value)
    assert message.startswith(
        "wte\\n: host memory: could not allocate 4194304.00 TiB: Cannot allocate memory; free are"
    )
    assert len(message.splitlines()) == 1
    assert isinstance(caught.value.__cause__, OSError)


# What a forked child does with the buffers that it inherits.

FORKING = """
import gc, mmap, os, resource, sys, torch
from fake_driver import GPU, FakeDriver
from ftw.pinned import PinnedBuffer

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
torch.cuda.synchronize = lambda device: None
driver = FakeDriver()
NBYTES = 5 << 20
buffer = PinnedBuffer(NBYTES, driver=driver.as_driver())
view = buffer.view()
view[:] = b"x" * NBYTES

def fork(action):
    sys.stdout.flush()
    child = os.fork()
    if not child:
        action()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def check():
    assert view[0] == view[NBYTES - 1] == 120
"""


def run_forking(script: str) -> None:
    paths = [str(Path(ftw.__file__).parents[1]), str(SUPPORT)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run([sys.executable, "-c", FORKING + script], env=environment, check=True)


def test_page_locked_memory_is_withheld_from_forked_children() -> None:
    run_forking("""
assert fork(check) == 0
buffer.pin(GPU)
assert fork(check) == -11
assert fork(lambda: view.__setitem__(0, 1)) == -11
check()
buffer.close()
check()
assert fork(check) == 0
""")


def test_memory_that_the_driver_refuses_is_not_withheld() -> None:
    run_forking("""
driver.code = 2
try:
    buffer.pin(GPU)
except MemoryError:
    pass
assert fork(check) == 0
""")


def test_kernel_that_cannot_withhold_memory_page_locks_it_all_the_same() -> None:
    run_forking("""
from ftw.host import memory as host_memory
host_memory._WIPE_ON_FORK = 9999
buffer.pin(GPU)
assert fork(check) == -11
buffer.close()
check()
""")


@pytest.mark.parametrize("way", ["buffer.close()", "del buffer"])
def test_forked_child_leaves_the_driver_and_its_own_new_memory_alone(way: str) -> None:
    run_forking(f"""
buffer.pin(GPU)
calls = list(driver.calls)

def drop():
    global buffer, view
    new = [mmap.mmap(-1, NBYTES + (2 << 20)) for _ in range(3)]
    {way}
    del view
    gc.collect()
    assert driver.calls == calls
    for mapping in new:
        mapping[:] = bytes(len(mapping))

assert fork(drop) == 0
check()
buffer.close()
assert [call[0] for call in driver.calls] == ["register", "unregister"]
""")


def test_shared_memory_is_not_withheld() -> None:
    run_forking("""
import tempfile
from pathlib import Path
from ftw.host.shared.segment import open_segment

def fill(view):
    view[:] = b"x" * NBYTES

with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
    segment = open_segment("a", NBYTES, fill, name="table", folder=Path(folder))
    with PinnedBuffer(NBYTES, memory=segment, driver=driver.as_driver()) as buffer:
        view = buffer.view()
        buffer.pin(GPU)
        assert fork(check) == 0
""")
