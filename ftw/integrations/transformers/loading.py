"""How `ftw.integrations.transformers.load` makes a model.

check      the format, and which class of transformers it is
tables     by `ftw.load`, into host memory
weights    by `from_pretrained`, of a state dict that is read when it asks; so names, casts and fusions are its own
places     modules whose weight is a host table give way to those that look it up
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers
from torch import nn

from ftw.checkpoint import NGRAM_EMBEDDING, TOKEN_EMBEDDING, Checkpoint, find_heads, find_other_tables, open_checkpoint
from ftw.errors import CheckpointError, FtwError, NotEligibleError, printable
from ftw.integrations.transformers.config import ModelRecipe, foreign_code, read_generation_config, read_recipe
from ftw.integrations.transformers.embedding import guard_tables, make_replacement, scale_of, weight_of
from ftw.integrations.transformers.folder import check_adapter, check_weight_files
from ftw.integrations.transformers.weights import LazyWeights, TieGuard
from ftw.loading import load_opened
from ftw.lookup import RowOptions
from ftw.offloading import check_room, find_table, is_table_module, plan_offload, replace_module, run_offload
from ftw.pinned import MemoryMonitor

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from transformers import PreTrainedModel

    from ftw.loading import LoadedModel, LoadOptions
    from ftw.lookup import HostEmbedding
    from ftw.verdict import TableVerdict

_log = logging.getLogger("ftw")

MEMORY = "ftw_memory"  # a model's attribute
_IS_V4 = int(transformers.__version__.split(".")[0]) < 5
_ALLOWED = "safetensors, and FTW folders made from them, are allowed"
_WAY_OUT = "embed 'gpu' or 'auto' leaves it on the GPU"


class Request(NamedTuple):
    """What is asked for; see `ftw.integrations.transformers.load`. `of_tables` says how `ftw.load` loads the tables."""

    source: str | os.PathLike[str]
    of_tables: LoadOptions
    dtype: torch.dtype | None
    model_class: type[Any] | None
    options: Mapping[str, Any]
    follow_links: bool = False


def load_model(request: Request, reason: str = "") -> PreTrainedModel:
    """Load a model; `reason` says why its tables stay on the GPU, where that is not `ftw.load`'s to say."""
    with contextlib.ExitStack() as stack:
        checkpoint = stack.enter_context(open_checkpoint(request.source, follow_links=request.follow_links))
        device = request.of_tables.device
        _check_format(checkpoint, request.of_tables.embed)
        check_adapter(checkpoint)
        recipe = read_recipe(checkpoint, request.model_class, request.options)
        check_weight_files(checkpoint, recipe.config)
        checkpoint.config = dataclasses.replace(checkpoint.config, model_class=_own_name(recipe.model_class))
        monitor = stack.enter_context(MemoryMonitor(device))
        with contextlib.ExitStack() as undo:
            # The hot rows are those of the modules that look up, in `_place_tables`.
            loaded = load_opened(checkpoint, dataclasses.replace(request.of_tables, hot_bytes=None), undo)
            model, marked = _load_weights(checkpoint, recipe, loaded, request)
            embeddings = _place_tables(model, marked, loaded, request, undo)
            guard_tables(model)
            nn.Module.to(model, device)
            undo.pop_all()
        is_gpu = device.type == "cuda"
        pinned = {table.name: table.pinned_nbytes if is_gpu else table.table.nbytes for table in embeddings}
        report = monitor.report(loaded.memory.placement, reason or loaded.memory.reason, pinned)
    for table in embeddings:
        table.memory = report
    setattr(model, MEMORY, report)
    model.name_or_path = model.config.name_or_path = str(request.source)
    return model


def _own_name(model_class: type[PreTrainedModel]) -> str:
    """Return what transformers itself calls a class, or the one that it is made from: the verdict knows those names."""
    return next(kind.__name__ for kind in model_class.__mro__ if kind.__module__.startswith("transformers."))


