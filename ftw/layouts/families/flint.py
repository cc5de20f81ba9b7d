"""Flint: dense layers, then layers with experts and a shared one; what the router adds may be missing."""

from __future__ import annotations

from sys import maxsize
from typing import TYPE_CHECKING

from ftw.layouts.families.family import GATE_UP, MOE, QKV, Family, Needs, Rules
from ftw.layouts.families.layer_kinds import DENSE, LayerConfig, dense_then_moe
from ftw.layouts.families.llama import ATTENTION, EXPERTS, MLP, MODEL, NORMS, QK_NORMS, SIZES
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
        model=MODEL,
        layers=f"{NORMS} {ATTENTION} {QK_NORMS} self_attn.softmax_offset=heads",
        kinds=_kinds,
        of_kind=(
            (DENSE, MLP),
            (
                MOE,
                "mlp.gate.weight=experts,hidden mlp.gate.expert_bias=experts "
                "mlp.shared_expert.gate_up_proj.=shared+shared,hidden mlp.shared_expert.down_proj.=hidden,shared",
            ),
        ),
        sizes={**SIZES, **EXPERTS, "shared": "shared_expert_intermediate_size"},
        rules=Rules(
            rope_heads=("head",),
            ropes=(),
            one_of=(
                ("hidden_act", ("silu",)),
                ("router_score_function", ("sigmoid",)),
                ("softmax_type", ("learnable",)),
                ("attention_bias", (False,)),
                ("decoder_sparse_step", (1,)),
            ),
            layer_types=("full_attention", "sliding_attention"),
        ),
    ),
    fuses=(QKV, GATE_UP),
    casts=((r"\.(softmax_offset|expert_bias)$", "F32"),),
    scaled=r"_proj$",
    banks=frozenset({"bf16", "nvfp4"}),
    finish=_add_missing_biases,
)
