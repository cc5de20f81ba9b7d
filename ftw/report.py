"""Report: what `ftw inspect` tells of a checkpoint, and what its user gains when the eligible tables leave the GPU."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftw.checkpoint import Checkpoint, open_checkpoint
from ftw.verdict import Verdict, judge

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from ftw.config import ModelConfig
    from ftw.readers.base import LeftOut
    from ftw.tensors import TensorInfo

KV_ELEMENT_NBYTES = 2  # KV caches are counted in a 16-bit type, whatever the weights are

_GENERATES = re.compile(r".*(CausalLM|LMHead|ConditionalGeneration|LMHeadModel).*")
_ONE_EXPERT = re.compile(r"(?P<bank>(?:.+\.)?\w*experts)\.(?P<expert>\d+)\..+")
_STACKED_EXPERTS = re.compile(r"(?P<bank>(?:.+\.)?\w*experts)\.[^.]+(?:\.weight)?")
_FTW_BANK = re.compile(r"(?P<bank>.+)#L(?P<layer>\d{5})")


@dataclass(frozen=True, slots=True)
class Gain:
    """What the eligible tables free on the GPU, None where the checkpoint does not tell.

    Attributes:
        vram_bytes: Bytes of all eligible tables.
        expert_slot_bytes: Bytes of one routed expert of one layer, in this checkpoint's encoding.
        expert_slots: Experts that fit into `vram_bytes`.
        kv_bytes_per_token: Bytes that one token adds to a 16-bit KV cache.
        kv_tokens: Tokens that fit into `vram_bytes`.
    """

    vram_bytes: int
    expert_slot_bytes: int | None
    expert_slots: int | None
    kv_bytes_per_token: int | None
    kv_tokens: int | None


@dataclass(frozen=True, slots=True)
class Report:
    """What a checkpoint is, its lookup tables, and what leaving the GPU frees."""

    format: str
    source: str
    config: ModelConfig
    num_tensors: int
    nbytes: int
    dtypes: dict[str, int]
    verdict: Verdict
    gain: Gain
    left_out: tuple[LeftOut, ...]

    @property
    def is_host_eligible(self) -> bool:
        """Whether the token embedding may leave the GPU."""
        return self.verdict.token_embedding.eligible

    def to_dict(self) -> dict[str, Any]:
        """Return the object that `ftw inspect --json` prints."""
        return {
            "format": self.format,
            "source": self.source,
            "architecture": self.config.architecture,
            "model_type": self.config.model_type,
            "num_tensors": self.num_tensors,
            "nbytes": self.nbytes,
            "dtypes": self.dtypes,
            "tables": [{key: getattr(table, key) for key in _TABLE_KEYS} for table in self.verdict.tables],
            "tied": {"value": self.verdict.tied, "evidence": list(self.verdict.tie_evidence)},
            "host": {"eligible": self.is_host_eligible, "nbytes": self.gain.vram_bytes},
            "gain": {key: getattr(self.gain, key) for key in _GAIN_KEYS},
            "warnings": list(self.verdict.warnings),
            "left_out": [{"name": name, "reason": reason} for name, reason in self.left_out],
        }


_TABLE_KEYS = ("name", "role", "rows", "columns", "dtype", "row_bytes", "nbytes", "eligible", "reason", "detail")
_GAIN_KEYS = ("vram_bytes", "expert_slot_bytes", "expert_slots", "kv_bytes_per_token", "kv_tokens")


def inspect(source: str | os.PathLike[str] | Checkpoint) -> Report:
    """Tell what a checkpoint is and whether its lookup tables may leave the GPU.

    Reads headers, and bytes only where a stored LM head may be a copy of the table.

    Raises:
        SourceNotFoundError: There is no checkpoint of that name.
        CheckpointError: It is broken.
    """
    if isinstance(source, Checkpoint):
        return _inspect(source)
    with open_checkpoint(source) as checkpoint:
        return _inspect(checkpoint)


def _inspect(checkpoint: Checkpoint) -> Report:
    dtypes: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        dtypes[tensor.ggml_type or tensor.dtype] += tensor.nbytes
    verdict = judge(checkpoint)
    return Report(
        format=checkpoint.format,
        source=checkpoint.source,
        config=checkpoint.config,
        num_tensors=len(checkpoint.tensors),
        nbytes=checkpoint.nbytes,
        dtypes=dict(dtypes.most_common()),
        verdict=verdict,
        gain=_gain(checkpoint, verdict),
        left_out=checkpoint.left_out,
    )


def _gain(checkpoint: Checkpoint, verdict: Verdict) -> Gain:
    vram = sum(table.nbytes for table in verdict.eligible_tables)
    expert = expert_slot_bytes(checkpoint.tensors.values(), checkpoint.config.num_experts)
    token = kv_bytes_per_token(checkpoint.config)
    return Gain(vram, expert, vram // expert if expert else None, token, vram // token if token else None)


def kv_bytes_per_token(config: ModelConfig) -> int | None:
    """Return the bytes that one token adds to a 16-bit KV cache, None for a model that keeps none."""
    if not config.architecture or not _GENERATES.fullmatch(config.architecture):
        return None
    if config.num_attention_layers is None or config.kv_elements_per_layer is None:
        return None
    return config.num_attention_layers * config.kv_elements_per_layer * KV_ELEMENT_NBYTES or None


def expert_slot_bytes(tensors: Iterable[TensorInfo], num_experts: int | None) -> int | None:
    """Return the bytes of one routed expert of one layer, None where there are no experts.

    Experts are stored one by one (`….experts.7.up_proj.weight`), stacked along the first dimension
    (`….experts.gate_up_proj`), or in an FTW's banks, one for each layer or one for all.
    """
    single: dict[tuple[str, str], int] = {}
    stacked: dict[str, int] = {}
    banks: dict[str, int] = {}
    for tensor in tensors:
        if tensor.kind == "experts_bank" and tensor.shape and tensor.shape[0]:
            match = _FTW_BANK.fullmatch(tensor.name)
            # A flat bank stacks the experts of all layers, so its share of one expert is the same division.
            banks.setdefault(match["bank"] if match else tensor.name, tensor.nbytes // tensor.shape[0])
        elif match := _ONE_EXPERT.fullmatch(tensor.name):
            key = (match["bank"], match["expert"])
            single[key] = single.get(key, 0) + tensor.nbytes
        elif (match := _STACKED_EXPERTS.fullmatch(tensor.name)) and tensor.shape[:1] == (num_experts,) and num_experts:
            stacked[match["bank"]] = stacked.get(match["bank"], 0) + tensor.nbytes // num_experts
    if banks:
        return sum(banks.values())
    sizes = list(single.values()) or list(stacked.values())
    return max(sizes) if sizes else None
