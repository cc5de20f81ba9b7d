"""Families like Llama: one row of text models with dense layers, and Qwen3-MoE, which adds experts."""

from __future__ import annotations

from ftw.conversion.families.family import GATE_UP, QKV, Family, Needs

_TEXT_PREFIX = (r"^language_model\.", "")
_NOT_LOADED = "FreeToken computes it, and refuses an FTW that holds it"

LLAMA = Family(
    architectures=("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    needs=Needs(
        model="model.embed_tokens. model.norm. lm_head.?",
        layers=(
            (
                "input_layernorm. post_attention_layernorm. self_attn.qkv_proj. self_attn.o_proj. self_attn.q_norm.? "
                "self_attn.k_norm.? mlp.gate_up_proj. mlp.down_proj.",
            ),
        ),
    ),
    left_out=((r"\.rotary_emb\.inv_freq$", _NOT_LOADED),),
    renames=(_TEXT_PREFIX,),
    fuses=(QKV, GATE_UP),
)

QWEN3_MOE = Family(
    architectures=("Qwen3MoeForCausalLM",),
    needs=Needs(
        model="model.embed_tokens. model.norm. lm_head.?",
        layers=(
            (
                "input_layernorm. post_attention_layernorm. self_attn.qkv_proj. self_attn.o_proj. self_attn.q_norm. "
                "self_attn.k_norm.",
            ),
            ("mlp.gate.", "mlp.gate_up_proj. mlp.down_proj."),
        ),
    ),
    renames=(_TEXT_PREFIX,),
    fuses=(QKV, GATE_UP),
    banks=frozenset({"bf16"}),
)
