"""Reports: the JSON of `ftw inspect`, and what its user gains when a table leaves the GPU."""

import json
import os
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import (
    llama_config,
    llama_tensors,
    safetensors_bytes,
    tensor_entry,
    write_checkpoint,
    write_ftw,
    write_sharded,
)

import ftw
from ftw.checkpoint.config import ModelConfig, parse_model_config
from ftw.tensors import TensorInfo
from ftw.verdict.gain import find_experts, kv_bytes_per_token

KEYS = [
    "format", "source", "architecture", "model_type", "num_tensors", "nbytes", "dtypes", "tables", "tied", "host",
    "gain", "warnings", "left_out",
]  # fmt: skip
TABLE_KEYS = [
    "name", "role", "rows", "columns", "dtype", "row_bytes", "nbytes", "eligible", "reason", "detail",
]  # fmt: skip
GAIN_KEYS = ["vram_bytes", "expert_slot_bytes", "expert_slots", "kv_bytes_per_token", "kv_tokens"]
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "tie_word_embeddings": False,
}  # fmt: skip


def write_qwen3_30b_a3b(folder: Path) -> Path:
    """Write the whole model's header before 57 GiB of hole; one byte of the head keeps it from equalling the table."""
    shapes = {
        "lm_head.weight": [151936, 2048],
        "model.embed_tokens.weight": [151936, 2048],
        "model.norm.weight": [2048],
    }
    for layer in range(48):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}self_attn.q_proj.weight": [4096, 2048], f"{prefix}self_attn.k_proj.weight": [512, 2048],
            f"{prefix}self_attn.v_proj.weight": [512, 2048], f"{prefix}self_attn.o_proj.weight": [2048, 4096],
            f"{prefix}self_attn.q_norm.weight": [128], f"{prefix}self_attn.k_norm.weight": [128],
            f"{prefix}input_layernorm.weight": [2048], f"{prefix}post_attention_layernorm.weight": [2048],
            f"{prefix}mlp.gate.weight": [128, 2048],
        }  # fmt: skip
        for expert in range(128):
            shapes |= {f"{prefix}mlp.experts.{expert}.{part}_proj.weight": [768, 2048] for part in ("gate", "up")}
            shapes[f"{prefix}mlp.experts.{expert}.down_proj.weight"] = [2048, 768]
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + prod(shape) * 2
        header[name] = tensor_entry("BF16", shape, begin, end)
    file = safetensors_bytes(header, b"\1")
    path = folder / "model.safetensors"
    path.write_bytes(file)
    os.truncate(path, len(file) - 1 + end)
    (folder / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    return folder


def info(name: str, *shape: int, dtype: str = "BF16", width: int = 2, kind: str = "weight") -> TensorInfo:
    """Return a tensor as a header describes it."""
    return TensorInfo(name, dtype, shape, 0, prod(shape) * width, kind=kind)


def test_report_of_the_design_document(tmp_path: Path) -> None:
    report = ftw.inspect(write_qwen3_30b_a3b(tmp_path)).to_dict()
    assert report == {
        "format": "safetensors",
        "source": str(tmp_path),
        "architecture": "Qwen3MoeForCausalLM",
        "model_type": "qwen3_moe",
        "num_tensors": 18867,
        "nbytes": 61064245248,
        "dtypes": {"BF16": 61064245248},
        "tables": [
            {
                "name": "model.embed_tokens.weight",
                "role": "token_embedding",
                "rows": 151936,
                "columns": 2048,
                "dtype": "BF16",
                "row_bytes": 4096,
                "nbytes": 622329856,
                "eligible": True,
                "reason": "ok",
                "detail": "untied: config says tie_word_embeddings=false and lm_head.weight is stored",
            }
        ],
        "tied": {"value": False, "evidence": ["config:tie_word_embeddings=false", "tensor:lm_head.weight"]},
        "host": {"eligible": True, "reason": "ok", "nbytes": 622329856},
        "gain": {
            "vram_bytes": 622329856,
            "expert_slot_bytes": 9437184,
            "expert_slots": 65,
            "kv_bytes_per_token": 98304,
            "kv_tokens": 6330,
        },
        "warnings": [],
        "left_out": [],
    }


@pytest.mark.parametrize(
    ("tensors", "config"),
    [
        (llama_tensors(), llama_config()),
        (llama_tensors(head=False), llama_config(tie_word_embeddings=True)),
        (llama_tensors(), None),
        ({"x": torch.ones(2)}, None),
        ({"x": torch.ones(2)}, {}),
    ],
    ids=["untied", "tied", "no-config", "no-table", "empty-config"],
)
def test_report_has_its_keys_in_their_order(tmp_path: Path, tensors: dict[str, Any], config: Any) -> None:
    report = ftw.inspect(write_checkpoint(tmp_path, tensors, config)).to_dict()
    assert list(report) == KEYS
    assert [list(table) for table in report["tables"]] == [TABLE_KEYS] * len(report["tables"])
    assert list(report["tied"]) == ["value", "evidence"]
    assert list(report["host"]) == ["eligible", "reason", "nbytes"]
    assert list(report["gain"]) == GAIN_KEYS
    assert json.loads(json.dumps(report)) == report


def test_tied_table_gains_nothing(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, llama_tensors(head=False), llama_config(tie_word_embeddings=True))
    report = ftw.inspect(tmp_path).to_dict()
    assert report["host"] == {"eligible": False, "reason": "tied", "nbytes": 0}
    assert report["gain"] == dict(zip(GAIN_KEYS, [0, None, None, 32, 0], strict=True))


def test_bytes_are_summed_by_type(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(3), "b": torch.ones(4, dtype=torch.float16), "c": torch.ones(8), "d": torch.ones(0)}
    report = ftw.inspect(write_checkpoint(tmp_path, tensors)).to_dict()
    assert (report["num_tensors"], report["nbytes"]) == (4, 52)
    assert list(report["dtypes"].items()) == [("F32", 44), ("F16", 8)]


def test_left_out_files_are_named(tmp_path: Path) -> None:
    write_sharded(tmp_path, {"model-00001-of-00001.safetensors": llama_tensors()}, llama_config())
    write_checkpoint(tmp_path, {"x": torch.ones(2)}, file="consolidated.safetensors")
    report = ftw.inspect(tmp_path).to_dict()
    assert report["left_out"] == [
        {"kind": "file", "name": "consolidated.safetensors", "reason": "another copy of the weights"}
    ]


def test_warnings_are_in_the_report(tmp_path: Path) -> None:
    report = ftw.inspect(write_checkpoint(tmp_path, llama_tensors(), llama_config(vocab_size=100))).to_dict()
    assert len(report["warnings"]) == 1
    assert "vocab_size 100" in report["warnings"][0]


def test_inspect_takes_an_open_checkpoint_and_leaves_it_open(tmp_path: Path) -> None:
    with ftw.open_checkpoint(write_checkpoint(tmp_path, llama_tensors(), llama_config())) as checkpoint:
        assert ftw.inspect(checkpoint).to_dict() == ftw.inspect(tmp_path).to_dict()
        checkpoint.read_into("model.norm.weight", bytearray(16))


def test_report_of_an_ftw_folder_is_that_of_its_tensors(tmp_path: Path) -> None:
    plain = ftw.inspect(write_checkpoint(tmp_path / "plain", llama_tensors(), llama_config())).to_dict()
    write_ftw(tmp_path / "ftw", llama_tensors())
    (tmp_path / "ftw" / "config.json").write_text(json.dumps(llama_config()))
    converted = ftw.inspect(tmp_path / "ftw").to_dict()
    assert converted["format"] == "ftw"
    differing = {"format", "source"}
    assert {key: converted[key] for key in set(KEYS) - differing} == {key: plain[key] for key in set(KEYS) - differing}


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("LlamaForCausalLM", 2 * 2 * 4 * 2),
        ("GPT2LMHeadModel", 2 * 2 * 4 * 2),
        ("LlavaForConditionalGeneration", 2 * 2 * 4 * 2),
        ("LlamaModel", None),
        ("LlamaForSequenceClassification", None),
        ("BertForMaskedLM", None),
        (..., None),
    ],
    ids=str,
)
def test_kv_cache_is_counted_for_classes_that_generate(architecture: Any, expected: int | None) -> None:
    architectures = architecture if architecture is ... else [architecture]
    config = parse_model_config(llama_config(architectures=architectures), Path("config.json"))
    assert kv_bytes_per_token(config) == expected


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 61}, 61 * 576 * 2),
        ({"layer_types": ["linear_attention", "full_attention"]}, 1 * 2 * 4 * 2),
        ({"layer_types": ["mamba", "mamba"]}, None),
        ({"num_hidden_layers": ...}, None),
        ({"hidden_size": ...}, None),
    ],
    ids=["mla", "hybrid", "no-attention", "no-layers", "no-width"],
)
def test_kv_cache_of_one_token(overrides: dict[str, Any], expected: int | None) -> None:
    config = parse_model_config(llama_config(**overrides), Path("config.json"))
    assert kv_bytes_per_token(config) == expected
    assert kv_bytes_per_token(ModelConfig()) is None


