"""Models of transformers with their lookup tables in host memory: loaded so, or moved there later.

    load             checkpoint -> tables into host memory, the rest by transformers' own loading onto the device
    offload_model    what `ftw.offload` does with a model
    close            gives the host memory back

transformers 5 takes weights one by one, which go straight from the file to the device. transformers 4 takes them all at
once, so there they are in host memory first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from ftw.checkpoint import TOKEN_EMBEDDING
from ftw.errors import LookupArgumentError, NotEligibleError, printable
from ftw.integrations.transformers.config import check_model_class, check_options
from ftw.integrations.transformers.embedding import (
    TransformersEmbedding,
    guard_tables,
    input_embeddings,
    make_replacement,
    scale_of,
    weight_of,
)
from ftw.integrations.transformers.loading import Request, load_model
from ftw.loading import LoadOptions
from ftw.offloading import ModelTable, OffloadedModel, find_model_tables, offload_tables
from ftw.pinned import resolve_device
from ftw.sizes import parse_nbytes
from ftw.verdict import DECODER_TABLE_READ_WHOLE

if TYPE_CHECKING:
    import os

    import torch
    from torch import nn

    from ftw.lookup import HostEmbedding

_log = logging.getLogger("ftw")


def load(
    source: str | os.PathLike[str],
    *,
    embed: str = "host",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    model_class: type[Any] | None = None,
    share: str | None = None,
    max_pinned_bytes: int | str | None = None,
    huge_pages: bool = True,
    num_threads: int | None = None,
    hot_bytes: int | str | None = None,
    follow_links: bool = False,
    **options: Any,
) -> PreTrainedModel:
    """Load a model of transformers whose lookup tables are in host memory and everything else on the device.

    It is the model that `from_pretrained` gives, in eval mode, but for its embeddings: `TransformersEmbedding`s, which
    are `ftw.HostEmbedding`s, have taken their places. Its attribute `ftw_memory` is a `MemoryReport` of all of the
    loading, whose `placement` and `reason` tell where the token embedding is, and why. The host memory is the model's:
    `close` gives it back, or the end of the model.

    Peak memory: on the device that of `from_pretrained` without the tables. Where `dtype` is not the stored one, tables
    are in host memory three times for a moment.

    Args:
        source: A folder or a hub id, of safetensors or of an FTW made from them.
        embed: "host" puts the lookup tables into host memory, "auto" does so where it is allowed and says why not where
            it isn't, "gpu" loads them onto the device.
        device: Where the model goes; None for the current GPU, or the CPU on a machine without one.
        dtype: Of the model; None for what config.json says, or else the weights.
        model_class: Of the model, or an auto class such as `AutoModelForCausalLM`; None for the first of config.json's
            `architectures`.
        share: As in `ftw.load`.
        max_pinned_bytes: As in `ftw.load`.
        huge_pages: As in `ftw.load`.
        num_threads: As in `ftw.load`.
        hot_bytes: As in `ftw.load`.
        follow_links: As in `ftw.load`.
        options: Values that replace config.json's, such as `use_cache`, and those arguments of `from_pretrained` that
            say what the model is made of: `attn_implementation`, `experts_implementation`, `generation_config`,
            `key_mapping`, and the ones about kernels. Code that a checkpoint brings is never run.

    Raises:
        NotEligibleError: `embed` is "host" and a table may not leave the GPU.
        CheckpointError: It is broken, has no config.json, or lacks weights that the model needs.
        FtwError: It is none of the formats, transformers has no such class, or cannot load it.
        SourceNotFoundError: There is no checkpoint of that name.
        PinError: The tables don't fit into host memory or the limit, or the driver refused to page-lock one.
        SharedMemoryError: Shared memory holds another table in its place, or has no room.
        DeviceError: torch has no such device.
        ValueError: An argument is none of its choices, or one of `from_pretrained` that says where weights come from
            or go, such as `revision`, or a `trust_remote_code` that is true.
        TypeError: `model_class` is no class of a model.
    """
    check_options(options)
    if model_class is not None:
        check_model_class(model_class)
    of_tables = LoadOptions(
        embed=embed,
        device=resolve_device(device),
        share=share,
        max_pinned_bytes=parse_nbytes("max_pinned_bytes", max_pinned_bytes),
        huge_pages=huge_pages,
        num_threads=num_threads,
        hot_bytes=parse_nbytes("hot_bytes", hot_bytes, LookupArgumentError),
    )
    request = Request(source, of_tables, dtype, model_class, options, follow_links)
    try:
        return load_model(request)
    except NotEligibleError as error:
        if embed != "auto":
            raise
        reason = str(error)
    _log.warning("%s: the tables stay on the GPU: %s", printable(str(source)), reason)
    on_gpu = dataclasses.replace(of_tables, embed="gpu", share=None, hot_bytes=None)
    return load_model(request._replace(of_tables=on_gpu), reason)


def offload_model(
    model: nn.Module,
    *,
    device: torch.device | str | None = None,
    max_pinned_bytes: int | None = None,
    hot_bytes: int | str | None = None,
    strict: bool = True,
) -> OffloadedModel:
    """Move the lookup tables of a model of transformers, or of one that holds such, to host memory.

    Arguments and errors are those of `ftw.offload`, which calls this.
    """
    inputs = [input_embeddings(module) for module in model.modules() if isinstance(module, PreTrainedModel)]
    tables = [
        table._replace(role=TOKEN_EMBEDDING) if any(table.module is own for own in inputs) else table
        for table in find_model_tables(model)
    ]
    devices = {table.path: weight_of(table.module).device for table in tables}

    def is_scaled(module: nn.Module) -> bool:
        return scale_of(module, weight_of(module).dtype, type(module).__name__) is not None

    def wrap(table: ModelTable, hot: int | None, host: HostEmbedding) -> HostEmbedding:
        return make_replacement(table.module, host, devices[table.path], hot)

    try:
        return offload_tables(
            model,
            tables,
            device=device,
            max_pinned_bytes=max_pinned_bytes,
            hot_bytes=parse_nbytes("hot_bytes", hot_bytes, LookupArgumentError),
            strict=strict,
            is_scaled=is_scaled,
            wrap=wrap,
            why_kept=partial(_why_kept, model),
        )
    finally:  # tables that have moved before one that may not stay moved
        guard_tables(model)


def _why_kept(model: nn.Module, table: ModelTable) -> str:
    """Say that a model computes with a whole table; empty where none is known to."""
    for path, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and module.config.model_type in DECODER_TABLE_READ_WHOLE:
            start = f"{path}." if path else ""
            whole = [place for place in table.places if place.startswith(start) and "decoder" in place.split(".")]
            if whole:
                return f"{type(module).__name__} computes with all of {printable(whole[0])}"
    return ""


def close(model: nn.Module) -> None:
    """Give the host memory of a model's tables back, once the device has finished; it looks nothing up any more."""
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, TransformersEmbedding):
                stack.callback(module.close)
