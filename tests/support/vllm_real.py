"""The plug-in beside the vLLM that is installed, on a CPU; prints what it finds as one JSON object.

python tests/support/vllm_real.py signatures
python tests/support/vllm_real.py load CHECKPOINT FTW_FOLDER NEW_CHECKPOINT
"""

import inspect
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]


def signatures() -> dict[str, Any]:
    """Return the parameters of what the fakes stand for, with kinds and defaults, and whether the plug-in takes it."""
    from fake_vllm import FakeVllm

    from ftw.integrations.vllm.hooks import check_release

    check_release(has_hot_rows=False)
    found: dict[str, Any] = {}
    for module, attributes in ((name, vars(module)) for name, module in FakeVllm().modules.items()):
        if module.startswith("vllm.v1"):
            continue
        for name, value in attributes.items():
            for path, function in functions_of(name, value):
                found[f"{module}:{path}"] = [describe(function), describe(find(module, path))]
    return found


def functions_of(name: str, value: Any) -> list[tuple[str, Any]]:
    """Return the functions that a fake offers in vLLM's place: itself, or its methods."""
    if name in ("reload", "make_model") or name.startswith("_") or inspect.ismodule(value):
        return []
    if not inspect.isclass(value):
        return [(name, value)] if callable(value) else []
    methods = {method: getattr(value, method) for method in vars(value)}
    return [
        (f"{name}.{method}", function)
        for method, function in methods.items()
        if callable(function) and method != "make_model" and (method == "__init__" or not method.startswith("_"))
    ]


def find(module: str, path: str) -> Any:
    import functools
    import importlib

    try:
        return functools.reduce(getattr, path.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"


def describe(function: Any) -> Any:
    if isinstance(function, str):
        return function
    return [
        [parameter.name, parameter.kind.name, repr(parameter.default)]
        for parameter in inspect.signature(function).parameters.values()
    ]


def load(checkpoint: str, folder: str, new: str) -> dict[str, Any]:
    """Load the tiny model through vLLM's own loaders and layers, stock and with its table in host memory; reload it."""
    import torch
    import vllm.distributed as distributed
    from tiny_vllm_model import TinyModel
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers import vocab_parallel_embedding as layers
    from vllm.model_executor.model_loader import base_loader, get_model_loader, reload

    from ftw.integrations.vllm import register

    register()
    classes = SimpleNamespace(**vars(layers))
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    ids = torch.tensor([0, 99, 7, 7, 42])
    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    with set_current_vllm_config(config):
        distributed.init_distributed_environment(1, 0, f"file://{folder}.ranks", 0, "gloo")
        distributed.initialize_model_parallel(1, 1)

        def initialize_model(vllm_config: Any, model_config: Any, prefix: str) -> Any:
            model = TinyModel(classes, os.environ.get("TIE", ""))
            reload.record_metadata_for_reloading(model)
            return model

        base_loader.initialize_model = initialize_model
        base_loader.process_weights_after_loading = process
        for way, source, load_format, embed in (
            ("stock", checkpoint, "auto", "gpu"),
            ("host", checkpoint, "auto", os.environ.get("EMBED", "host")),
            ("ftw", folder, "ftw", os.environ.get("EMBED", "host")),
        ):
            given = fake_config(source, embed, config)
            loader = get_model_loader(load_config(load_format))
            model = loader.load_model(vllm_config=given, model_config=given.model_config)
            layer = model.model.embed_tokens
            rows = model(ids)
            found[way] = {
                "layer": type(layer).__name__,
                "is_vllms": type(layer) is layers.VocabParallelEmbedding,
                "method": type(layer.quant_method).__name__,
                "parameter": list(layer.weight.shape),
                "rows": rows.float().tolist(),
                "handles": given.additional_config.get("ftw_tables", {}).get("handles"),
            }
            if way == "ftw" or os.environ.get("TIE"):
                continue
            with torch.device("cpu"):
                reloader = get_model_loader(load_config("auto"))
                given.model_config.model = new
                reload.initialize_layerwise_reload(model)
                model.load_weights(reloader.get_all_weights(given.model_config, model))
                reload.finalize_layerwise_reload(model, given.model_config)
            found[way]["reloaded"] = model(ids).float().tolist()
            found[way]["parameter after"] = list(layer.weight.shape)
    return found


def process(model: Any, model_config: Any, target_device: Any) -> None:
    """Stand for vLLM's function of this name, which asks attention layers of the platform too."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(module)


def load_config(load_format: str) -> Any:
    from vllm.config.load import LoadConfig

    return LoadConfig(load_format=load_format, use_tqdm_on_load=False)


def fake_config(source: str, embed: str, real: Any) -> Any:
    from fake_vllm import FakeVllm

    config = FakeVllm().config(source)
    config.load_config = load_config("auto")
    config.model_config.dtype = __import__("torch").bfloat16
    config.model_config.is_moe = False
    config.parallel_config = real.parallel_config
    config.additional_config = {"ftw": {"embed": embed}}
    return config


if __name__ == "__main__":
    actions = {"signatures": signatures, "load": load}
    print(json.dumps(actions[sys.argv[1]](*sys.argv[2:])))
