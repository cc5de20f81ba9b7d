"""A checkpoint that is open: its source, tensors and configuration, and what the names of its tensors mean.

Imports: `ftw.readers` and what that imports. No torch.
"""

from ftw.checkpoint.checkpoint import CHUNK_NBYTES, Checkpoint, open_checkpoint, open_damaged
from ftw.checkpoint.config import CONFIG_NAME, TIE_KEY, ConfigPart, ModelConfig, TieFlag, config_parts
from ftw.checkpoint.gguf_config import FILE_TYPE_KEY
from ftw.checkpoint.not_a_model import NotAModel, find_not_a_model
from ftw.checkpoint.quantization_schemes import name_scheme
from ftw.checkpoint.stored_modules import StoredModule
from ftw.checkpoint.tensor_names import (
    MOVED_ROLES,
    NGRAM_EMBEDDING,
    PER_LAYER_EMBEDDING,
    TOKEN_EMBEDDING,
    find_heads,
    find_other_tables,
    find_possible_heads,
    find_token_embeddings,
    is_beside,
    is_position_like,
)

__all__ = [
    "CHUNK_NBYTES", "CONFIG_NAME", "FILE_TYPE_KEY", "MOVED_ROLES", "NGRAM_EMBEDDING", "PER_LAYER_EMBEDDING",
    "TIE_KEY", "TOKEN_EMBEDDING", "Checkpoint", "ConfigPart", "ModelConfig", "NotAModel", "StoredModule", "TieFlag",
    "config_parts", "find_heads", "find_not_a_model", "find_other_tables", "find_possible_heads",
    "find_token_embeddings", "is_beside", "is_position_like", "name_scheme", "open_checkpoint", "open_damaged",
]  # fmt: skip
