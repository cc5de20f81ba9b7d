"""gpt-oss: attention with biases and sinks, experts as MXFP4."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftw.conversion.families.family import KV_SCALES, LINEARS, QKV, Family, Needs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftw.checkpoint import ModelConfig

_BIASED = ("self_attn.qkv_proj", "self_attn.o_proj")


def _name_biases(config: ModelConfig) -> Iterator[str]:
    if config.raw.get("attention_bias", True):
        for layer in range(config.num_layers or 0):
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
