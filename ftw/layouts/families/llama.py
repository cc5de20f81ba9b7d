"""Text models: Llama and those like it, which differ in biases and norms, and Qwen3-MoE and gpt-oss, with experts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ftw.layouts.families.family import GATE_UP, KV_SCALES, LINEARS, QKV, Family, Needs, Rules
from ftw.layouts.families.layer_kinds import LayerConfig, all_moe, dense_then_moe

if TYPE_CHECKING:
    from ftw.checkpoint import Checkpoint
    from ftw.layouts.families.layer_kinds import Kinds

MODEL = "model.embed_tokens.=vocab,hidden model.norm.=hidden lm_head.?=vocab,hidden"
NORMS = "input_layernorm.=hidden post_attention_layernorm.=hidden"
MLP = "mlp.gate_up_proj.=inner+inner,hidden mlp.down_proj.=hidden,inner"
OUT = "self_attn.o_proj.=hidden,q"
ATTENTION = f"self_attn.qkv_proj.=q+kv+kv,hidden {OUT}"
QK_NORMS = "self_attn.q_norm.=head self_attn.k_norm.=head"
SIZES = {
    "vocab": "vocab_size",
    "hidden": "hidden_size",
    "inner": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head": "head_dim",
    "q": "heads*head",
    "kv": "kv_heads*head",
}
_KV_NULL = {"kv_heads": "num_key_value_heads?heads"}  # one for each query, where the key is null
_HEAD_NULL = {"head": "head_dim|hidden/heads"}
EXPERTS = {"experts": "num_experts|num_local_experts", "expert_inner": "moe_intermediate_size"}
# The names of activations that its dense layers have.
ACTIVATIONS = ("hidden_act", ("silu", "gelu", "gelu_tanh"))
_RULES = Rules(rope_heads=("head",), one_of=(ACTIVATIONS,))
_NOT_LOADED = "FreeToken computes it, and refuses an FTW that holds it"

LLAMA = Family(
    architectures=("LlamaForCausalLM", "MistralForCausalLM"),
    needs=Needs(MODEL, f"{NORMS} {ATTENTION} {MLP}", sizes={**SIZES, **_KV_NULL, **_HEAD_NULL}, rules=_RULES),
    left_out=((r"\.rotary_emb\.inv_freq$", _NOT_LOADED), KV_SCALES),
    renames=((r"^language_model\.", ""),),
    fuses=(QKV, GATE_UP),
    scaled=LINEARS,
)

QWEN2 = replace(
    LLAMA,
    architectures=("Qwen2ForCausalLM",),
    needs=replace(
        LLAMA.needs,
        layers=f"{NORMS} self_attn.qkv_proj.+=q+kv+kv,hidden {OUT} {MLP}",
        rules=replace(_RULES, layer_types=()),
    ),
)

QWEN3 = replace(
    LLAMA,
    architectures=("Qwen3ForCausalLM",),
    needs=replace(
        QWEN2.needs,
        layers=f"{NORMS} {ATTENTION} {QK_NORMS} {MLP}",
        sizes={**SIZES, **_KV_NULL},
    ),
)

QWEN3_MOE = replace(
    LLAMA,
    architectures=("Qwen3MoeForCausalLM",),
    needs=Needs(
        MODEL,
        f"{NORMS} {ATTENTION} {QK_NORMS} mlp.gate.=experts,hidden",
        kinds=all_moe,
        sizes={**SIZES, **_HEAD_NULL, **EXPERTS},
        rules=Rules(rope_heads=("head",)),
        hints=((r"\.mlp\.", "mlp_only_layers"),),
    ),
    banks=frozenset({"bf16", "fp8_block", "nvfp4"}),
)

_BIASED = "biased"
_SINKS = "self_attn.sinks=heads"


def _gpt_oss_kinds(checkpoint: Checkpoint) -> Kinds:
    config = LayerConfig(checkpoint)
    has_biases = config.flag("attention_bias", default=True)
    return dense_then_moe(config.number("num_hidden_layers"), 0, *((_BIASED,) if has_biases else ()))


GPT_OSS = Family(
    architectures=("GptOssForCausalLM",),
    needs=Needs(
        model=MODEL,
        layers=f"{NORMS} {ATTENTION} {_SINKS} mlp.router.+=experts,hidden",
        kinds=_gpt_oss_kinds,
        of_kind=((_BIASED, "self_attn.qkv_proj.bias=q+kv+kv self_attn.o_proj.bias=hidden"),),
        sizes={**SIZES, "experts": "num_local_experts|num_experts", "expert_inner": "inner"},
        rules=Rules(rope_heads=("head",), layer_types=()),
        hints=((r"\.self_attn\.\w+\.bias$", "attention_bias"),),
    ),
    left_out=(KV_SCALES,),
    fuses=(QKV,),
    scaled=LINEARS,
    banks=frozenset({"mxfp4_triton"}),
)
