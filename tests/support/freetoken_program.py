"""FreeToken's own converter and loader, without a GPU: a program that does what a list of jobs asks for.

    python freetoken_program.py JOBS.json

JOBS.json is a list of objects: {"do": "convert", "source": FOLDER, "target": FOLDER}, {"do": "load", "folder": FOLDER}
or {"do": "describe", "folder": FOLDER}. For each job a line of JSON is printed: {"ok": true} or {"ok": false, "error":
TEXT}. Loading takes a folder into FreeToken's model of that architecture: every name, shape and type, of dense weights
and of banks, must fit. A description says what the model of a configuration holds: "tensors" and "banks", type and
shape by name, and "formats" of the experts of each layer.

What the package imports and does not need here is replaced by objects that do nothing.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import json
import logging
import os
import sys
import types
from pathlib import Path
from typing import Any

os.environ["FREETOKEN_SKIP_BANK_PIN"] = "1"
_STAND_INS = (
    "flashlib", "triton", "modelscope", "torch_memory_saver", "flashinfer", "sgl_kernel", "pynvml", "cuda", "openai",
    "prompt_toolkit", "fastapi", "uvicorn", "xgrammar", "llguidance", "outlines",
)  # fmt: skip


class Anything:
    """Can be called, indexed, inherited from, and used as a decorator, which returns the function as it is."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return arguments[0] if len(arguments) == 1 and not named and callable(arguments[0]) else Anything()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __getitem__(self, key: Any) -> Any:
        return Anything()

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (object,)

    def __iter__(self) -> Any:
        return iter(())

    def __index__(self) -> int:
        return 0

    def __or__(self, other: Any) -> Any:
        return Anything()

    __ror__ = __or__


class StandIn(types.ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or (self.__name__ == "triton.runtime" and name == "driver"):
            raise AttributeError(name)
        if self.__name__ == "triton" and name == "runtime":
            return importlib.import_module("triton.runtime")
        return Anything()


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stand-ins for packages that are not installed."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        is_one = fullname.partition(".")[0] in self.names
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if is_one else None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = StandIn(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def prepare() -> Any:
    """Put stand-ins in place; return torch."""
    missing = frozenset(name for name in _STAND_INS if importlib.util.find_spec(name) is None)
    import torch
    import torch._dynamo
    import transformers  # noqa: F401  # before the stand-ins: both look for optional packages

    sys.meta_path.append(Finder(missing))
    torch.cuda.set_device = lambda *_: None
    return torch


def let_flint_parse() -> None:
    """Give Flint's configuration the names that it has with transformers 5.18, which FreeToken is made for."""
    from freetoken.models import flint
    from freetoken.models.flint import config, weight

    parse = config.parse_config

    def parse_config(given: Any) -> Any:
        names = {key: value for key, value in given.to_dict().items() if key != "rope_parameters"}
        names.setdefault("rope_theta", (given.rope_parameters or {}).get("rope_theta"))
        return parse(types.SimpleNamespace(**names))

    for module in (flint, config, weight):
        module.parse_config = parse_config


def convert(source: str, target: str) -> None:
    """Convert a checkpoint with FreeToken's converter."""
    from freetoken.checkpoint.convert import convert_checkpoint

    convert_checkpoint(source, target, device="cpu")


def make_model(torch: Any, folder: str) -> tuple[Any, Any]:
    """Return FreeToken's model of a folder's configuration, without memory, and what it was made from."""
    from freetoken.distributed import DistributedInfo
    from freetoken.engine import engine
    from freetoken.engine.config import EngineConfig

    config = EngineConfig(
        model_path=folder, tp_info=DistributedInfo(0, 1), dtype=torch.bfloat16, moe_strategy="offload"
    )
    if not config.model_config.is_moe:
        object.__setattr__(config, "moe_strategy", "fused")
    return engine._meta_model(config, "gpu"), config


def describe(torch: Any, folder: str) -> dict[str, Any]:
    """Return what FreeToken's model of a folder's configuration holds."""
    from freetoken.engine import engine
    from freetoken.moe.legacy_format import legacy_bank_names, legacy_format_for

    model, config = make_model(torch, folder)
    tensors = {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in model.state_dict().items()}
    methods = engine.offload_layer_methods(model) if config.model_config.is_moe else []
    formats = [legacy_format_for(method.kind, method.kernel.name) for method in methods]
    names = legacy_bank_names(max(formats, key=formats.count)) if formats else {}
    banks = {
        f"{names[role]}#L{layer:05d}": [str(spec.dtype), [config.model_config.num_experts, *spec.shape]]
        for layer, method in enumerate(methods)
        for role, spec in method.layout().items()
    }
    return {"tensors": tensors, "banks": banks, "formats": formats}


def load(torch: Any, folder: str) -> None:
    """Take a folder into FreeToken's model.

    Raises:
        Exception: A name is missing or has no place, or a shape or a bank's type does not fit.
    """
    from freetoken.checkpoint.ftw import load_ftw_banks
    from freetoken.engine import engine
    from freetoken.models.weight import load_weight

    model, config = make_model(torch, folder)
    model_config = config.model_config
    state, cpu = model.state_dict(), torch.device("cpu")
    has_vision = bool(config.active_encoders)
    weights = load_weight(folder, cpu, include_moe_experts=not model_config.is_moe, include_vision=has_vision)
    loaded = engine._materialize_loaded_weight_state_dict(state, weights, device=cpu, host_keys=frozenset())
    model.load_state_dict(loaded)
    if model_config.is_moe:
        banks = load_ftw_banks(folder, num_layers=model_config.num_moe_layers)
        check_banks(engine, model, banks, model_config.num_experts)


def check_banks(engine: Any, model: Any, banks: Any, num_experts: int) -> None:
    """Hold banks against what the model's layers take."""
    methods = engine.offload_layer_methods(model)
    engine._check_layer_formats(banks, methods)
    for layer, method in enumerate(methods):
        layout = {role: spec for role, spec in method.layout().items() if not spec.resident}
        for role, spec in layout.items():
            bank = banks.sources[role][layer]
            if tuple(bank.shape) != (num_experts, *spec.shape) or bank.dtype != spec.dtype:
                raise ValueError(f"{role} of layer {layer} is {bank.dtype} {tuple(bank.shape)}, {spec} is needed")
        if not banks.layer_formats and set(banks.sources) != set(layout):
            raise ValueError(f"banks are {sorted(banks.sources)}, {sorted(layout)} are needed")


def main() -> None:
    """Do all jobs."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the package prints goes elsewhere
    torch = prepare()
    from freetoken.distributed import set_tp_info
    from freetoken.layers import set_rope_device

    logging.disable(logging.WARNING)
    let_flint_parse()
    set_tp_info(rank=0, size=1)
    set_rope_device(torch.device("cpu"))
    for job in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        try:
            answer: dict[str, Any] = {}
            if job["do"] == "convert":
                convert(job["source"], job["target"])
            elif job["do"] == "describe":
                answer = describe(torch, job["folder"])
            else:
                load(torch, job["folder"])
            print(json.dumps({"ok": True, **answer}), file=output, flush=True)
        except Exception as error:  # whatever it is, it is the answer
            print(json.dumps({"ok": False, "error": f"{type(error).__name__}: {error}"}), file=output, flush=True)


if __name__ == "__main__":
    main()
