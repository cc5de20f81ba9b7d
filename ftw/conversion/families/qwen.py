"""Qwen3-VL and Qwen3.5, with a vision tower; Qwen3.5 also as text alone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ftw.conversion.families.family import GATE_UP, KV_SCALES, LINEARS, NO_VISION, QKV, Family, Fuse, Needs
from ftw.conversion.families.llama import MODEL, NORMS, QK_NORMS, QWEN3, QWEN3_MOE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftw.checkpoint import ModelConfig

_RENAMES = ((r"^(?:model\.)?visual\.", "visual."), (r"^(?:model\.)?language_model\.", "model."))
_VISION = (
    "visual.patch_embed.proj.+ visual.pos_embed. visual.merger.norm.+ visual.merger.linear_fc1.+ "
    "visual.merger.linear_fc2.+"
)
_BLOCK = "norm1.+ norm2.+ attn.qkv.+ attn.proj.+ mlp.linear_fc1.+ mlp.linear_fc2.+"
_VISION_LINEARS = r"^visual\..*\.(?:attn\.qkv|attn\.proj|linear_fc1|linear_fc2)$"


def with_vision(needs: Needs) -> Needs:
    """Return a text model's needs with those of the vision tower."""
    return replace(needs, vision=_VISION, blocks=((_BLOCK,),))


def _name_taps(config: ModelConfig) -> Iterator[str]:
    """Yield the mergers behind those blocks of Qwen3-VL's tower whose output goes into the first layers."""
    vision = config.raw.get("vision_config")
    taps = vision.get("deepstack_visual_indexes") if isinstance(vision, dict) else None
    for number in range(len(taps) if isinstance(taps, list) else 0):
        below = f"visual.deepstack_merger_list.{number}."
        yield f"{below}norm.+ {below}linear_fc1.+ {below}linear_fc2.+"


def _with_taps(family: Family) -> Family:
    return replace(
        family,
        needs=replace(with_vision(family.needs), by_config=_name_taps),
        renames=_RENAMES,
        scaled=f"{LINEARS}|{_VISION_LINEARS}",
        asks_top_for_tie=True,
    )


QWEN3_VL = replace(_with_taps(QWEN3), architectures=("Qwen3VLForConditionalGeneration",))
QWEN3_VL_MOE = replace(_with_taps(QWEN3_MOE), architectures=("Qwen3VLMoeForConditionalGeneration",))

_GDN = "linear_attn.A_log linear_attn.dt_bias linear_attn.conv1d. linear_attn.norm. linear_attn.out_proj."
ATTENTION = (
    f"{_GDN} linear_attn.in_proj.",
    f"{_GDN} linear_attn.in_proj_qkvz. linear_attn.in_proj_ba.",
    f"self_attn.qkv_proj. self_attn.o_proj. {QK_NORMS}",
)
MOE = "mlp.gate. mlp.shared_expert_gate. mlp.shared_expert.gate_up_proj. mlp.shared_expert.down_proj. @experts"
_GDN_FUSES = (
    Fuse(("in_proj_qkv", "in_proj_z"), "in_proj_qkvz", if_packed="in_proj_qkv"),
    Fuse(("in_proj_b", "in_proj_a"), "in_proj_ba", if_packed="in_proj_qkv"),
    Fuse(("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), "in_proj"),
)
_NOT_LOADED = ((r"^mtp\.", "FreeToken does not load the layers that predict several tokens"), KV_SCALES)
_ROUTERS = r"\.mlp\.(?:gate|shared_expert_gate)$"
GDN_LINEARS = r"\.linear_attn\.(?:in_proj_(?:qkv|z|b|a)|out_proj)$"

QWEN3_5_TEXT = Family(
    architectures=("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
    needs=Needs(MODEL, ((NORMS,), ATTENTION, ("mlp.gate_up_proj. mlp.down_proj.", MOE))),
    left_out=(*_NOT_LOADED, NO_VISION),
    renames=_RENAMES,
    fuses=(QKV, GATE_UP, *_GDN_FUSES),
    scaled=f"{LINEARS}|{GDN_LINEARS}|{_ROUTERS}",
    unpacked=_ROUTERS,
    banks=frozenset({"bf16", "fp8_block", "nvfp4"}),
)
QWEN3_5 = replace(
    QWEN3_5_TEXT,
    architectures=("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
    needs=with_vision(QWEN3_5_TEXT.needs),
    left_out=_NOT_LOADED,
    scaled=f"{QWEN3_5_TEXT.scaled}|{_VISION_LINEARS}",
)
