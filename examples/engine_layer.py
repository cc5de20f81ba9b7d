"""A layer for an engine's models: this rank's rows of the token embedding, in page-locked memory from the start.

Engines make their modules first and fill parameters by a `weight_loader` while they read a checkpoint. So does this
one: its parameter lies in host memory, and no row is ever on the device. It has the ids, the padding and the order of
ranks of `VocabParallelEmbedding` in vLLM and SGLang, without LoRA's added ids.

`ftw.HostTable` is the memory: it is filled first and page-locked then, in huge pages, and takes as much as the table
has. `torch.empty(..., pin_memory=True)` would take up to twice as much, since torch rounds page-locked memory up to a
power of two. New weights go into the same place, so captured graphs see them.

    python examples/engine_layer.py
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import ftw

PADDING = 64


class HostVocabEmbedding(nn.Module):
    """Looks ids up; `reduce` sums over the ranks, as the engine does it. Call `finish` once it is loaded."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        rank: int = 0,
        size: int = 1,
        reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
        hot_bytes: str | None = None,
    ) -> None:
        super().__init__()
        padded = -(-num_embeddings // PADDING) * PADDING
        if padded % size:
            raise ValueError(f"{padded} rows cannot be spread evenly over {size} ranks")
        share = padded // size
        start = rank * share
        self.vocab_range = start, min(share, num_embeddings - start)
        if self.vocab_range[1] <= 0:
            raise ValueError(f"rank {rank} of {size} has none of {num_embeddings} ids")
        self.reduce, self.hot_bytes = reduce, hot_bytes
        self.table = ftw.HostTable(self.vocab_range[1], embedding_dim, dtype=dtype, name="embed_tokens", device=device)
        self.weight: nn.Parameter | None = nn.Parameter(self.table.rows, requires_grad=False)
        self.weight.weight_loader = self.weight_loader  # type: ignore[attr-defined]
        self.rows: ftw.HostEmbedding | None = None

    def weight_loader(self, parameter: nn.Parameter, loaded: torch.Tensor) -> None:
        """Copy this rank's rows out of the whole table."""
        parameter.data.copy_(loaded.narrow(0, *self.vocab_range))

    def finish(self, max_ids: int = 8192) -> None:
        """Page-lock the rows where they are; from here on they are no parameter, which nothing moves or casts."""
        if self.rows is None:
            self.weight = None
            self.rows = self.table.finish(vocab_range=self.vocab_range, hot_bytes=self.hot_bytes)
            self.rows.warm_up(max_ids)  # so that no request waits for a compiler

    def reload(self, loaded: torch.Tensor) -> None:
        """Copy this rank's rows out of another table, between steps."""
        if self.rows is None:
            raise RuntimeError("finish() comes before a reload")
        with self.rows.refill() as rows:
            rows.copy_(loaded.narrow(0, *self.vocab_range))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return `[..., embedding_dim]`; ids of other ranks give zeros, which their ranks' rows are added to."""
        if self.rows is None:
            raise RuntimeError("finish() comes before the first lookup")
        rows: torch.Tensor = self.rows(ids)
        return rows if self.reduce is None else self.reduce(rows)


def main() -> None:
    """Load a table into the layers of two ranks, and add their rows."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    table = torch.randn(1000, 64).bfloat16()
    layers = [HostVocabEmbedding(1000, 64, dtype=table.dtype, device=device, rank=rank, size=2) for rank in (0, 1)]
    for layer in layers:
        layer.weight_loader(layer.get_parameter("weight"), table)
        layer.finish()
    ids = torch.randint(0, 1000, (32,), device=device)
    found = layers[0](ids) + layers[1](ids)
    print(f"ids of rank 0 and 1: {layers[0].vocab_range}, {layers[1].vocab_range}")
    print(f"rows equal the table's: {torch.equal(found, table.to(device)[ids])}")
    for layer in layers:
        layer.reload(-table)
    print(f"and a new table's: {torch.equal(layers[0](ids) + layers[1](ids), -table.to(device)[ids])}")
    for layer in layers:
        if layer.rows is not None:
            layer.rows.close()


if __name__ == "__main__":
    main()
