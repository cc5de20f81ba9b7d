"""Device copy: how a tensor of a checkpoint gets onto a device.

On a GPU tensors stream through two page-locked buffers of 16 MiB, one being read while the other is copied. Dummy ones
are made where they are needed.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from ftw.checkpoint import CHUNK_NBYTES, Checkpoint
from ftw.dtypes import DTYPES, torch_shape
from ftw.errors import CheckpointError
from ftw.host import HUGE_PAGE_NBYTES, HostMemory
from ftw.loading.dummy import fill_dummy
from ftw.pinned import PinnedBuffer, tensor_over

if TYPE_CHECKING:
    from ftw.tensors import TensorInfo

_NUM_BUFFERS = 2


class DeviceCopy:
    """Puts tensors of a checkpoint onto a device, for as long as its `with` block runs."""

    def __init__(self, device: torch.device, *, is_dummy: bool = False) -> None:
        self._device = device
        self._is_dummy = is_dummy
        self._buffers: list[PinnedBuffer] = []
        self._copies: list[torch.cuda.Event | None] = [None] * _NUM_BUFFERS
        self._next = 0

    def __enter__(self) -> DeviceCopy:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as stack:
            for buffer in self._buffers:
                stack.callback(buffer.close)

    def load(self, checkpoint: Checkpoint, tensor: TensorInfo) -> torch.Tensor:
        """Return a new tensor on the device, complete for work that is queued on its current stream.

        Raises:
            CheckpointError: A file has changed, or torch has no such dtype.
        """
        dtype, shape = torch_form(checkpoint, tensor)
        if self._device.type == "cpu" and not self._is_dummy:
            return tensor_over(_read_to_host(checkpoint, tensor), dtype, shape)
        target = torch.empty(shape, dtype=dtype, device=self._device)
        if tensor.nbytes:
            flat = target.reshape(-1).view(torch.uint8)
            if self._is_dummy:
                fill_dummy(flat, tensor)
            else:
                self._copy(checkpoint, tensor, flat)
        return target

    def _copy(self, checkpoint: Checkpoint, tensor: TensorInfo, flat: torch.Tensor) -> None:
        """Read a tensor's bytes into the buffers by turns, and queue their copies to the device."""
        for offset in range(0, tensor.nbytes, CHUNK_NBYTES):
            nbytes = min(CHUNK_NBYTES, tensor.nbytes - offset)
            number = self._next_buffer()
            view = self._buffers[number].view()[:nbytes]
            checkpoint.read_into(tensor.name, view, offset=offset)
            staged = torch.frombuffer(view, dtype=torch.uint8)
            flat[offset : offset + nbytes].copy_(staged, non_blocking=True)
            event = self._copies[number] = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))

    def _next_buffer(self) -> int:
        """Return the number of a buffer that no copy reads any more."""
        number = self._next
        self._next = (number + 1) % _NUM_BUFFERS
        if number == len(self._buffers):
            buffer = PinnedBuffer(CHUNK_NBYTES, name="staging", device=self._device)
            self._buffers.append(buffer)
            buffer.pin(self._device)
        copy = self._copies[number]
        if copy is not None:
            copy.synchronize()
        return number


def torch_dtype(checkpoint: Checkpoint, tensor: TensorInfo) -> torch.dtype:
    """Return torch's dtype of a tensor.

    Raises:
        CheckpointError: As `torch_form` does.
    """
    return torch_form(checkpoint, tensor)[0]


def torch_form(checkpoint: Checkpoint, tensor: TensorInfo) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return dtype and shape that a tensor has in torch.

    Raises:
        CheckpointError: This torch has no such dtype, or none for rows of that length.
    """
    known = DTYPES[tensor.dtype]
    dtype = getattr(torch, known.torch_name, None) if known.torch_name else None
    if not isinstance(dtype, torch.dtype):
        problem = f"dtype is {tensor.dtype}, which this torch does not have"
        raise CheckpointError(checkpoint.source, tensor.name, problem)
    shape = torch_shape(known, tensor.shape)
    if shape is None:
        problem = f"is {tensor.describe()}, torch needs rows of a multiple of {known.torch_elements} elements"
        raise CheckpointError(checkpoint.source, tensor.name, problem)
    return dtype, shape


def _read_to_host(checkpoint: Checkpoint, tensor: TensorInfo) -> memoryview:
    """Return a tensor's bytes in new memory, in huge pages if large: their first touch takes a fifth of the time."""
    is_large = tensor.nbytes >= HUGE_PAGE_NBYTES
    view = HostMemory(tensor.nbytes).view() if is_large else memoryview(bytearray(tensor.nbytes))
    checkpoint.read_into(tensor.name, view)
    return view
