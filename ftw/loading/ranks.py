"""The ranks that load one model together: which group they are, and that all of them succeed or none does."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ftw.errors import FtwError, printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed import ProcessGroup


def resolve_group(tp: ProcessGroup | bool | None) -> ProcessGroup | None:
    """Return the group that `tp` means: True is the default group, None and False are none.

    Raises:
        ValueError: There is no such group, or this process is not one of its ranks.
    """
    if tp is None or tp is False:
        return None
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("tp: torch.distributed has no process group yet, call init_process_group first")
    group = dist.group.WORLD if tp is True else tp
    if group is None or not isinstance(group, dist.ProcessGroup):  # new_group gives a process outside of it none
        raise ValueError(f"tp is {tp!r}, a ProcessGroup of which this process is a rank, True or None is needed")
    return group


@contextlib.contextmanager
def all_or_none(group: ProcessGroup | None, device: torch.device, source: str) -> Iterator[None]:
    """Let a block succeed on all ranks or on none: at its end each one waits for the others.

    A rank that went on alone would wait in its first lookup for one that has failed. This is also the first collective
    on the device, which sets the communicator up: a CUDA graph can be captured afterwards.

    Raises:
        FtwError: Here the block succeeded, on another rank it did not.
    """
    if group is None:
        yield
        return
    failures = torch.ones(1, dtype=torch.int32, device=device)
    try:
        yield
        failures.zero_()
    finally:
        dist.all_reduce(failures, group=group)
        num_failed = int(failures.item())
    if num_failed:
        problem = f"{num_failed} of {group.size()} ranks could not load it, their errors say why"
        raise FtwError(f"{printable(source)}: tp: {problem}")
