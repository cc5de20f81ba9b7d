"""A dense decoder such as Qwen3's or Llama's for `minimal_engine.py`: plain torch, filled from `ftw.load`.

It computes the families of `MODEL_TYPES` and refuses all others, and what their configs may ask for besides: tests hold
its tokens against those of transformers.

Keys and values lie in a pool of slots, one for each token. A sequence's row of slots says which are its own, in the
order of its positions. A forward pass of one prompt and a decode step of all lanes are the same function: it writes
keys and values to the slots of its tokens, and attends to the slots of the positions up to each.

    B  lanes     S  tokens of each in this pass     T  positions that are looked at
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import ftw

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "seed_oss")


@dataclass(frozen=True)
class Sizes:
    """What the decoder takes from config.json; stop tokens from generation_config.json, too."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    epsilon: float
    rope_base: float
    stops: frozenset[int]

    @staticmethod
    def read(checkpoint: ftw.Checkpoint) -> Sizes:
        """Read them, and refuse what this example does not compute: it would give other tokens without a word."""
        raw = checkpoint.config.raw
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        for problem in _problems(checkpoint, rope):
            raise SystemExit(f"{checkpoint.source}: this example does not compute it: {problem}")
        heads = raw["num_attention_heads"]
        generation = checkpoint.folder / "generation_config.json"
        generating = json.loads(generation.read_text(encoding="utf-8")) if generation.is_file() else {}
        return Sizes(
            vocab=raw["vocab_size"],
            hidden=raw["hidden_size"],
            intermediate=raw["intermediate_size"],
            layers=raw["num_hidden_layers"],
            heads=heads,
            kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            epsilon=raw.get("rms_norm_eps", 1e-6),
            rope_base=rope.get("rope_theta", raw.get("rope_theta", 10_000.0)),
            stops=frozenset(_stops(raw) + _stops(generating)),
        )


def _problems(checkpoint: ftw.Checkpoint, rope: dict[str, Any]) -> list[str]:
    """Return what of a model the decoder has no code for."""
    config, raw = checkpoint.config, checkpoint.config.raw
    has_window = raw.get("sliding_window") is not None and raw.get("use_sliding_window", True)
    checks = {
        "it is a GGUF or made of one, whose tensors have other names; ftw.load opens it": config.is_gguf,
        f"model_type is {config.model_type!r}, allowed are {', '.join(MODEL_TYPES)}": config.model_type
        not in MODEL_TYPES,
        "its weights are quantized": "quantization_config" in raw,
        "rotary positions are not plain": rope.get("rope_type", rope.get("type", "default")) != "default"
        or rope.get("partial_rotary_factor", raw.get("partial_rotary_factor")) not in (None, 1),
        "hidden_act is not silu": raw.get("hidden_act", "silu") != "silu",
        "attention has a sliding window": has_window or set(raw.get("layer_types") or ()) - {"full_attention"},
    }
    return [problem for problem, is_so in checks.items() if is_so]


def _stops(config: dict[str, Any]) -> list[int]:
    """Return the stop tokens of a config: one, several or none."""
    stop = config.get("eos_token_id")
    return stop if isinstance(stop, list) else [] if stop is None else [stop]


