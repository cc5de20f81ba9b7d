"""Which tensor of a module is its lookup table, and whether looking rows up is all that the module does.

nn.Embedding              ids from 0 on; rows are returned as they are
VocabParallelEmbedding    of vLLM and SGLang: a shard of the vocabulary, padded, of which the ranks' sums are taken
any other                 the caller names the parameter, and answers for the rest

rows of a shard   | the model's own ids | padding | added (LoRA) ids | padding |
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from ftw.errors import NotEligibleError

_ALLOWED = "an nn.Embedding, a VocabParallelEmbedding, or any module with parameter=... is allowed"


class Table(NamedTuple):
    """A table in a module.

    `vocab_range` is `(start, length)` of a shard, None for ids from 0 to the last row. `dtype` is what the module
    converts rows to, None where it does not.
    """

    tensor: torch.Tensor
    vocab_range: tuple[int, int] | None
    dtype: torch.dtype | None


def table_name(parameter: str | None) -> str:
    """Return the name of the parameter that is the table."""
    return "weight" if parameter is None else parameter


def is_table_module(module: nn.Module) -> bool:
    """Return whether a module is of a kind that holds a lookup table as its weight, whatever else it may do."""
    return isinstance(module, nn.Embedding) or _is_vocab_parallel(module)


def find_table(module: nn.Module, parameter: str | None, subject: str) -> Table:
    """Return the table of a module; with `parameter` that one, whatever else the module does.

    Raises:
        NotEligibleError: The module does more than looking rows up, or has no such parameter.
    """
    if is_parametrized(module):
        raise NotEligibleError(f"{subject}: module: has parametrizations, which compute its table at every use")
    if getattr(module, "max_norm", None) is not None:
        problem = f"has max_norm={module.max_norm}, which changes rows while they are read"
        raise NotEligibleError(f"{subject}: module: {problem}")
    if parameter is None:
        _check_is_plain_lookup(module, subject)
    name = table_name(parameter)
    tensor = {**module._buffers, **module._parameters}.get(name)
    if tensor is None:
        found = ", ".join([*module._parameters, *module._buffers]) or "none"
        raise NotEligibleError(f"{subject}: parameter: {type(module).__name__} has no {name!r}, it has {found}")
    return Table(tensor, _vocab_range(module, subject), getattr(module, "output_dtype", None))


def check_table(tensor: torch.Tensor, subject: str, ggml_type: str | None) -> None:
    """Check that a tensor is a table whose rows can be read where they lie.

    Raises:
        NotEligibleError: It is not.
    """
    problem = _find_problem(tensor, ggml_type)
    if problem is not None:
        raise NotEligibleError(f"{subject}: table: {problem}")


def _check_is_plain_lookup(module: nn.Module, subject: str) -> None:
    kind = type(module).__name__
    instead = "pass parameter='weight' to look its rows up and do the rest yourself"
    if not is_table_module(module):
        raise NotEligibleError(f"{subject}: module: found a {kind}, {_ALLOWED}")
    own = type(module)
    is_own = own.forward is not nn.Embedding.forward or own.__call__ is not nn.Module.__call__
    if isinstance(module, nn.Embedding) and is_own:
        raise NotEligibleError(f"{subject}: module: {kind} does more in its forward than look rows up; {instead}")
    if "forward" in vars(module):
        raise NotEligibleError(f"{subject}: module: the forward of this {kind} has been replaced; {instead}")
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        raise NotEligibleError(f"{subject}: module: has hooks, which would be lost; remove them, or {instead}")
    method = type(getattr(module, "quant_method", None)).__name__
    if method not in ("NoneType", "UnquantizedEmbeddingMethod"):
        problem = f"its rows are quantised ({method}), plain rows are needed"
        raise NotEligibleError(f"{subject}: module: {problem}; {instead}")


def _is_vocab_parallel(module: nn.Module) -> bool:
    """Recognise vLLM's and SGLang's class by its name, as neither is imported; its LM head is a subclass of it."""
    return type(module).__name__ == "VocabParallelEmbedding" and hasattr(module, "shard_indices")


def _vocab_range(module: nn.Module, subject: str) -> tuple[int, int] | None:
    """Read vLLM's and SGLang's `VocabParallelEmbeddingShardIndices`; whole vocabularies have them too."""
    indices = getattr(module, "shard_indices", None)
    if indices is None:
        return None
    num_ids, num_own = (_count(module, name) for name in ("num_embeddings", "org_vocab_size"))
    if num_ids != num_own:
        problem = f"{num_ids - num_own} ids were added to the model's {num_own} (LoRA), a lookup needs one run of ids"
        raise NotEligibleError(f"{subject}: module: {problem}")
    start, stop = int(indices.org_vocab_start_index), int(indices.org_vocab_end_index)
    return start, stop - start


def _count(module: nn.Module, name: str) -> int:
    value: Any = getattr(module, name)
    return int(value)


def _find_problem(tensor: torch.Tensor, ggml_type: str | None) -> str | None:
    """Return what keeps a tensor from being a table, in words."""
    kind = type(tensor).__name__
    if is_lazy(tensor) or tensor.is_meta:
        return "has no memory yet (lazy or meta tensor)"
    # A subclass that computes its operations has no rows of its own: torchao's quantised tensors, DTensor, fake ones.
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or tensor.is_quantized:
        return f"found a {kind} that computes its values (quantised or distributed), stored rows are needed"
    if tensor.layout is not torch.strided or tensor.ndim != 2 or not tensor.is_contiguous():
        return f"found {tensor.layout} {list(tensor.shape)}, contiguous [rows, columns] is needed"
    if tensor.device.type not in ("cpu", "cuda"):
        return f"found on {tensor.device}, a CPU, CUDA or ROCm device is needed"
    if ggml_type is None and not tensor.dtype.is_floating_point:
        return f"found {tensor.dtype}, a floating-point dtype is needed, or uint8 with ggml_type=..."
    if ggml_type is not None and tensor.dtype != torch.uint8:
        return f"found {tensor.dtype}, torch.uint8 is needed for packed rows of {ggml_type}"
    if tensor._is_view():
        return "is a view of another tensor, which keeps its memory; pass that one"
    if not tensor.is_leaf or tensor.grad is not None:
        return "takes part in training (it has a gradient, or is computed); only weights that stay as they are may move"
    return None
