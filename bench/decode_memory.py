"""Parts of `ftw bench decode`: the VRAM that a model takes with each placement of its table, by the driver's count."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import torch

import ftw.memory
from ftw.sizes import parse_size

from .decode_plan import Placement, Plan, describe, placements
from .decode_session import load_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .decoder import Shape

_MIB = 1 << 20


def memory_rows(folder: Path, shape: Shape, plan: Plan, device: torch.device) -> Iterator[dict[str, Any]]:
    """Load the model with each placement alone; on a CPU no VRAM is taken, and KV tokens have all of it."""
    ways = placements(plan)
    _measure(folder, shape, ways[-1], device)  # brings the kernels and what the driver takes once, for all that follow
    on_gpu = None
    for placement in ways:
        nbytes, pinned = _measure(folder, shape, placement, device)
        on_gpu = nbytes if on_gpu is None else on_gpu
        token = shape.kv_bytes_per_token
        yield {
            **describe(shape),
            "placement": placement.name,
            "vram_mib": round(nbytes / _MIB, 2),
            "below_gpu_mib": round((on_gpu - nbytes) / _MIB, 2),
            "pinned_mib": round(pinned / _MIB, 2),
            "kv_bytes_per_token": token,
            "kv_tokens": (parse_size(plan.vram) - nbytes) // token,
            "more_with_all_layers": (on_gpu - nbytes) * shape.layers // (token * shape.full_layers),
        }


def empty_device(device: torch.device) -> None:
    """Give back to the driver what nobody holds."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def _measure(folder: Path, shape: Shape, placement: Placement, device: torch.device) -> tuple[int, int]:
    """Load and drop a model; return the bytes by which the device's free memory fell, and those page-locked."""
    empty_device(device)
    before = ftw.memory.snapshot(device)
    loaded = load_model(folder, shape, device, placement)
    after = ftw.memory.snapshot(device)
    pinned = loaded.model.memory.total_pinned_bytes
    loaded.model.close()
    del loaded
    empty_device(device)
    return before.device_free - after.device_free, pinned
