"""Vocab-parallel embeddings as serving engines have them, with the attributes and the arithmetic of the real ones.

After `vllm/model_executor/layers/vocab_parallel_embedding.py` of vLLM 0.33.0 and
`sglang/srt/layers/vocab_parallel_embedding.py` of SGLang 0.5.23, without the distributed part: `forward` gives what a
rank has before the all-reduce, whose sum `whole_rows` takes.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class VocabParallelEmbeddingShardIndices:
    padded_org_vocab_start_index: int
    padded_org_vocab_end_index: int
    padded_added_vocab_start_index: int
    padded_added_vocab_end_index: int
    org_vocab_start_index: int
    org_vocab_end_index: int
    added_vocab_start_index: int
    added_vocab_end_index: int


class UnquantizedEmbeddingMethod:
    """Keeps the table as the parameter "weight"."""

    def embedding(self, layer: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, layer.weight)

    def tie_weights(self, layer: nn.Module, embed_tokens: nn.Module) -> nn.Module:
        layer.weight = embed_tokens.weight
        return layer


class Fp8EmbeddingMethod(UnquantizedEmbeddingMethod):
    """Stands for a method whose weight is not the table."""


def padded(count: int, padding_size: int) -> int:
    return -(-count // padding_size) * padding_size


class VocabParallelEmbedding(nn.Module):
    """A rank's shard: the model's own ids, padding, added ids, padding."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        org_num_embeddings: int | None = None,
        padding_size: int = 64,
        tp_rank: int = 0,
        tp_size: int = 1,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.tp_size = tp_size
        self.num_embeddings = num_embeddings
        self.padding_size = padding_size
        self.org_vocab_size = org_num_embeddings or num_embeddings
        self.num_added_embeddings = num_embeddings - self.org_vocab_size
        self.org_vocab_size_padded = padded(self.org_vocab_size, padding_size)
        self.num_embeddings_padded = padded(self.org_vocab_size_padded + self.num_added_embeddings, padding_size)
        own = self.org_vocab_size_padded // tp_size
        added = (self.num_embeddings_padded - self.org_vocab_size_padded) // tp_size
        start, stop = own * tp_rank, own * (tp_rank + 1)
        added_start, added_stop = (self.org_vocab_size + added * rank for rank in (tp_rank, tp_rank + 1))
        self.shard_indices = VocabParallelEmbeddingShardIndices(
            start, stop, added_start, added_stop,
            min(start, self.org_vocab_size), min(stop, self.org_vocab_size),
            min(added_start, num_embeddings), min(added_stop, num_embeddings),
        )  # fmt: skip
        self.embedding_dim = embedding_dim
        self.num_embeddings_per_partition = self.num_embeddings_padded // tp_size
        self.quant_method = UnquantizedEmbeddingMethod()
        weight = torch.empty(self.num_embeddings_per_partition, embedding_dim, dtype=dtype)
        self.register_parameter("weight", nn.Parameter(weight, requires_grad=False))

    def load(self, table: torch.Tensor) -> "VocabParallelEmbedding":
        """Take the shard's rows; padding holds what must never be read."""
        indices = self.shard_indices
        rows = table[indices.org_vocab_start_index : indices.org_vocab_end_index]
        self.weight.data[: rows.shape[0]].copy_(rows)
        self.weight.data[rows.shape[0] :].fill_(float("nan"))
        return self

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        indices = self.shard_indices
        is_own = (ids >= indices.org_vocab_start_index) & (ids < indices.org_vocab_end_index)
        rows = self.quant_method.embedding(self, (ids - indices.org_vocab_start_index) * is_own)
        return rows.masked_fill(~is_own.unsqueeze(-1), 0)


class SglangVocabParallelEmbedding(VocabParallelEmbedding):
    """SGLang's has a dtype that it converts rows to, and says whether it is cut at all."""

    def __init__(self, *args: object, output_dtype: torch.dtype | None = None, **options: object) -> None:
        super().__init__(*args, **options)
        self.output_dtype = output_dtype
        self.enable_tp = self.tp_size > 1
        self.use_presharded_weights = False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = super().forward(ids)
        return rows if self.output_dtype is None else rows.to(self.output_dtype)


SglangVocabParallelEmbedding.__name__ = "VocabParallelEmbedding"


class ParallelLMHead(VocabParallelEmbedding):
    """The LM head is a subclass of the embedding in both, and cannot be called."""

    def tie_weights(self, embed_tokens: VocabParallelEmbedding) -> nn.Module:
        return self.quant_method.tie_weights(self, embed_tokens)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("LMHead's weights should be used in the sampler.")
