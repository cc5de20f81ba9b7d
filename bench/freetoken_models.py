"""Random MoE checkpoints of real widths that FreeToken serves: Qwen3-MoE, a tensor per expert; Qwen3.5-MoE, stacked.

Both are bf16 and untied, with few layers, and have a tokenizer of words "t2" to "tN", one token each. The same numbers
each time on one kind of device.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .word_tokenizer import write_word_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import torch

    Tensors = dict[str, torch.Tensor]


_CHAT = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model; those of Qwen3.5's linear attention follow from them."""

    vocab: int = 151_936
    hidden: int = 2048
    layers: int = 4
    experts: int = 32
    experts_per_token: int = 8
    expert_width: int = 768
    heads: int = 32
    kv_heads: int = 4
    head_dim: int = 128


TINY = Sizes(128, 64, 4, 4, 2, 32, 2, 1, 64)


class _Random:
    """Makes weights of one seed."""

    def __init__(self) -> None:
        import torch

        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._generator = torch.Generator(self._device).manual_seed(0)

    def normal(self, *shape: int, std: float = 0.02) -> torch.Tensor:
        import torch

        return (torch.randn(*shape, generator=self._generator, device=self._device) * std).bfloat16().cpu()


def write_qwen3_moe(folder: Path, sizes: Sizes) -> None:
    """Write a Qwen3-MoE whose experts have a tensor each."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **_common_config(sizes),
        "intermediate_size": 3 * sizes.hidden,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "use_sliding_window": False,
    }
    random = _Random()
    _write(folder, config, sizes, [_outer(random, sizes, "model."), *_qwen3_layers(random, sizes)])


def write_qwen3_5_moe(folder: Path, sizes: Sizes) -> None:
    """Write a Qwen3.5-MoE, of text alone: stacked experts, linear attention in three of four layers."""
    kinds = ["linear_attention" if (layer + 1) % 4 else "full_attention" for layer in range(sizes.layers)]
    config = {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        **_common_config(sizes),
        "layer_types": kinds,
        "shared_expert_intermediate_size": sizes.expert_width,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": sizes.head_dim,
        "linear_value_head_dim": sizes.head_dim,
        "linear_num_key_heads": sizes.heads // 2,
        "linear_num_value_heads": sizes.heads,
        "partial_rotary_factor": 0.25,
        "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 10000000.0, "rope_type": "default"},
    }
    random = _Random()
    _write(folder, config, sizes, [_outer(random, sizes, "model."), *_qwen3_5_layers(random, sizes, kinds)])


def _common_config(sizes: Sizes) -> dict[str, Any]:
    return {
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.hidden,
        "moe_intermediate_size": sizes.expert_width,
        "num_experts": sizes.experts,
        "num_experts_per_tok": sizes.experts_per_token,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def _outer(random: _Random, sizes: Sizes, prefix: str) -> Tensors:
    import torch

    return {
        f"{prefix}embed_tokens.weight": random.normal(sizes.vocab, sizes.hidden, std=1.0),
        f"{prefix}norm.weight": torch.ones(sizes.hidden, dtype=torch.bfloat16),
        "lm_head.weight": random.normal(sizes.vocab, sizes.hidden),
    }


def _attention(random: _Random, sizes: Sizes, prefix: str, *, has_gate: bool) -> Tensors:
    import torch

    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    return {
        f"{prefix}q_proj.weight": random.normal(queries * (2 if has_gate else 1), sizes.hidden),
        f"{prefix}k_proj.weight": random.normal(keys, sizes.hidden),
        f"{prefix}v_proj.weight": random.normal(keys, sizes.hidden),
        f"{prefix}o_proj.weight": random.normal(sizes.hidden, queries),
        f"{prefix}q_norm.weight": torch.ones(sizes.head_dim, dtype=torch.bfloat16),
        f"{prefix}k_norm.weight": torch.ones(sizes.head_dim, dtype=torch.bfloat16),
    }


def _norms(sizes: Sizes, prefix: str) -> Tensors:
    import torch

    names = ("input_layernorm", "post_attention_layernorm")
    return {f"{prefix}{name}.weight": torch.ones(sizes.hidden, dtype=torch.bfloat16) for name in names}


def _qwen3_layers(random: _Random, sizes: Sizes) -> Iterator[Tensors]:
    for layer in range(sizes.layers):
        prefix = f"model.layers.{layer}."
        tensors = _attention(random, sizes, f"{prefix}self_attn.", has_gate=False) | _norms(sizes, prefix)
        tensors[f"{prefix}mlp.gate.weight"] = random.normal(sizes.experts, sizes.hidden)
        for expert in range(sizes.experts):
            tensors |= _mlp(random, sizes, f"{prefix}mlp.experts.{expert}.")
        yield tensors


def _qwen3_5_layers(random: _Random, sizes: Sizes, kinds: list[str]) -> Iterator[Tensors]:
    for layer, kind in enumerate(kinds):
        prefix = f"model.layers.{layer}."
        tensors = _norms(sizes, prefix)
        if kind == "full_attention":
            tensors |= _attention(random, sizes, f"{prefix}self_attn.", has_gate=True)
        else:
            tensors |= _linear_attention(random, sizes, f"{prefix}linear_attn.")
        tensors |= _mlp(random, sizes, f"{prefix}mlp.shared_expert.")
        tensors |= {
            f"{prefix}mlp.gate.weight": random.normal(sizes.experts, sizes.hidden),
            f"{prefix}mlp.shared_expert_gate.weight": random.normal(1, sizes.hidden),
            f"{prefix}mlp.experts.gate_up_proj": random.normal(sizes.experts, 2 * sizes.expert_width, sizes.hidden),
            f"{prefix}mlp.experts.down_proj": random.normal(sizes.experts, sizes.hidden, sizes.expert_width),
        }
        yield tensors


def _linear_attention(random: _Random, sizes: Sizes, prefix: str) -> Tensors:
    import torch

    values = sizes.heads * sizes.head_dim
    mixed = 2 * values  # as many key and query heads together as value heads
    return {
        f"{prefix}in_proj_qkv.weight": random.normal(mixed, sizes.hidden),
        f"{prefix}in_proj_z.weight": random.normal(values, sizes.hidden),
        f"{prefix}in_proj_b.weight": random.normal(sizes.heads, sizes.hidden),
        f"{prefix}in_proj_a.weight": random.normal(sizes.heads, sizes.hidden),
        f"{prefix}conv1d.weight": random.normal(mixed, 1, 4, std=0.3),
        f"{prefix}dt_bias": random.normal(sizes.heads, std=1.0),
        f"{prefix}A_log": random.normal(sizes.heads, std=0.5).float(),
        f"{prefix}norm.weight": torch.ones(sizes.head_dim),
        f"{prefix}out_proj.weight": random.normal(sizes.hidden, values),
    }


def _mlp(random: _Random, sizes: Sizes, prefix: str) -> Tensors:
    return {
        f"{prefix}gate_proj.weight": random.normal(sizes.expert_width, sizes.hidden),
        f"{prefix}up_proj.weight": random.normal(sizes.expert_width, sizes.hidden),
        f"{prefix}down_proj.weight": random.normal(sizes.hidden, sizes.expert_width),
    }


def _write(folder: Path, config: dict[str, Any], sizes: Sizes, shards: list[Tensors]) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    generation = {"bos_token_id": 0, "eos_token_id": 1, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    write_word_tokenizer(folder, sizes.vocab, _CHAT)