def _check_format(checkpoint: Checkpoint, embed: str) -> None:
    source = printable(checkpoint.source)
    if checkpoint.config.is_gguf or any(tensor.ggml_type for tensor in checkpoint.tensors.values()):
        found = "found weights of a GGUF, which no model of transformers takes"
        raise FtwError(f"{source}: format: {found}; {_ALLOWED}, and ftw.load opens it for an engine of your own")
    if embed == "gpu":
        return
    for role, module in find_other_tables(checkpoint.tensors, [], checkpoint.source):
        if role == NGRAM_EMBEDDING:
            problem = "is an n-gram table, which transformers puts together while it loads"
            raise NotEligibleError(f"{source}: {printable(module.path)}: {problem}; embed 'gpu' leaves that to it")


def _load_weights(
    checkpoint: Checkpoint,
    recipe: ModelRecipe,
    loaded: LoadedModel,
    request: Request,
) -> tuple[PreTrainedModel, dict[str, list[str]]]:
    """Return the model, whose host tables are empty tensors, and their parameters by the name in the checkpoint."""
    model_class, config = recipe.model_class, recipe.config
    cpu, meta = torch.device("cpu"), torch.device("meta")
    reads_on, marks_on = (cpu, cpu) if _IS_V4 else (request.of_tables.device, meta)
    from_pretrained: Any = model_class.from_pretrained
    # A default device of the caller's would be taken for a device_map.
    with LazyWeights(checkpoint, reads_on, _host_tensors(loaded), marks_on) as weights, cpu:
        state_dict: Mapping[str, Any] = weights.state_dict
        if _IS_V4:
            dtype = request.dtype or config.dtype or _first_dtype(weights)
            state_dict = {
                name: weight.to(dtype=dtype if weight.is_marker else None) for name, weight in state_dict.items()
            }
        make_error = partial(_loading_error, checkpoint, model_class, weights)
        with foreign_code(make_error), TieGuard(weights, partial(_tie_error, checkpoint, model_class)):
            model, info = from_pretrained(
                None,
                config=config,
                state_dict=state_dict,
                dtype=request.dtype or "auto",
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                trust_remote_code=False,
                **recipe.options,
            )
        _check_complete(checkpoint, model_class, info, is_named=request.model_class is not None)
        if model.can_generate() and "generation_config" not in recipe.options:
            model.generation_config = read_generation_config(checkpoint, request.options) or model.generation_config
        # transformers 4 takes all weights, those that it has no use for, too.
        return model, weights.find_marked(model, state_dict if _IS_V4 else info["unexpected_keys"])


def _loading_error(
    checkpoint: Checkpoint, model_class: type[PreTrainedModel], weights: LazyWeights, what: str
) -> Exception:
    """Return what ended the loading: a weight that cannot be read, or else what transformers says."""
    problem = f"transformers cannot load it as {model_class.__name__}: {what}"
    return weights.problem or FtwError(f"{printable(checkpoint.source)}: weights: {problem}")


def _tie_error(checkpoint: Checkpoint, model_class: type[PreTrainedModel], table: str) -> NotEligibleError:
    """Return why a class that ties a table by what its weights hold leaves it on the GPU; T5 does, if untied."""
    heads = [head.path for head in find_heads(checkpoint.tensors, checkpoint.source)]
    head = printable(heads[0]) if heads else "another weight"
    problem = f"{model_class.__name__} ties it to {head} where their bytes are the same, so it reads all of it"
    return NotEligibleError(f"{printable(checkpoint.source)}: {printable(table)}: {problem}; {_WAY_OUT}")


def _check_complete(
    checkpoint: Checkpoint, model_class: type[PreTrainedModel], info: Mapping[str, Any], *, is_named: bool
) -> None:
    """Check that nothing of a model is left to chance; what transformers may leave out it has left out itself."""
    for entry in sorted(info["mismatched_keys"], key=str):
        if isinstance(entry, str):  # transformers 4 does not tell the shapes
            raise CheckpointError(checkpoint.source, entry, f"{model_class.__name__} has another shape there")
        name, found, wanted = entry
        problem = f"found {list(found)}, {model_class.__name__} has {list(wanted)} there"
        raise CheckpointError(checkpoint.source, name, problem)
    missing, unexpected = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    if missing:
        others = f" and {len(missing) - 1} others" if missing[1:] else ""
        strange = (
            f"; it has {len(unexpected)} that the model lacks, such as {printable(unexpected[0])}" if unexpected else ""
        )
        advice = "none is made up here, name a class that has all its weights there" if is_named else _ALLOWED
        problem = f"{model_class.__name__} needs it{others}, the checkpoint lacks it{strange}; {advice}"
        raise CheckpointError(checkpoint.source, missing[0], problem)


