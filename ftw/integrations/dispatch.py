"""offload: what `ftw.offload` takes, a table or a whole model, and who moves it.

an embedding, a tensor, a module with `parameter`    `ftw.offloading.offloader`
a model of transformers, or one that holds such      `ftw.integrations.transformers`, which keeps its own habits
any other model that holds embeddings                `ftw.offloading.model_tables`
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, overload

from torch import nn

from ftw.errors import LookupArgumentError
from ftw.lookup import RowOptions
from ftw.offloading import (
    OffloadedModel,
    check_room,
    find_model_tables,
    is_table_module,
    offload_tables,
    plan_offload,
    run_offload,
)
from ftw.sizes import parse_nbytes

if TYPE_CHECKING:
    import torch
    from typing_extensions import TypedDict, Unpack

    from ftw.lookup import HostEmbedding

    class OffloadOptions(TypedDict, total=False):
        """The options of `offload` that one table and a whole model have alike."""

        name: str | None
        device: torch.device | str | None
        dtype: torch.dtype | None
        ggml_type: str | None
        max_pinned_bytes: int | str | None
        hot_bytes: int | str | None
        scale: float | None


@overload
def offload(
    target: nn.Embedding | torch.Tensor, *, parameter: str | None = ..., **options: Unpack[OffloadOptions]
) -> HostEmbedding: ...


@overload
def offload(target: nn.Module, *, parameter: str, **options: Unpack[OffloadOptions]) -> HostEmbedding: ...


@overload
def offload(
    target: nn.Module, *, parameter: None = ..., strict: bool = ..., **options: Unpack[OffloadOptions]
) -> HostEmbedding | OffloadedModel: ...


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
    strict: bool = True,
) -> HostEmbedding | OffloadedModel:
    """Move a table from the GPU to pinned host memory, or all lookup tables of a model.

    Of an embedding or a tensor the module that looks the rows up from there is returned: put it in the place of the
    module given. That one stays alive: its parameter is the same object, now of the host copy, so its state dict holds
    the true table. The shard of a vocab-parallel embedding gives zeros for ids of other shards, so the caller sums over
    the ranks, as the engine's own module did.

    In a model, any other module that holds embeddings, the modules are replaced in place, and an `OffloadedModel` tells
    which. All tables are checked before the first one moves; `ftw.offloading.model_tables` says which ones should. If
    the driver refuses one later, those that have moved before stay moved, and the model works.

    Offload before CUDA graphs are captured: one that was captured with the old table reads memory that is not its own.

    Peak memory: nothing on the device, the tables once in host memory.

    Args:
        target: An `nn.Embedding`, a `VocabParallelEmbedding` of vLLM or SGLang, another module with `parameter`, a
            tensor `[rows, columns]` that no module holds, or a model.
        parameter: Which parameter or buffer of the module is the table; the module's own forward and hooks then do not
            matter.
        name: For messages and the memory report; None for the table's path in the model.
        device: Whose kernels will read it; None for the table's own, of one on the CPU the current GPU where there is
            one.
        dtype: Of the rows that a lookup returns; None for the table's own, of a packed one bfloat16.
        ggml_type: The GGUF type of packed rows, a key of `ftw.ggml_types.PACKED_TYPES`; None for a plain table.
        max_pinned_bytes: Page-locked bytes that the tables may bring this process to, as bytes or as a size such as
            "8GiB". None for what the host has available, of which a limit of yours takes the place.
        hot_bytes: Keep the rows that are used most on the device, as many as fit into these bytes; see `HostEmbedding`.
            Of a model, those of each token embedding.
        scale: Multiply rows by this, as a module does whose `parameter` is given; see `HostEmbedding`.
        strict: Refuse a model of which a table that should leave may not; False leaves that one, and says why in
            `OffloadedModel.left`.

    Returns:
        A module that owns the memory, whose `memory` tells what was measured, `freed_bytes` above all; of a model an
        `OffloadedModel` with these.

    Raises:
        NotEligibleError: Somebody else holds a table, a tied LM head above all; or a module does more than look rows
            up; or a tensor is no table; or a model has none; or a CUDA graph is being captured. Nothing has changed
            then.
        PinError: The tables don't fit into host memory or the limit, or the driver refused to page-lock one.
        DeviceError: torch has no such device.
        LookupArgumentError: `dtype` is no floating-point type, `hot_bytes` no size or `scale` no number, or the rows
            are not whole blocks of `ggml_type`.
        ValueError: `max_pinned_bytes` is no size, a tensor comes with `parameter`, or a model with what describes one
            table.
    """
    limit = parse_nbytes("max_pinned_bytes", max_pinned_bytes)
    hot_nbytes = parse_nbytes("offload: hot_bytes", hot_bytes, LookupArgumentError)
    if parameter is not None or not isinstance(target, nn.Module) or not _is_model(target):
        options = RowOptions(dtype=dtype, ggml_type=ggml_type, hot_bytes=hot_nbytes, scale=scale)
        plan = plan_offload(target, options, parameter=parameter, name=name, device=device)
        check_room([plan], limit)
        return run_offload(plan)
    of_one = {"name": name, "dtype": dtype, "ggml_type": ggml_type, "scale": scale}
    given = [option for option, value in of_one.items() if value is not None]
    if given:
        problem = f"{given[0]} describes one table, a {type(target).__name__} is a model; pass the module of the table"
        raise ValueError(problem)
    if _holds_transformers(target):
        from ftw.integrations.transformers.models import offload_model

        return offload_model(target, device=device, max_pinned_bytes=limit, hot_bytes=hot_nbytes, strict=strict)
    tables = find_model_tables(target)
    return offload_tables(target, tables, device=device, max_pinned_bytes=limit, hot_bytes=hot_nbytes, strict=strict)


def _is_model(module: nn.Module) -> bool:
    """Return whether a module is no table itself, but may hold some."""
    return not is_table_module(module) and next(module.children(), None) is not None


def _holds_transformers(model: nn.Module) -> bool:
    """Return whether models of transformers are in it; where their module was not imported, there are none."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and any(isinstance(module, modeling.PreTrainedModel) for module in model.modules())
