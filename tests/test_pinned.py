import mmap
import os

import pytest
import torch

import ftw
from ftw import pinned
from ftw.host_memory import HostMemory
from ftw.pinned import Driver, PinnedBuffer

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


class FakeDriver:
    """A driver that records its calls, and refuses with `code` where that is not 0."""

    def __init__(self, code: int = 0) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.code = code

    def register(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append(("register", address, nbytes, flags))
        return self.code

    def unregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        return 0

    def as_driver(self) -> Driver:
        return Driver(self.register, self.unregister, lambda code: f"out of memory ({code})")


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
        assert driver.calls == [("register", address, buffer.pinned_nbytes, 1 | 2)]


def test_close_waits_and_unregisters_before_the_memory_goes(
    no_synchronize: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = FakeDriver()
    buffer = PinnedBuffer(4096, driver=driver.as_driver())
    buffer.pin(GPU)
    address = buffer.address
    order: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append("synchronize"))
    unregister, close = driver.unregister, HostMemory.close
    buffer._driver = driver.as_driver()._replace(
        unregister=lambda address: (order.append("unregister"), unregister(address))[1]
    )
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
        with pytest.raises(ftw.PinError, match=r"8192 bytes: out of memory \(2\)") as caught:
            buffer.pin(GPU)
        assert len(str(caught.value).splitlines()) == 1
        assert isinstance(caught.value, MemoryError)
        buffer.view()[:1] = b"x"
        assert buffer.pinned_nbytes == 0


def resident_nbytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def test_close_returns_the_memory() -> None:
    before = resident_nbytes()
    buffer = PinnedBuffer(64 << 20)
    buffer.view()[:] = bytes(64 << 20)
    assert resident_nbytes() > before + (60 << 20)
    buffer.close()
    assert resident_nbytes() < before + (8 << 20)


def test_a_view_outlives_the_buffer() -> None:
    buffer = PinnedBuffer(1 << 20)
    view = buffer.view()
    view[:] = os.urandom(1 << 20)
    content = bytes(view)
    buffer.close()
    assert bytes(view) == content


class FakeLibrary:
    """A driver's shared library whose functions take attributes, as those of ctypes do, and record their calls."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[tuple[object, ...]] = []

    def __getattr__(self, name: str) -> object:
        def function(*arguments: object) -> object:
            self.calls.append((name, *arguments))
            return b"refused by HIP" if name == "hipGetErrorString" else 0

        setattr(self, name, function)
        return function


@pytest.mark.parametrize(
    ("hip", "library", "register", "unregister"),
    [
        ("6.4", "libamdhip64.so", "hipHostRegister", "hipHostUnregister"),
        (None, "libcuda.so.1", "cuMemHostRegister_v2", "cuMemHostUnregister"),
    ],
    ids=["rocm", "cuda"],
)
def test_load_driver_takes_the_calls_of_torchs_gpu(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, library: str, register: str, unregister: str
) -> None:
    loaded: list[FakeLibrary] = []
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(pinned.ctypes, "CDLL", lambda name: loaded.append(FakeLibrary(name)) or loaded[-1])
    driver = pinned.load_driver()
    assert driver.register(4096, 8192, 3) == 0
    assert driver.unregister(4096) == 0
    assert [made.name for made in loaded] == [library]
    assert loaded[0].calls == [(register, 4096, 8192, 3), (unregister, 4096)]
    assert driver.describe(1) in ("refused by HIP", "unknown error")
