"""LazyWeights: a checkpoint as the state dict that transformers loads, read tensor by tensor when it asks.

transformers renames, casts, fuses and splits weights while it loads; for that it takes each by `[...]` and `to`, from
several threads, as slices of safetensors files. These stand in for such slices:

    a weight        is read onto the device, and cast there
    a host table    becomes an empty tensor that is never written, and marks the parameter that it ends up as
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from ftw.errors import ClosedError, FtwError, printable
from ftw.loading import DeviceCopy, torch_form

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from torch import nn

    from ftw.checkpoint import Checkpoint
    from ftw.tensors import TensorInfo


class LazyWeights:
    """The weights of a checkpoint on their way to a device, for as long as its `with` block runs.

    Attributes:
        state_dict: A stand-in for each tensor, by its name, in the order in which transformers looks for their dtype:
            by file, then by name.
        problem: What ended the first reading that failed; transformers swallows some errors.
    """

    def __init__(
        self, checkpoint: Checkpoint, device: torch.device, on_host: Collection[str], marks_on: torch.device
    ) -> None:
        """Stand in for all tensors; those named `on_host` are tables, marked by tensors on another device."""
        self.problem: Exception | None = None
        self.state_dict = {
            tensor.name: LazyWeight(self, tensor, *torch_form(checkpoint, tensor), is_marker=tensor.name in on_host)
            for tensor in sorted(checkpoint.tensors.values(), key=lambda tensor: (tensor.shard, tensor.name))
        }
        self._checkpoint = checkpoint
        self._copy = DeviceCopy(device)
        self._lock = threading.Lock()
        self._is_closed = False
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._marks_on = marks_on
        self._markers: dict[str, torch.Tensor] = {}

    def __enter__(self) -> LazyWeights:
        self._copy.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:  # after an error threads of transformers' may still be at work
            self._is_closed = True
            self._copy.__exit__()

    def read(self, tensor: TensorInfo, dtype: torch.dtype | None) -> torch.Tensor:
        """Return a tensor on the device, ready for work on the stream that was current when this was made."""
        try:
            with self._lock, torch.cuda.stream(self._stream):
                if self._is_closed:
                    raise ClosedError(f"{printable(self._checkpoint.source)}: weights: loading has ended")
                return self._copy.load(self._checkpoint, tensor).to(dtype)
        except (FtwError, OSError, RuntimeError) as error:
            self.problem = self.problem or error
            raise

    def mark(self, tensor: TensorInfo, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor that stands for a table of this dtype."""
        self._markers[tensor.name] = torch.empty(tensor.shape, dtype=dtype, device=self._marks_on)
        return self._markers[tensor.name]

    def find_mark(self, tensor: torch.Tensor) -> str | None:
        """Return the name of the table that a tensor stands for; None for one that stands for none."""
        place = tensor.untyped_storage()._cdata
        return next((name for name, mark in self._markers.items() if mark.untyped_storage()._cdata == place), None)

    def find_marked(self, model: nn.Module, unread: Collection[str]) -> dict[str, list[str]]:
        """Return the parameters that the tables ended up as, by the names of their tensors.

        Those that the model never asked for, or that are told to be `unread`, are not among them.
        """
        found: dict[str, list[str]] = {name: [] for name in self._markers if name not in unread}
        for path, parameter in model.named_parameters(remove_duplicate=False):
            name = self.find_mark(parameter)
            if name is not None:
                found.setdefault(name, []).append(path)
        return found


class TieGuard(TorchFunctionMode):
    """Ends a loading that ties a table to other weights where both hold the same bytes, as a mark has none."""

    def __init__(self, weights: LazyWeights, make_error: Callable[[str], FtwError]) -> None:
        super().__init__()
        self._weights = weights
        self._make_error = make_error

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.equal:
            with torch._C.DisableTorchFunctionSubclass():
                table = next(filter(None, map(self._weights.find_mark, args)), None)
            if table is not None:
                raise self._make_error(table)
        return func(*args, **(kwargs or {}))


class LazyWeight:
    """Stands in for a slice of a safetensors file; `to` reads it, wherever it is asked to go, onto the device."""

    def __init__(
        self, weights: LazyWeights, tensor: TensorInfo, dtype: torch.dtype, shape: tuple[int, ...], *, is_marker: bool
    ) -> None:
        self.dtype = dtype
        self.shape = torch.Size(shape)
        self._weights = weights
        self._tensor = tensor
        self.is_marker = is_marker

    def is_floating_point(self) -> bool:
        """Return what `torch.Tensor.is_floating_point` does."""
        return self.dtype.is_floating_point

    def to(self, device: object = None, dtype: torch.dtype | None = None) -> torch.Tensor:  # noqa: ARG002
        """Return the tensor; its device is the loading's, whatever transformers, which knows of none, asks for."""
        if self.is_marker:
            return self._weights.mark(self._tensor, dtype or self.dtype)
        return self._weights.read(self._tensor, dtype)

    def __getitem__(self, index: Any) -> LazyWeight | torch.Tensor:
        return self if index is ... else self.to()[index]
