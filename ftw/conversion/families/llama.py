"""Text models: Llama and those like it, which differ in biases and norms, and Qwen3-MoE and gpt-oss, with experts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ftw.conversion.families.family import GATE_UP, KV_SCALES, LINEARS, QKV, Family, Needs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftw.checkpoint import Checkpoint

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
    needs=Needs(MODEL, ((f"{NORMS} self_attn.qkv_proj. self_attn.o_proj. {QK_NORMS} mlp.gate. @experts",),)),
    banks=frozenset({"bf16", "fp8_block", "nvfp4"}),
)

_BIASED = ("self_attn.qkv_proj", "self_attn.o_proj")


def _name_biases(checkpoint: Checkpoint) -> Iterator[str]:
    if checkpoint.config.raw.get("attention_bias", True):
        for layer in range(checkpoint.config.num_layers or 0):
            yield " ".join(f"model.layers.{layer}.{module}.bias" for module in _BIASED)


GPT_OSS = Family(
    architectures=("GptOssForCausalLM",),
    needs=Needs(
        model="model.embed_tokens. model.norm. lm_head.?",
        layers=(
            (
                "input_layernorm. post_attention_layernorm. self_attn.qkv_proj. self_attn.o_proj. self_attn.sinks "
                "mlp.router.+ @experts",
            ),
        ),
        by_config=_name_biases,
    ),
    left_out=(KV_SCALES,),
    fuses=(QKV,),
    scaled=LINEARS,
    banks=frozenset({"mxfp4_triton"}),
)
