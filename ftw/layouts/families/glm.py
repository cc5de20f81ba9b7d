"""GLM-4.5 to 4.7 (glm4_moe), GLM-5.2 (glm_moe_dsa) and GLM-5.3 (glm5_next): sigmoid routers, and a shared expert."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ftw.layouts.families.df11 import DF11_ROLES, encode_df11
from ftw.layouts.families.family import MOE, Family, Fuse, Needs
from ftw.layouts.families.layer_kinds import DENSE, LayerConfig, add_kind, dense_then_moe

if TYPE_CHECKING:
    from ftw.checkpoint import Checkpoint
    from ftw.layouts.families.layer_kinds import Kinds

_QK_NORM, _BIAS, _INDEXED, _LINEAR = "qk_norm", "bias", "indexed", "linear"

_ROUTER_BIAS = (r"\.mlp\.gate\.e_score_correction_bias$", ".mlp.e_score_correction_bias")
_ROUTER_BIAS_CAST = (r"\.mlp\.e_score_correction_bias$", "F32")
_DENSE_MLP = "mlp.gate_proj. mlp.up_proj. mlp.down_proj."
_MOE_MLP = (
    "mlp.gate.weight mlp.e_score_correction_bias "
    "mlp.shared_experts.gate_proj. mlp.shared_experts.up_proj. mlp.shared_experts.down_proj."
)
_NORMS = "input_layernorm.weight post_attention_layernorm.weight"
_INDEXER = (
    "self_attn.indexer.wq_b.weight self_attn.indexer.wk.weight self_attn.indexer.weights_proj.weight "
    "self_attn.indexer.k_norm.weight self_attn.indexer.k_norm.bias"
)
_LATENT_ATTENTION = (
    "self_attn.q_a_proj. self_attn.q_b_proj. self_attn.kv_a_proj_with_mqa. self_attn.kv_b_proj.weight "
    "self_attn.o_proj. self_attn.q_a_layernorm.weight self_attn.kv_a_layernorm.weight"
)


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


def _df11(*modules: str) -> str:
    return " ".join(f"{module}.{role}" for module in modules for role in DF11_ROLES)


GLM4_MOE = Family(
    architectures=("Glm4MoeForCausalLM",),
    needs=Needs(
        model=f"{_df11('model.embed_tokens')} model.norm.weight lm_head.",
        layers=((f"{_NORMS} {_df11(*(f'self_attn.{part}_proj' for part in 'qkvo'))}",),),
        kinds=_glm4_kinds,
        of_kind=(
            (_QK_NORM, "self_attn.q_norm.weight self_attn.k_norm.weight"),
            (_BIAS, "self_attn.q_proj.bias self_attn.k_proj.bias self_attn.v_proj.bias"),
            (DENSE, _DENSE_MLP),
            (MOE, _MOE_MLP),
        ),
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
        model="model.embed_tokens. model.norm.weight lm_head.?",
        layers=((f"{_NORMS} {_LATENT_ATTENTION}",),),
        kinds=_dsa_kinds,
        of_kind=((_INDEXED, _INDEXER), (DENSE, _DENSE_MLP), (MOE, _MOE_MLP)),
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
        model="model.embed_tokens. model.norm.weight lm_head.?",
        layers=((f"{_NORMS} hc_attn_fn hc_attn_base hc_attn_scale hc_ffn_fn hc_ffn_base hc_ffn_scale",),),
        kinds=_next_kinds,
        of_kind=(
            (
                _LINEAR,
                "self_attn.in_proj. self_attn.conv1d.weight self_attn.f_b_proj. self_attn.g_b_proj. self_attn.o_proj. "
                "self_attn.A_log self_attn.dt_bias self_attn.o_norm.weight",
            ),
            (
                _INDEXED,
                f"{_LATENT_ATTENTION} {_INDEXER} self_attn.indexer.index_kpool_compress_gate "
                "self_attn.indexer.index_kpool_compress_ape",
            ),
            (DENSE, _DENSE_MLP),
            (MOE, _MOE_MLP),
        ),
        vision=(
            "visual.patch_embed.proj. visual.patch_embed.proj.bias visual.post_layernorm.weight visual.downsample. "
            "visual.downsample.bias visual.merger.gate_proj. "
            "visual.merger.up_proj. visual.merger.down_proj. visual.merger.proj. "
            "visual.merger.post_projection_norm. visual.merger.post_projection_norm.bias"
        ),
        blocks=(
            (
                "norm1.weight norm2.weight attn.qkv. attn.qkv.bias? attn.proj. attn.proj.bias? attn.q_norm.weight "
                "attn.k_norm.weight mlp.gate_proj. mlp.gate_proj.bias? mlp.up_proj. mlp.up_proj.bias? mlp.down_proj. "
                "mlp.down_proj.bias?",
            ),
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