@pytest.mark.parametrize(
    ("tensors", "num_experts", "expected"),
    [
        ([], 4, None),
        ([info("model.layers.0.mlp.up_proj.weight", 4, 8)], 4, None),
        ([info(f"layers.{layer}.experts.{expert}.w1.weight", 4, 8) for layer in (0, 1) for expert in (0, 1)], 2, 64),
        ([info("layers.0.experts.0.w1.weight", 4, 8), info("layers.0.experts.1.w1.weight", 2, 8),
          info("layers.0.experts.0.w1.weight_scale", 4, dtype="F32", width=4)], 2, 64 + 16),
        ([info("layers.0.mlp.experts.gate_up_proj", 4, 8, 16), info("layers.0.mlp.experts.down_proj", 4, 8, 8),
          info("layers.1.mlp.experts.gate_up_proj", 4, 8, 16)], 4, 8 * 16 * 2 + 8 * 8 * 2),
        ([info("layers.0.mlp.experts.gate_up_proj_blocks", 4, 8, 16, dtype="U8", width=1),
          info("layers.0.mlp.experts.gate_up_proj_scales", 4, 8, dtype="U8", width=1),
          info("layers.0.mlp.experts.gate_up_proj_bias", 4, 8)], 4, 8 * 16 + 8 + 16),
        ([info("layers.0.mlp.experts.gate_up_proj", 4, 8, 16)], None, None),
        ([info("layers.0.mlp.experts.gate_up_proj", 4, 8, 16)], 8, None),
        ([info("layers.0.mlp.shared_expert.up_proj.weight", 4, 8)], 4, None),
        ([info(f"gate_up#L{layer:05}", 4, 8, 16, kind="experts_bank") for layer in (0, 1)]
         + [info(f"down#L{layer:05}", 4, 16, 4, kind="experts_bank") for layer in (0, 1)], 4, 8 * 16 * 2 + 16 * 4 * 2),
        ([info("gate_up", 2 * 4, 8, 16, kind="experts_bank"), info("down", 2 * 4, 16, 4, kind="experts_bank")],
         4, 8 * 16 * 2 + 16 * 4 * 2),
        ([info("gate_up", 0, 8, 16, kind="experts_bank")], 4, None),
    ],
    ids="none dense single uneven stacked mxfp4 unknown-count other-count shared bank-per-layer bank-flat bank-empty"
    .split(),
)  # fmt: skip
def test_expert_slot_is_one_expert_of_one_layer(
    tensors: list[TensorInfo], num_experts: int | None, expected: int | None
) -> None:
    assert find_experts(tensors, num_experts).slot_bytes == expected
    assert find_experts(reversed(tensors), num_experts).slot_bytes == expected
