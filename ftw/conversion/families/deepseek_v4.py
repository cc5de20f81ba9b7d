"""DeepSeek-V4: hyper-connections, compressed attention, MXFP4 experts, images.

What its layers are stands in inference/config.json, which FreeToken reads as well.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ftw.conversion.families.family import MOE, Family, Needs
from ftw.conversion.families.layer_kinds import LayerConfig, add_kind
from ftw.conversion.recipes.block_scales import BLOCK, Dequantized
from ftw.conversion.recipes.dense_tensor import FLOATS, DenseTensor, cast_to, renamed
from ftw.errors import CheckpointError

if TYPE_CHECKING:
    from ftw.checkpoint import Checkpoint
    from ftw.conversion.families.layer_kinds import Kinds

NO_PREDICTION = "FreeToken does not predict several tokens at a time"
SHARED_EXPERT = "ffn.shared_experts.w1. ffn.shared_experts.w2. ffn.shared_experts.w3."
HYPER_CONNECTIONS = "hc_attn_fn hc_ffn_fn hc_attn_base hc_ffn_base hc_attn_scale hc_ffn_scale"

_ARGUMENTS = ("inference/config.json", "model_args.json")
_COMPRESSED, _INDEXED, _HASHED, _BIASED, _SEEING = "compressed", "indexed", "hashed", "biased", "seeing"
_INDEXED_RATIO = 4
_WO_A = re.compile(r"(model\.layers\.\d+\.attn\.wo_a)\.(weight|weight_scale_inv)")


def _kinds(checkpoint: Checkpoint) -> Kinds:
    raws = ((name, checkpoint.read_json(name)) for name in _ARGUMENTS)
    name, raw = next(((name, raw) for name, raw in raws if raw is not None), ("", None))
    if raw is None:
        problem = "is missing, FreeToken reads from it what the layers of a DeepSeek-V4 are"
        raise CheckpointError(checkpoint.source, _ARGUMENTS[0], problem)
    config = LayerConfig(checkpoint, raw=raw, name=name)
    num_layers, num_hashed = config.number("n_layers"), config.number("n_hash_layers", default=3)
    ratios = config.items("compress_ratios", length=num_layers)
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
    wanted = tuple(-(-size // BLOCK) for size in weight.shape)
    is_fp8 = weight.dtype == "F8_E4M3" and scale is not None and scale.dtype == "F8_E8M0"
    if not is_fp8 or scale is None or scale.shape != wanted or len(wanted) != 2 or 0 in wanted:
        found = f"its scale {scale.dtype} {list(scale.shape)}" if scale is not None else "it has no scale"
        problem = f"is {weight.dtype} {list(weight.shape)}, {found}; F8_E4M3 with F8_E8M0 {list(wanted)} is needed"
        raise CheckpointError(source, weight.origin, problem)
    recipe = Dequantized(weight.recipe, scale.recipe, weight.shape[1])
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
                f"attn.attn_sink attn_norm.weight ffn_norm.weight ffn.gate.weight {SHARED_EXPERT} {HYPER_CONNECTIONS}",
            ),
        ),
        kinds=_kinds,
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
            "visual.vision.patch_embed.proj. visual.vision.patch_embed.proj.bias visual.vision.norm.weight "
            "visual.aligner.w1. visual.aligner.w1.bias visual.aligner.w2. visual.aligner.w2.bias "
            "visual.image_start visual.image_end visual.image_newline visual.image_pad"
        ),
        vision_part="",
        blocks=(("norm1.weight attn.wqkv. attn.wqkv.bias attn.wo. attn.wo.bias norm2.weight mlp.w1. mlp.w2.",),),
        block_prefix="visual.vision.blocks.",
        block_count="vision_n_layers",
    ),
    left_out=((r"^mtp\.", NO_PREDICTION),),
    renames=(
        (r"^(vision\.|aligner\.|image_)", r"visual.\1"),
        (r"^(.*)\.scale$", r"model.\1.weight_scale_inv"),
        (r"^", "model."),
    ),
    banks=frozenset({"ds_fp4"}),
    refuses_others=False,
    finish=_dequantize_wo_a,
)
