"""LoadOptions: what a caller asks of loading, checked when it is made; and how a table's rows are looked up for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ftw.checkpoint import PER_LAYER_EMBEDDING, TOKEN_EMBEDDING
from ftw.files import parse_num_threads
from ftw.ggml_types import PACKED_TYPES, ggml_types_by_name
from ftw.lookup import RowOptions

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ftw.checkpoint import ModelConfig
    from ftw.verdict import TableVerdict

SHARES: tuple[str | None, ...] = (None, "node")


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What a caller asks of loading; see `ftw.load`. Sizes are in bytes.

    Attributes:
        embed: "host", "auto" or "gpu".
        device: Where the weights go and lookups run.
        dtype: Of the rows that lookups return; None for the table's own.
        share: "node" for one copy of the tables for all processes of this host.
        is_dummy: Random values instead of the file's.
        max_pinned_bytes: Page-locked bytes that tables may bring the process to; None for what the host has.
        huge_pages: Ask for pages of 2 MiB.
        num_threads: That read at a time; None for as many as there are processors, but 6 to 8.
        group: Over whose ranks every table is spread, by its rows.
        vocab_range: `(start, length)` of the token ids whose rows are wanted.
        hot_bytes: Of the token embedding's most used rows, which the device keeps.
        scale: What the rows of the token embedding are multiplied by.

    Raises:
        ValueError: `share`, `dtype` or `num_threads` is not one of its choices, or two options exclude each other.
    """

    embed: str
    device: torch.device
    dtype: torch.dtype | None = None
    share: str | None = None
    is_dummy: bool = False
    max_pinned_bytes: int | None = None
    huge_pages: bool = True
    num_threads: int | None = None
    group: ProcessGroup | None = None
    vocab_range: tuple[int, int] | None = None
    hot_bytes: int | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None and not (isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point):
            allowed = "a floating-point dtype of torch, the name of one such as 'bfloat16', or None"
            raise ValueError(f"dtype is {self.dtype!r}, {allowed} is needed")
        if self.share not in SHARES:
            raise ValueError(f"share is {self.share!r}, allowed are 'node' and None")
        parse_num_threads(self.num_threads)
        self._check_cut()
        asked = "hot_bytes" if self.hot_bytes else "share" if self.is_shared else ""
        if asked and self.embed == "gpu":
            raise ValueError(f"{asked}: embed='gpu' has no table in host memory, 'host' or 'auto' is needed")

    @property
    def is_shared(self) -> bool:
        """Whether all processes of this host share one copy of the tables."""
        return self.share == "node"

    def _check_cut(self) -> None:
        """Check what cutting tables by their rows goes with."""
        has_group, has_range = self.group is not None, self.vocab_range is not None
        if has_group and has_range:
            raise ValueError("tp chooses each rank's rows itself, so vocab_range has to be None; give one of the two")
        asked = "tp" if has_group else "vocab_range" if has_range else ""
        if asked and self.is_shared:
            why = "with share='node' each process of the host looks up all rows itself, and no collective is needed"
            raise ValueError(f"{asked} cuts tables, share='node' does not: {why}; give one of the two")
        if asked and self.embed == "gpu":
            raise ValueError(f"{asked} cuts tables in host memory, embed='gpu' has none; 'host' or 'auto' is needed")


def parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return a dtype of torch that is given by its name, such as "bfloat16"; what is none stays as it is."""
    named = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else None
    return named if isinstance(named, torch.dtype) else dtype  # type: ignore[return-value]  # LoadOptions refuses it


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

    A row of a per-layer embedding is one slice for each layer of the model, in their order, each of
    `hidden_size_per_layer_input` values. None for a table of another role, if the configuration does not say or is
    about other rows, and if a slice of packed rows would begin inside a block.
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
