"""Declared schemes: how config.json says that each module is quantised, as FreeToken reads it to build its layers.

    quant_method          which modules                       schemes
    modelopt              all but `ignore`, or those that     nvfp4, fp8, fp8_block, mxfp8
                          `quantized_layers` names
    compressed-tensors    `targets` but `ignore`              nvfp4, fp8, fp8_block
    fp8                   all but `modules_to_not_convert`    fp8_block, mxfp4 for experts of DeepSeek-V4
    mxfp4                 `experts` of each layer             mxfp4

Its server has a place for just the tensors of the declared scheme, so what is stored must agree.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from ftw.checkpoint import config_parts
from ftw.errors import CheckpointError
from ftw.files import short_repr
from ftw.layouts.freetoken.name_patterns import holds_part, is_below, is_target, iter_above

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import TypeAlias

    from ftw.checkpoint import Checkpoint

    Config: TypeAlias = Mapping[str, Any]

KEY = "quantization_config"
_OLD_FILE, _OLD_KEY = "hf_quant_config.json", "quantization"  # where ModelOpt wrote it before it was in config.json
_MAX_GROUPS = 100  # of compressed-tensors, each of which is asked for each module
_BLOCK_SIZES = (32, 128)
_ROUTED_EXPERT = re.compile(r"\.experts(\.\d+(\.|$)|$)")


class Scheme(NamedTuple):
    """How a module is quantised.

    Attributes:
        kind: "nvfp4", "fp8" (one scale, or one for each row), "fp8_block", "mxfp8" or "mxfp4".
        has_input_scale: Whether it holds a scale of its input.
        block: Rows and columns of a block, of "fp8_block".
    """

    kind: str
    has_input_scale: bool = False
    block: int = 128


class DeclaredSchemes:
    """The schemes that a checkpoint declares."""

    def __init__(self, find: Callable[[str], Scheme | None] | None) -> None:
        self._find = find

    def of(self, module: str) -> Scheme | None:
        """Return the scheme of a module, by its name in the checkpoint; None if it is not quantised."""
        return None if self._find is None else self._find(module)


def read_declared_schemes(checkpoint: Checkpoint) -> DeclaredSchemes:
    """Read the quantization_config of config.json, or ModelOpt's in hf_quant_config.json.

    Raises:
        CheckpointError: It declares what FreeToken does not read.
    """
    raw = checkpoint.config.raw
    parts = [raw, *config_parts(raw)[:-1]]
    declared = next((part[KEY] for part in parts if part.get(KEY) is not None), None)
    if declared is None:
        old = (checkpoint.read_json(_OLD_FILE) or {}).get(_OLD_KEY)
        declared = {"quant_method": "modelopt", **old} if isinstance(old, dict) else None
    if declared is None:
        return DeclaredSchemes(None)
    if not isinstance(declared, dict):
        raise CheckpointError(checkpoint.source, KEY, f"is {short_repr(declared)}, an object is needed")
    method = str(declared.get("quant_method") or ("modelopt" if declared.get("quant_algo") else "")).lower()
    if method not in _METHODS:
        known = ", ".join(_METHODS)
        problem = f"quant_method is {short_repr(method) if method else 'missing'}, FreeToken reads {known}"
        raise CheckpointError(checkpoint.source, KEY, problem)
    return DeclaredSchemes(_METHODS[method](_Declared(checkpoint.source, declared, raw)))


class _Declared:
    """A quantization_config, whose values are checked as they are asked for."""

    def __init__(self, source: str, config: Config, raw: Config) -> None:
        self.source = source
        self.config = config
        self.raw = raw

    def names(self, key: str, part: Config | None = None) -> tuple[str, ...]:
        """Return a list of names, empty if it is not there."""
        found = (self.config if part is None else part).get(key) or []
        if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
            raise self.refuse(f"{key} is {short_repr(found)}, a list of names is needed")
        return tuple(found)

    def objects(self, key: str) -> dict[str, Config]:
        """Return an object of objects, empty if it is not there."""
        found = self.config.get(key) or {}
        if not isinstance(found, dict) or not all(isinstance(part, dict) for part in found.values()):
            raise self.refuse(f"{key} is {short_repr(found)}, an object of objects is needed")
        return found

    def refuse(self, problem: str) -> CheckpointError:
        """Return an error about it."""
        return CheckpointError(self.source, KEY, problem)


def _find_modelopt(declared: _Declared) -> Callable[[str], Scheme | None]:
    config = declared.config
    algorithm = str(config.get("quant_algo") or "").upper()
    groups = config.get("config_groups")
    has_input_scale = config.get("with_input_scale")
    if has_input_scale is None and algorithm == "NVFP4" and isinstance(groups, dict) and groups:
        is_weight_only = all(isinstance(one, dict) and one.get("input_activations") is None for one in groups.values())
        has_input_scale = False if is_weight_only else None
    is_ignored = is_below(declared.source, declared.names("ignore") or declared.names("exclude_modules"))
    algorithms = {
        name: str(part.get("quant_algo") or "").upper() for name, part in declared.objects("quantized_layers").items()
    }
    is_mixed = algorithm == "MIXED_PRECISION"
    if is_mixed and not algorithms:
        raise declared.refuse("quant_algo is MIXED_PRECISION, quantized_layers must name the layers")
    schemes = {
        name: _name_modelopt(declared, name, has_input_scale is not False)
        for name in (algorithms.values() if is_mixed else [algorithm])
    }

    def find(module: str) -> Scheme | None:
        if is_ignored(module):
            return None
        if not is_mixed:
            return schemes[algorithm]
        found = next((algorithms[above] for above in iter_above(module) if above in algorithms), None)
        return None if found is None else schemes[found]

    return find


def _name_modelopt(declared: _Declared, algorithm: str, has_input_scale: bool) -> Scheme:
    schemes = {
        "NVFP4": Scheme("nvfp4", has_input_scale),
        "W4A16_NVFP4": Scheme("nvfp4"),
        "FP8": Scheme("fp8", has_input_scale),
        "FP8_PER_CHANNEL_PER_TOKEN": Scheme("fp8"),
        "FP8_PB_WO": Scheme("fp8_block"),
        "MXFP8": Scheme("mxfp8"),
    }
    if algorithm not in schemes:
        raise declared.refuse(
            f"quant_algo is {short_repr(algorithm) if algorithm else 'missing'}, FreeToken reads {', '.join(schemes)}"
        )
    return schemes[algorithm]


def _find_compressed_tensors(declared: _Declared) -> Callable[[str], Scheme | None]:
    is_ignored = is_target(declared.source, declared.names("ignore"), takes_classes=False)
    parts = declared.objects("config_groups").values()
    if len(parts) > _MAX_GROUPS:
        raise declared.refuse(f"config_groups are {len(parts)}, at most {_MAX_GROUPS} are allowed")
    groups = [
        (
            is_target(declared.source, declared.names("targets", group), takes_classes=True),
            _name_compressed_tensors(declared, group),
        )
        for group in parts
    ]
    return lambda module: (
        None if is_ignored(module) else next((scheme for is_named, scheme in groups if is_named(module)), None)
    )


def _name_compressed_tensors(declared: _Declared, group: Config) -> Scheme:
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    if not isinstance(weights, dict) or not isinstance(inputs, dict | None):
        raise declared.refuse("weights and input_activations of a group must be objects")
    form = tuple(weights.get(key) for key in ("num_bits", "type", "strategy"))
    dynamic = None if inputs is None else inputs.get("dynamic")
    if form == (4, "float", "tensor_group") and weights.get("group_size") == 16:
        return Scheme("nvfp4", dynamic == "local")
    if form == (8, "float", "tensor"):
        return Scheme("fp8", inputs is not None and not dynamic)
    if form == (8, "float", "channel"):
        return Scheme("fp8")
    if form == (8, "float", "block") and weights.get("block_structure") == [128, 128]:
        return Scheme("fp8_block")
    problem = (
        f"weights are {short_repr(weights)}, FreeToken reads NVFP4, and FP8 per tensor, channel or 128 x 128 block"
    )
    raise declared.refuse(problem)


def _find_fp8(declared: _Declared) -> Callable[[str], Scheme | None]:
    config = declared.config
    size = config.get("weight_block_size")
    if config.get("weight_per_tensor") or size not in [[block, block] for block in _BLOCK_SIZES]:
        allowed = " or ".join(f"[{block}, {block}]" for block in _BLOCK_SIZES)
        raise declared.refuse(f"weight_block_size is {short_repr(size)}, FreeToken reads {allowed}")
    skipped = declared.names("modules_to_not_convert") or ("lm_head",)  # as transformers skips without a list
    is_skipped, holds_skipped = is_below(declared.source, skipped), holds_part(skipped)
    is_table = is_below(declared.source, declared.names("modules_to_convert"))
    expert_dtype = config.get("expert_dtype") or declared.raw.get("expert_dtype")
    has_fp4_experts = str(expert_dtype).lower() == "fp4"
    scheme = Scheme("fp8_block", block=size[0])

    def find(module: str) -> Scheme | None:
        if is_table(module):
            return Scheme("fp8")
        if is_skipped(module) or holds_skipped(module):
            return None
        return Scheme("mxfp4") if has_fp4_experts and _ROUTED_EXPERT.search(module) else scheme

    return find


def _find_mxfp4(declared: _Declared) -> Callable[[str], Scheme | None]:
    is_skipped = is_below(declared.source, declared.names("modules_to_not_convert"))
    return lambda module: Scheme("mxfp4") if module.endswith(".experts") and not is_skipped(module) else None


_METHODS: dict[str, Callable[[_Declared], Callable[[str], Scheme | None]]] = {
    "modelopt": _find_modelopt,
    "compressed-tensors": _find_compressed_tensors,
    "fp8": _find_fp8,
    "mxfp4": _find_mxfp4,
}
