"""offload: a table that is on the GPU already goes to pinned host memory, and its VRAM back to the driver.

The copy engine writes straight into the memory where the table stays, 64 MiB at a time. Until the last step nothing has
changed; that step gives the tensor its host copy (`tensor.data`), and makes sure that the old memory is gone.

    before    module.weight -> VRAM
    after     module.weight -> host memory <- HostEmbedding, which takes the module's place
"""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ftw.devices import resolve_device
from ftw.embedding import HostEmbedding
from ftw.errors import NotEligibleError, printable
from ftw.host_limits import read_host_limits
from ftw.host_memory import PAGE_NBYTES, align_up
from ftw.kernels.packed_lookup import prepare
from ftw.live_tensors import find_holder, place_of
from ftw.memory import MemoryWatch
from ftw.pin_budget import check_pin_budget
from ftw.pinned import PinnedBuffer, count_pinned_bytes
from ftw.sizes import parse_nbytes
from ftw.table_modules import Table, check_table, find_table, table_name

_CHUNK_NBYTES = 64 << 20
_HELD_UNSEEN = (
    "is also held by what Python does not see, such as a storage, an export (DLPack), or results that autograd tracks; "
    "drop them first"
)


def offload(
    target: nn.Module | torch.Tensor,
    *,
    parameter: str | None = None,
    name: str | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    ggml_type: str | None = None,
    max_pinned_bytes: int | str | None = None,
    hot_bytes: int | str | None = None,
    scale: float | None = None,
) -> HostEmbedding:
    """Move a table from the GPU to pinned host memory, and return the module that looks its rows up from there.

    Put it in the place of the module given. That one stays alive: its parameter is the same object, now of the host
    copy, so its state dict holds the true table. The shard of a vocab-parallel embedding gives zeros for ids of other
    shards, so the caller sums over the ranks, as the engine's own module did. Offload before CUDA graphs are captured:
    one that was captured with the old table reads memory that is not its own.

    Peak memory: nothing on the device, the table once in host memory.

    Args:
        target: An `nn.Embedding`, a `VocabParallelEmbedding` of vLLM or SGLang, another module with `parameter`, or a
            tensor `[rows, columns]` that no module holds.
        parameter: Which parameter or buffer of the module is the table; the module's own forward and hooks then do not
            matter.
        name: For messages and the memory report; None for the table's path in the model.
        device: Whose kernels will read it; None for the table's own, of one on the CPU the current GPU where there is
            one.
        dtype: Of the rows that a lookup returns; None for the table's own, of a packed one bfloat16.
        ggml_type: The GGUF type of packed rows, a key of `ftw.ggml_types.PACKED_TYPES`; None for a plain table.
        max_pinned_bytes: Page-locked bytes that the table may bring this process to, as bytes or as a size such as
            "8GiB". None for what the host has available, of which a limit of yours takes the place.
        hot_bytes: Keep the rows that are used most on the device, as many as fit into these bytes; see `HostEmbedding`.
        scale: Multiply rows by this, as a module does whose `parameter` is given; see `HostEmbedding`.

    Returns:
        A module that owns the memory. Its `memory` tells what was measured, `freed_bytes` above all.

    Raises:
        NotEligibleError: Somebody else holds the table, a tied LM head above all; or the module does more than look
            rows up; or the tensor is no table; or a CUDA graph is being captured. Nothing has changed then.
        PinError: The table doesn't fit into host memory or the limit, or the driver refused to page-lock it. Nothing
            has changed then.
        DeviceError: torch has no such device.
        LookupArgumentError: `dtype` is no floating-point type, `hot_bytes` no size or `scale` no number, or the rows
            are not whole blocks of `ggml_type`.
        ValueError: `max_pinned_bytes` is no size, or a tensor comes with `parameter`.
    """
    limit = parse_nbytes("max_pinned_bytes", max_pinned_bytes)
    owner = target if isinstance(target, nn.Module) else None
    if name is None:
        name = "table" if owner is None else place_of(owner, table_name(parameter)).path
    subject = printable(name)
    table = _find(target, parameter, subject)
    tensor = table.tensor
    check_table(tensor, subject, ggml_type)
    reader = tensor.device if device is None and tensor.is_cuda else resolve_device(device)
    _check_not_capturing(subject, tensor.device, reader)
    _check_is_sole(tensor, owner, subject)
    check_pin_budget(
        {name: align_up(tensor.nbytes, PAGE_NBYTES)},
        pinned_nbytes=count_pinned_bytes(),
        max_pinned_bytes=limit,
        limits=read_host_limits(),
        source="offload",
    )
    _empty_cache(tensor.device)  # so that what is measured is the table alone
    source = tensor.device
    with MemoryWatch(source) as watch:
        own = {"dtype": dtype or table.dtype, "ggml_type": ggml_type, "hot_bytes": hot_bytes, "scale": scale}
        embedding = _move(table, reader, name, own)
        _empty_cache(source)
        pinned = embedding.pinned_nbytes if reader.type == "cuda" else tensor.nbytes
        embedding.memory = watch.report("host", "offloaded", {name: pinned})
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
                    raise NotEligibleError(
                        f"{subject}: {device}: a CUDA graph is being captured, offload before or after"
                    )


def _check_is_sole(tensor: torch.Tensor, owner: nn.Module | None, subject: str) -> None:
    holder = find_holder(tensor, owner)
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


def _move(table: Table, reader: torch.device, name: str, own: dict[str, Any]) -> HostEmbedding:
    """Copy a table to host memory, then let go of the original; whatever fails leaves all as it was.

    `own` are options of the `HostEmbedding`.
    """
    tensor = table.tensor
    with contextlib.ExitStack() as stack:
        buffer = PinnedBuffer(tensor.nbytes, name=name, device=reader)
        stack.callback(buffer.close)
        rows = _rows_in(buffer, tensor)
        embedding = HostEmbedding(rows, name=name, buffer=buffer, vocab_range=table.vocab_range, device=reader, **own)
        if embedding.ggml_type is not None:
            prepare(embedding.ggml_type, reader)
        buffer.pin(reader)
        copy_to_host(tensor, rows)
        _switch(tensor, rows, printable(name))
        stack.pop_all()
    return embedding


def _rows_in(buffer: PinnedBuffer, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the buffer, which it keeps alive, of the same type and shape."""
    if not tensor.nbytes:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    return torch.frombuffer(buffer.view(), dtype=torch.uint8).view(tensor.dtype).reshape(tensor.shape)


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
