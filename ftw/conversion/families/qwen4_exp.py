"""Qwen4-Exp: Qwen3.5's layers between hyper-connections, and a table of n-grams that lies in side files."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ftw.checkpoint import config_parts
from ftw.conversion.families.family import LINEARS, Fuse, Needs
from ftw.conversion.families.qwen import ATTENTION, GDN_LINEARS, MOE, QWEN3_5, with_vision
from ftw.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ftw.checkpoint import Checkpoint, ModelConfig
    from ftw.conversion.recipes.dense_tensor import DenseTensor

_TABLE = r"\.ple\.ple_embedding\.ngram_embedding\."
_TABLE_PART = re.compile(_TABLE + r"shard_(\d{1,6})\.weight$")
_TABLE_SCALE = re.compile(_TABLE + r"weight_scale$")
_HYPER = "{0}hc_norm. {0}input_mix_weight_up. {0}input_mix_weight_down_block_inject."
_INDEXER = "self_attn.indexer."
_PLE = (
    *("ple_embedding.layer_multipliers", "ple_embedding.ngram_heads_vocab_sizes", "ple_embedding.ngram_heads_offsets"),
    *("key_proj.", "value_proj.", "norm_key.", "norm_query.", "norm_conv.", "conv1d."),
)
_HYPER_FUSE = Fuse(
    parts=("input_mix_weight_down", "block_inject_weight"),
    into="input_mix_weight_down_block_inject",
    where=r"model\.layers\.",
    rows_multiple=16,  # rows that a matrix product takes without copying
)
_QWEN4_LINEARS = r"\.(?:index_qk_proj|input_mix_weight_(?:down|up)|block_inject_weight|key_proj|value_proj)$"


def _text(config: ModelConfig) -> Mapping[str, Any]:
    return config_parts(config.raw)[0]


def _name_ngram_layers(config: ModelConfig) -> Iterator[str]:
    """Yield what there is in the layers that look up n-grams; config.json counts them from 1."""
    for layer in _text(config).get("ple_layer_ids") or ():
        yield " ".join(f"model.layers.{int(layer) - 1}.ple.{name}" for name in _PLE)


def _check_table(checkpoint: Checkpoint, tensors: list[DenseTensor]) -> list[DenseTensor]:
    """Check the n-gram table, which FreeToken joins out of its parts, all alike."""
    text = _text(checkpoint.config)
    named = [(found, tensor) for name, tensor in checkpoint.tensors.items() if (found := _TABLE_PART.search(name))]
    stored, numbers = [tensor for _, tensor in named], {int(found[1]) for found, _ in named}
    count = int(text.get("split_ngram_parts") or 0) if text.get("ple_layer_ids") else 0
    if len(stored) != count or numbers != set(range(count)):
        missing = next((number for number in range(count) if number not in numbers), None)
        problem = f"there are {len(stored)} of its parts" if missing is None else f"its part {missing} is missing"
        raise CheckpointError(checkpoint.source, "n-gram table", f"{problem}, config.json says that it has {count}")
    for part in stored:
        if part.dtype not in ("BF16", "F8_E4M3") or (part.dtype, part.shape) != (stored[0].dtype, stored[0].shape):
            both = f"is {part.describe()}, {stored[0].name} is {stored[0].describe()}"
            problem = f"{both}; all parts must be alike, BF16 or F8_E4M3"
            raise CheckpointError(checkpoint.source, part.name, problem)
    if stored and stored[0].dtype == "F8_E4M3" and not any(_TABLE_SCALE.search(name) for name in checkpoint.tensors):
        raise CheckpointError(checkpoint.source, stored[0].name, "is F8_E4M3, its table has no weight_scale")
    return tensors


QWEN4_EXP = replace(
    QWEN3_5,
    architectures=("Qwen4ExpForConditionalGeneration",),
    needs=with_vision(
        Needs(
            "model.embed_tokens. lm_head.? model.hyper_connection_mixer.hc_norm. "
            "model.hyper_connection_mixer.input_mix_weight_down. model.hyper_connection_mixer.input_mix_weight_up.",
            (
                (_HYPER.format("attn_hyper_connection."),),
                (_HYPER.format("mlp_hyper_connection."),),
                (
                    *ATTENTION[:2],
                    f"{ATTENTION[2]} {_INDEXER}index_qk_proj. {_INDEXER}q_layernorm. {_INDEXER}k_layernorm.",
                ),
                (MOE,),
            ),
            by_config=_name_ngram_layers,
        )
    ),
    side_files=f"{_TABLE_PART.pattern}|{_TABLE_SCALE.pattern}",
    fuses=(*QWEN3_5.fuses, _HYPER_FUSE),
    scaled=f"{LINEARS}|{GDN_LINEARS}|{_QWEN4_LINEARS}",
    unpacked="",
    banks=frozenset({"nvfp4"}),
    prepare=_check_table,
)
