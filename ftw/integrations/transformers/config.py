"""What config.json makes of a model of transformers: its configuration, its class, and how it generates.

options that `load` hands on        to from_pretrained, or to the constructor of the class
options that name config values     into the configuration, as from_pretrained does
all others                          are refused, as `load` could not keep to them

Code that a checkpoint brings is never run, and nobody is asked whether it may.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from ftw.errors import CheckpointError, FtwError, printable
from ftw.integrations.transformers.folder import CONFIG_NAME, copied_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from transformers.configuration_utils import PretrainedConfig as PreTrainedConfig

    from ftw.checkpoint import Checkpoint

_log = logging.getLogger("ftw")

_HANDED_ON = frozenset(
    "allow_all_kernels attn_implementation experts_implementation generation_config kernel_config key_mapping"
    " use_kernels".split()
)
# Arguments of from_pretrained that are this loader's to give, or that it cannot keep to.
_NOT_TAKEN = frozenset(
    """
    adapter_kwargs adapter_name cache_dir code_revision config device_map device_mesh disable_mmap distributed_config
    force_download from_flax from_tf fusion_config gguf_file ignore_mismatched_sizes load_in_4bit load_in_8bit
    local_files_only low_cpu_mem_usage max_memory mirror offload_buffers offload_folder offload_state_dict
    output_loading_info proxies quantization_config resume_download revision state_dict subfolder token torch_dtype
    tp_plan tp_size tqdm_class trust_remote_code use_auth_token use_safetensors variant weights_only
    """.split()
)
# Values of theirs that ask for what is done anyway.
_DONE_ANYWAY: dict[str, tuple[Any, ...]] = {"trust_remote_code": (False, None), "use_safetensors": (True, None)}
_INSTEAD = {
    "revision": 'the source names it, as "org/name@revision"',
    "subfolder": 'the source names it, as "org/name/folder"',
    "torch_dtype": "dtype is its name",
    "trust_remote_code": "code that a checkpoint brings is never run; model_class=… names a class of your own",
    "token": "huggingface_hub finds it in HF_TOKEN",
    "cache_dir": "huggingface_hub finds it in HF_HOME",
}
# What transformers raises of a config.json whose values make no sense: whatever its code happens to run into.
_FOREIGN_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, OSError, RuntimeError,
    StrictDataclassError, TypeError, ValueError,
)  # fmt: skip
_CLEAR_ERRORS = (ImportError, OSError, RuntimeError, ValueError)  # tell their story without their name


class ModelRecipe(NamedTuple):
    """The class of a model, its configuration, and the options that go to from_pretrained beside it."""

    model_class: type[PreTrainedModel]
    config: PreTrainedConfig
    options: Mapping[str, Any]


def check_options(options: Mapping[str, Any]) -> None:
    """Check that no option is one of from_pretrained's that `load` gives itself, or cannot keep to.

    Raises:
        ValueError: One is.
    """
    for name in sorted(options):
        if name.startswith("_") or (name in _NOT_TAKEN and options[name] not in _DONE_ANYWAY.get(name, ())):
            instead = _INSTEAD.get(name, "source, device and dtype say which weights go where")
            raise ValueError(f"{name} is for from_pretrained alone; {instead}")


def check_model_class(model_class: Any) -> None:
    """Check that a model can be made of a class.

    Raises:
        TypeError: It is neither a PreTrainedModel nor one of the auto classes.
    """
    is_class = isinstance(model_class, type)
    if not is_class or not (issubclass(model_class, PreTrainedModel) or _mapping_of(model_class) is not None):
        found = f"the class {model_class.__name__}" if is_class else f"{model_class!r}"
        raise TypeError(f"model_class is {printable(found)}, a subclass of PreTrainedModel or an AutoModel… is needed")


def read_recipe(checkpoint: Checkpoint, model_class: Any, options: Mapping[str, Any]) -> ModelRecipe:
    """Read config.json, and find the class of the model, `model_class` or else the one that it names.

    Raises:
        CheckpointError: There is none, or it tells nothing that this release of transformers knows.
        FtwError: An auto class has no model for it.
        ValueError: An option is neither the config's, nor the class's, nor from_pretrained's.
    """
    handed_on = {name: value for name, value in options.items() if name in _HANDED_ON}
    others = {name: value for name, value in options.items() if name not in _HANDED_ON | _NOT_TAKEN}
    config, unused = _read_config(checkpoint, AutoConfig, others)
    found = model_class
    if model_class is None:
        found = _class_by_name(checkpoint, config)
    elif _mapping_of(model_class) is not None:
        found = _class_by_type(checkpoint, config, model_class)
    own_config = found.config_class
    if isinstance(own_config, type) and not isinstance(config, own_config):
        if model_class is None:
            problem = f"{found.__name__} takes a {own_config.__name__}, model_type {config.model_type!r} is another's"
            raise CheckpointError(checkpoint.folder / CONFIG_NAME, "architectures", f"{problem}; name a model_class")
        config, unused = _read_config(checkpoint, own_config, others)  # perhaps a part of it, as from_pretrained does
    for name in sorted(unused):
        if name not in inspect.signature(found.__init__).parameters:
            kinds = f"from_pretrained, {type(config).__name__} or {found.__name__}"
            raise ValueError(f"{printable(name)} is no option of {kinds} that load can take")
    return ModelRecipe(found, config, {**handed_on, **unused})


def read_generation_config(checkpoint: Checkpoint, options: Mapping[str, Any]) -> GenerationConfig | None:
    """Read generation_config.json, or what config.json says of generating where there is none or it is broken.

    Values of `options` replace those that it has. None where neither can be taken; from_pretrained does not mind,
    either.
    """
    in_config: dict[str, Any] = {"config_file_name": CONFIG_NAME, "_from_model_config": True}
    overrides = {name: value for name, value in options.items() if name not in _HANDED_ON | _NOT_TAKEN}
    own: dict[str, Any]
    for name, own in (("generation_config.json", {}), (CONFIG_NAME, in_config)):
        try:
            with copied_json(checkpoint, name) as folder:
                if folder is not None:
                    return GenerationConfig.from_pretrained(folder, **own, **overrides)
        except _FOREIGN_ERRORS as error:
            path = printable(str(checkpoint.folder / name))
            problem = _describe(error).removeprefix(f"{path}: ")
            _log.warning("%s: generation config: is not taken: %s", path, problem)
    return None


@contextlib.contextmanager
def foreign_code(make_error: Callable[[str], Exception]) -> Iterator[None]:
    """Run code of transformers, and make of what it runs into an error of ours, of one line.

    A device that has no memory left says so itself.
    """
    try:
        yield
    except (FtwError, torch.OutOfMemoryError):
        raise
    except _FOREIGN_ERRORS as error:
        made = make_error(_describe(error))
        if made is error:
            raise
        raise made from error


def _read_config(
    checkpoint: Checkpoint, kind: Any, overrides: Mapping[str, Any]
) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """Return the configuration, with those overrides that it has, and the other ones."""
    path = checkpoint.folder / CONFIG_NAME
    own = {"trust_remote_code": False} if kind is AutoConfig else {}
    with copied_json(checkpoint, CONFIG_NAME) as folder:
        if folder is None:
            raise CheckpointError(path, "file", "is missing, transformers makes a model from it")

        def make_error(what: str) -> CheckpointError:
            said = what.replace(str(folder), str(checkpoint.folder))
            return CheckpointError(path, "config", f"transformers {transformers.__version__}: {said}")

        with foreign_code(make_error):
            config, unused = kind.from_pretrained(folder, return_unused_kwargs=True, **own, **overrides)
    return config, {name: value for name, value in unused.items() if name in overrides}


def _class_by_name(checkpoint: Checkpoint, config: PreTrainedConfig) -> type[PreTrainedModel]:
    path, names = checkpoint.folder / CONFIG_NAME, config.architectures or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(path, "architectures", f"found {printable(repr(names))}, a list of class names is needed")
    found = getattr(transformers, names[0], None) if names else None
    if isinstance(found, type) and issubclass(found, PreTrainedModel):
        return found
    version = transformers.__version__
    what = f"{printable(names[0])!r} is no model of transformers {version}" if names else "there are none"
    raise CheckpointError(path, "architectures", f"{what}; name one by model_class=…")


def _class_by_type(checkpoint: Checkpoint, config: PreTrainedConfig, auto_class: type) -> type[PreTrainedModel]:
    """Do what an auto class does, but for code of the checkpoint's own."""
    mapping, kind = _mapping_of(auto_class), type(config)
    if kind not in mapping:
        problem = f"{auto_class.__name__} has no class for a {kind.__name__}"
        raise FtwError(f"{printable(checkpoint.source)}: model_class: {problem}; name a class itself")
    found: Any = mapping[kind]
    if not isinstance(found, (list, tuple)):
        return found  # type: ignore[no-any-return]
    names = {each.__name__: each for each in found}
    named = [names[name] for name in config.architectures or [] if name in names]
    return [*named, *found][0]  # type: ignore[no-any-return]


def _mapping_of(model_class: type) -> Any:
    """Return which classes an auto class chooses from; None of any other class."""
    return getattr(model_class, "_model_mapping", None)


def _describe(error: BaseException) -> str:
    """Return what an error says, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[:2]) if lines and lines[0].endswith(":") else next(iter(lines), "")
    clear = text and isinstance(error, (*_CLEAR_ERRORS, StrictDataclassError))
    return printable(text if clear else f"{type(error).__name__}: {text}")
