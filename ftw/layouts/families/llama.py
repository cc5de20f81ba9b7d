"""Text models: Llama and those like it, which differ in biases and norms, and Qwen3-MoE and gpt-oss, with experts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ftw.layouts.families.family import GATE_UP, KV_SCALES, LINEARS, QKV, Family, Needs
from ftw.layouts.families.layer_kinds import LayerConfig, all_moe, dense_then_moe

if TYPE_CHECKING:
    from ftw.checkpoint import Checkpoint
    from ftw.layouts.families.layer_kinds import Kinds

MODEL = "model.embed_tokens. model.norm. lm_head.?"
NORMS = "input_layernorm. post_attention_layernorm."
_MLP = "mlp.gate_up_proj. mlp.down_proj."
QK_NORMS = "self_attn.q_norm. self_attn.k_norm."
_NOT_LOADED = "FreeToken computes it, and refuses an FTW that holds it"

LLAMA = Family(
    architectures=("LlamaForCausalLM", "MistralForCausalLM"),
    needs=Needs(MODEL, ((f"{NORMS} self_attn.qkv_proj. self_attn.o_proj. {_MLP}",),)),
    left_out=((r"\.rotary_emb\.inv_freq$", _NOT_LOADED), KV_SCALES),
    renames=((r"^language_model\.", ""),),
    fuses=(QKV, GATE_UP),
    scaled=LINEARS,
)

QWEN2 = replace(
    LLAMA,
    architectures=("Qwen2ForCausalLM",),
    needs=Needs(MODEL, ((f"{NORMS} self_attn.qkv_proj.+ self_attn.o_proj. {_MLP}",),)),
)

QWEN3 = replace(
    LLAMA,
    architectures=("Qwen3ForCausalLM",),
    needs=Needs(MODEL, ((f"{NORMS} self_attn.qkv_proj. self_attn.o_proj. {QK_NORMS} {_MLP}",),)),
)

QWEN3_MOE = replace(
    LLAMA,
    architectures=("Qwen3MoeForCausalLM",),
    needs=Needs(MODEL, ((f"{NORMS} self_attn.qkv_proj. self_attn.o_proj. {QK_NORMS} mlp.gate.",),), kinds=all_moe),
    banks=frozenset({"bf16", "fp8_block", "nvfp4"}),
)

_BIASED = "biased"


def _gpt_oss_kinds(checkpoint: Checkpoint) -> Kinds:
    config = LayerConfig(checkpoint)
    has_biases = config.flag("attention_bias", default=True)
    return dense_then_moe(config.number("num_hidden_layers"), 0, *((_BIASED,) if has_biases else ()))


GPT_OSS = Family(
    architectures=("GptOssForCausalLM",),
    needs=Needs(
        model=MODEL,
        layers=((f"{NORMS} self_attn.qkv_proj. self_attn.o_proj. self_attn.sinks mlp.router.+",),),
        kinds=_gpt_oss_kinds,
        of_kind=((_BIASED, "self_attn.qkv_proj.bias self_attn.o_proj.bias"),),
    ),
    left_out=(KV_SCALES,),
    fuses=(QKV,),
    scaled=LINEARS,
    banks=frozenset({"mxfp4_triton"}),
)