class Attention(nn.Module):
    """Grouped-query attention over the slots of the pool."""

    def __init__(self, sizes: Sizes, *, has_norms: bool, has_biases: bool, has_output_bias: bool) -> None:
        super().__init__()
        self.head_dim = sizes.head_dim
        self.q_proj = nn.Linear(sizes.hidden, sizes.heads * sizes.head_dim, bias=has_biases)
        self.k_proj = nn.Linear(sizes.hidden, sizes.kv_heads * sizes.head_dim, bias=has_biases)
        self.v_proj = nn.Linear(sizes.hidden, sizes.kv_heads * sizes.head_dim, bias=has_biases)
        self.o_proj = nn.Linear(sizes.heads * sizes.head_dim, sizes.hidden, bias=has_output_bias)
        self.q_norm = nn.RMSNorm(sizes.head_dim, sizes.epsilon) if has_norms else nn.Identity()
        self.k_norm = nn.RMSNorm(sizes.head_dim, sizes.epsilon) if has_norms else nn.Identity()

    def forward(self, hidden: torch.Tensor, step: Step, pool: torch.Tensor) -> torch.Tensor:
        """Write the keys and values of `[B, S]` tokens to their slots of `pool` and attend to those before."""
        heads = (*hidden.shape[:2], -1, self.head_dim)
        query = step.rotate(self.q_norm(self.q_proj(hidden).view(heads)))
        pool[0][step.targets] = step.rotate(self.k_norm(self.k_proj(hidden).view(heads)))
        pool[1][step.targets] = self.v_proj(hidden).view(heads)
        keys, values = (kept[step.slots].transpose(1, 2) for kept in pool)
        query = query.transpose(1, 2)
        found = F.scaled_dot_product_attention(query, keys, values, attn_mask=step.is_seen, enable_gqa=True)
        mixed: torch.Tensor = self.o_proj(found.transpose(1, 2).flatten(2))
        return mixed


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden, sizes.intermediate, bias=False)
        self.up_proj = nn.Linear(sizes.hidden, sizes.intermediate, bias=False)
        self.down_proj = nn.Linear(sizes.intermediate, sizes.hidden, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `[B, S, hidden]`."""
        mixed: torch.Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return mixed


class Layer(nn.Module):
    """Attention and MLP beside the residual stream."""

    def __init__(self, sizes: Sizes, **options: bool) -> None:
        super().__init__()
        self.self_attn = Attention(sizes, **options)
        self.mlp = Mlp(sizes)
        self.input_layernorm = nn.RMSNorm(sizes.hidden, sizes.epsilon)
        self.post_attention_layernorm = nn.RMSNorm(sizes.hidden, sizes.epsilon)

    def forward(self, hidden: torch.Tensor, step: Step, pool: torch.Tensor) -> torch.Tensor:
        """Return the stream after this layer."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), step, pool)
        mixed: torch.Tensor = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + mixed


class Stack(nn.Module):
    """The layers, and the norm behind them."""

    def __init__(self, sizes: Sizes, **options: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(sizes, **options) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden, sizes.epsilon)


class Decoder(nn.Module):
    """All of the model but its token embedding, with the tensors' names of the checkpoint."""

    def __init__(self, sizes: Sizes, **options: bool) -> None:
        super().__init__()
        self.model = Stack(sizes, **options)
        self.lm_head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)

    def forward(self, hidden: torch.Tensor, step: Step, pool: torch.Tensor) -> torch.Tensor:
        """Return the likeliest next token of each lane, `[B]`."""
        for number, layer in enumerate(self.model.layers):
            hidden = layer(hidden, step, pool[number])
        logits: torch.Tensor = self.lm_head(self.model.norm(hidden[:, -1]))
        return logits.argmax(dim=-1)


@dataclass(frozen=True)
class Step:
    """Where the tokens of one forward pass stand: what all its layers share."""

    slots: torch.Tensor  # [B, T], of the sequences' positions
    targets: torch.Tensor  # [B, S], those that are written
    is_seen: torch.Tensor  # [B, 1, S, T]
    cosine: torch.Tensor  # [B, S, 1, head_dim]
    sine: torch.Tensor

    @staticmethod
    def at(positions: torch.Tensor, slots: torch.Tensor, rotation: torch.Tensor) -> Step:
        """Plan for tokens at `positions` `[B, S]`; `rotation` is `[2, positions, head_dim]`."""
        is_seen = torch.arange(slots.shape[1], device=slots.device) <= positions[:, None, :, None]
        cosine, sine = rotation[:, positions, None]
        return Step(slots, slots.gather(1, positions), is_seen, cosine, sine)

    def rotate(self, heads: torch.Tensor) -> torch.Tensor:
        """Rotate `[B, S, heads, head_dim]` by the tokens' positions."""
        first, second = heads.chunk(2, dim=-1)
        return heads * self.cosine + torch.cat((-second, first), dim=-1) * self.sine


def fill_decoder(loaded: ftw.LoadedModel, sizes: Sizes) -> Decoder:
    """Return a decoder that owns the loaded weights: modules are made without memory, and tensors assigned."""
    names, first = loaded.tensors, "model.layers.0.self_attn."
    has = {"has_norms": "q_norm.weight", "has_biases": "q_proj.bias", "has_output_bias": "o_proj.bias"}
    with torch.device("meta"):
        decoder = Decoder(sizes, **{option: first + name in names for option, name in has.items()})
    weights = dict(loaded.weights())
    table = weights.pop("model.embed_tokens.weight", None)  # the one that `loaded.embedding` reads, or none
    if table is not None:
        weights.setdefault("lm_head.weight", table)  # tied: it could not leave
    for name in sorted(weights.keys() ^ decoder.state_dict().keys()):
        raise SystemExit(f"{name}: this example does not compute a model with it, or without it")
    decoder.load_state_dict(weights, assign=True)
    return decoder
