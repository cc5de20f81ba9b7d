"""Qwen3-VL, Qwen3.5 (also as text alone) and Qwen4-Exp, which has a table of n-grams in side files."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from ftw.checkpoint import config_parts
from ftw.errors import CheckpointError
from ftw.layouts.families.family import GATE_UP, KV_SCALES, LINEARS, MOE, NO_VISION, QKV, Family, Fuse, Needs, Rules
from ftw.layouts.families.layer_kinds import DENSE, LayerConfig, add_kind, moe_if_any, name_layer_types
from ftw.layouts.families.llama import EXPERTS, MLP, MODEL, NORMS, OUT, QK_NORMS, QWEN3, QWEN3_MOE, SIZES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftw.checkpoint import Checkpoint
    from ftw.layouts.families.layer_kinds import Kinds
    from ftw.layouts.recipes.dense_tensor import DenseTensor

_RENAMES = ((r"^(?:model\.)?visual\.", "visual."), (r"^(?:model\.)?language_model\.", "model."))
_VISION = (
    "visual.patch_embed.proj.+=seen,vision_config.in_channels,vision_config.temporal_patch_size,patch,patch "
    "visual.pos_embed.=vision_config.num_position_embeddings,seen visual.merger.norm.+=seen "
    "visual.merger.linear_fc1.+=merged,merged visual.merger.linear_fc2.+=shown,merged"
)
_BLOCK = (
    "norm1.+=seen norm2.+=seen attn.qkv.+=3*seen_q,seen attn.proj.+=seen,seen "
    "mlp.linear_fc1.+=seen_inner,seen mlp.linear_fc2.+=seen,seen_inner"
)
_VISION_SIZES = {
    "patch": "vision_config.patch_size",
    "seen": "vision_config.hidden_size",
    "seen_q": "seen/vision_config.num_heads*vision_config.num_heads",
    "seen_inner": "vision_config.intermediate_size",
    "merged": "seen*vision_config.spatial_merge_size*vision_config.spatial_merge_size",
    "shown": "vision_config.out_hidden_size",
}
_VISION_LINEARS = r"^visual\..*\.(?:attn\.qkv|attn\.proj|linear_fc1|linear_fc2)$"


def _with_vision(needs: Needs) -> Needs:
    """Return a text model's needs with those of the vision tower."""
    return replace(needs, vision=_VISION, blocks=_BLOCK, sizes={**needs.sizes, **_VISION_SIZES})


