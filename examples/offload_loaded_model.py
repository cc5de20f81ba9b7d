"""A model that is on the GPU already: move its token embedding to host memory, and get the VRAM back.

One table, `ftw.offload(module)`, whose place the caller gives to what it returns; or all tables of a whole model,
`ftw.offload(model)`, in place.

python examples/offload_loaded_model.py
"""

from __future__ import annotations

import torch
from torch import nn

import ftw


class Model(nn.Module):
    """A table, a layer, and a head of its own."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.embed_tokens: nn.Module = nn.Embedding(vocab, hidden)
        self.layer = nn.Linear(hidden, hidden)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits `[..., vocab]`."""
        logits: torch.Tensor = self.lm_head(torch.tanh(self.layer(self.embed_tokens(ids))))
        return logits


def make_model(vocab: int = 32_000, hidden: int = 256) -> tuple[Model, torch.Tensor, torch.Tensor]:
    """Return a model on the GPU, where there is one, ids, and the logits that it gives for them."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Model(vocab, hidden).to(device, torch.bfloat16).requires_grad_(False)
    ids = torch.randint(0, vocab, (4, 16), device=device)
    return model, ids, model(ids)


def run_whole_model() -> bool:
    """Offload all tables of a model, in place; return whether it computes the same as before."""
    model, ids, expected = make_model()
    offloaded = ftw.offload(model, hot_bytes="1MiB")
    is_equal = torch.equal(model(ids), expected)
    names = ", ".join(offloaded.tables)
    print(f"of a whole model: {names} left, what stays: {offloaded.left}, it computes the same: {is_equal}")
    offloaded.close()
    return is_equal


def run() -> bool:
    """Offload the table of a model; return whether it computes the same as before."""
    model, ids, expected = make_model()

    embedding = ftw.offload(model.embed_tokens, hot_bytes="1MiB")
    model.embed_tokens = embedding  # the old module is dropped, and the table's VRAM has gone back already
    print(f"{embedding.num_embeddings} x {embedding.embedding_dim} on the {embedding.placement}")
    if embedding.memory is not None:
        print(f"VRAM that came back, by the driver's count: {embedding.memory.freed_bytes / 2**20:.1f} MiB")

    is_equal = torch.equal(model(ids), expected)
    embedding.update_hot_rows()  # from here on the rows that were just read come out of VRAM
    is_equal &= torch.equal(model(ids), expected)
    print(f"the model computes the same: {is_equal}")

    tied = nn.Embedding.from_pretrained(model.lm_head.weight)
    try:
        ftw.offload(tied)
    except ftw.NotEligibleError as error:
        print(f"a table that an LM head shares is refused: {error}")
    else:
        raise SystemExit("a shared table was taken")
    embedding.close()
    return is_equal


if __name__ == "__main__":
    if not (run() and run_whole_model()):
        raise SystemExit("the model computes something else")