def _place_tables(
    model: PreTrainedModel,
    marked: Mapping[str, Sequence[str]],
    loaded: LoadedModel,
    request: Request,
    undo: contextlib.ExitStack,
) -> list[HostEmbedding]:
    """Put what looks host tables up into the places of the modules that hold their marks."""
    embeddings: list[HostEmbedding] = []
    is_any_read = any(marked.values())
    for table in _host_verdicts(loaded):
        subject = f"{printable(str(request.source))}: {printable(table.name)}"
        paths = marked.get(table.tensors[0])
        if paths is None and is_any_read:
            _log.warning("%s: is left out, as no weight of %s is made of it", subject, type(model).__name__)
            loaded.tables[table.name].close()
            continue
        if not paths:
            problem = f"is no weight of {type(model).__name__} as it is stored"
            raise NotEligibleError(f"{subject}: {problem}; embed 'gpu' leaves it to transformers")
        modules = {path: _reader_of(model, path, subject) for path in paths}
        host: Any = loaded.tables[table.name]
        dtype = weight_of(next(iter(modules.values()))).dtype
        if host.table.dtype != dtype:
            host = _cast(host, dtype, subject, request.of_tables)
            undo.callback(host.close)
        hot_bytes = request.of_tables.hot_bytes if table.role == TOKEN_EMBEDDING else None
        made: dict[int, HostEmbedding] = {}  # a module may stand in several places
        for path, module in modules.items():
            if id(module) not in made:
                made[id(module)] = make_replacement(module, host, request.of_tables.device, hot_bytes)
            replace_module(model, path.rpartition(".")[0], made[id(module)])
        embeddings += made.values()
    return embeddings


def _reader_of(model: PreTrainedModel, path: str, subject: str) -> nn.Module:
    """Return the module that has a host table as its weight, if looking rows up is all that it does."""
    parent, _, parameter = path.rpartition(".")
    module: nn.Module = model.get_submodule(parent)
    if parameter != "weight" or not is_table_module(module):
        problem = f"is {path} of {type(model).__name__}, where a {type(module).__name__} does more than look rows up"
        raise NotEligibleError(f"{subject}: {problem}; {_WAY_OUT}")
    is_scaled = scale_of(module, weight_of(module).dtype, path) is not None
    try:
        find_table(module, "weight" if is_scaled else None, path)
    except NotEligibleError as error:
        raise NotEligibleError(f"{subject}: {type(module).__name__} does more than look rows up; {_WAY_OUT}") from error
    return module


def _cast(host: HostEmbedding, dtype: torch.dtype, subject: str, options: LoadOptions) -> HostEmbedding:
    """Return a table of the model's own dtype, in memory of its own, and close the one that is stored."""
    if options.is_shared:
        problem = f"found {host.table.dtype}, the model has {dtype}; share='node' shares tables as they are stored"
        raise FtwError(f"{subject}: {problem}: convert the checkpoint, or share=None")
    tensor = host.table.to(dtype)
    host.close()
    plan = plan_offload(tensor, RowOptions(), name=host.name, device=options.device)
    check_room([plan], options.max_pinned_bytes)
    return run_offload(plan)


def _host_verdicts(loaded: LoadedModel) -> list[TableVerdict]:
    return [table for table in loaded.verdict.tables if table.name in loaded.tables]


def _host_tensors(loaded: LoadedModel) -> frozenset[str]:
    return frozenset(name for table in _host_verdicts(loaded) for name in table.tensors)


def _first_dtype(weights: LazyWeights) -> torch.dtype:
    """Return what transformers takes for the model's dtype where config.json tells none."""
    dtypes = [weight.dtype for weight in weights.state_dict.values() if weight.is_floating_point()]
    return dtypes[0] if dtypes else torch.float32
