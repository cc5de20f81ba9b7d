"""DeepSeek-V4 and V4.1: hyper-connections, compressed attention, MXFP4 experts, images.

What the layers of V4 are stands in inference/config.json, which FreeToken reads as well. In V4.1 layers own a
compressed cache or share one, and tables of n-grams lie in side files.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ftw.errors import CheckpointError
from ftw.layouts.families.family import HYPER_CONNECTIONS, HYPER_SIZES, MOE, Family, Needs, Rules
from ftw.layouts.families.layer_kinds import LayerConfig, add_kind
from ftw.layouts.recipes.dense_tensor import FLOATS, DenseTensor, cast_to, renamed
from ftw.layouts.recipes.dequantized import Dequantized
from ftw.layouts.recipes.recipe import join

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ftw.checkpoint import Checkpoint
    from ftw.layouts.families.layer_kinds import Kinds

_NO_PREDICTION = "FreeToken does not predict several tokens at a time"
_SHARED_EXPERT = (
    "ffn.shared_experts.w1.=expert_inner,hidden ffn.shared_experts.w2.=hidden,expert_inner "
    "ffn.shared_experts.w3.=expert_inner,hidden"
)
_ATTENTION = (
    "attn.wq_a.=q_lora_rank,hidden attn.q_norm.weight=q_lora_rank attn.wq_b.=q,q_lora_rank attn.wkv.=head,hidden "
    "attn.kv_norm.weight=head attn.wo_a=any:grouped,q/o_groups attn.wo_b.=hidden,grouped attn.attn_sink=heads "
    "attn_norm.weight=hidden ffn_norm.weight=hidden ffn.gate.weight=experts,hidden"
)
_VISION = (
    "visual.vision.patch_embed.proj.+=seen,3*patch*patch visual.vision.norm.weight=seen "
    "visual.aligner.w1.+=shown,seen*ratio*ratio visual.aligner.w2.+=shown,shown visual.image_start=hidden "
    "visual.image_end=hidden visual.image_newline=hidden"
)
_BLOCK_OF_VISION = (
    "norm1.weight=seen attn.wqkv.+=3*seen,seen attn.wo.+=seen,seen norm2.weight=seen mlp.w1.=2*seen_inner,seen "
    "mlp.w2.=seen,seen_inner"
)
_SIZES = {
    **HYPER_SIZES,
    "vocab": "vocab_size",
    "head": "head_dim",
    "q": "heads*head",
    "grouped": "o_groups*o_lora_rank",
    "indexed": "index_n_heads*index_head_dim",
    "experts": "n_routed_experts",
}

_ARGUMENTS = ("inference/config.json", "model_args.json")
_COMPRESSED, _INDEXED, _HASHED, _BIASED, _SEEING = "compressed", "indexed", "hashed", "biased", "seeing"
_INDEXED_RATIO = 4
_BLOCK = 128  # rows and columns that share a scale
_WO_A = re.compile(r"(model\.layers\.\d+\.attn\.wo_a)\.(weight|weight_scale_inv)")

# A layer with a cache of its own pools several tokens into an entry, or has one for each; some layers have an indexer.
_OWNING, _POOLING, _SINGLE, _ENGRAM = "owning", "pooling", "single", "engram"
_POOLED = re.compile(r"(model\.layers\.(\d+)\.attn\.compressor\.(?:wkv|wgate))\.weight")
_IMAGE_BIAS = re.compile(r"model\.layers\.(\d+)\.ffn\.gate\.bias_vl")
_STACKED = "visual.routing_bias"
_TABLE = "layers.{}.engram.embed.{}"


def _read_arguments(checkpoint: Checkpoint) -> tuple[str, dict[str, Any]]:
    """Return the name of the file that tells of a DeepSeek-V4's layers, and what it says."""
    for name in _ARGUMENTS:
        raw = checkpoint.read_json(name)
        if raw is not None:
            return name, raw
    problem = "is missing, FreeToken reads from it what the layers of a DeepSeek-V4 are"
    raise CheckpointError(checkpoint.source, _ARGUMENTS[0], problem)


