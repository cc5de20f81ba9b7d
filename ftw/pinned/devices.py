"""Which device a name means."""

from __future__ import annotations

import torch

from ftw.errors import DeviceError


def resolve_device(device: torch.device | str | None) -> torch.device:
    """Return a device with its index; None is the current GPU, or the CPU on a machine without one.

    Raises:
        DeviceError: torch has no such device.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise DeviceError(f"{device}: device: {str(error).splitlines()[0]}") from error
    if where.type == "cpu":
        return where
    count = torch.cuda.device_count() if where.type == "cuda" else 0
    if not count or (where.index or 0) >= count:
        found = f"cuda:0 to cuda:{count - 1}" if count else "no CUDA or ROCm device"
        raise DeviceError(f"{where}: device: torch finds {found}; 'cpu' works without one")
    return torch.device("cuda", torch.cuda.current_device() if where.index is None else where.index)
