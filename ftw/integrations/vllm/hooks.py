"""Hooks: where the plug-in takes hold of vLLM, and whether this release has all of it.

    register_model_loader("ftw")        the load format
    BaseModelLoader.load_model          wrapped: it is the first that is given the whole configuration, and all that it
                                        does counts as the model's memory

Both are there in every process that imports vLLM's loaders; the wrapper calls vLLM's own function and nothing else,
unless ftw was asked for. The rest is used only then.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
from typing import TYPE_CHECKING, Any

from ftw.errors import FtwError, NotEligibleError
from ftw.integrations.vllm.settings import ENVIRONMENT, LOAD_FORMAT, find_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

RUN_RELEASES = ("0.26.0",)  # of vLLM, with which all of this has been run
_LAYERS = "vllm.model_executor.layers.vocab_parallel_embedding"
_LOADERS = "vllm.model_executor.model_loader"
# Functions of vLLM that are called or replaced, and the names of their parameters.
NEEDED: Mapping[str, tuple[str, ...]] = {
    f"{_LOADERS}:register_model_loader": ("load_format",),
    f"{_LOADERS}.base_loader:BaseModelLoader.load_model": ("self", "vllm_config", "model_config", "prefix"),
    f"{_LOADERS}.base_loader:BaseModelLoader.load_weights": ("self", "model", "model_config"),
    f"{_LOADERS}.base_loader:BaseModelLoader.download_model": ("self", "model_config"),
    f"{_LOADERS}.reload:record_metadata_for_reloading": ("model",),
    "vllm.model_executor.custom_op:PluggableLayer.register_oot": ("_decorated_layer_cls", "name"),
    f"{_LAYERS}:VocabParallelEmbedding.__init__": (
        *("self", "num_embeddings", "embedding_dim", "params_dtype", "org_num_embeddings", "padding_size"),
        *("quant_config", "prefix"),
    ),
    f"{_LAYERS}:VocabParallelEmbedding.weight_loader": ("self", "param", "loaded_weight"),
    f"{_LAYERS}:VocabParallelEmbedding.forward": ("self", "input_"),
    f"{_LAYERS}:UnquantizedEmbeddingMethod.create_weights": (
        *("self", "layer", "input_size_per_partition", "output_partition_sizes", "input_size", "output_size"),
        *("params_dtype", "extra_weight_attrs"),
    ),
    f"{_LAYERS}:UnquantizedEmbeddingMethod.process_weights_after_loading": ("self", "layer"),
    f"{_LAYERS}:UnquantizedEmbeddingMethod.apply": ("self", "layer", "x", "bias"),
    f"{_LAYERS}:UnquantizedEmbeddingMethod.embedding": ("self", "layer", "input_"),
    "vllm.distributed:get_pp_group": (),
}
NEEDED_FOR_HOT_ROWS: Mapping[str, tuple[str, ...]] = {
    "vllm.v1.worker.gpu_worker:Worker.execute_model": ("self", "scheduler_output"),
}
_WRAPPED = "ftw_wraps"

# vLLM shows what is logged below its own name.
_log = logging.getLogger("vllm.ftw")


def install(loaders: ModuleType) -> None:
    """Register the load format and wrap the loading of models, each once.

    Raises:
        FtwError: ftw is asked for by the environment, and this vLLM has no such loaders.
    """
    base, register = (getattr(loaders, name, None) for name in ("BaseModelLoader", "register_model_loader"))
    if base is None or register is None or not hasattr(base, "load_model"):
        problem = "found no BaseModelLoader, so the plug-in is off"
        if os.environ.get(ENVIRONMENT, "gpu") not in ("", "gpu"):
            raise FtwError(_refusal(f"{_LOADERS}: {problem}"))
        _log.debug(_refusal(f"{_LOADERS}: {problem}"))
        return
    if hasattr(base.load_model, _WRAPPED):
        return
    from ftw.integrations.vllm.loader import FtwModelLoader

    _register_quietly(register, FtwModelLoader)
    _wrap(base, _load)
    for value in list(vars(loaders).values()):
        if inspect.isclass(value) and issubclass(value, base) and value is not base and "load_model" in vars(value):
            _wrap(value, _leave)


def check_release(*, has_hot_rows: bool) -> None:
    """Check that this vLLM has all that the plug-in uses.

    Raises:
        FtwError: It has not.
    """
    needed = {**NEEDED, **(NEEDED_FOR_HOT_ROWS if has_hot_rows else {})}
    for place, parameters in needed.items():
        found = find_parameters(place)
        if found != parameters:
            shown = "nothing" if found is None else f"({', '.join(found)})"
            raise FtwError(_refusal(f"{place}: found {shown}, ({', '.join(parameters)}) is needed"))
    release = _release()
    if release not in RUN_RELEASES:
        _log.warning("ftw has not been run with vLLM %s, which has what it needs; it was with %s", release, _run_with())


def find_parameters(place: str) -> tuple[str, ...] | None:
    """Return the names of the parameters of a function, `module:path`; None if there is no such function.

    Raises:
        ModuleNotFoundError: A package that vLLM imports is not there.
    """
    module, _, path = place.partition(":")
    try:
        found = functools.reduce(getattr, path.split("."), importlib.import_module(module))
    except AttributeError:
        return None
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("vllm"):
            raise
        return None
    return tuple(inspect.signature(found).parameters)  # type: ignore[arg-type]


def _wrap(owner: Any, around: Callable[..., Any]) -> None:
    """Replace `load_model` of a class by one that hands it to `around` if ftw was asked for, and else calls it."""
    original = owner.load_model

    @functools.wraps(original)
    def load_model(self: Any, *args: Any, **options: Any) -> Any:
        config = options.get("vllm_config", args[0] if args else None)
        settings = find_settings(os.environ, getattr(config, "additional_config", None), self.load_config.load_format)
        if settings is None:
            return original(self, *args, **options)
        bound = inspect.signature(original).bind(self, *args, **options)
        bound.apply_defaults()
        if getattr(bound.arguments["model_config"], "runner_type", "") == "draft":
            return original(self, *args, **options)  # what drafts for a model looks up in that one's table, or its own
        return around(original, owner, settings, bound.arguments)

    setattr(load_model, _WRAPPED, original)
    owner.load_model = load_model


def _load(original: Callable[..., Any], owner: Any, settings: Any, arguments: Mapping[str, Any]) -> Any:
    loader = arguments["self"]
    if getattr(type(loader).load_model, _WRAPPED, original) is not original:
        return original(**arguments)  # its class has a way of its own, of which `_leave` has said so
    del owner
    check_release(has_hot_rows=bool(settings.hot_bytes))
    from ftw.integrations.vllm.model_load import load_model

    return load_model(functools.partial(original, **arguments), settings, arguments)


def _leave(original: Callable[..., Any], owner: Any, settings: Any, arguments: Mapping[str, Any]) -> Any:
    """Call a loader that makes layers in a way of its own, which leaves no place for a table of ours."""
    load_format = arguments["self"].load_config.load_format
    problem = f"load format {load_format!r}: {owner.__name__} makes layers in a way of its own, which ftw leaves alone"
    if settings.must_move:
        raise NotEligibleError(f"{problem}; embed 'gpu' or 'auto' leaves the table on the GPU")
    _log.warning("%s; the table stays on the GPU", problem)
    return original(**arguments)


def _register_quietly(register: Callable[[str], Callable[[type], type]], loader: type) -> None:
    """Register the load format without the line that vLLM logs in each process: nobody has asked for ftw yet."""
    log = logging.getLogger(_LOADERS)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        register(LOAD_FORMAT)(loader)
    finally:
        log.setLevel(level)


def _release() -> str:
    return str(getattr(importlib.import_module("vllm"), "__version__", "of no release"))


def _run_with() -> str:
    return f"vLLM {', '.join(RUN_RELEASES)}"


def _refusal(problem: str) -> str:
    return f"vllm {_release()}: {problem}; ftw has been run with {_run_with()}"
