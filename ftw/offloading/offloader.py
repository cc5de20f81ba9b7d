"""Offloading of one table: it is on the GPU already, and goes to pinned host memory, and its VRAM back to the driver.

The copy engine writes straight into the memory where the table stays, 64 MiB at a time. Until the last step nothing has
changed; that step gives the tensor its host copy (`tensor.data`), and makes sure that the old memory is gone.

    before    module.weight -> VRAM
    after     module.weight -> host memory <- HostEmbedding, which takes the module's place
"""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ftw.errors import NotEligibleError, printable
from ftw.lookup import HostEmbedding, RowOptions, make_embedding
from ftw.offloading.table_modules import Table, check_table, find_table, table_name
from ftw.offloading.tensor_holders import find_holder, place_of
from ftw.pinned import MemoryMonitor, PinnedBuffer, check_pin_budget, resolve_device, tensor_over

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

_CHUNK_NBYTES = 64 << 20
_HELD_UNSEEN = (
    "is also held by what Python does not see, such as a storage, an export (DLPack), or results that autograd tracks; "
    "drop them first"
)


class OffloadPlan(NamedTuple):
    """A table that may go to host memory: its name, whose kernels will read it, and how."""

    tensor: torch.Tensor
    name: str
    reader: torch.device
    options: RowOptions


def plan_offload(
    target: nn.Module | torch.Tensor,
    options: RowOptions,
    *,
    parameter: str | None = None,
    name: str | None = None,
    device: torch.device | str | None = None,
    readers: Mapping[nn.Module, int] | None = None,
) -> OffloadPlan:
    """Check that a table may go to host memory; the arguments are those of `ftw.offload`.

    `readers` are the modules, the target among them, that hold the table and only look rows up, each with the number
    of its places in a model, if the caller replaces them all; None for the target in one place.

    Raises:
        NotEligibleError: It may not.
        DeviceError: torch has no such device.
        ValueError: A tensor comes with `parameter`.
    """
    owner = target if isinstance(target, nn.Module) else None
    if name is None:
        name = "table" if owner is None else place_of(owner, table_name(parameter)).path
    subject = printable(name)
    tensor, vocab_range, dtype = _find(target, parameter, subject)
    check_table(tensor, subject, options.ggml_type)
    reader = tensor.device if device is None and tensor.is_cuda else resolve_device(device)
    _check_not_capturing(subject, tensor.device, reader)
    _check_is_sole(tensor, owner, readers or ({owner: 1} if owner is not None else {}), subject)
    return OffloadPlan(tensor, name, reader, options._replace(vocab_range=vocab_range, dtype=options.dtype or dtype))


def check_room(plans: Iterable[OffloadPlan], max_pinned_bytes: int | None) -> None:
    """Check that host memory takes all of these tables.

    Raises:
        PinError: It does not, or they are more than `max_pinned_bytes` allows.
    """
    check_pin_budget({plan.name: plan.tensor.nbytes for plan in plans}, "offload", max_pinned_bytes)


def run_offload(plan: OffloadPlan, wrap: Callable[[HostEmbedding], HostEmbedding] | None = None) -> HostEmbedding:
    """Move a table, and return the module that looks its rows up; whatever fails leaves all as it was.

    `wrap` makes the module that is returned of the one that owns the memory, before the table moves.
    """
    source, nbytes = plan.tensor.device, plan.tensor.nbytes
    _empty_cache(source)  # so that what is measured is the table alone
    with MemoryMonitor(source) as monitor:
        embedding = _move(plan, wrap)
        _empty_cache(source)
        pinned = embedding.pinned_nbytes if plan.reader.type == "cuda" else nbytes
        embedding.memory = monitor.report("host", "offloaded", {plan.name: pinned})
    return embedding


