"""Tables for lookups that are spread over ranks: rows of all kinds of bits, their files, and the rows wanted."""

import math
from pathlib import Path

import torch
from builders import llama_config, write_checkpoint

TABLE = "model.embed_tokens.weight"


def special_rows(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Return rows of all kinds of bits: some of -0.0 alone, some with infinities and signalling NaNs of any payload."""
    generator = torch.Generator().manual_seed(rows)
    size = torch.empty(0, dtype=dtype).element_size()
    bits = torch.randint(0, 256, (rows, columns * size), generator=generator, dtype=torch.uint8)
    table = bits.view(dtype).clone()
    if dtype.itemsize > 1:
        table[::5] = -0.0
        table[1::5, ::2] = math.inf
        table[2::5].view(torch.uint8)[:, size - 1 :: size] = 0xFF  # NaN, negative
        table[2::5].view(torch.uint8)[:, size - 2 :: size] |= 0x81 if dtype == torch.bfloat16 else 0x10
    return table


def as_bytes(rows: torch.Tensor) -> bytes:
    return rows.reshape(-1).view(torch.uint8).numpy().tobytes() if rows.numel() else b""


def wanted_rows(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    is_inside = (ids >= 0) & (ids < table.shape[0])
    bits = table.view(torch.uint8)[ids.where(is_inside, 0)] * is_inside[..., None]
    return bits.view(table.dtype)


def write_table(folder: Path, table: torch.Tensor) -> Path:
    head = torch.ones(table.shape[0], table.shape[1], dtype=table.dtype)
    config = llama_config(vocab_size=table.shape[0], hidden_size=table.shape[1])
    return write_checkpoint(folder, {TABLE: table, "lm_head.weight": head}, config)
