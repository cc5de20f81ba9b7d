"""Per-layer embeddings: how a row of theirs, one slice for each layer of the model, is cut.

row = slice of layer 0 | slice of layer 1 | …    each of `hidden_size_per_layer_input` values
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftw.checkpoint import PER_LAYER_EMBEDDING
from ftw.ggml_types import PACKED_TYPES, ggml_types_by_name

if TYPE_CHECKING:
    from ftw.checkpoint import ModelConfig
    from ftw.verdict import TableVerdict


def count_slices(table: TableVerdict, config: ModelConfig) -> int | None:
    """Return how many slices a row has.

    None for a table of another role, where the configuration does not tell or tells of other rows than these, and where
    a slice of packed rows would begin inside a block.
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
