import ctypes
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ftw.host import numa
from ftw.pinned import driver as gpu_driver


class FakeLibrary:
    """A driver's shared library whose functions take attributes, as those of ctypes do, and record their calls."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[tuple[object, ...]] = []

    def __getattr__(self, name: str) -> object:
        def function(*arguments: object) -> object:
            self.calls.append((name, *arguments))
            if name.endswith(("GetDevicePointer", "GetDevicePointer_v2")):
                ctypes.c_void_p.from_address(int(str(arguments[0]))).value = 0x5000_0000_1000
            return b"refused by HIP" if name == "hipGetErrorString" else 0

        setattr(self, name, function)
        return function


@pytest.mark.parametrize(
    ("hip", "library", "register", "unregister", "pointer"),
    [
        ("6.4", "libamdhip64.so", "hipHostRegister", "hipHostUnregister", "hipHostGetDevicePointer"),
        (None, "libcuda.so.1", "cuMemHostRegister_v2", "cuMemHostUnregister", "cuMemHostGetDevicePointer_v2"),
    ],
    ids=["rocm", "cuda"],
)
def test_load_driver_takes_the_calls_of_torchs_gpu(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, library: str, register: str, unregister: str, pointer: str
) -> None:
    loaded: list[FakeLibrary] = []
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(gpu_driver.ctypes, "CDLL", lambda name: loaded.append(FakeLibrary(name)) or loaded[-1])
    driver = gpu_driver.load_driver()
    assert driver.register(4096, 8192) == 0
    assert driver.unregister(4096) == 0
    assert driver.device_pointer(4096) == (0, 0x5000_0000_1000)
    assert [made.name for made in loaded] == [library]
    assert loaded[0].calls[:2] == [(register, 4096, 8192, 1 | 2), (unregister, 4096)]
    name, _, address, flags = loaded[0].calls[2]
    assert (name, address, flags) == (pointer, 4096, 0)
    assert driver.describe(1) in ("refused by HIP", "unknown error")


@pytest.fixture
def two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a sysfs of two nodes, where a GPU hangs on the second."""
    (tmp_path / "devices/system/node").mkdir(parents=True)
    (tmp_path / "devices/system/node/has_memory").write_text("0-1\n")
    device = tmp_path / "bus/pci/devices/0001:c1:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    monkeypatch.setattr(gpu_driver, "node_of_pci_device", lambda name: numa.node_of_pci_device(name, tmp_path))
    return device / "numa_node"


def properties(**numbers: int) -> SimpleNamespace:
    return SimpleNamespace(**{f"pci_{key}_id": value for key, value in numbers.items()})


def test_node_of_a_gpu_is_that_of_its_pci_device(two_nodes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = properties(domain=1, bus=0xC1, device=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    assert gpu_driver.numa_node_of(torch.device("cuda", 0)) == 1
    assert gpu_driver.numa_node_of(torch.device("cpu")) is None
    two_nodes.write_text("-1\n")  # what a virtual machine tells
    assert gpu_driver.numa_node_of(torch.device("cuda", 0)) is None


@pytest.mark.parametrize("numbers", [{}, {"domain": 0, "bus": 9, "device": 0}], ids=["older-torch", "other-device"])
def test_node_of_a_gpu_that_is_not_found_is_not_known(
    two_nodes: Path, monkeypatch: pytest.MonkeyPatch, numbers: dict[str, int]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties(**numbers))
    assert gpu_driver.numa_node_of(torch.device("cuda", 0)) is None
