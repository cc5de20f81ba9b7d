"""PinnedBuffer: host memory of exactly a table's size that the GPU reads over PCIe.

The memory is an anonymous mapping (see `ftw.host_memory`), filled first and page-locked then, so that no page is
touched twice. Registration goes through the driver's own call: a refusal through the runtime would stay latched and
surface in the next torch call. File-backed mappings are never registered.

    CUDA   libcuda.so.1      cuMemHostRegister_v2 / cuMemHostUnregister, portable and mapped
    ROCm   libamdhip64.so    hipHostRegister / hipHostUnregister, portable and mapped
    none   plain memory
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, NamedTuple

import torch

from ftw.errors import PinError
from ftw.host_memory import HostMemory

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

_PORTABLE = 1
_MAPPED = 2  # the driver's CU_MEMHOSTREGISTER_DEVICEMAP, HIP's hipHostRegisterMapped


class Driver(NamedTuple):
    """The two calls of a driver; each returns 0, or an error code that `describe` puts into words."""

    register: Callable[[int, int, int], int]
    unregister: Callable[[int], int]
    describe: Callable[[int], str]


class PinnedBuffer:
    """Host memory that is page-locked once it has been filled.

    Attributes:
        nbytes: Bytes asked for.
        pinned_nbytes: Bytes page-locked: `nbytes` rounded up to whole pages, 0 before `pin` and without a GPU.
    """

    def __init__(self, nbytes: int, *, driver: Driver | None = None) -> None:
        self.nbytes = nbytes
        self.pinned_nbytes = 0
        self._memory = HostMemory(nbytes)
        self._driver = driver
        self._device: torch.device | None = None

    @property
    def address(self) -> int:
        """Address of the first byte; 0 for an empty or closed buffer."""
        return self._memory.address

    def view(self) -> memoryview:
        """Return the bytes, writable; they stay valid as long as this view or the buffer lives."""
        return self._memory.view()

    def pin(self, device: torch.device) -> None:
        """Page-lock the memory for a device; on a CPU there is nothing to do.

        Raises:
            PinError: The driver refuses. The memory stays usable by the CPU.
        """
        if device.type == "cpu" or not self.nbytes or self.pinned_nbytes:
            return
        driver = self._driver or load_driver()
        torch.cuda.synchronize(device)  # makes the device's context current, which the driver's own calls need
        code = driver.register(self.address, self._memory.mapped_nbytes, _PORTABLE | _MAPPED)
        if code:
            words = driver.describe(code)
            problem = f"the driver refused {self._memory.mapped_nbytes} bytes: {words}; see 'ulimit -l' and free memory"
            raise PinError(f"{device}: page-locked memory: {problem}")
        self._driver, self._device = driver, device
        self.pinned_nbytes = self._memory.mapped_nbytes

    def close(self) -> None:
        """Wait for the device, unregister the memory, and drop it."""
        if self.pinned_nbytes and self._driver is not None and self._device is not None:
            torch.cuda.synchronize(self._device)  # no kernel may still be reading
            self.pinned_nbytes = 0
            code = self._driver.unregister(self.address)
            if code:
                raise PinError(f"{self._device}: page-locked memory: not released: {self._driver.describe(code)}")
        self._memory.close()

    def __enter__(self) -> PinnedBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def load_driver() -> Driver:
    """Return the driver of the installed torch's kind of GPU."""
    if torch.version.hip:
        hip = ctypes.CDLL("libamdhip64.so")
        hip.hipGetErrorString.restype = ctypes.c_char_p
        return Driver(
            register=_typed(hip.hipHostRegister, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint),
            unregister=_typed(hip.hipHostUnregister, ctypes.c_void_p),
            describe=lambda code: (hip.hipGetErrorString(code) or b"unknown error").decode(),
        )
    cuda = ctypes.CDLL("libcuda.so.1")

    def describe(code: int) -> str:
        text = ctypes.c_char_p()
        cuda.cuGetErrorString(code, ctypes.byref(text))
        return (text.value or b"unknown error").decode()

    return Driver(
        register=_typed(cuda.cuMemHostRegister_v2, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint),
        unregister=_typed(cuda.cuMemHostUnregister, ctypes.c_void_p),
        describe=describe,
    )


def _typed(function: Callable[..., int], *argtypes: type) -> Callable[..., int]:
    """Declare the arguments of a foreign function: pointers and sizes are wider than the default int."""
    function.argtypes = argtypes  # type: ignore[attr-defined]
    return function
