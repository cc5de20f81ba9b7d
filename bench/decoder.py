"""A decoder of a real model's shapes for `ftw bench decode`: plain torch, its decode step fit for a CUDA graph.

The token embedding is an argument of each call, so that models with different ones share all other weights. A step is
a function of shapes alone, but for the experts of a prompt on a device without grouped products.

`examples/dense_decoder.py` is much like it, and stands by itself: examples are not in the installed package, and that
one is filled from checkpoints of several families and keeps keys and values in a pool, which nothing here needs.

    B   sequences         S  tokens of a prompt     T  positions of the cache     D  size of a head
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .sparse_mlp import SparseMlp, swiglu

if TYPE_CHECKING:
    from collections.abc import Callable

EPSILON = 1e-6
ROPE_BASE = 1_000_000.0
_ELEMENT_NBYTES = 2  # bf16, in which models are served


class Shape(NamedTuple):
    """A model's sizes; `layers` are built, `full_layers` the model has; no `experts` for a dense one."""

    name: str
    layers: int
    full_layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: int = 0
    experts_per_token: int = 0

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token adds to the cache of the layers that are built."""
        return self.layers * 2 * self.kv_heads * self.head_dim * _ELEMENT_NBYTES

    @property
    def table_nbytes(self) -> int:
        """Bytes of the token embedding."""
        return self.vocab * self.hidden * _ELEMENT_NBYTES


class Cache(NamedTuple):
    """Keys and values `[layers, B, kv heads, T, D]`, and the rotation of each position, `[T, D]` twice."""

    keys: torch.Tensor
    values: torch.Tensor
    cosine: torch.Tensor
    sine: torch.Tensor


def make_cache(shape: Shape, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> Cache:
    """Return an empty cache of `length` positions for each of `batch` sequences."""
    size = (shape.layers, batch, shape.kv_heads, length, shape.head_dim)
    exponents = torch.arange(0, shape.head_dim, 2, device=device) / shape.head_dim
    angles = torch.arange(length, device=device)[:, None] * ROPE_BASE**-exponents
    angles = torch.cat((angles, angles), dim=1)
    keys, values = (torch.zeros(size, dtype=dtype, device=device) for _ in range(2))
    return Cache(keys, values, angles.cos().to(dtype), angles.sin().to(dtype))


class Decoder(nn.Module):
    """All of a model but its token embedding, under the names that Hugging Face gives its tensors."""

    def __init__(self, shape: Shape, *, is_grouped: bool = False) -> None:
        """Make the layers; on the meta device, for weights that are assigned. `is_grouped` is for `SparseMlp`."""
        super().__init__()
        self.has_fixed_shapes = is_grouped or not shape.experts  # of prompts too: a graph can hold them
        self.model = Stack(shape, is_grouped=is_grouped)
        self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def prefill(self, embedding: nn.Module, ids: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Fill the cache from position 0 with prompts `[B, S]`; return the likeliest next tokens `[B]`."""
        length = ids.shape[1]
        rotation = cache.cosine[:length], cache.sine[:length]

        def attend(number: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))
            cache.keys[number, :, :, :length] = key
            cache.values[number, :, :, :length] = value
            found = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            return found.transpose(1, 2)

        return self._run(embedding(ids), rotation, attend)

    def step(self, embedding: nn.Module, tokens: torch.Tensor, positions: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Decode tokens `[B]` at `positions` `[B]`; return the likeliest next ones `[B]`."""
        batch, length = tokens.shape[0], cache.keys.shape[3]
        rows = torch.arange(batch, device=tokens.device)
        is_seen = (torch.arange(length, device=tokens.device) <= positions[:, None])[:, None, None]
        rotation = cache.cosine[positions, None], cache.sine[positions, None]

        def attend(number: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            cache.keys[number][rows, :, positions] = key[:, 0]
            cache.values[number][rows, :, positions] = value[:, 0]
            # Query heads that share keys stand where a prompt's positions would, so nothing is repeated for them.
            grouped = query.view(batch, key.shape[2], -1, query.shape[-1])
            return F.scaled_dot_product_attention(grouped, cache.keys[number], cache.values[number], attn_mask=is_seen)

        return self._run(embedding(tokens[:, None]), rotation, attend)

    def _run(
        self, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], attend: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        for number, layer in enumerate(self.model.layers):
            hidden = layer(hidden, rotation, lambda *heads, number=number: attend(number, *heads))
        logits: torch.Tensor = self.lm_head(self.model.norm(hidden[:, -1]))
        return logits.argmax(dim=-1)


class Stack(nn.Module):
    """The layers, and the norm behind them."""

    def __init__(self, shape: Shape, *, is_grouped: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(shape, is_grouped=is_grouped) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=EPSILON)


class Layer(nn.Module):
    """Attention and an MLP, each behind a norm and beside the residual stream `[B, S, hidden]`."""

    def __init__(self, shape: Shape, *, is_grouped: bool) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        if shape.experts:
            sizes = shape.hidden, shape.intermediate, shape.experts, shape.experts_per_token
            self.mlp: nn.Module = SparseMlp(*sizes, is_grouped=is_grouped)
        else:
            self.mlp = DenseMlp(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=EPSILON)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=EPSILON)

    def forward(
        self,
        hidden: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        attend: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        """Return the residual stream after this layer."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, attend)
        mlp: torch.Tensor = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + mlp


class Attention(nn.Module):
    """Grouped-query attention with norms of queries and keys; `attend` keeps keys and values, and mixes them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_dim, eps=EPSILON)
        self.k_norm = nn.RMSNorm(shape.head_dim, eps=EPSILON)

    def forward(
        self,
        hidden: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        attend: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        """Return `[B, S, hidden]`."""
        size = (*hidden.shape[:2], -1, self.head_dim)
        query = _rotate(self.q_norm(self.q_proj(hidden).view(size)), *rotation)
        key = _rotate(self.k_norm(self.k_proj(hidden).view(size)), *rotation)
        found = attend(query, key, self.v_proj(hidden).view(size))
        mixed: torch.Tensor = self.o_proj(found.reshape(*hidden.shape[:2], -1))
        return mixed


class DenseMlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `[B, S, hidden]`."""
        mixed: torch.Tensor = self.down_proj(swiglu(self.gate_proj(hidden), self.up_proj(hidden)))
        return mixed


def _rotate(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotate `[B, S, heads, D]` by `[S, D]` or `[B, 1, D]`."""
    cosine, sine = cosine.unsqueeze(-2), sine.unsqueeze(-2)
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat((-second, first), dim=-1) * sine
