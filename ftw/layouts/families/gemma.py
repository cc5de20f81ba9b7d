"""Gemma 4, with or without experts, and Muse Glimmer: norms before and after each part, vision towers of their own."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ftw.checkpoint import config_parts
from ftw.errors import CheckpointError
from ftw.layouts.families.family import GATE_UP, KV_SCALES, LAYER_LINEARS, MOE, NO_VISION, QKV, Family, Fuse, Needs
from ftw.layouts.families.layer_kinds import moe_if_any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ftw.checkpoint import Checkpoint, ModelConfig
    from ftw.layouts.recipes.dense_tensor import DenseTensor

_LAYER = r"^model\.(?:language_model\.)?layers\.(\d+)\."
_FED_FORWARD = (
    r"(router\.|layer_scalar$|post_feedforward_layernorm\.|post_feedforward_layernorm_[12]\.|"
    r"pre_feedforward_layernorm_2\.)"
)
_KEY = re.compile(r"^model\.layers\.(\d{1,6})\.self_attn\.k_proj\.")
_AUDIO = (r"^model\.(?:audio_tower|embed_audio)\.", "FreeToken does not load the part for audio")
_VISION_BLOCK = (
    "self_attn.q_proj. self_attn.k_proj. self_attn.v_proj. self_attn.o_proj. self_attn.q_norm. self_attn.k_norm. "
    "mlp.gate_proj. mlp.up_proj. mlp.down_proj. input_layernorm. post_attention_layernorm. pre_feedforward_layernorm. "
    "post_feedforward_layernorm."
)
_EXPERTS = (
    "feed_forward.router.proj. feed_forward.router.scale feed_forward.router.per_expert_scale "
    "feed_forward.pre_feedforward_layernorm_2. feed_forward.post_feedforward_layernorm_1. "
    "feed_forward.post_feedforward_layernorm_2."
)


def _text(config: ModelConfig) -> Mapping[str, Any]:
    return config_parts(config.raw)[0]


def _name_standard(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the numbers by which the output of a vision tower is standardised."""
    vision = checkpoint.config.raw.get("vision_config")
    if isinstance(vision, dict) and vision.get("standardize"):
        yield "vision_tower.std_bias vision_tower.std_scale"


def _take_keys_for_values(checkpoint: Checkpoint, tensors: list[DenseTensor]) -> list[DenseTensor]:
    """Return tensors with the key projection as the value's too, in full-attention layers of models that say so."""
    vision = checkpoint.config.raw.get("vision_config")
    if isinstance(vision, dict) and vision.get("use_clipped_linears"):
        problem = "use_clipped_linears is true, FreeToken has no vision tower with it"
        raise CheckpointError(checkpoint.source, "config.json", problem)
    text = _text(checkpoint.config)
    if not text.get("attention_k_eq_v"):
        return tensors
    kinds = text.get("layer_types")
    names = {tensor.name for tensor in tensors}
    made = []
    for tensor in tensors:
        made.append(tensor)
        found = _KEY.match(tensor.name)
        layer = int(found[1]) if found else 0
        is_full = found and isinstance(kinds, list) and layer < len(kinds) and kinds[layer] == "full_attention"
        value = tensor.name.replace(".k_proj.", ".v_proj.")
        if is_full and value not in names:
            made.append(replace(tensor, name=value))
    return made


