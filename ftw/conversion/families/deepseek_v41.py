"""DeepSeek-V4.1: layers that own a compressed cache or share one, tables of n-grams in side files, images."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ftw.conversion.families.deepseek_v4 import HYPER_CONNECTIONS, NO_PREDICTION, SHARED_EXPERT
from ftw.conversion.families.family import MOE, Family, Needs
from ftw.conversion.families.layer_kinds import LayerConfig, add_kind
from ftw.conversion.recipes.dense_tensor import DenseTensor, renamed
from ftw.conversion.recipes.recipe import join
from ftw.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ftw.checkpoint import Checkpoint
    from ftw.conversion.families.layer_kinds import Kinds

# A layer with a cache of its own pools several tokens into an entry, or has one for each; some layers have an indexer.
_OWNING, _POOLING, _SINGLE, _INDEXED, _ENGRAM = "owning", "pooling", "single", "indexed", "engram"
_POOLED = re.compile(r"(model\.layers\.(\d+)\.attn\.compressor\.(?:wkv|wgate))\.weight")
_IMAGE_BIAS = re.compile(r"model\.layers\.(\d+)\.ffn\.gate\.bias_vl")
_STACKED = "visual.routing_bias"
_TABLE = "layers.{}.engram.embed.{}"


def _kinds(checkpoint: Checkpoint) -> Kinds:
    config = LayerConfig(checkpoint)
    num_layers = config.number("num_hidden_layers", "n_layers")
    layers = range(num_layers)
    ratios = config.items("compress_ratios", length=num_layers)
    if not ratios:
        raise CheckpointError(checkpoint.source, "config.json: compress_ratios", "is missing, a list is needed")
    caches = set(config.items("kv_source_layer_ids", "kv_source_layers"))
    indexers = set(config.items("index_source_layer_ids", "index_source_layers"))
    owning = [layer for layer in layers if ratios[layer] and layer in caches]
    kinds: Kinds = [frozenset({MOE}) for _ in layers]
    kinds = add_kind(kinds, _OWNING, owning)
    kinds = add_kind(kinds, _POOLING, (layer for layer in owning if ratios[layer] > 1))
    kinds = add_kind(kinds, _SINGLE, (layer for layer in owning if ratios[layer] == 1))
    kinds = add_kind(kinds, _INDEXED, (layer for layer in layers if ratios[layer] and layer in caches | indexers))
    return add_kind(kinds, _ENGRAM, config.items("engram_layer_ids"))


def _finish(checkpoint: Checkpoint, tensors: list[DenseTensor]) -> list[DenseTensor]:
    """Check that the tables are there, rename what pools tokens, and stack the layers' biases for images."""
    kinds = _kinds(checkpoint)
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
    for layer in range(num_layers):
        if layer not in biases:
            problem = "is missing, FreeToken chooses the experts of image tokens by it"
            raise CheckpointError(source, f"layers.{layer}.ffn.gate.bias_vl", problem)
    parts = [biases[layer] for layer in range(num_layers)]
    first = parts[0]
    for part in parts:
        if (part.dtype, part.shape) != (first.dtype, first.shape):
            found = f"is {part.dtype} {list(part.shape)}, {first.origin} is {first.dtype} {list(first.shape)}"
            raise CheckpointError(source, part.origin, f"{found}; all layers' must be alike")
    recipe = join([part.recipe for part in parts])
    return DenseTensor(_STACKED, first.dtype, (num_layers, *first.shape), recipe, max(part.position for part in parts))


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
                f"{SHARED_EXPERT} {HYPER_CONNECTIONS}",
            ),
        ),
        kinds=_kinds,
        of_kind=(
            (_OWNING, "attn.compressor.norm.weight attn.indexer.wk.weight attn.indexer.k_norm.weight"),
            (_POOLING, "attn.compressor.wkv attn.compressor.wgate"),
            (_SINGLE, "attn.compressor.wkv.weight"),
            (_INDEXED, "attn.indexer.wq_b. attn.indexer.weights_proj.weight"),
            (_ENGRAM, "engram.wkv. engram.q_weight engram.k_weight"),
        ),
        vision=(
            "visual.vision.patch_embed.proj. visual.vision.patch_embed.proj.bias visual.vision.norm.weight "
            "visual.aligner.w1. visual.aligner.w1.bias visual.aligner.w2. visual.aligner.w2.bias "
            f"visual.image_start visual.image_end visual.image_newline {_STACKED}"
        ),
        blocks=(("norm1.weight attn.wqkv. attn.wqkv.bias attn.wo. attn.wo.bias norm2.weight mlp.w1. mlp.w2.",),),
        block_prefix="visual.vision.blocks.",
        block_count="num_hidden_layers",
    ),
    left_out=((r"^mtp\.", NO_PREDICTION),),
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
    finish=_finish,
)
