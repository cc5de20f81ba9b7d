"""The GPU driver's own calls for host memory.

They are not made through the runtime: a refusal there would stay latched, and surface in the next call of torch.

    CUDA   libcuda.so.1      cuMemHostRegister_v2   cuMemHostUnregister   cuMemHostGetDevicePointer_v2
    ROCm   libamdhip64.so    hipHostRegister        hipHostUnregister     hipHostGetDevicePointer
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ftw.errors import PinError
from ftw.host import node_of_pci_device

if TYPE_CHECKING:
    from collections.abc import Callable

_PORTABLE = 1  # for the contexts of all devices
_MAPPED = 2  # into the device's addresses: CU_MEMHOSTREGISTER_DEVICEMAP, hipHostRegisterMapped


class Driver(NamedTuple):
    """The calls of a driver; each returns a code, 0 or an error that `describe` puts into words.

    Attributes:
        register: Page-locks memory of an address and size.
        unregister: Ends that, by the address.
        device_pointer: Returns a code, and the address by which the device reads registered memory.
        describe: Returns the words for a code.
    """

    register: Callable[[int, int], int]
    unregister: Callable[[int], int]
    device_pointer: Callable[[int], tuple[int, int]]
    describe: Callable[[int], str]


def load_driver() -> Driver:
    """Return the driver of the installed torch's kind of GPU.

    Raises:
        PinError: Its library cannot be loaded; Linux's is meant.
    """
    return _load_hip() if torch.version.hip else _load_cuda()


def numa_node_of(device: torch.device) -> int | None:
    """Return the NUMA node that a GPU hangs on; None for a CPU, on a machine of one node, and where it is not known."""
    if device.type != "cuda":
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    if not hasattr(properties, "pci_bus_id"):  # before torch 2.8
        return None
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    return node_of_pci_device(address)


def _load_cuda() -> Driver:
    cuda = _load("libcuda.so.1")

    def describe(code: int) -> str:
        text = ctypes.c_char_p()
        cuda.cuGetErrorString(code, ctypes.byref(text))
        return (text.value or b"unknown error").decode()

    return _make_driver(
        cuda.cuMemHostRegister_v2, cuda.cuMemHostUnregister, cuda.cuMemHostGetDevicePointer_v2, describe
    )


def _load_hip() -> Driver:
    hip = _load("libamdhip64.so")
    hip.hipGetErrorString.restype = ctypes.c_char_p
    return _make_driver(
        hip.hipHostRegister,
        hip.hipHostUnregister,
        hip.hipHostGetDevicePointer,
        lambda code: (hip.hipGetErrorString(code) or b"unknown error").decode(),
    )


def _load(name: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise PinError(f"{name}: page-locked memory: the GPU driver's library cannot be loaded: {error}") from error


def _make_driver(
    register: Callable[..., int],
    unregister: Callable[..., int],
    get_device_pointer: Callable[..., int],
    describe: Callable[[int], str],
) -> Driver:
    """Declare the arguments of the foreign functions, whose pointers and sizes are wider than the default int."""
    register.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)  # type: ignore[attr-defined]
    unregister.argtypes = (ctypes.c_void_p,)  # type: ignore[attr-defined]
    get_device_pointer.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)  # type: ignore[attr-defined]

    def device_pointer(address: int) -> tuple[int, int]:
        pointer = ctypes.c_void_p()
        code = get_device_pointer(ctypes.addressof(pointer), address, 0)
        return code, pointer.value or 0

    return Driver(
        register=lambda address, nbytes: register(address, nbytes, _PORTABLE | _MAPPED),
        unregister=unregister,
        device_pointer=device_pointer,
        describe=describe,
    )
