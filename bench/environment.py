"""Where and with what a benchmark ran, as its JSON records it."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ftw import __version__


def describe_environment() -> dict[str, Any]:
    """Return date, machine, versions, and the GPU with its driver where there is one."""
    facts: dict[str, Any] = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "ftw": __version__,
        "python": platform.python_version(),
        "kernel": platform.release().split("-")[0],
        "cpus": os.cpu_count(),
    }
    for package in ("torch", "triton", "safetensors"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = None
    import torch

    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["driver"] = _driver_version()
    return facts


def _driver_version() -> str | None:
    try:
        with open("/proc/driver/nvidia/version", encoding="ascii", errors="replace") as file:
            words = file.readline().split()
    except FileNotFoundError:
        return None
    return next((word for word in words if word[:1].isdigit() and "." in word), None)
