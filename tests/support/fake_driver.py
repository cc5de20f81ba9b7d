"""A GPU driver for machines without one."""

import torch

from ftw.pinned.driver import Driver

GPU = torch.device("cuda", 0)


class FakeDriver:
    """A driver that records its calls, and refuses with `code` where that is not 0."""

    def __init__(self, code: int = 0) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.code = code

    def register(self, address: int, nbytes: int) -> int:
        self.calls.append(("register", address, nbytes))
        return self.code

    def unregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        return 0

    def device_pointer(self, address: int) -> tuple[int, int]:
        """Translate as WDDM does: the device knows the memory by another address."""
        self.calls.append(("device_pointer", address))
        return self.code, address + (1 << 40)

    def as_driver(self) -> Driver:
        return Driver(self.register, self.unregister, self.device_pointer, lambda code: f"out of memory ({code})")
