"""Gemma 4, with or without experts, and Muse Glimmer: norms before and after each part, vision towers of their own."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ftw.checkpoint import config_parts
from ftw.layouts.families.family import (
    GATE_UP,
    KV_SCALES,
    LAYER_LINEARS,
    MOE,
    NO_VISION,
    QKV,
    Family,
    Fuse,
    Needs,
    Rules,
)
from ftw.layouts.families.layer_kinds import LayerConfig, moe_if_any, name_layer_types
from ftw.layouts.families.llama import ATTENTION, EXPERTS, MLP, MODEL, NORMS, SIZES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ftw.checkpoint import Checkpoint, ModelConfig
    from ftw.layouts.families.layer_kinds import Kinds
    from ftw.layouts.recipes.dense_tensor import DenseTensor

_LAYER = r"^model\.(?:language_model\.)?layers\.(\d+)\."
_FED_FORWARD = (
    r"(router\.|layer_scalar$|post_feedforward_layernorm\.|post_feedforward_layernorm_[12]\.|"
    r"pre_feedforward_layernorm_2\.)"
)
_KEY = re.compile(r"^model\.layers\.(\d{1,6})\.self_attn\.k_proj\.")
_AUDIO = (r"^model\.(?:audio_tower|embed_audio)\.", "FreeToken does not load the part for audio")
_VISION_BLOCK = (
    "self_attn.q_proj.=seen_q,seen self_attn.k_proj.=seen_kv,seen self_attn.v_proj.=seen_kv,seen "
    "self_attn.o_proj.=seen,seen_q self_attn.q_norm.=seen_head self_attn.k_norm.=seen_head "
    "mlp.gate_proj.=seen_inner,seen mlp.up_proj.=seen_inner,seen mlp.down_proj.=seen,seen_inner "
    "input_layernorm.=seen post_attention_layernorm.=seen pre_feedforward_layernorm.=seen "
    "post_feedforward_layernorm.=seen"
)
_EXPERTS = (
    "feed_forward.router.proj.=experts,hidden feed_forward.router.scale=hidden "
    "feed_forward.router.per_expert_scale=experts feed_forward.pre_feedforward_layernorm_2.=hidden "
    "feed_forward.post_feedforward_layernorm_1.=hidden feed_forward.post_feedforward_layernorm_2.=hidden"
)
_KINDS = ("sliding_attention", "full_attention")
_FULL_EVERY = 6  # layers, where no list says it
# Both kinds of attention have sizes of their own, below a key that `_part_by_kind` adds.
_ATTENTIONS = tuple(
    (
        kind,
        f"self_attn.qkv_proj.={kind}_q+{kind}_kv+{kind}_kv,hidden self_attn.o_proj.=hidden,{kind}_q "
        f"self_attn.q_norm.={kind}_head self_attn.k_norm.={kind}_head",
    )
    for kind in _KINDS
)
_SIZES = {
    **{name: SIZES[name] for name in ("vocab", "hidden", "inner", "heads")},
    **EXPERTS,
    **{f"{kind}_head": f"{kind}.head_dim" for kind in _KINDS},
    **{f"{kind}_q": f"heads*{kind}_head" for kind in _KINDS},
    **{f"{kind}_kv": f"{kind}.num_key_value_heads*{kind}_head" for kind in _KINDS},
}
_VISION_SIZES = {
    "patch": "vision_config.patch_size",
    "seen": "vision_config.hidden_size",
    "seen_inner": "vision_config.intermediate_size",
    "seen_head": "vision_config.head_dim",
    "seen_q": "vision_config.num_attention_heads*seen_head",
    "seen_kv": "vision_config.num_key_value_heads*seen_head",
}
_UNIFIED_SIZES = {
    "seen": "vision_config.mm_embed_dim",
    "patch": "vision_config.model_patch_size|vision_config.patch_size*vision_config.pooling_kernel_size",
    "pixels": "3*patch*patch",
}
_RULES = Rules(
    rope_heads=tuple(f"{kind}_head" for kind in _KINDS),
    ropes=(),  # of the two kinds it looks at one
    one_of=(
        ("rope_parameters.full_attention.rope_type", ("default", "proportional")),
        ("vision_config.use_clipped_linears", (False,)),
    ),
    required=tuple(f"rope_parameters.{kind}.rope_theta" for kind in _KINDS),
    layer_types=_KINDS,
)


def _text(config: ModelConfig) -> Mapping[str, Any]:
    return config_parts(config.raw)[0]


def _name_kinds(checkpoint: Checkpoint, num_layers: int) -> list[str]:
    """Return what the attention of each layer is; that of the last one is full, whatever the list says."""
    names = name_layer_types(checkpoint, num_layers, lambda layer: _KINDS[(layer + 1) % _FULL_EVERY == 0])
    return [*names[: num_layers - 1], "full_attention"][:num_layers]


def _gemma_kinds(checkpoint: Checkpoint) -> Kinds:
    kinds = moe_if_any(checkpoint)
    return [found | {name} for found, name in zip(kinds, _name_kinds(checkpoint, len(kinds)), strict=True)]


def _part_by_kind(checkpoint: Checkpoint, config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Add a part for each kind of attention: from `per_layer_config`, or the keys of older files for full layers."""
    keys, by_layer = ("head_dim", "num_key_value_heads"), config.get("per_layer_config")
    parts: dict[str, dict[str, Any]] = {kind: {key: config[key] for key in keys if key in config} for kind in _KINDS}
    if isinstance(by_layer, dict):
        names = _name_kinds(checkpoint, LayerConfig(checkpoint).number("num_hidden_layers"))
        for kind in _KINDS:
            own = by_layer.get(str(names.index(kind))) if kind in names else None
            parts[kind].update({key: own[key] for key in keys if key in own} if isinstance(own, dict) else {})
    else:
        full = parts["full_attention"]
        full.pop("head_dim", None)  # without a key of its own it is one that transformers fills in
        full |= {"head_dim": config["global_head_dim"]} if "global_head_dim" in config else {}
        if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads") is not None:
            full["num_key_value_heads"] = config["num_global_key_value_heads"]
    return "config.json", {**config, **parts}