GEMMA4_TEXT = Family(
    architectures=("Gemma4ForCausalLM", "Gemma4UnifiedForCausalLM"),
    needs=Needs(
        model="model.embed_tokens. model.norm. lm_head.?",
        layers=(
            (
                "input_layernorm. post_attention_layernorm. pre_feedforward_layernorm. self_attn.qkv_proj. "
                "self_attn.o_proj. self_attn.q_norm. self_attn.k_norm. feed_forward.shared_mlp.gate_up_proj. "
                "feed_forward.shared_mlp.down_proj. feed_forward.post_feedforward_layernorm. feed_forward.layer_scalar",
            ),
        ),
        kinds=moe_if_any,
        of_kind=((MOE, _EXPERTS),),
    ),
    left_out=(_AUDIO, KV_SCALES, NO_VISION),
    renames=(
        (r"^language_model\.", "model.language_model."),
        (_LAYER + r"mlp\.", r"model.layers.\1.feed_forward.shared_mlp."),
        (_LAYER + _FED_FORWARD, r"model.layers.\1.feed_forward.\2"),
        (r"^model\.language_model\.", "model."),
        (r"^model\.vision_tower\.(.*)\.linear\.", r"vision_tower.\1."),
        (r"^model\.(vision_tower|embed_vision|vision_embedder)\.", r"\1."),
    ),
    fuses=(replace(QKV, where=r"model\.layers\."), replace(GATE_UP, where=r"model\.layers\.")),
    scaled=rf"^model\..*{LAYER_LINEARS}|^lm_head$",
    is_written_by_module=True,
    banks=frozenset({"bf16", "nvfp4"}),
    keeps_tied_head=False,
    is_tied_by_default=True,
    prepare=_take_keys_for_values,
)

GEMMA4 = replace(
    GEMMA4_TEXT,
    architectures=("Gemma4ForConditionalGeneration",),
    needs=replace(
        GEMMA4_TEXT.needs,
        vision=(
            "vision_tower.patch_embedder.input_proj. vision_tower.patch_embedder.position_embedding_table "
            "embed_vision.embedding_projection."
        ),
        blocks=((_VISION_BLOCK,),),
        block_prefix="vision_tower.encoder.layers.",
        block_count="num_hidden_layers",
        by_config=_name_standard,
    ),
    left_out=(_AUDIO, KV_SCALES),
)

GEMMA4_UNIFIED = replace(
    GEMMA4,
    architectures=("Gemma4UnifiedForConditionalGeneration",),
    needs=replace(
        GEMMA4_TEXT.needs,
        vision=(
            "vision_embedder.patch_ln1.+ vision_embedder.patch_dense.+ vision_embedder.patch_ln2.+ "
            "vision_embedder.pos_embedding vision_embedder.pos_norm.+ embed_vision.embedding_projection."
        ),
    ),
)

_MUSE_BLOCK = "norm1.+ norm2.+ attn.qkv.+ attn.proj.+ mlp.fc1.+ mlp.fc2.+"

MUSE_GLIMMER = Family(
    architectures=("MuseGlimmerForConditionalGeneration",),
    needs=Needs(
        model="model.embed_tokens. model.norm. lm_head.?",
        layers=(
            (
                "input_layernorm. post_attention_layernorm. pre_feedforward_layernorm. post_feedforward_layernorm. "
                "self_attn.qkv_proj. self_attn.gate_proj. self_attn.o_proj. mlp.gate_up_proj. mlp.down_proj.",
            ),
        ),
        vision=(
            "vision_tower.patch_embedder.patch_embedding. vision_tower.patch_embedder.position_embedding_table. "
            "vision_tower.ln_pre.+ vision_tower.ln_post.+ vision_tower.adapter.fc1. vision_tower.adapter.fc2. "
            "vision_tower.projection."
        ),
        blocks=((_MUSE_BLOCK,),),
        block_prefix="vision_tower.layers.",
        block_count="num_hidden_layers",
    ),
    left_out=(KV_SCALES,),
    renames=(
        (r"^(?:model\.)?language_model\.", "model."),
        (r"^model\.vision_tower\.", "vision_tower."),
        (r"^model\.vision_adapter\.", "vision_tower.adapter."),
        (r"^model\.vision_projection\.", "vision_tower.projection."),
    ),
    fuses=(
        replace(QKV, where=r"model\..*\.self_attn$"),
        replace(GATE_UP, where=r"model\..*\.mlp$"),
        Fuse(QKV.parts, "qkv", where=r"vision_tower\..*\.attn$"),
    ),
    scaled=rf"^model\..*{LAYER_LINEARS}|^lm_head$",
    is_written_by_module=True,
)
