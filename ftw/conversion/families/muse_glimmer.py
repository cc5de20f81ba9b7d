"""Muse Glimmer: gated attention with norms before and after, and a vision tower with its adapter and projection."""

from __future__ import annotations

from dataclasses import replace

from ftw.conversion.families.family import GATE_UP, KV_SCALES, LAYER_LINEARS, QKV, Family, Fuse, Needs

_BLOCK = "norm1.+ norm2.+ attn.qkv.+ attn.proj.+ mlp.fc1.+ mlp.fc2.+"

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
        blocks=((_BLOCK,),),
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