def _with_arguments(checkpoint: Checkpoint, config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the arguments, and what FreeToken reads in config.json: what it says of images, and their width."""
    name, arguments = _read_arguments(checkpoint)
    read = {key: value for key, value in config.items() if key.startswith("vision_") or key == "hidden_size"}
    return f"config.json, {name}", {**arguments, **read}


def _v4_kinds(checkpoint: Checkpoint) -> Kinds:
    name, raw = _read_arguments(checkpoint)
    config = LayerConfig(checkpoint, raw=raw, name=name)
    num_layers, num_hashed = config.number("n_layers"), config.number("n_hash_layers", default=3)
    ratios = config.counts("compress_ratios", length=num_layers)
    if not ratios:
        raise CheckpointError(checkpoint.source, f"{name}: compress_ratios", "is missing, a list is needed")
    sees = config.number("vision_n_layers", default=0) > 0
    layers = range(num_layers)
    kinds: Kinds = [frozenset({MOE, _SEEING} if sees else {MOE}) for _ in layers]
    kinds = add_kind(kinds, _COMPRESSED, (layer for layer in layers if ratios[layer] not in (0, _INDEXED_RATIO)))
    kinds = add_kind(kinds, _INDEXED, (layer for layer in layers if ratios[layer] == _INDEXED_RATIO))
    kinds = add_kind(kinds, _HASHED, range(num_hashed))
    return add_kind(kinds, _BIASED, layers if sees else range(num_hashed, num_layers))


def _dequantize_wo_a(checkpoint: Checkpoint, tensors: list[DenseTensor]) -> list[DenseTensor]:
    """Put one BF16 tensor in place of each `wo_a` and its scales: FreeToken multiplies it so."""
    found = {tensor.name: tensor for tensor in tensors}
    made: list[DenseTensor] = []
    for tensor in tensors:
        parts = _WO_A.fullmatch(tensor.name)
        if parts is None:
            made.append(tensor)
        elif parts[2] == "weight":
            made.append(_dequantize(checkpoint.source, tensor, found.get(f"{parts[1]}.weight_scale_inv"), parts[1]))
    return made


def _dequantize(source: str, weight: DenseTensor, scale: DenseTensor | None, name: str) -> DenseTensor:
    if scale is None and weight.dtype in FLOATS:
        return cast_to(renamed(weight, name), "BF16")
    wanted = tuple(-(-size // _BLOCK) for size in weight.shape)
    is_fp8 = weight.dtype == "F8_E4M3" and scale is not None and scale.dtype == "F8_E8M0"
    if not is_fp8 or scale is None or scale.shape != wanted or len(wanted) != 2 or 0 in wanted:
        found = f"its scale {scale.dtype} {list(scale.shape)}" if scale is not None else "it has no scale"
        problem = f"is {weight.dtype} {list(weight.shape)}, {found}; F8_E4M3 with F8_E8M0 {list(wanted)} is needed"
        raise CheckpointError(source, weight.origin, problem)
    recipe = Dequantized(weight.recipe, scale.recipe, scale.dtype, weight.shape[1], (_BLOCK, _BLOCK))
    return DenseTensor(name, "BF16", weight.shape, recipe, max(weight.position, scale.position))


DEEPSEEK_V4 = Family(
    architectures=("DeepseekV4ForCausalLM",),
    needs=Needs(
        model=(
            "model.embed.weight=vocab,hidden model.norm.weight=hidden model.head.=vocab,hidden "
            "model.hc_head_fn=hc_mult,wide model.hc_head_base=hc_mult model.hc_head_scale=1"
        ),
        layers=f"{_ATTENTION} {_SHARED_EXPERT} {HYPER_CONNECTIONS}",
        kinds=_v4_kinds,
        of_kind=(
            (
                _COMPRESSED,  # by any ratio but the indexed one
                "attn.compressor.ape=*,head attn.compressor.wkv.weight=head,hidden "
                "attn.compressor.wgate.weight=head,hidden attn.compressor.norm.weight=head",
            ),
            (
                _INDEXED,  # whose windows overlap, so that what is pooled is twice as wide
                f"attn.compressor.ape={_INDEXED_RATIO},2*head attn.compressor.wkv.weight=2*head,hidden "
                "attn.compressor.wgate.weight=2*head,hidden attn.compressor.norm.weight=head "
                "attn.indexer.wq_b.=indexed,q_lora_rank attn.indexer.weights_proj.weight=index_n_heads,hidden "
                f"attn.indexer.compressor.ape={_INDEXED_RATIO},2*index_head_dim "
                "attn.indexer.compressor.wkv.weight=2*index_head_dim,hidden "
                "attn.indexer.compressor.wgate.weight=2*index_head_dim,hidden "
                "attn.indexer.compressor.norm.weight=index_head_dim",
            ),
            (_HASHED, "ffn.gate.tid2eid=int:vocab,n_activated_experts"),
            (_BIASED, "ffn.gate.bias=experts"),
            (_SEEING, "ffn.gate.bias_vl=experts"),
        ),
        vision=f"{_VISION} visual.image_pad=hidden",
        vision_part="",
        blocks=_BLOCK_OF_VISION,
        block_prefix="visual.vision.blocks.",
        block_count="vision_n_layers",
        sizes={
            **_SIZES,
            "hidden": "dim",
            "shown": "hidden_size",
            "heads": "n_heads",
            "expert_inner": "moe_inter_dim",
            "seen": "vision_dim",
            "seen_inner": "vision_inter_dim",
            "patch": "vision_patch_size",
            "ratio": "vision_downsample_ratio",
        },
        config=_with_arguments,
    ),
    left_out=((r"^mtp\.", _NO_PREDICTION),),
    renames=(
        (r"^(vision\.|aligner\.|image_)", r"visual.\1"),
        (r"^(.*)\.scale$", r"model.\1.weight_scale_inv"),
        (r"^", "model."),
    ),
    banks=frozenset({"ds_fp4"}),
    refuses_others=False,
    finish=_dequantize_wo_a,
)


def _v41_kinds(checkpoint: Checkpoint) -> Kinds:
    config = LayerConfig(checkpoint)
    num_layers = config.number("num_hidden_layers", "n_layers")
    layers = range(num_layers)
    ratios = config.counts("compress_ratios", length=num_layers)
    if not ratios:
        raise CheckpointError(checkpoint.source, "config.json: compress_ratios", "is missing, a list is needed")
    caches = set(config.counts("kv_source_layer_ids", "kv_source_layers"))
    indexers = set(config.counts("index_source_layer_ids", "index_source_layers"))
    owning = [layer for layer in layers if ratios[layer] and layer in caches]
    kinds: Kinds = [frozenset({MOE}) for _ in layers]
    kinds = add_kind(kinds, _OWNING, owning)
    kinds = add_kind(kinds, _POOLING, (layer for layer in owning if ratios[layer] > 1))
    kinds = add_kind(kinds, _SINGLE, (layer for layer in owning if ratios[layer] == 1))
    kinds = add_kind(kinds, _INDEXED, (layer for layer in layers if ratios[layer] and layer in caches | indexers))
    return add_kind(kinds, _ENGRAM, config.counts("engram_layer_ids"))


def _finish_v41(checkpoint: Checkpoint, tensors: list[DenseTensor]) -> list[DenseTensor]:
    """Check that the tables are there, rename what pools tokens, and stack the layers' biases for images."""
    kinds = _v41_kinds(checkpoint)
    for layer in _of_kind(kinds, _ENGRAM):
        for name in (_TABLE.format(layer, role) for role in ("weight", "scale")):
            if name not in checkpoint.tensors:
                raise CheckpointError(
                    checkpoint.source, name, "is missing, FreeToken's server reads it from a side file"
                )
    pooling = set(_of_kind(kinds, _POOLING))
    made: list[DenseTensor] = []
    biases: dict[int, DenseTensor] = {}
    for tensor in tensors:
        pooled, bias = _POOLED.fullmatch(tensor.name), _IMAGE_BIAS.fullmatch(tensor.name)
        if bias is not None:
            biases[int(bias[1])] = tensor
        elif pooled is not None and int(pooled[2]) in pooling:
            made.append(renamed(tensor, pooled[1]))
        else:
            made.append(tensor)
    if isinstance(checkpoint.config.raw.get("vision_config"), dict):
        return [*made, _stack(checkpoint.source, biases, len(kinds))]
    return [*made, *biases.values()]


def _stack(source: str, biases: dict[int, DenseTensor], num_layers: int) -> DenseTensor:
    """Return the biases of all layers as one tensor `[layers, experts]`."""
    for layer in range(max(num_layers, 1)):
        if layer not in biases:
            problem = "is missing, FreeToken chooses the experts of image tokens by it"
            raise CheckpointError(source, f"layers.{layer}.ffn.gate.bias_vl", problem)
    parts = [biases[layer] for layer in range(max(num_layers, 1))]
    first = parts[0]
    for part in parts:
        if (part.dtype, part.shape) != (first.dtype, first.shape):
            found = f"is {part.dtype} {list(part.shape)}, {first.origin} is {first.dtype} {list(first.shape)}"
            raise CheckpointError(source, part.origin, f"{found}; all layers' must be alike")
    recipe = join([part.recipe for part in parts])
    return DenseTensor(_STACKED, first.dtype, (len(parts), *first.shape), recipe, max(part.position for part in parts))


def _of_kind(kinds: Sequence[Iterable[str]], kind: str) -> list[int]:
    return [layer for layer, found in enumerate(kinds) if kind in found]


DEEPSEEK_V41 = Family(
    architectures=("DeepseekV41ForCausalLM",),
    needs=Needs(
        model="model.embed.weight=vocab,hidden model.norm.weight=hidden head.=vocab,hidden",
        layers=(
            f"{_ATTENTION} attn.wo_a_scale?=any:grouped/block,q/o_groups/block ffn.gate.bias=experts "
            f"{_SHARED_EXPERT} {HYPER_CONNECTIONS}"
        ),
        kinds=_v41_kinds,
        of_kind=(
            (
                _OWNING,
                "attn.compressor.norm.weight=head attn.indexer.wk.weight=index_head_dim,head "
                "attn.indexer.k_norm.weight=index_head_dim",
            ),
            (_POOLING, "attn.compressor.wkv=head,hidden attn.compressor.wgate=head,hidden"),
            (_SINGLE, "attn.compressor.wkv.weight=head,hidden"),
            (
                _INDEXED,
                "attn.indexer.wq_b.=indexed,q_lora_rank attn.indexer.weights_proj.weight=index_n_heads,hidden",
            ),
            (
                _ENGRAM,
                "engram.wkv.=widened,engram engram.q_weight=hc_mult,hidden engram.k_weight=hc_mult,hidden",
            ),
        ),
        vision=f"{_VISION} {_STACKED}=layers,experts",
        blocks=_BLOCK_OF_VISION,
        sizes={
            **_SIZES,
            "hidden": "hidden_size|dim",
            "shown": "hidden",
            "heads": "num_attention_heads|n_heads",
            "expert_inner": "moe_intermediate_size|moe_inter_dim",
            "engram": "engram_max_ngram_size*engram_n_heads*engram_head_dim-engram_n_heads*engram_head_dim",
            "widened": "hc_mult*hidden+hidden",
            "layers": "num_hidden_layers|n_layers",
            "seen": "vision_config.hidden_size",
            "seen_inner": "vision_config.intermediate_size",
            "patch": "vision_config.patch_size",
            "ratio": "vision_config.downsample_ratio",
        },
        rules=Rules(ropes=(), one_of=(("n_shared_experts", (1,)),), not_null=()),
        block_prefix="visual.vision.blocks.",
        block_count="num_hidden_layers",
    ),
    left_out=((r"^mtp\.", _NO_PREDICTION),),
    side_shards=r"^layers\.\d+\.engram\.embed\.(weight|scale)$",
    renames=(
        (r"^(vision\.|aligner\.|image_)", r"visual.\1"),
        (r"^head\.", "head."),
        (r"^(.*\.attn\.wo_a)\.weight$", r"model.\1"),
        (r"^(.*\.attn\.wo_a)\.scale$", r"model.\1_scale"),
        (r"^(.*)\.scale$", r"model.\1.weight_scale_inv"),
        (r"^", "model."),
    ),
    banks=frozenset({"ds_fp4"}),
    refuses_others=False,
    finish=_finish_v41,
)
