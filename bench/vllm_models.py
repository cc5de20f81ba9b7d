"""Checkpoints of random weights and real widths that vLLM serves, for `bench/vllm_plugin.py`; TINY=1 makes small ones.

untied, other    Qwen3 of four layers with an LM head of its own; `other` has other weights
tied             the same, the LM head being the table
fp8              `untied` with its layers in FP8, as llm-compressor and vLLM store them; the table stays bf16
moe              Qwen3-MoE of two layers and 16 experts
gemma            Gemma 3 (text) of two layers, tied by the default of its family
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from .word_tokenizer import write_word_tokenizer

Weights = dict[str, torch.Tensor]
IS_TINY = bool(os.environ.get("TINY"))
VOCAB, HIDDEN, INTERMEDIATE = (512, 64, 128) if IS_TINY else (151936, 2048, 6144)
HEADS, KV_HEADS, HEAD_DIM = (4, 2, 32) if IS_TINY else (16, 8, 128)
EXPERTS, EXPERT_WIDTH = 16, 64 if IS_TINY else 768
_FP8_MAX = 448.0


class _Random:
    """Draws weights on the GPU where there is one: on a CPU a table of this size takes seconds."""

    def __init__(self, seed: int) -> None:
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._generator = torch.Generator(device=self._device).manual_seed(seed)

    def __call__(self, *shape: int, std: float = 0.02) -> torch.Tensor:
        values = torch.randn(*shape, generator=self._generator, device=self._device)
        return (values * std).bfloat16().cpu()


def make(kind: str, folder: Path) -> Path:
    """Write one of the module's checkpoints into a folder of its name, unless it is there; return that folder."""
    target = folder / kind
    if not (target / "config.json").exists():
        target.mkdir(parents=True, exist_ok=True)
        weights, config = _MAKERS[kind]()
        save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
        write_word_tokenizer(target, VOCAB)
        (target / "config.json").write_text(json.dumps(config))  # last: it says that all is there
    return target


def _attention(prefix: str, random: _Random) -> Weights:
    return {
        f"{prefix}self_attn.q_proj.weight": random(HEADS * HEAD_DIM, HIDDEN),
        f"{prefix}self_attn.k_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
        f"{prefix}self_attn.v_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
        f"{prefix}self_attn.o_proj.weight": random(HIDDEN, HEADS * HEAD_DIM),
        f"{prefix}self_attn.q_norm.weight": torch.ones(HEAD_DIM, dtype=torch.bfloat16),
        f"{prefix}self_attn.k_norm.weight": torch.ones(HEAD_DIM, dtype=torch.bfloat16),
        f"{prefix}input_layernorm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
        f"{prefix}post_attention_layernorm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
    }


def _mlp(prefix: str, width: int, random: _Random) -> Weights:
    return {
        f"{prefix}gate_proj.weight": random(width, HIDDEN),
        f"{prefix}up_proj.weight": random(width, HIDDEN),
        f"{prefix}down_proj.weight": random(HIDDEN, width),
    }


def _tables(random: _Random, *, is_tied: bool) -> Weights:
    weights = {
        "model.embed_tokens.weight": random(VOCAB, HIDDEN, std=1.0),
        "model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
    }
    return weights if is_tied else {**weights, "lm_head.weight": random(VOCAB, HIDDEN)}


def _config(architecture: str, model_type: str, layers: int, **values: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        **values,
    }


def _qwen3(*, seed: int = 0, is_tied: bool = False) -> tuple[Weights, dict[str, Any]]:
    random = _Random(seed)
    weights = _tables(random, is_tied=is_tied)
    for layer in range(4):
        prefix = f"model.layers.{layer}."
        weights |= _attention(prefix, random) | _mlp(f"{prefix}mlp.", INTERMEDIATE, random)
    config = _config("Qwen3ForCausalLM", "qwen3", 4, hidden_act="silu", tie_word_embeddings=is_tied)
    return weights, config


def _fp8() -> tuple[Weights, dict[str, Any]]:
    weights, config = _qwen3()
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        values = weights[name].float()
        scale = values.abs().max() / _FP8_MAX
        weights[name] = (values / scale).to(torch.float8_e4m3fn)
        weights[f"{name}_scale"] = scale.reshape(())
    scheme = {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head"]}
    return weights, {**config, "quantization_config": scheme}


def _moe() -> tuple[Weights, dict[str, Any]]:
    random = _Random(2)
    weights = _tables(random, is_tied=False)
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        weights |= _attention(prefix, random)
        weights[f"{prefix}mlp.gate.weight"] = random(EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            weights |= _mlp(f"{prefix}mlp.experts.{expert}.", EXPERT_WIDTH, random)
    experts = {"num_experts": EXPERTS, "num_experts_per_tok": 4, "moe_intermediate_size": EXPERT_WIDTH}
    steps = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    values = {**experts, **steps, "hidden_act": "silu", "tie_word_embeddings": False}
    return weights, _config("Qwen3MoeForCausalLM", "qwen3_moe", 2, **values)


def _gemma() -> tuple[Weights, dict[str, Any]]:
    random = _Random(3)
    weights = _tables(random, is_tied=True)
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        weights |= _attention(prefix, random) | _mlp(f"{prefix}mlp.", INTERMEDIATE, random)
        for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
            weights[f"{prefix}{name}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    window = {"sliding_window": 512, "query_pre_attn_scalar": HEAD_DIM, "layer_types": ["full_attention"] * 2}
    values = {**window, "hidden_activation": "gelu_pytorch_tanh", "rope_local_base_freq": 10000.0}
    return weights, _config("Gemma3ForCausalLM", "gemma3_text", 2, **values)


_MAKERS: dict[str, Callable[[], tuple[Weights, dict[str, Any]]]] = {
    "untied": _qwen3,
    "other": lambda: _qwen3(seed=1),
    "tied": lambda: _qwen3(is_tied=True),
    "fp8": _fp8,
    "moe": _moe,
    "gemma": _gemma,
}
