"""Encodings: by which scheme a module is packed or scaled, told by the tensors that it stores.

The tensors count, not `quantization_config`: most schemes leave embeddings plain, and some configurations list modules
that are not, or leave out some that are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ftw.dtypes import FLOAT8_DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ftw.tensors import TensorInfo


class Scheme(NamedTuple):
    """A scheme, and the tensors, by what follows the module's path, of which it stores every one."""

    name: str
    tensors: tuple[str, ...]


# Asked in this order: what comes first stores more, or tells more.
_SCHEMES = (
    Scheme("DF11", ("encoded_exponent",)),
    Scheme("DF11", ("sign_mantissa",)),
    Scheme("DF11", ("luts",)),
    Scheme("bitsandbytes 4-bit", ("weight.absmax", "weight.quant_map")),
    Scheme("bitsandbytes 8-bit", ("SCB",)),
    Scheme("GPTQ", ("qweight", "qzeros", "scales", "g_idx")),
    Scheme("AWQ or GPTQ", ("qweight", "qzeros", "scales")),
    Scheme("AQLM", ("codes", "codebooks")),
    Scheme("compressed-tensors NVFP4", ("weight_packed", "weight_global_scale")),
    Scheme("compressed-tensors pack-quantized", ("weight_packed", "weight_shape")),
    Scheme("compressed-tensors", ("weight_packed",)),
    Scheme("ModelOpt NVFP4", ("weight", "weight_scale", "weight_scale_2")),
    Scheme("torchao", ("_weight_qdata",)),
    Scheme("quanto", ("weight._data",)),
    Scheme("quanto", ("weight._data._data",)),
    Scheme("HQQ", ("W_q",)),
    Scheme("EETQ", ("weight", "weight_scales")),
    Scheme("Gemma QAT", ("embedding_quantized",)),
    Scheme("MLX affine", ("weight", "scales", "biases")),
    Scheme("metal affine", ("weight", "scales", "qbiases")),
    Scheme("MXFP4", ("weight_blocks", "weight_scales")),
    Scheme("VPTQ", ("indices",)),
    Scheme("SpQR", ("dense_weights",)),
    Scheme("HIGGS", ("weight", "scales", "tables2")),
    Scheme("FP-Quant", ("qweight", "scales")),
    Scheme("FP-Quant", ("dqweight",)),
    Scheme("EXL2", ("q_weight", "q_scale")),
    Scheme("EXL3", ("trellis",)),
    Scheme("rows in two tensors", ("embedding", "new_embedding")),
    Scheme("rows in two tensors", ("weight", "additional_embedding.weight")),
)
_SCALES = ("weight_scale_inv", "weight_scale", "scale_weight", "scale", "scales")


def name_scheme(suffixes: Iterable[str], tensors: Mapping[str, TensorInfo]) -> str:
    """Return the name of the scheme of a module that stores more than a weight; empty if it is not known.

    Args:
        suffixes: What follows the module's path in the names of all its tensors.
        tensors: Those tensors, by the same.
    """
    stored = set(suffixes)
    for scheme in _SCHEMES:
        if stored.issuperset(scheme.tensors):
            return scheme.name
    scale = next((tensors[suffix] for suffix in _SCALES if suffix in tensors), None)
    weight = tensors.get("weight") or tensors.get("shard_0.weight")
    if scale is None or weight is None:
        return ""
    kind = "FP8" if weight.dtype in FLOAT8_DTYPES else "INT8" if weight.dtype in ("I8", "U8") else weight.dtype
    return f"{weight.ggml_type or kind} with {_scale_words(weight.shape, scale.shape)}"


def _scale_words(weight: tuple[int, ...], scale: tuple[int, ...]) -> str:
    """Say what one scale is for, from the two shapes."""
    if all(size == 1 for size in scale):
        return "one scale for the tensor"
    if len(weight) != 2 or len(scale) > 2:
        return "scales"
    rows, columns = (*scale, 1)[:2]
    if rows == weight[0] and columns == 1:
        return "a scale for each row"
    if not rows or not columns:
        return "scales"
    block = f"{-(-weight[0] // rows)} x {-(-weight[1] // columns)}"
    return f"a scale for each block of {block}"