def copy_to_host(tensor: torch.Tensor, rows: torch.Tensor) -> None:
    """Copy a table's bytes, by the copy engine where it is on a device, and wait for the end.

    Args:
        tensor: `[rows, columns]`, contiguous; complete on whichever stream wrote it.
        rows: Host memory of the same type and shape, page-locked for full speed: 54.0 GB/s on an H200 with PCIe 5.0
            x16, where a GiB copied at once runs at 54.8 (2026-11-30).
    """
    _synchronize(tensor.device)  # whichever stream has written the table last
    if tensor.nbytes:
        source, target = (side.detach().view(torch.uint8).reshape(-1) for side in (tensor, rows))
        for one, other in zip(source.split(_CHUNK_NBYTES), target.split(_CHUNK_NBYTES), strict=True):
            other.copy_(one, non_blocking=True)
    _synchronize(tensor.device)


def _find(target: nn.Module | torch.Tensor, parameter: str | None, subject: str) -> Table:
    if isinstance(target, nn.Module):
        return find_table(target, parameter, subject)
    if not isinstance(target, torch.Tensor):
        raise TypeError(f"target is a {type(target).__name__}, a module or a tensor is needed")
    if parameter is not None:
        raise ValueError(f"parameter is {parameter!r}, but a tensor has none; pass the module that holds it")
    return Table(target, vocab_range=None, dtype=None)


def _check_not_capturing(subject: str, *devices: torch.device) -> None:
    """Allocating, freeing and waiting are not allowed while a graph is being captured, and would end the capture."""
    for device in devices:
        if device.type == "cuda":
            with torch.cuda.device(device):
                if torch.cuda.is_current_stream_capturing():
                    problem = "a CUDA graph is being captured, offload before or after"
                    raise NotEligibleError(f"{subject}: {device}: {problem}")


def _check_is_sole(
    tensor: torch.Tensor, owner: nn.Module | None, readers: Mapping[nn.Module, int], subject: str
) -> None:
    holder = find_holder(tensor, readers)
    if holder is None:
        # An export by DLPack, or a graph of autograd, that holds the very tensor would get the host copy unasked.
        if _count_uses(tensor) > _count_uses(torch.empty(0)):
            raise NotEligibleError(f"{subject}: memory: {_HELD_UNSEEN}")
        return
    advice = "pass that module, unless others read it" if owner is None else "a table that others read must stay"
    raise NotEligibleError(f"{subject}: memory: is also held by {holder}; {advice}")


def _count_uses(tensor: Any) -> int:
    """Count who holds a tensor in C++; one of Python's own counts as one."""
    return int(tensor._use_count())


def _move(plan: OffloadPlan, wrap: Callable[[HostEmbedding], HostEmbedding] | None) -> HostEmbedding:
    """Copy a table to host memory, then let go of the original."""
    tensor, name, reader, options = plan
    with contextlib.ExitStack() as stack:
        buffer = PinnedBuffer(tensor.nbytes, name=name, device=reader)
        stack.callback(buffer.close)
        rows = tensor_over(buffer.view(), tensor.dtype, tensor.shape)
        embedding = make_embedding(rows, name, reader, options, buffer)
        if wrap is not None:
            embedding = wrap(embedding)
        buffer.pin(reader)
        copy_to_host(tensor, rows)
        _switch(tensor, rows, printable(name))
        stack.pop_all()
    return embedding


def _switch(tensor: torch.Tensor, rows: torch.Tensor, subject: str) -> None:
    """Give a tensor its host copy, and put the original back where that does not end the original's memory."""
    device, dtype = tensor.device, tensor.dtype
    layout = tensor.storage_offset(), tensor.shape, tensor.stride()
    original = StorageWeakRef(tensor.untyped_storage())
    tensor.data = rows
    if original.expired():
        return
    gc.collect()
    storage = torch.UntypedStorage._new_with_weak_ptr(original.cdata)
    if storage is None:
        return
    tensor.data = torch.empty(0, dtype=dtype, device=device).set_(storage, *layout)
    del storage  # the error's traceback would keep it, and the next try would be refused for that
    raise NotEligibleError(f"{subject}: memory: {_HELD_UNSEEN}")


def _empty_cache(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
