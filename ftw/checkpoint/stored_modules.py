"""Stored modules: a module of a checkpoint by its path, and by what follows the path in the names of its tensors.

    model.embed_tokens.weight                      path model.embed_tokens, suffix weight
    lm_head.weight_packed, lm_head.weight_scale    path lm_head, packed: suffixes weight_packed and weight_scale
    lm_head.base_layer.weight, lm_head.lora_A.…    path lm_head.base_layer, suffixes weight and lora_A.…

Wrappers that training code puts around modules are passed over at any level of a path, and stay in the path of what
is found.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from ftw.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

# Of torch's DDP, compile, FSDP and checkpointing, of DeepSpeed, and of PEFT: around the model, a module, its copies.
_WRAPPER = re.compile(
    r"(?<![^.])(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module|base_model\.model"
    r"|base_layer|original_module|token_adapter|modules_to_save\.[^.]+)\."
)
_BASE_LAYER = ".base_layer"
SHARD = re.compile(r"(?:shard_)?\d+\.weight")  # one part of an n-gram table, cut along its rows
# What PEFT stores beside a weight that it adds to: a LoRA, or rows of single tokens.
_ADAPTED = r"lora_.+|trainable_tokens_.+"
# What a packed or scaled module stores beside its weight, and what it stores in place of one.
_BESIDE_WEIGHT = (
    r"(?:weight[._:])?(?:.*_)?(?:scales?|scale_\w+|descale|shift|zeros?|zero_point|qzeros|biases|qbiases|SCB|absmax"
    r"|shape|g_idx)|weight_(?:meta|norm|qscale|zp)|_?amax|.+_amax|.+_quantizer\..+|.*zp|scaling|wscale|q_(?:inv)?perm"
    r"|q_groups|s_(?:channel|group|extra)|s[uv]h?|mcg|mul1|rotation_\w+"
    rf"|{_ADAPTED}|additional_embedding\.weight"  # Idefics: rows of the tokens added last
)
_IN_PLACE_OF_WEIGHT = (
    r"(?:weight[._:])?(?:.*_)?(?:quant_map|quant_state\..+|packed|W_q|q?data|q_?weight|luts|encoded_exponent"
    r"|sign_mantissa|output_positions|gaps|split_positions|embedding_quantized|codes|codebooks)"
    r"|dqweight|dense_weights|indices|centroids\.weight|tables2|trellis|weight_[gv]|weight\..+"
    r"|parametrizations\.weight\..+"
    r"|(?:new_)?embedding"  # Molmo: rows of its vocabulary, and of the tokens added last
)
_ADAPTATION = re.compile(_ADAPTED)
SCALES = re.compile(_BESIDE_WEIGHT)
PACKED = re.compile(f"{_BESIDE_WEIGHT}|{_IN_PLACE_OF_WEIGHT}")
MAX_MODULES = 4096  # of one kind; models have some hundred tables, and each costs memory wherever it is judged
# No module's name is longer; matching a hostile one of megabytes would take hours.
MAX_NAME = 512


class StoredModule(NamedTuple):
    """A module of a checkpoint: its path as stored, and the names of its tensors by what follows the path."""

    path: str
    tensors: Mapping[str, str]

    @property
    def bare_path(self) -> str:
        """Its path in the model, without wrappers."""
        return without_wrappers(f"{self.path}.")[:-1]

    @property
    def shards(self) -> list[str]:
        """What follows its path in the names of its parts, in the order of its rows."""
        shards = [suffix for suffix in self.tensors if SHARD.fullmatch(suffix)]
        return sorted(shards, key=lambda suffix: int(re.sub(r"\D", "", suffix)))

    @property
    def own_tensors(self) -> dict[str, str]:
        """Its tensors without those that an adapter adds."""
        return {suffix: name for suffix, name in self.tensors.items() if not _ADAPTATION.fullmatch(suffix)}

    @property
    def is_of_known_form(self) -> bool:
        """Whether it stores a weight, or what a known scheme has in place of one."""
        return any(suffix == "weight" or is_in_place_of_weight(suffix) for suffix in self.tensors)


def is_part(suffix: str) -> bool:
    """Return whether what follows a module's path is its weight, or a part of a packed or scaled one."""
    return suffix == "weight" or PACKED.fullmatch(suffix) is not None


def is_in_place_of_weight(suffix: str) -> bool:
    """Return whether a tensor of that suffix holds the values of a packed weight, not only scales or an adapter."""
    return PACKED.fullmatch(suffix) is not None and SCALES.fullmatch(suffix) is None


def without_wrappers(name: str) -> str:
    """Return a tensor's name as the model itself calls it."""
    return _WRAPPER.sub("", name)


def stored_path(name: str, num_characters: int) -> str:
    """Return the path that a module has in a tensor's stored name, with the wrappers around it.

    Args:
        name: The tensor's name.
        num_characters: Of the module's path without wrappers.
    """
    bare = end = 0
    for match in _WRAPPER.finditer(name):
        before = bare + match.start() - end
        if before > num_characters + 1:  # behind the module's dot
            break
        bare, end = before, match.end()
    return name[: end + num_characters - bare]


class ModuleCollection:
    """Modules of one kind, as their tensors are found; a hostile checkpoint may have too many of them."""

    def __init__(self, kind: str, source: str) -> None:
        self._kind, self._source = kind, source
        self._tensors: dict[tuple[str, str], dict[str, str]] = {}

    def add(self, path: str, suffix: str, name: str, role: str = "") -> None:
        """Note a tensor of a module.

        Raises:
            CheckpointError: Its module is one too many.
        """
        key = role, path
        if key not in self._tensors and len(self._tensors) == MAX_MODULES:
            problem = f"more than {MAX_MODULES} {self._kind} are stored, at most {MAX_MODULES} are allowed"
            raise CheckpointError(self._source, "tensors", problem)
        self._tensors.setdefault(key, {})[suffix] = name

    def modules(self) -> list[tuple[str, StoredModule]]:
        """Return the modules with their roles; what PEFT stores beside a layer that it wraps is the layer's too."""
        for role, path in list(self._tensors):
            outer = path
            while outer.endswith(_BASE_LAYER):
                outer = outer.removesuffix(_BASE_LAYER)
                self._join(role, outer, path)
                outer = outer.removesuffix(".token_adapter")
                self._join(role, outer, path)
        return [(role, StoredModule(path, tensors)) for (role, path), tensors in self._tensors.items()]

    def _join(self, role: str, outer: str, path: str) -> None:
        beside = self._tensors.get((role, outer), {})
        is_layer = path != outer and (role, path) in self._tensors
        if beside and is_layer and all(_ADAPTATION.fullmatch(suffix) for suffix in beside):
            self._tensors[role, path].update(self._tensors.pop((role, outer)))
