"""Synthetic checkpoints for benchmarks, of a real model's shapes, and cheap to make."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

HIDDEN, INTERMEDIATE, VOCAB = 2048, 6144, 151936
TABLE = "model.embed_tokens.weight"


def write_dense_checkpoint(folder: Path, nbytes: int, num_shards: int = 3) -> None:
    """Write an untied Qwen3-like checkpoint of about `nbytes` in bf16, in `num_shards` shards with an index."""
    folder.mkdir(parents=True)
    tables = {name: _random(VOCAB, HIDDEN) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    layer = {
        "self_attn.q_proj.weight": (2 * HIDDEN, HIDDEN),
        "self_attn.k_proj.weight": (HIDDEN // 2, HIDDEN),
        "self_attn.v_proj.weight": (HIDDEN // 2, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, 2 * HIDDEN),
        "mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
    }
    layer_nbytes = sum(torch.Size(shape).numel() for shape in layer.values()) * 2
    num_layers = max(1, (nbytes - sum(table.nbytes for table in tables.values())) // layer_nbytes)
    names = [f"model.layers.{number}.{name}" for number in range(num_layers) for name in layer]
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        tensors = {name: _random(*layer[name.split(".", 3)[3]]) for name in names[shard::num_shards]}
        if shard == 0:
            tensors.update(tables)
        save_file(tensors, folder / file)
        weight_map.update(dict.fromkeys(tensors, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": HIDDEN, "vocab_size": VOCAB,
        "num_hidden_layers": num_layers, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": INTERMEDIATE, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def write_gguf_checkpoint(folder: Path, nbytes: int) -> None:
    """Write an untied model of about `nbytes` as a GGUF: a table, a head and layers of random Q8_0 blocks."""
    import gguf

    folder.mkdir(parents=True)
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    writer.add_embedding_length(HIDDEN)
    row_bytes = HIDDEN // 32 * 34
    rows = {"token_embd.weight": VOCAB, "output.weight": VOCAB}
    num_layers = max(1, (nbytes // row_bytes - 2 * VOCAB) // (3 * INTERMEDIATE))
    for number in range(num_layers):
        rows |= {f"blk.{number}.{name}.weight": INTERMEDIATE for name in ("ffn_gate", "ffn_up", "ffn_down")}
    for name, count in rows.items():
        shape, kind = (count, row_bytes), gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor_info(name, shape, np.dtype(np.uint8), count * row_bytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    generator = np.random.default_rng(0)
    for count in rows.values():
        writer.write_tensor_data(generator.integers(256, size=(count, row_bytes), dtype=np.uint8))
    writer.close()


def write_hollow_checkpoint(folder: Path, shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, object]) -> None:
    """Write a bf16 checkpoint whose header is whole and whose data are a hole: for `ftw.load(dummy=True)`.

    The file takes a block of the disk, whatever it says; one byte of its first tensor is no zero, so that two tensors
    of a shape are not the same.
    """
    header, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * 2
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + b"\x01")
        file.truncate(8 + len(text) + offset)
    (folder / "config.json").write_text(json.dumps(config))


def write_table_checkpoints(folder: Path, rows: int, columns: int) -> dict[str, Path]:
    """Write an untied model of a table [rows, columns] in bf16 and a head of zeros, in each format; return paths."""
    import gguf

    import ftw

    paths = {name: folder / name for name in ("safetensors", "gguf", "ftw")}
    for path in paths.values():
        path.mkdir(parents=True)
    table, head = _random(rows, columns), torch.zeros(rows, columns, dtype=torch.bfloat16)
    save_file({"lm_head.weight": head, TABLE: table}, paths["safetensors"] / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": columns, "vocab_size": rows,
        "num_hidden_layers": 1, "num_attention_heads": 16, "tie_word_embeddings": False,
    }  # fmt: skip
    (paths["safetensors"] / "config.json").write_text(json.dumps(config))
    writer = gguf.GGUFWriter(paths["gguf"] / "model.gguf", "llama")
    writer.add_embedding_length(columns)
    for name, tensor in (("token_embd.weight", table), ("output.weight", head)):
        raw = tensor.view(torch.uint8).numpy()
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    paths["ftw"].rmdir()
    ftw.convert(paths["safetensors"], paths["ftw"], embed="host")
    return paths


def _random(*shape: int) -> torch.Tensor:
    return torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16).view(torch.bfloat16)
