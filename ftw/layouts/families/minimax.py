"""MiniMax-M2 and MiniMax-M3: NVFP4 experts; M3 has MXFP8 projections, an indexer in its sparse layers, and images."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftw.layouts.families.family import GATE_UP, MOE, QKV, Family, Fuse, Needs, Rules
from ftw.layouts.families.layer_kinds import DENSE, LayerConfig, add_kind, dense_then_moe
from ftw.layouts.families.llama import ATTENTION, MODEL, NORMS, QK_NORMS, SIZES

if TYPE_CHECKING:
    from ftw.checkpoint import Checkpoint
    from ftw.layouts.families.layer_kinds import Kinds

_QK_NORM, _SPARSE = "qk_norm", "sparse"
_ROUTER = "block_sparse_moe.gate.weight=experts,hidden block_sparse_moe.e_score_correction_bias=experts"
_EXPERTS = {"experts": "num_local_experts|num_experts"}
_KV_CACHE_SCALE = "FreeToken's cache of keys and values is BF16 and takes no scale"


def _m2_kinds(checkpoint: Checkpoint) -> Kinds:
    config = LayerConfig(checkpoint)
    more = (_QK_NORM,) if config.flag("use_qk_norm") else ()
    return dense_then_moe(config.number("num_hidden_layers"), 0, *more)


def _m3_kinds(checkpoint: Checkpoint) -> Kinds:
    """Both ways of saying which layers are sparse and have experts: the release's, and transformers'."""
    config = LayerConfig(checkpoint)
    num_layers = config.number("num_hidden_layers")
    has_experts = config.items("moe_layer_freq", length=num_layers)
    has_experts = has_experts or [kind == "sparse" for kind in config.items("mlp_layer_types", length=num_layers)]
    has_experts = has_experts or [True] * num_layers
    kinds = [frozenset({MOE if has_experts[layer] else DENSE}) for layer in range(num_layers)]
    attention = LayerConfig(checkpoint, raw=config.section("sparse_attention_config"))
    is_sparse = [kind == "minimax_m3_sparse" for kind in config.items("layer_types", length=num_layers)]
    if attention.flag("use_sparse_attention"):
        is_sparse = attention.items("sparse_attention_freq", length=num_layers) or [True] * num_layers
    return add_kind(kinds, _SPARSE, (layer for layer in range(num_layers) if is_sparse and is_sparse[layer]))


MINIMAX_M2 = Family(
    architectures=("MiniMaxM2ForCausalLM",),
    needs=Needs(
        model=MODEL,
        layers=f"{NORMS} {ATTENTION} {_ROUTER}",
        kinds=_m2_kinds,
        of_kind=((_QK_NORM, "self_attn.q_norm.=q self_attn.k_norm.=kv"),),
        sizes={**SIZES, **_EXPERTS, "expert_inner": "moe_intermediate_size|inner"},
        rules=Rules(rope_heads=("head",)),
        hints=((r"\.self_attn\.[qk]_norm\.", "use_qk_norm"),),
    ),
    left_out=((r"\.[qkv]_scale$|\.self_attn\.\w+_scale$", _KV_CACHE_SCALE),),
    fuses=(QKV,),
    casts=((r"\.e_score_correction_bias$", "F32"),),
    scaled=r"\.self_attn\.\w+_proj$",
    banks=frozenset({"nvfp4", "bf16", "fp8_block"}),
)

MINIMAX_M3 = Family(
    architectures=("MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3SparseForCausalLM"),
    needs=Needs(
        model=MODEL,
        layers=f"{NORMS} {ATTENTION} {QK_NORMS}",
        kinds=_m3_kinds,
        of_kind=(
            (
                _SPARSE,
                "self_attn.index_qk_proj.=indexers*index+index,hidden self_attn.index_q_norm.=index "
                "self_attn.index_k_norm.=index",
            ),
            (DENSE, "mlp.gate_up_proj.=dense+dense,hidden mlp.down_proj.=hidden,dense"),
            (
                MOE,
                f"{_ROUTER} block_sparse_moe.shared_experts.gate_up_proj.=shared+shared,hidden "
                "block_sparse_moe.shared_experts.down_proj.=hidden,shared",
            ),
        ),
        sizes={
            **SIZES,
            **_EXPERTS,
            "expert_inner": "inner",
            "dense": "dense_intermediate_size",
            "shared_inner": "shared_intermediate_size",
            "shared": "n_shared_experts*shared_inner",
            "indexers": "sparse_attention_config.sparse_num_index_heads|index_n_heads",
            "index": "sparse_attention_config.sparse_index_dim|index_head_dim",
            "patch": "vision_config.patch_size",
            "frames": "vision_config.temporal_patch_size",
            "merge": "vision_config.spatial_merge_size",
            "seen": "vision_config.hidden_size",
            "seen_inner": "vision_config.intermediate_size",
            "projected": "projector_hidden_size?hidden",
        },
        rules=Rules(
            rope_heads=("head",),
            ropes=("default",),
            equal=(("indexers", "kv_heads"), ("index", "head")),
            one_of=(
                ("sparse_attention_config.sparse_block_size", (128,)),
                ("sparse_attention_config.sparse_score_type", ("max",)),
                ("scoring_func", ("sigmoid",)),
                ("qk_norm_type", ("per_head",)),
                ("attention_output_gate", (False,)),
                ("use_gemma_norm", (True,)),
                ("vision_config.hidden_act", ("gelu",)),
            ),
        ),
        vision=(
            "vision_tower.vision_model.embeddings.patch_embedding.=seen,vision_config.num_channels,frames,patch,patch "
            "vision_tower.vision_model.pre_layrnorm.+=seen "
            "vision_tower.multi_modal_projector.linear_1.+=projected,seen "
            "vision_tower.multi_modal_projector.linear_2.+=hidden,projected "
            "vision_tower.patch_merge_mlp.linear_1.+=projected,hidden*merge*merge "
            "vision_tower.patch_merge_mlp.linear_2.+=hidden,projected"
        ),
        blocks=(
            "layer_norm1.+=seen layer_norm2.+=seen mlp.fc1.+=seen_inner,seen mlp.fc2.+=seen,seen_inner "
            "self_attn.qkv.+=seen+seen+seen,seen self_attn.out_proj.+=seen,seen"
        ),
        block_prefix="vision_tower.vision_model.encoder.layers.",
        block_count="num_hidden_layers",
    ),
    renames=(
        (r"^language_model\.", ""),
        (r"^(multi_modal_projector|patch_merge_mlp)\.", r"vision_tower.\1."),
    ),
    fuses=(
        Fuse(QKV.parts, "qkv", where=r"vision_tower\."),
        QKV,
        GATE_UP,
        Fuse(("index_q_proj", "index_k_proj"), "index_qk_proj"),
    ),
    casts=((r"\.block_sparse_moe\.(gate\.weight|e_score_correction_bias)$", "F32"), (r"^vision_tower\.", "BF16")),
    scaled=r"^model\..*_proj$",
    banks=frozenset({"nvfp4", "bf16"}),
    refuses_others=False,
)
