"""A model as vLLM's files make it: a token embedding inside of a part, and an LM head, tied as vLLM ties them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from builders import llama_config, write_checkpoint
from torch import nn

ROWS, COLUMNS = 100, 8


class Inner(nn.Module):
    def __init__(self, embed_tokens: nn.Module) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens


class TinyModel(nn.Module):
    def __init__(self, classes: Any, tie: str = "", prefix: str = "model.embed_tokens", **options: Any) -> None:
        super().__init__()
        embed = classes.VocabParallelEmbedding(ROWS, COLUMNS, torch.bfloat16, prefix=prefix, **options)
        self.model = Inner(embed)
        if tie == "module":
            self.lm_head = embed
            return
        self.lm_head = classes.ParallelLMHead(ROWS, COLUMNS, params_dtype=torch.bfloat16, prefix="lm_head")
        if tie == "method":
            self.lm_head = self.lm_head.tie_weights(embed)
        elif tie == "weight":
            self.lm_head.weight = embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed_tokens(ids)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        parameters = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            if name in parameters:
                parameters[name].weight_loader(parameters[name], tensor)
                loaded.add(name)
        return loaded


class PlainModel(nn.Module):
    """One whose embedding is torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(ROWS, COLUMNS, dtype=torch.bfloat16)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        found = {name: tensor for name, tensor in weights if "embed_tokens" in name}
        self.embed_tokens.weight.data.copy_(*found.values())
        return set(found)


def make_weights(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    return {name: torch.randn(ROWS, COLUMNS, generator=generator).to(dtype) for name in names}


def write_model(folder: Path, *, tied: bool = False, **options: Any) -> Path:
    """Write a checkpoint of the weights that `make_weights` returns."""
    weights = make_weights(**options)
    if tied:
        del weights["lm_head.weight"]
    return write_checkpoint(folder, weights, llama_config(vocab_size=ROWS, tie_word_embeddings=tied))