def _name_taps(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the mergers behind those blocks of Qwen3-VL's tower whose output goes into the first layers."""
    vision = checkpoint.config.raw.get("vision_config")
    taps = vision.get("deepstack_visual_indexes") if isinstance(vision, dict) else None
    for number in range(len(taps) if isinstance(taps, list) else 0):
        below = f"visual.deepstack_merger_list.{number}."
        yield f"{below}norm.+=merged {below}linear_fc1.+=merged,merged {below}linear_fc2.+=shown,merged"


def _with_taps(family: Family) -> Family:
    return replace(
        family,
        needs=replace(_with_vision(family.needs), by_config=_name_taps),
        renames=_RENAMES,
        scaled=f"{LINEARS}|{_VISION_LINEARS}",
        asks_top_for_tie=True,
    )


QWEN3_VL = replace(_with_taps(QWEN3), architectures=("Qwen3VLForConditionalGeneration",))
QWEN3_VL_MOE = replace(_with_taps(QWEN3_MOE), architectures=("Qwen3VLMoeForConditionalGeneration",))

_LINEAR, _FULL = "linear", "full"
_GDN = (
    "linear_attn.A_log=values linear_attn.dt_bias=values linear_attn.conv1d.=mixed,1,linear_conv_kernel_dim "
    "linear_attn.norm.=linear_value_head_dim linear_attn.out_proj.=hidden,value"
)
_LINEAR_ATTENTION = (
    f"{_GDN} linear_attn.in_proj.=mixed+value+values+values,hidden|"
    f"{_GDN} linear_attn.in_proj_qkvz.=mixed+value,hidden linear_attn.in_proj_ba.=values+values,hidden"
)
_GATED_ATTENTION = f"self_attn.qkv_proj.=gated+kv+kv,hidden {OUT} {QK_NORMS}"
_MOE = (
    "mlp.gate.=experts,hidden mlp.shared_expert_gate.=1,hidden "
    "mlp.shared_expert.gate_up_proj.=shared+shared,hidden mlp.shared_expert.down_proj.=hidden,shared"
)
_HYBRID_SIZES = {
    **SIZES,
    **EXPERTS,
    "shared": "shared_expert_intermediate_size",
    "gated": "2*q",
    "values": "linear_num_value_heads",
    "key": "linear_num_key_heads*linear_key_head_dim",
    "value": "values*linear_value_head_dim",
    "mixed": "2*key+value",
}
_HYBRID_RULES = Rules(
    rope_heads=("head",),
    equal=(("linear_key_head_dim", "linear_value_head_dim"),),
    layer_types=("linear_attention", "full_attention"),
)


def _hybrid_kinds(checkpoint: Checkpoint) -> Kinds:
    """Return the kinds of layers of which some have linear attention: all but each fourth, where no list says it."""
    kinds = moe_if_any(checkpoint)
    every = max(LayerConfig(checkpoint).number("full_attention_interval", default=4), 1)
    names = name_layer_types(checkpoint, len(kinds), lambda layer: "linear_attention" if (layer + 1) % every else "")
    linear = [layer for layer, name in enumerate(names) if name == "linear_attention"]
    return add_kind(add_kind(kinds, _LINEAR, linear), _FULL, set(range(len(kinds))) - {*linear})


_ATTENTIONS = ((_LINEAR, _LINEAR_ATTENTION), (_FULL, _GATED_ATTENTION))
_GDN_FUSES = (
    Fuse(("in_proj_qkv", "in_proj_z"), "in_proj_qkvz", if_packed="in_proj_qkv"),
    Fuse(("in_proj_b", "in_proj_a"), "in_proj_ba", if_packed="in_proj_qkv"),
    Fuse(("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), "in_proj"),
)
_NOT_LOADED = ((r"^mtp\.", "FreeToken does not load the layers that predict several tokens"), KV_SCALES)
_ROUTERS = r"\.mlp\.(?:gate|shared_expert_gate)$"
_GDN_LINEARS = r"\.linear_attn\.(?:in_proj_(?:qkv|z|b|a)|out_proj)$"

QWEN3_5_TEXT = Family(
    architectures=("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
    needs=Needs(
        MODEL,
        NORMS,
        kinds=_hybrid_kinds,
        of_kind=(*_ATTENTIONS, (DENSE, MLP), (MOE, _MOE)),
        sizes=_HYBRID_SIZES,
        rules=_HYBRID_RULES,
        hints=((r"\.(linear|self)_attn\.", "layer_types"),),
    ),
    left_out=(*_NOT_LOADED, NO_VISION),
    renames=_RENAMES,
    fuses=(QKV, GATE_UP, *_GDN_FUSES),
    scaled=f"{LINEARS}|{_GDN_LINEARS}|{_ROUTERS}",
    unpacked=_ROUTERS,
    banks=frozenset({"bf16", "fp8_block", "nvfp4"}),
)
QWEN3_5 = replace(
    QWEN3_5_TEXT,
    architectures=("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
    needs=_with_vision(QWEN3_5_TEXT.needs),
    left_out=_NOT_LOADED,
    scaled=f"{QWEN3_5_TEXT.scaled}|{_VISION_LINEARS}",
)

_TABLE = r"\.ple\.ple_embedding\.ngram_embedding\."
_TABLE_PART = re.compile(_TABLE + r"shard_(\d{1,6})\.weight$")
_TABLE_SCALE = re.compile(_TABLE + r"weight_scale$")
_HYPER = "{0}hc_norm.=wide {0}input_mix_weight_up.=wide,hc_lowrank {0}input_mix_weight_down_block_inject.=injected,wide"
_INDEXER = (
    "self_attn.indexer.index_qk_proj.=indexer_n_heads*indexer_head_dim+indexer_kv_heads*indexer_head_dim,hidden "
    "self_attn.indexer.q_layernorm.=indexer_head_dim self_attn.indexer.k_layernorm.=indexer_head_dim"
)
_NGRAM = "ngram"
_PLE = (
    "ple_embedding.layer_multipliers=int:ngram_size",
    "ple_embedding.ngram_heads_vocab_sizes=int:ngram_heads",
    "ple_embedding.ngram_heads_offsets=int:ngram_heads",
    "key_proj.=wide,ple_width",
    "value_proj.=hidden,ple_width",
    *("norm_key.=wide", "norm_query.=wide", "norm_conv.=wide", "conv1d.=wide,1,ple_conv_kernel_size"),
)
_HYPER_FUSE = Fuse(
    parts=("input_mix_weight_down", "block_inject_weight"),
    into="input_mix_weight_down_block_inject",
    where=r"model\.layers\.",
    rows_multiple=16,  # rows that a matrix product takes without copying
)
_QWEN4_LINEARS = r"\.(?:index_qk_proj|input_mix_weight_(?:down|up)|block_inject_weight|key_proj|value_proj)$"


def _find_ngram_layers(checkpoint: Checkpoint) -> list[int]:
    """Return the layers that look up n-grams, counted from 0; config.json counts them from 1."""
    found = config_parts(checkpoint.config.raw)[0].get("ple_layer_ids") or []
    if not isinstance(found, list) or not all(isinstance(layer, int) and layer > 0 for layer in found):
        raise CheckpointError(checkpoint.source, "config.json: ple_layer_ids", "must be a list of layers, from 1 on")
    return [layer - 1 for layer in found]


def _qwen4_kinds(checkpoint: Checkpoint) -> Kinds:
    return add_kind(_hybrid_kinds(checkpoint), _NGRAM, _find_ngram_layers(checkpoint))


def _check_table(checkpoint: Checkpoint, tensors: list[DenseTensor]) -> list[DenseTensor]:
    """Check the n-gram table, which FreeToken joins out of its parts, all alike."""
    named = [(found, tensor) for name, tensor in checkpoint.tensors.items() if (found := _TABLE_PART.search(name))]
    stored, numbers = [tensor for _, tensor in named], {int(found[1]) for found, _ in named}
    count = checkpoint.config.count("split_ngram_parts") or 0 if _find_ngram_layers(checkpoint) else 0
    if len(stored) != count or numbers != set(range(count)):
        missing = next((number for number in range(count) if number not in numbers), None)
        problem = f"there are {len(stored)} of its parts" if missing is None else f"its part {missing} is missing"
        raise CheckpointError(checkpoint.source, "n-gram table", f"{problem}, config.json says that it has {count}")
    for part in stored:
        if part.dtype not in ("BF16", "F8_E4M3") or (part.dtype, part.shape) != (stored[0].dtype, stored[0].shape):
            both = f"is {part.describe()}, {stored[0].name} is {stored[0].describe()}"
            problem = f"{both}; all parts must be alike, BF16 or F8_E4M3"
            raise CheckpointError(checkpoint.source, part.name, problem)
    if stored and stored[0].dtype == "F8_E4M3" and not any(_TABLE_SCALE.search(name) for name in checkpoint.tensors):
        raise CheckpointError(checkpoint.source, stored[0].name, "is F8_E4M3, its table has no weight_scale")
    return tensors


QWEN4_EXP = replace(
    QWEN3_5,
    architectures=("Qwen4ExpForConditionalGeneration",),
    needs=_with_vision(
        Needs(
            "model.embed_tokens.=vocab,hidden lm_head.?=vocab,hidden model.hyper_connection_mixer.hc_norm.=wide "
            "model.hyper_connection_mixer.input_mix_weight_down.=hc_lowrank,wide "
            "model.hyper_connection_mixer.input_mix_weight_up.=wide,hc_lowrank",
            f"{_HYPER.format('attn_hyper_connection.')} {_HYPER.format('mlp_hyper_connection.')}",
            kinds=_qwen4_kinds,
            of_kind=(
                *_ATTENTIONS,
                (_FULL, _INDEXER),
                (MOE, _MOE),
                (_NGRAM, " ".join(f"ple.{name}" for name in _PLE)),
            ),
            sizes={
                **_HYBRID_SIZES,
                "wide": "hc_count*hidden",
                "injected": "hc_lowrank+hc_count~16",
                "ngram_heads": "ngram_size*heads_per_ngram-heads_per_ngram",
                "ple_width": "ple_embed_dim?hidden",
            },
            rules=replace(
                _HYBRID_RULES,
                one_of=(("hidden_act", ("silu",)),),
                layer_types=("linear_attention", "full_attention", "indexed_attention"),
            ),
        )
    ),
    side_files=f"{_TABLE_PART.pattern}|{_TABLE_SCALE.pattern}",
    fuses=(*QWEN3_5.fuses, _HYPER_FUSE),
    scaled=f"{LINEARS}|{_GDN_LINEARS}|{_QWEN4_LINEARS}",
    unpacked="",
    banks=frozenset({"nvfp4"}),
    prepare=_check_table,
)
