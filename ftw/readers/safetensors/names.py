"""Names of safetensors files, where they tell what is in a file: no model, or a part of each tensor.

adapter_model.safetensors                          PEFT's adapter
adapters.safetensors, 0000100_adapters.safetensors mlx-lm's adapter, and one of its training
pytorch_lora_weights.safetensors                   diffusers' adapter
consolidated*.safetensors                          another copy of the weights
optimizer.safetensors, scaler_0.safetensors, ...   what was made while the model was trained
shard-00002-model-00001-of-00001.safetensors       torch's distributed checkpoints: one rank's part of tensors
model1-mp2.safetensors                             DeepSeek's: one rank's part of two
model-rank-1-part-0.safetensors                    vLLM's sharded state: one rank's part
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ftw.errors import printable

if TYPE_CHECKING:
    from collections.abc import Iterable

AN_ADAPTER = "an adapter, not the model"
_STATE = "a state of training, not the model"
# What lies beside the weights of a model and is no part of it.
_NO_PART = (
    (re.compile(r"(adapter_model|pytorch_lora_weights).*|([0-9]+_)?adapters([-_.].*)?", re.DOTALL), AN_ADAPTER),
    (re.compile(r"consolidated.*", re.DOTALL), "another copy of the weights"),
    (re.compile(r"(optimizer|scheduler|random_states|scaler)([-_.].*)?", re.DOTALL), _STATE),
)
# Files of one rank: the number of the rank, and how many there are where the name tells.
_OF_A_RANK = (
    re.compile(r"model(?P<rank>[0-9]{1,5})-mp(?P<count>[0-9]{1,5})\.safetensors"),
    re.compile(r"shard-(?P<rank>[0-9]{5})-model-[0-9]{5}-of-[0-9]{5}\.safetensors"),
    re.compile(r"model-rank-(?P<rank>[0-9]{1,5})-part-[0-9]{1,5}\.safetensors"),
)
_FIRST_RANKS = ("0", "00001", "0")


def is_adapter_file(name: str) -> bool:
    """Return whether a file is by its name an adapter, which is no model."""
    return why_no_part(name) == AN_ADAPTER


def describe_adapter(base: str) -> str:
    """Return what an adapter is, as a part of a sentence, with the name of its base model where that is not empty."""
    named = f" of '{printable(base)}'" if base else ""
    return f"an adapter (LoRA or the like){named}, no model"


def why_no_part(name: str) -> str:
    """Return what a file is that lies beside a model's weights and is no part of them; empty if it may be one."""
    stem = name.removesuffix(".safetensors")
    return next((reason for pattern, reason in _NO_PART if pattern.fullmatch(stem)), "")


def without_strays(names: list[str]) -> list[str]:
    """Return the files that may be a model's; if all are something else, copies of weights, or else one adapter."""
    models = [name for name in names if not why_no_part(name)]
    copies = [name for name in names if not is_adapter_file(name)]
    adapters = [name for name in names if not name[0].isdigit()]  # mlx-lm's last one, not those on the way to it
    return models or copies or adapters or names


def is_of_a_rank(name: str) -> bool:
    """Return whether a file is by its name what one rank saved: of several, a part of each tensor."""
    return any(pattern.fullmatch(name) for pattern in _OF_A_RANK)


def find_ranks_part(names: Iterable[str], siblings: Iterable[str]) -> str:
    """Return the first of the names that surely holds one rank's part of each tensor; empty if there is none.

    Where a name does not tell how many ranks there are, `siblings`, all names in the folder, do.
    """
    present = list(siblings)
    for name in names:
        for pattern, first in zip(_OF_A_RANK, _FIRST_RANKS, strict=True):
            match = pattern.fullmatch(name)
            if match is None:
                continue
            if "count" in pattern.groupindex:
                is_part = int(match["count"]) > 1
            else:
                ranks = {other["rank"] for other in map(pattern.fullmatch, present) if other}
                is_part = len(ranks | {match["rank"], first}) > 1
            if is_part:
                return name
    return ""
