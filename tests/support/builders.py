"""Checkpoints in memory and on disk, made from small specs, without ftw's own writer."""

import json
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def safetensors_bytes(header: Any, data: bytes = b"") -> bytes:
    """Return a file: `header` is bytes to be taken as they are, or an object that becomes JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor_entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    """Return a header entry."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write_checkpoint(
    folder: Path,
    tensors: dict[str, torch.Tensor],
    config: dict[str, Any] | None = None,
    file: str = "model.safetensors",
) -> Path:
    """Write a folder with one safetensors file and a config.json, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_sharded(
    folder: Path, shards: dict[str, dict[str, torch.Tensor]], config: dict[str, Any] | None = None
) -> Path:
    """Write safetensors shards and their index, and return the folder."""
    for file, tensors in shards.items():
        write_checkpoint(folder, tensors, config, file)
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def llama_config(**overrides: Any) -> dict[str, Any]:
    """Return the config.json of a tiny untied Llama, which fits `llama_tensors`."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 8,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False,
    }  # fmt: skip
    return {key: value for key, value in {**config, **overrides}.items() if value is not ...}


def llama_tensors(*, head: bool = True, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Return an embedding, a norm, one projection, and perhaps a head of its own."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "model.embed_tokens.weight": (64, 8),
        "model.layers.0.self_attn.q_proj.weight": (8, 8),
        "model.norm.weight": (8,),
        **({"lm_head.weight": (64, 8)} if head else {}),
    }
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def ftw_index(tensors: list[dict[str, Any]], shards: list[dict[str, Any]], **overrides: Any) -> dict[str, Any]:
    """Return an FTW index as an object; a key set to `...` is left out."""
    index = {
        "format": "freetoken_weight", "version": 1, "align": 4096, "shard_limit": 8 << 30,
        "total_bytes": sum(shard["nbytes"] for shard in shards), "tensors": tensors, "shards": shards,
    }  # fmt: skip
    return {key: value for key, value in {**index, **overrides}.items() if value is not ...}


def write_ftw(folder: Path, tensors: dict[str, torch.Tensor], **overrides: Any) -> Path:
    """Write a one-shard FTW folder as FreeToken does: no checksums, nothing that only ftw adds."""
    folder.mkdir(parents=True, exist_ok=True)
    region, entries = bytearray(), []
    for name, tensor in tensors.items():
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        entries.append(
            {
                "name": name,
                "kind": "weight",
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "global_off": len(region),
                "nbytes": len(data),
            }
        )
        region += data + bytes(-len(data) % 4096)
    (folder / "freetoken-00000.ftw").write_bytes(region)
    shards = [{"file": "freetoken-00000.ftw", "global_off": 0, "nbytes": len(region)}]
    (folder / "freetoken_weight.json").write_text(json.dumps(ftw_index(entries, shards, **overrides)))
    return folder


def padded(tensors: dict[str, torch.Tensor], nbytes: int = 2 << 20, name: str = "padding") -> dict[str, torch.Tensor]:
    """Return the tensors and one more, so that their file is larger than a first request."""
    return {**tensors, name: torch.zeros(nbytes, dtype=torch.uint8)}
