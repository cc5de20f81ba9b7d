"""DeepSeek-V4 and V4.1: hyper-connections, compressed attention, MXFP4 experts, images.

What the layers of V4 are stands in inference/config.json, which FreeToken reads as well. In V4.1 layers own a
compressed cache or share one, and tables of n-grams lie in side files.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ftw.errors import CheckpointError
from ftw.layouts.families.family import MOE, Family, Needs
from ftw.layouts.families.layer_kinds import LayerConfig, add_kind
from ftw.layouts.recipes.dense_tensor import FLOATS, DenseTensor, cast_to, renamed
from ftw.layouts.recipes.dequantized import Dequantized
from ftw.layouts.recipes.recipe import join

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ftw.checkpoint import Checkpoint
    from ftw.layouts.families.layer_kinds import Kinds

_NO_PREDICTION = "FreeToken does not predict several tokens at a time"
_SHARED_EXPERT = "ffn.shared_experts.w1. ffn.shared_experts.w2. ffn.shared_experts.w3."
_HYPER_CONNECTIONS = "hc_attn_fn hc_ffn_fn hc_attn_base hc_ffn_base hc_attn_scale hc_ffn_scale"

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


def _v4_kinds(checkpoint: Checkpoint) -> Kinds:
    raws = ((name, checkpoint.read_json(name)) for name in _ARGUMENTS)
    name, raw = next(((name, raw) for name, raw in raws if raw is not None), ("", None))
    if raw is None:
        problem = "is missing, FreeToken reads from it what the layers of a DeepSeek-V4 are"
        raise CheckpointError(checkpoint.source, _ARGUMENTS[0], problem)
    config = LayerConfig(checkpoint, raw=raw, name=name)
    num_layers, num_hashed = config.number("n_layers"), config.number("n_hash_layers", default=3)
    ratios = config.counts("compress_ratios", length=num_layers)
    if not ratios:
        raise CheckpointError(checkpoint.source, f"{name}: compress_ratios", "is missing, a list is needed")
    sees = config.number("vision_n_layers", default=0) > 0
    layers = range(num_layers)
    kinds: Kinds = [frozenset({MOE, _SEEING} if sees else {MOE}) for _ in layers]
    kinds = add_kind(kinds, _COMPRESSED, (layer for layer in layers if ratios[layer]))
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
            "model.embed.weight model.norm.weight model.head. model.hc_head_fn model.hc_head_base model.hc_head_scale"
        ),
        layers=(
            (
                "attn.wq_a. attn.q_norm.weight attn.wq_b. attn.wkv. attn.kv_norm.weight attn.wo_a attn.wo_b. "
                "attn.attn_sink attn_norm.weight ffn_norm.weight ffn.gate.weight "
                f"{_SHARED_EXPERT} {_HYPER_CONNECTIONS}",
            ),
        ),
        kinds=_v4_kinds,
        of_kind=(
            (
                _COMPRESSED,
                "attn.compressor.ape attn.compressor.wkv.weight attn.compressor.wgate.weight "
                "attn.compressor.norm.weight",
            ),
            (
                _INDEXED,
                "attn.indexer.wq_b. attn.indexer.weights_proj.weight attn.indexer.compressor.ape "
                "attn.indexer.compressor.wkv.weight attn.indexer.compressor.wgate.weight "
                "attn.indexer.compressor.norm.weight",
            ),
            (_HASHED, "ffn.gate.tid2eid"),
            (_BIASED, "ffn.gate.bias"),
            (_SEEING, "ffn.gate.bias_vl"),
        ),
        vision=(
            "visual.vision.patch_embed.proj.+ visual.vision.norm.weight visual.aligner.w1.+ visual.aligner.w2.+ "
            "visual.image_start visual.image_end visual.image_newline visual.image_pad"
        ),
        vision_part="",
        blocks=(("norm1.weight attn.wqkv.+ attn.wo.+ norm2.weight mlp.w1. mlp.w2.",),),
        block_prefix="visual.vision.blocks.",
        block_count="vision_n_layers",
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
        model="model.embed.weight model.norm.weight head.",
        layers=(
            (
                "attn.wq_a. attn.q_norm.weight attn.wq_b. attn.wkv. attn.kv_norm.weight attn.wo_a attn.wo_a_scale? "
                "attn.wo_b. attn.attn_sink attn_norm.weight ffn_norm.weight ffn.gate.weight ffn.gate.bias "
                f"{_SHARED_EXPERT} {_HYPER_CONNECTIONS}",
            ),
        ),
        kinds=_v41_kinds,
        of_kind=(
            (_OWNING, "attn.compressor.norm.weight attn.indexer.wk.weight attn.indexer.k_norm.weight"),
            (_POOLING, "attn.compressor.wkv attn.compressor.wgate"),
            (_SINGLE, "attn.compressor.wkv.weight"),
            (_INDEXED, "attn.indexer.wq_b. attn.indexer.weights_proj.weight"),
            (_ENGRAM, "engram.wkv. engram.q_weight engram.k_weight"),
        ),
        vision=(
            "visual.vision.patch_embed.proj.+ visual.vision.norm.weight visual.aligner.w1.+ visual.aligner.w2.+ "
            f"visual.image_start visual.image_end visual.image_newline {_STACKED}"
        ),
        blocks=(("norm1.weight attn.wqkv.+ attn.wo.+ norm2.weight mlp.w1. mlp.w2.",),),
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
