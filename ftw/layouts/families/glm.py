"""GLM-4.5 to 4.7 (glm4_moe), GLM-5.2 (glm_moe_dsa) and GLM-5.3 (glm5_next): sigmoid routers, and a shared expert."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ftw.layouts.families.df11 import DF11_LUT, DF11_ROLES, encode_df11
from ftw.layouts.families.family import HYPER_CONNECTIONS, HYPER_SIZES, MOE, Family, Fuse, Needs, Rules
from ftw.layouts.families.layer_kinds import DENSE, LayerConfig, add_kind, dense_then_moe
from ftw.layouts.families.llama import MODEL, SIZES

if TYPE_CHECKING:
    from ftw.checkpoint import Checkpoint
    from ftw.layouts.families.layer_kinds import Kinds

_QK_NORM, _BIAS, _INDEXED, _LINEAR = "qk_norm", "bias", "indexed", "linear"

_ROUTER_BIAS = (r"\.mlp\.gate\.e_score_correction_bias$", ".mlp.e_score_correction_bias")
_ROUTER_BIAS_CAST = (r"\.mlp\.e_score_correction_bias$", "F32")
_DENSE_MLP = "mlp.gate_proj.=inner,hidden mlp.up_proj.=inner,hidden mlp.down_proj.=hidden,inner"
_MOE_MLP = (
    "mlp.gate.weight=experts,hidden mlp.e_score_correction_bias=experts mlp.shared_experts.gate_proj.=shared,hidden "
    "mlp.shared_experts.up_proj.=shared,hidden mlp.shared_experts.down_proj.=hidden,shared"
)
_NORMS = "input_layernorm.weight=hidden post_attention_layernorm.weight=hidden"
_INDEXER = (
    "self_attn.indexer.wq_b.weight=index_n_heads*index_head_dim,q_lora_rank "
    "self_attn.indexer.wk.weight=index_head_dim,hidden self_attn.indexer.weights_proj.weight=index_n_heads,hidden "
    "self_attn.indexer.k_norm.weight=index_head_dim self_attn.indexer.k_norm.bias=index_head_dim"
)
_LATENT_ATTENTION = (
    "self_attn.q_a_proj.=q_lora_rank,hidden self_attn.q_b_proj.=heads*qk,q_lora_rank "
    "self_attn.kv_a_proj_with_mqa.=latent,hidden self_attn.kv_b_proj.weight=heads*kv_b,kv_lora_rank "
    "self_attn.o_proj.=hidden,heads*v_head_dim self_attn.q_a_layernorm.weight=q_lora_rank "
    "self_attn.kv_a_layernorm.weight=kv_lora_rank"
)
_SIZES = {
    **SIZES,
    "qk": "qk_nope_head_dim+qk_rope_head_dim",
    "kv_b": "qk_nope_head_dim+v_head_dim",
    "latent": "kv_lora_rank+qk_rope_head_dim",
    "experts": "n_routed_experts|num_local_experts|num_experts",
    "expert_inner": "moe_intermediate_size?inner",
    "shared": "n_shared_experts*expert_inner",
}


def _glm4_kinds(checkpoint: Checkpoint) -> Kinds:
    config = LayerConfig(checkpoint)
    more = [kind for key, kind in (("use_qk_norm", _QK_NORM), ("attention_bias", _BIAS)) if config.flag(key)]
    return dense_then_moe(config.number("num_hidden_layers"), config.number("first_k_dense_replace", default=1), *more)


def _dsa_kinds(checkpoint: Checkpoint) -> Kinds:
    """Which layers have an indexer: by a list, by a pattern of F and S, or every so many layers."""
    config = LayerConfig(checkpoint)
    num_layers = config.number("num_hidden_layers")
    kinds = dense_then_moe(num_layers, config.number("first_k_dense_replace", default=3))
    types = config.items("indexer_types", "index_topk_pattern", length=num_layers)
    frequency = max(config.number("index_topk_freq", default=1), 1)
    offset = config.number("index_skip_topk_offset", default=2)
    has_one = [kind in ("full", "F") for kind in types]
    has_one = has_one or [max(layer - offset + 1, 0) % frequency == 0 for layer in range(num_layers)]
    return add_kind(kinds, _INDEXED, (layer for layer in range(num_layers) if has_one[layer]))


def _next_kinds(checkpoint: Checkpoint) -> Kinds:
    config = LayerConfig(checkpoint)
    num_layers = config.number("num_hidden_layers")
    mlp_types = config.items("mlp_layer_types", length=num_layers)
    num_dense = mlp_types.count("dense") if mlp_types else config.number("first_k_dense_replace", default=3)
    kinds = dense_then_moe(num_layers, num_dense)
    types = config.items("layer_types", length=num_layers)
    is_linear = [kind == "linear_attention" for kind in types] or [layer % 4 != 3 for layer in range(num_layers)]
    kinds = add_kind(kinds, _LINEAR, (layer for layer in range(num_layers) if is_linear[layer]))
    return add_kind(kinds, _INDEXED, (layer for layer in range(num_layers) if not is_linear[layer]))


def _df11(module: str, elements: str) -> str:
    """Return what a matrix of so many elements is stored as."""
    sizes = {"low8": elements, "lut": str(DF11_LUT)}
    return " ".join(f"{module}.{role}=int:{sizes.get(role, '*')}" for role in DF11_ROLES)


GLM4_MOE = Family(
    architectures=("Glm4MoeForCausalLM",),
    needs=Needs(
        model=f"{_df11('model.embed_tokens', 'vocab*hidden')} model.norm.weight=hidden lm_head.=vocab,hidden",
        layers=" ".join(
            (
                *(_NORMS, _df11("self_attn.q_proj", "q*hidden"), _df11("self_attn.k_proj", "kv*hidden")),
                *(_df11("self_attn.v_proj", "kv*hidden"), _df11("self_attn.o_proj", "hidden*q")),
            )
        ),
        kinds=_glm4_kinds,
        of_kind=(
            (_QK_NORM, "self_attn.q_norm.weight=head self_attn.k_norm.weight=head"),
            (_BIAS, "self_attn.q_proj.bias=q self_attn.k_proj.bias=kv self_attn.v_proj.bias=kv"),
            (DENSE, _DENSE_MLP),
            (MOE, _MOE_MLP),
        ),
        sizes={**_SIZES, "head": "head_dim|hidden/heads"},
        rules=Rules(rope_heads=("head",), layer_types=()),
        hints=((r"_norm\.", "use_qk_norm"), (r"\.self_attn\.\w+\.bias$", "attention_bias")),
    ),
    renames=(_ROUTER_BIAS,),
    casts=(_ROUTER_BIAS_CAST, (r"\.self_attn\.[qkvo]_proj\.bias$", "BF16")),
    scaled=r"\.mlp\.(shared_experts\.)?\w+_proj$",
    banks=frozenset({"nvfp4", "bf16"}),
    refuses_others=False,
    finish=partial(
        encode_df11,
        matrices=r"model\.layers\.\d+\.self_attn\.[qkvo]_proj\.weight",
        tables=r"model\.embed_tokens\.weight",
    ),
)

GLM_MOE_DSA = Family(
    architectures=("GlmMoeDsaForCausalLM",),
    needs=Needs(
        model=MODEL,
        layers=f"{_NORMS} {_LATENT_ATTENTION}",
        kinds=_dsa_kinds,
        of_kind=((_INDEXED, _INDEXER), (DENSE, _DENSE_MLP), (MOE, _MOE_MLP)),
        sizes=_SIZES,
        rules=Rules(rope_heads=("qk_rope_head_dim", "index_head_dim"), ropes=(), layer_types=()),
    ),
    renames=(_ROUTER_BIAS,),
    casts=(_ROUTER_BIAS_CAST,),
    scaled=r"\.(self_attn|mlp|shared_experts)\.\w+_(proj|with_mqa)$",
    banks=frozenset({"nvfp4", "bf16", "fp8_block"}),
    refuses_others=False,
)

GLM5_NEXT = Family(
    architectures=("Glm5NextForConditionalGeneration", "Glm5NextForCausalLM"),
    needs=Needs(
        model=MODEL,
        layers=f"{_NORMS} {HYPER_CONNECTIONS}",
        kinds=_next_kinds,
        of_kind=(
            (
                _LINEAR,
                "self_attn.in_proj.=linear+linear+linear+linear_heads+linear_head+linear_head,hidden "
                "self_attn.conv1d.weight=linear+linear+linear,1,kernel self_attn.f_b_proj.=linear,linear_head "
                "self_attn.g_b_proj.=linear,linear_head self_attn.o_proj.=hidden,linear self_attn.A_log=linear_heads "
                "self_attn.dt_bias=linear self_attn.o_norm.weight=linear_head",
            ),
            (
                _INDEXED,
                f"{_LATENT_ATTENTION} {_INDEXER} "
                "self_attn.indexer.index_kpool_compress_gate=index_head_dim,hidden "
                "self_attn.indexer.index_kpool_compress_ape=index_kpool,index_head_dim",
            ),
            (DENSE, _DENSE_MLP),
            (MOE, _MOE_MLP),
        ),
        vision=(
            "visual.patch_embed.proj.+=seen,vision_config.in_channels,vision_config.temporal_patch_size,patch,patch "
            "visual.post_layernorm.weight=seen visual.downsample.+=shown,seen,merge,merge "
            "visual.merger.gate_proj.=projected,shown visual.merger.up_proj.=projected,shown "
            "visual.merger.down_proj.=shown,projected visual.merger.proj.=shown,shown "
            "visual.merger.post_projection_norm.+=shown"
        ),
        blocks=(
            "norm1.weight=seen norm2.weight=seen attn.qkv.=3*seen,seen attn.qkv.bias?=3*seen attn.proj.=seen,seen "
            "attn.proj.bias?=seen attn.q_norm.weight=seen_head attn.k_norm.weight=seen_head "
            "mlp.gate_proj.=seen_inner,seen mlp.gate_proj.bias?=seen_inner mlp.up_proj.=seen_inner,seen "
            "mlp.up_proj.bias?=seen_inner mlp.down_proj.=seen,seen_inner mlp.down_proj.bias?=seen"
        ),
        sizes={
            **_SIZES,
            **HYPER_SIZES,
            "linear_heads": "linear_attn_config.num_heads|linear_num_heads",
            "linear_head": "linear_attn_config.head_dim|linear_head_dim",
            "kernel": "linear_attn_config.short_conv_kernel_size|linear_conv_kernel_dim",
            "linear": "linear_heads*linear_head",
            "patch": "vision_config.patch_size",
            "seen": "vision_config.hidden_size",
            "seen_head": "seen/vision_config.num_heads",
            "seen_inner": "vision_config.intermediate_size",
            "merge": "vision_config.spatial_merge_size",
            "shown": "vision_config.out_hidden_size",
            "projected": "vision_config.projection_intermediate_size",
        },
        rules=Rules(
            ropes=(),
            equal=(("num_key_value_heads", "num_attention_heads"),),
            one_of=(("mhc", (True,)), ("mla_use_nope", (True,)), ("vision_config.hidden_act", ("silu",))),
        ),
    ),
    renames=(
        (r"^model\.language_model\.(layers\.\d+\.mlp\.)gate\.(e_score_correction_bias)$", r"model.\1\2"),
        (r"^model\.language_model\.", "model."),
        (r"^model\.visual\.", "visual."),
        _ROUTER_BIAS,
    ),
    fuses=(
        Fuse(("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj"), "in_proj", where=r"model\.layers\."),
        Fuse(("q_conv1d", "k_conv1d", "v_conv1d"), "conv1d", where=r"model\.layers\."),
    ),
    casts=(
        _ROUTER_BIAS_CAST,
        (r"\.(A_log|dt_bias|index_kpool_compress_ape|hc_\w+)$", "F32"),
        (r"^(?!.*\.(weight_scale|weight_scale_inv|weight_global|input_scale)$)", "BF16"),
    ),
    scaled=r"^model\.layers\..*_(proj|with_mqa)$",
    banks=frozenset({"nvfp4", "bf16", "fp8_block"}),
    refuses_others=False,
)