def _name_standard(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the numbers by which the output of a vision tower is standardised."""
    vision = checkpoint.config.raw.get("vision_config")
    if isinstance(vision, dict) and vision.get("standardize"):
        yield "vision_tower.std_bias=seen vision_tower.std_scale=seen"


def _take_keys_for_values(checkpoint: Checkpoint, tensors: list[DenseTensor]) -> list[DenseTensor]:
    """Return tensors with the key projection as the value's too, in full-attention layers of models that say so."""
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
        model=MODEL,
        layers=(
            f"{NORMS} pre_feedforward_layernorm.=hidden feed_forward.shared_mlp.gate_up_proj.=inner+inner,hidden "
            "feed_forward.shared_mlp.down_proj.=hidden,inner feed_forward.post_feedforward_layernorm.=hidden "
            "feed_forward.layer_scalar=1"
        ),
        kinds=_gemma_kinds,
        of_kind=(*_ATTENTIONS, (MOE, _EXPERTS)),
        sizes=_SIZES,
        config=_part_by_kind,
        rules=_RULES,
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
            "vision_tower.patch_embedder.input_proj.=seen,3*patch*patch "
            "vision_tower.patch_embedder.position_embedding_table=2,vision_config.position_embedding_size,seen "
            "embed_vision.embedding_projection.=hidden,seen"
        ),
        blocks=_VISION_BLOCK,
        sizes={**_SIZES, **_VISION_SIZES},
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
            "vision_embedder.patch_ln1.+=pixels vision_embedder.patch_dense.+=seen,pixels "
            "vision_embedder.patch_ln2.+=seen vision_embedder.pos_embedding=vision_config.mm_posemb_size,2,seen "
            "vision_embedder.pos_norm.+=seen embed_vision.embedding_projection.=hidden,seen"
        ),
        sizes={**_SIZES, **_UNIFIED_SIZES},
    ),
)

_MUSE_BLOCK = (
    "norm1.+=seen norm2.+=seen attn.qkv.+=seen+seen+seen,seen attn.proj.+=seen,seen mlp.fc1.+=seen_inner,seen "
    "mlp.fc2.+=seen,seen_inner"
)

MUSE_GLIMMER = Family(
    architectures=("MuseGlimmerForConditionalGeneration",),
    needs=Needs(
        model=MODEL,
        layers=(
            f"{NORMS} pre_feedforward_layernorm.=hidden post_feedforward_layernorm.=hidden {ATTENTION} "
            f"self_attn.gate_proj.=q,hidden {MLP}"
        ),
        sizes={
            **SIZES,
            "seen": "vision_config.hidden_size",
            "seen_inner": "vision_config.intermediate_size",
            "pixels": "3*vision_config.patch_temporal*vision_config.patch_size*vision_config.patch_size",
            "merged": "seen*vision_config.merge_size*vision_config.merge_size",
            "projected": "projector_hidden_size",
        },
        rules=Rules(
            rope_heads=("head",),
            equal=(
                ("out_hidden_size", "merged"),
                ("vision_config.pos_emb_height", "vision_config.pos_emb_width"),
            ),
            ropes=(),
            one_of=(("vision_config.hidden_act", ("gelu",)), ("projector_hidden_act", ("gelu",))),
            layer_types=_KINDS,
        ),
        vision=(
            "vision_tower.patch_embedder.patch_embedding.=seen,pixels "
            "vision_tower.patch_embedder.position_embedding_table.="
            "vision_config.pos_emb_height*vision_config.pos_emb_width,seen "
            "vision_tower.ln_pre.+=seen vision_tower.ln_post.+=seen vision_tower.adapter.fc1.=projected,merged "
            "vision_tower.adapter.fc2.=projected,projected vision_tower.projection.=hidden,projected"
        ),
        blocks=_MUSE_BLOCK,
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
