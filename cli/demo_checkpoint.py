"""A small but real mixture-of-experts checkpoint: Qwen3-MoE's layout and names, random weights, about 20 MB."""

from __future__ import annotations

import json
from pathlib import Path

_VOCAB, _HIDDEN, _LAYERS, _EXPERTS, _INTERMEDIATE = 8192, 256, 4, 16, 128
_HEADS, _KV_HEADS, _HEAD_DIM = 8, 2, 32


def write_demo_checkpoint(folder: Path, *, tied: bool = False, seed: int = 0) -> None:
    """Write the checkpoint, untied or tied, as transformers' `save_pretrained` would: a tied one has no LM head."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: (torch.randn(shape, generator=generator) * 0.02).to(torch.bfloat16)
        for name, shape in _shapes(tied=tied).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config(tied=tied), indent=2) + "\n", encoding="utf-8")


def _shapes(*, tied: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (_VOCAB, _HIDDEN),
        "model.norm.weight": (_HIDDEN,),
    }
    if not tied:
        shapes["lm_head.weight"] = (_VOCAB, _HIDDEN)
    for number in range(_LAYERS):
        layer = f"model.layers.{number}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (_HIDDEN,),
            f"{layer}.post_attention_layernorm.weight": (_HIDDEN,),
            f"{layer}.self_attn.q_proj.weight": (_HEADS * _HEAD_DIM, _HIDDEN),
            f"{layer}.self_attn.k_proj.weight": (_KV_HEADS * _HEAD_DIM, _HIDDEN),
            f"{layer}.self_attn.v_proj.weight": (_KV_HEADS * _HEAD_DIM, _HIDDEN),
            f"{layer}.self_attn.o_proj.weight": (_HIDDEN, _HEADS * _HEAD_DIM),
            f"{layer}.self_attn.q_norm.weight": (_HEAD_DIM,),
            f"{layer}.self_attn.k_norm.weight": (_HEAD_DIM,),
            f"{layer}.mlp.gate.weight": (_EXPERTS, _HIDDEN),
        }
        for expert in range(_EXPERTS):
            shapes |= {
                f"{layer}.mlp.experts.{expert}.gate_proj.weight": (_INTERMEDIATE, _HIDDEN),
                f"{layer}.mlp.experts.{expert}.up_proj.weight": (_INTERMEDIATE, _HIDDEN),
                f"{layer}.mlp.experts.{expert}.down_proj.weight": (_HIDDEN, _INTERMEDIATE),
            }
    return shapes


def _config(*, tied: bool) -> dict[str, object]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": "bfloat16",
        "vocab_size": _VOCAB,
        "hidden_size": _HIDDEN,
        "intermediate_size": 2 * _HIDDEN,
        "moe_intermediate_size": _INTERMEDIATE,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "num_experts": _EXPERTS,
        "num_experts_per_tok": 4,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
    }
