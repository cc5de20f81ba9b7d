"""Weights of an FTW folder for vLLM's `load_weights`, in the order of their bytes on disk.

a table whose layer keeps its rows in host memory    read straight into that memory, this rank's rows alone
the same of another dtype                            yielded on the CPU: vLLM's loader casts it into that memory
all other weights                                    yielded on the device, through two page-locked buffers
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ftw.checkpoint import Checkpoint, open_checkpoint
from ftw.errors import CheckpointError
from ftw.integrations.vllm.layer import HostEmbeddingMethod
from ftw.integrations.vllm.model_load import source_of
from ftw.loading import DeviceCopy, torch_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from ftw.tensors import TensorInfo

_ALLOWED = "an FTW folder that ftw convert made of safetensors is needed"
_CPU = torch.device("cpu")


def open_weights(model_config: Any) -> Checkpoint:
    """Open the FTW folder that vLLM's model names. Close it.

    Raises:
        CheckpointError: It is another format, or of no use to vLLM.
        SourceNotFoundError: There is none of that name.
    """
    checkpoint = open_checkpoint(source_of(model_config))
    problem = _find_problem(checkpoint)
    if problem:
        checkpoint.close()
        raise CheckpointError(checkpoint.source, "format", f"{problem}; {_ALLOWED}")
    return checkpoint


def find_host_layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers of a model whose rows are in host memory, by their path."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(getattr(module, "quant_method", None), HostEmbeddingMethod)
    }


def stream_weights(model_config: Any, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of a model but for those that are read straight into host memory, which this does first.

    Raises:
        CheckpointError: It is broken, or of no use to vLLM.
    """
    device = next((parameter.device for parameter in model.parameters()), _CPU)
    with open_weights(model_config) as checkpoint:
        of_tables = _layers_by_tensor(checkpoint, model)
        straight = [name for name, layers in of_tables.items() if _is_straight(checkpoint, name, layers)]
        for name in straight:
            _read_rows(checkpoint, checkpoint.tensors[name], of_tables[name][0])
        with DeviceCopy(device) as copy, DeviceCopy(_CPU) as copy_to_host:
            for tensor in checkpoint.tensors.values():
                if tensor.name not in straight:
                    where = copy_to_host if tensor.name in of_tables else copy
                    yield tensor.name, where.load(checkpoint, tensor)


def _find_problem(checkpoint: Checkpoint) -> str:
    if checkpoint.config.is_gguf or any(tensor.ggml_type for tensor in checkpoint.tensors.values()):
        return "found weights of a GGUF, which no model of vLLM takes"
    if checkpoint.format != "ftw":
        return f"found {checkpoint.format}, which vLLM loads by itself"
    return ""


def _layers_by_tensor(checkpoint: Checkpoint, model: nn.Module) -> dict[str, list[Any]]:
    """Return the layers in host memory that each tensor of a table fills; mostly one of one."""
    found: dict[str, list[Any]] = {}
    for layer in find_host_layers(model).values():
        method: Any = layer.quant_method
        for name in method.stored_as:
            if name in checkpoint.tensors:
                found.setdefault(name, []).append(layer)
    return found


def _is_straight(checkpoint: Checkpoint, name: str, layers: list[Any]) -> bool:
    """Return whether a tensor is the table of one layer, in the dtype that the layer has it in."""
    tensor, layer = checkpoint.tensors[name], layers[0]
    method = layer.quant_method
    is_whole = tensor.shape == (layer.org_vocab_size, layer.embedding_dim) and len(method.stored_as) == 1
    return is_whole and len(layers) == 1 and torch_dtype(checkpoint, tensor) == method.dtype


def _read_rows(checkpoint: Checkpoint, tensor: TensorInfo, layer: Any) -> None:
    """Read the rows of this rank's shard into its table; rows of padding are zeros, as they were."""
    method: Any = layer.quant_method
    shard: Any = layer.shard_indices
    start, stop = shard.org_vocab_start_index, shard.org_vocab_end_index
    row_nbytes = tensor.nbytes // tensor.shape[0] if tensor.shape[0] else 0
    if start == stop or not row_nbytes:
        return
    with method.filling() as rows:
        own = memoryview(rows[: stop - start].view(torch.uint8).reshape(-1).numpy())
        checkpoint.read_many([(tensor.name, own, start * row_nbytes)])
