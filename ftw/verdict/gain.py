"""Gain: what leaving the GPU frees, in expert slots and KV tokens; and Budget: how a given VRAM is spent with it."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ftw.tensors import EXPERTS_BANK
from ftw.verdict import families
from ftw.verdict.placement import moving_tables

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ftw.checkpoint import Checkpoint, ModelConfig
    from ftw.tensors import TensorInfo
    from ftw.verdict.verdict import Verdict

RESERVE_NBYTES = 1 << 30  # a CUDA context takes 0.3 to 0.6 GiB, activations and a library's workspace the rest
KV_ELEMENT_NBYTES = 2  # KV caches are counted in a 16-bit type, whatever the weights are

_GENERATES = re.compile(
    "CausalLM|LMHead|ConditionalGeneration|ChatModel|ChatGLMModel|MTModel|EncoderDecoderModel|VisionText2Text"
)
_STACKED_EXPERTS = re.compile(
    r"(?P<bank>(?:.+\.)?(?!shared)\w*experts)\.[^.]+(?:\.weight)?|(?P<block>blk\.\d+)\.ffn_\w+_exps\.weight"
)
_FTW_BANK = re.compile(r"(?P<bank>.+)#L(?P<layer>\d{5})")


class Experts(NamedTuple):
    """The routed experts of a model: `slot_bytes` of one of one layer, None where there are none; `nbytes` of all."""

    slot_bytes: int | None
    nbytes: int

    @property
    def number(self) -> int | None:
        """How many there are, each of one layer, as far as all are of one size; None where there are none."""
        return self.nbytes // self.slot_bytes if self.slot_bytes else None

    def slots_in(self, nbytes: int) -> int | None:
        """Return how many of them fit into `nbytes`, at most all; None where there are none."""
        return None if self.number is None else min(_how_many(nbytes, self.slot_bytes) or 0, self.number)


@dataclass(frozen=True, slots=True)
class Gain:
    """What the tables that move free on the GPU, None where the checkpoint does not tell.

    Attributes:
        vram_bytes: Bytes of the eligible tables that `embed="host"` moves.
        expert_slot_bytes: Bytes of one routed expert of one layer, in this checkpoint's encoding.
        expert_slots: Experts that fit into `vram_bytes`, were there so many.
        kv_bytes_per_token: Bytes that one token adds to a 16-bit KV cache.
        kv_tokens: Tokens that fit into `vram_bytes`.
    """

    vram_bytes: int
    expert_slot_bytes: int | None
    expert_slots: int | None
    kv_bytes_per_token: int | None
    kv_tokens: int | None


class BudgetSide(NamedTuple):
    """One side of a budget.

    Attributes:
        table_bytes: Lookup tables on the GPU.
        left_bytes: What is left for experts and KV; negative where the rest does not fit.
        expert_slots: Routed experts that fit into that, None for a model without.
        kv_tokens: Tokens whose keys and values fit into it, None where the checkpoint does not tell.
    """

    table_bytes: int
    left_bytes: int
    expert_slots: int | None
    kv_tokens: int | None


@dataclass(frozen=True, slots=True)
class Budget:
    """How the VRAM of a GPU is spent, with the tables that move on it and without.

    Attributes:
        vram_bytes: All of it.
        weights_bytes: All weights but tables that move and routed experts, which an engine can keep in host memory.
        expert_bytes: All routed experts.
        num_experts: How many they are, each of one layer; None where there are none.
        reserved_bytes: What stays with the CUDA context, activations and others.
        before: With those tables on the GPU.
        after: With them in host memory.
    """

    vram_bytes: int
    weights_bytes: int
    expert_bytes: int
    before: BudgetSide
    after: BudgetSide
    num_experts: int | None
    reserved_bytes: int


def find_gain(config: ModelConfig, verdict: Verdict, experts: Experts) -> Gain:
    """Return what leaving the GPU frees."""
    vram, slot, token = _moving_nbytes(verdict), experts.slot_bytes, kv_bytes_per_token(config)
    return Gain(vram, slot, _how_many(vram, slot), token, _how_many(vram, token))


def plan_budget(
    checkpoint: Checkpoint, verdict: Verdict, experts: Experts, vram_bytes: int, reserve_bytes: int | None = None
) -> Budget:
    """Return how `vram_bytes` are spent before and after the tables that move have left."""
    tables, token = _moving_nbytes(verdict), kv_bytes_per_token(checkpoint.config)
    weights = checkpoint.nbytes - tables - experts.nbytes
    reserved = min(RESERVE_NBYTES, vram_bytes // 10) if reserve_bytes is None else reserve_bytes

    def share(table_bytes: int) -> BudgetSide:
        left = vram_bytes - reserved - weights - table_bytes
        return BudgetSide(table_bytes, left, experts.slots_in(left), _how_many(left, token))

    return Budget(vram_bytes, weights, experts.nbytes, share(tables), share(0), experts.number, reserved)


def kv_bytes_per_token(config: ModelConfig) -> int | None:
    """Return the bytes that one token adds to a 16-bit KV cache, None for a model that keeps none."""
    if not config.architecture or not config.kv_elements_per_token:
        return None
    if config.is_gguf:
        generates = config.architecture not in families.GGUF_WITHOUT_HEAD
    else:
        generates = _GENERATES.search(config.architecture) is not None
    return config.kv_elements_per_token * KV_ELEMENT_NBYTES if generates else None


def find_experts(tensors: Iterable[TensorInfo], num_experts: int | None) -> Experts:
    """Return the bytes of the routed experts.

    They are stored one by one (`….experts.7.up_proj.weight`), stacked along the first dimension
    (`….experts.gate_up_proj`, GGUF's `blk.0.ffn_up_exps.weight`), or in an FTW's banks, one for each layer or one for
    all.
    """
    single: defaultdict[str, int] = defaultdict(int)  # by the start of their names, which ends with the expert's number
    stacked: defaultdict[str, int] = defaultdict(int)
    banks: dict[str, int] = {}
    nbytes = 0
    for tensor in tensors:
        if tensor.kind == EXPERTS_BANK and tensor.shape and tensor.shape[0]:
            match = _FTW_BANK.fullmatch(tensor.name)
            # A flat bank stacks the experts of all layers, so its share of one expert is the same division.
            banks.setdefault(match["bank"] if match else tensor.name, tensor.nbytes // tensor.shape[0])
        elif "exp" not in tensor.name:
            continue
        elif one := _one_expert(tensor.name):
            single[one] += tensor.nbytes
        elif (match := _STACKED_EXPERTS.fullmatch(tensor.name)) and tensor.shape[:1] == (num_experts,) and num_experts:
            stacked[match["bank"] or match["block"]] += tensor.nbytes // num_experts
        else:
            continue
        nbytes += tensor.nbytes
    if banks:
        return Experts(sum(banks.values()), nbytes)
    return Experts(max([*single.values(), *stacked.values()], default=None), nbytes)


def _one_expert(name: str) -> str:
    """Return `….experts.7` of `….experts.7.up_proj.weight`, and nothing of another name; a pattern takes longer."""
    bank, _, rest = name.partition("experts.")
    number, dot, part = rest.partition(".")
    if not (dot and part and number.isdecimal()) or bank.rpartition(".")[2].startswith("shared"):
        return ""
    return name[: len(name) - len(part)]


def _moving_nbytes(verdict: Verdict) -> int:
    return sum(table.nbytes for table in moving_tables(verdict))


def _how_many(nbytes: int, each: int | None) -> int | None:
    return max(nbytes, 0) // each if each else None
