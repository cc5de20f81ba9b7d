"""How the rows of a checkpoint's table are looked up.

A row of a per-layer embedding is one slice for each layer of the model:

    row = slice of layer 0 | slice of layer 1 | …    each of `hidden_size_per_layer_input` values
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftw.checkpoint import PER_LAYER_EMBEDDING, TOKEN_EMBEDDING
from ftw.ggml_types import PACKED_TYPES, ggml_types_by_name
from ftw.lookup import RowOptions

if TYPE_CHECKING:
    from ftw.checkpoint import ModelConfig
    from ftw.loading.options import LoadOptions
    from ftw.verdict import TableVerdict


def row_options(
    table: TableVerdict, config: ModelConfig, options: LoadOptions, vocab_range: tuple[int, int] | None
) -> RowOptions:
    """Return how a table is looked up of which this process holds the rows in `vocab_range`, None for all."""
    is_token_embedding = table.role == TOKEN_EMBEDDING
    return RowOptions(
        dtype=options.dtype,
        ggml_type=table.dtype if table.dtype in PACKED_TYPES else None,
        vocab_range=vocab_range,
        hot_bytes=options.hot_bytes if is_token_embedding else None,
        scale=options.scale if is_token_embedding else None,
        num_slices=_count_slices(table, config),
    )


def _count_slices(table: TableVerdict, config: ModelConfig) -> int | None:
    """Return how many slices a row has.

    None for a table of another role, if the configuration does not say or is about other rows, and if a slice of
    packed rows would begin inside a block.
    """
    if table.role != PER_LAYER_EMBEDDING or not config.num_layers:
        return None
    of_gguf = f"{config.architecture}.embedding_length_per_layer_input"
    width = config.count(of_gguf if config.is_gguf else "hidden_size_per_layer_input")
    if not width or width * config.num_layers != table.columns:
        return None
    if table.dtype in PACKED_TYPES and width % ggml_types_by_name()[table.dtype].block_size:
        return None
    return config.num_layers
