"""Flint: dense layers, then layers with experts and a shared one; what the router adds may be missing."""

from __future__ import annotations

from sys import maxsize
from typing import TYPE_CHECKING

from ftw.layouts.families.family import GATE_UP, MOE, QKV, Family, Needs
from ftw.layouts.families.layer_kinds import DENSE, LayerConfig, dense_then_moe
from ftw.layouts.recipes.dense_tensor import DenseTensor
from ftw.layouts.recipes.recipe import Zeros

if TYPE_CHECKING:
    from ftw.checkpoint import Checkpoint
    from ftw.layouts.families.layer_kinds import Kinds


def _kinds(checkpoint: Checkpoint) -> Kinds:
    config = LayerConfig(checkpoint)
    return dense_then_moe(config.number("num_hidden_layers"), len(config.items("mlp_only_layers")))


def _add_missing_biases(checkpoint: Checkpoint, tensors: list[DenseTensor]) -> list[DenseTensor]:
    """Add zeros, behind all others, for the routers that have no bias: FreeToken's model loads one of each."""
    found = {tensor.name for tensor in tensors}
    made = list(tensors)
    num_experts = checkpoint.config.num_experts or 0
    for layer, kinds in enumerate(_kinds(checkpoint)):
        name = f"model.layers.{layer}.mlp.gate.expert_bias"
        if MOE in kinds and name not in found:
            made.append(DenseTensor(name, "F32", (num_experts,), Zeros(4 * num_experts), maxsize))
    return made


FLINT = Family(
    architectures=("FlintForCausalLM",),
    needs=Needs(
        model="model.embed_tokens. model.norm.weight lm_head.?",
        layers=(
            (
                "input_layernorm.weight post_attention_layernorm.weight self_attn.qkv_proj. self_attn.o_proj. "
                "self_attn.q_norm.weight self_attn.k_norm.weight self_attn.softmax_offset",
            ),
        ),
        kinds=_kinds,
        of_kind=(
            (DENSE, "mlp.gate_up_proj. mlp.down_proj."),
            (MOE, "mlp.gate.weight mlp.gate.expert_bias mlp.shared_expert.gate_up_proj. mlp.shared_expert.down_proj."),
        ),
    ),
    fuses=(QKV, GATE_UP),
    casts=((r"\.(softmax_offset|expert_bias)$", "F32"),),
    scaled=r"_proj$",
    banks=frozenset({"bf16", "nvfp4"}),
    finish=_add_missing_biases,
)
