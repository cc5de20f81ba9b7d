"""Adapters are no models: under any name, with or without a config; and files of one rank are no whole tables."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import llama_config, llama_tensors, write_checkpoint
from ftw.cli.main import main
from gguf import GGUFValueType
from gguf_builder import write_gguf

import ftw

BASE = "org/base"
FRONT = "base_model.model.model"
TABLE, HEAD = f"{FRONT}.embed_tokens.weight", "base_model.model.lm_head.weight"


def weights(*names: str, rows: int = 4) -> dict[str, torch.Tensor]:
    return {name: torch.full((rows, 8), number + 1.0) for number, name in enumerate(names)}


def lora(module: str, a: str = "lora_A.weight", b: str = "lora_B.weight") -> dict[str, torch.Tensor]:
    return weights(*(f"{FRONT}.{layer}.{module}.{part}" for layer in ("layers.0", "layers.1") for part in (a, b)))


def write_adapter(
    folder: Path, tensors: dict[str, torch.Tensor], file: str, config: dict[str, Any] | None, key: str | None
) -> Path:
    write_checkpoint(folder, tensors, config, file)
    if key:
        (folder / "adapter_config.json").write_text(json.dumps({key: BASE, "peft_type": "LORA"}))
    return folder


# Tensors as PEFT 0.21 saves them, of what was trained; and as mlx-lm does.
TRAINED = {
    "lora": lora("self_attn.q_proj"),
    "modules-to-save": {**lora("self_attn.q_proj"), **weights(TABLE, HEAD, rows=64)},
    "embedding": {
        **lora("self_attn.q_proj"), **weights(f"{FRONT}.embed_tokens.base_layer.weight", rows=64),
        **weights(f"{FRONT}.embed_tokens.lora_embedding_A", f"{FRONT}.embed_tokens.lora_embedding_B"),
        **weights("base_model.model.lm_head.base_layer.weight", rows=64),
        **weights("base_model.model.lm_head.lora_A.weight", "base_model.model.lm_head.lora_B.weight"),
    },
    "tokens": {**lora("q_proj"), **weights(f"{FRONT}.embed_tokens.token_adapter.trainable_tokens_delta")},
    "mlx-lm": lora("self_attn.q_proj", "lora_a", "lora_b"),
    "loha": lora("q_proj", "hada_w1_a", "hada_w1_b"),
    "lokr": lora("q_proj", "lokr_w1", "lokr_w2_a"),
    "ia3": weights(f"{FRONT}.layers.0.k_proj.ia3_l", f"{FRONT}.layers.0.mlp.down_proj.ia3_l"),
    "vera": lora("q_proj", "vera_lambda_b", "vera_lambda_d"),
    "prompt": weights("prompt_embeddings"),
}  # fmt: skip


@pytest.mark.parametrize("tensors", TRAINED.values(), ids=TRAINED)
@pytest.mark.parametrize("config", [None, llama_config(), llama_config(tie_word_embeddings=True)], ids=str)
def test_adapter_is_no_model(tmp_path: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] | None) -> None:
    write_adapter(tmp_path, tensors, "adapter_model.safetensors", config, "base_model_name_or_path")
    (tmp_path / "renamed").mkdir()
    for source in (tmp_path, tmp_path / "adapter_model.safetensors", tmp_path / "renamed"):
        if source.name == "renamed":  # known by its tensors alone
            write_adapter(source, tensors, "model.safetensors", config, "base_model_name_or_path")
        report = ftw.inspect(source)
        table = report.verdict.token_embedding
        assert (table.reason, table.eligible, report.verdict.tied) == ("adapter", False, None)
        assert table.detail.startswith(
            f"it is an adapter (LoRA or the like) of '{BASE}', no model; inspect or convert the"
        )
        assert not report.verdict.eligible_tables
        assert report.to_dict()["host"] == {"eligible": False, "reason": "adapter", "nbytes": 0}


def test_commands_refuse_an_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_adapter(tmp_path / "a", TRAINED["modules-to-save"], "adapter_model.safetensors", None, None)
    assert main(["inspect", str(source), "--check"]) == 3
    assert main(["convert", str(source), str(tmp_path / "out"), "--embed", "host"]) == 3
    assert "it is an adapter (LoRA or the like), no model" in capsys.readouterr().err
    ftw.convert(source, tmp_path / "out")  # its tensors are tensors
    assert ftw.inspect(tmp_path / "out").verdict.token_embedding.reason == "adapter"


@pytest.mark.parametrize("kind", ["adapter", "model"], ids=str)
def test_gguf_says_itself_that_it_is_an_adapter(tmp_path: Path, kind: str) -> None:
    text = GGUFValueType.STRING
    kvs = {"general.type": (text, kind), "general.base_model.0.name": (text, "Base 8B")}
    tensors = {"token_embd.weight": np.ones((10, 64), np.float32), "output.weight": np.zeros((10, 64), np.float32)}
    table = ftw.inspect(write_gguf(tmp_path / "m.gguf", tensors, kvs)).verdict.token_embedding
    assert table.reason == ("ok" if kind == "model" else "adapter")
    assert table.eligible or table.detail.startswith("it is an adapter (LoRA or the like) of 'Base 8B', no model")


ROUTED = {f"model.layers.{layer}.router.lora_A.weight": torch.ones(4, 8) for layer in range(9)}


@pytest.mark.parametrize(
    "beside",
    [
        # Phi-4-multimodal keeps its LoRAs beside the layers.
        {"model.layers.0.self_attn.q_proj.base_layer.weight": torch.ones(8, 8),
         **{f"model.layers.0.self_attn.q_proj.lora_{one}.{sense}.weight": torch.ones(4, 8)
            for one in "AB" for sense in ("speech", "vision", "more")}},
        {f"model.layers.0.self_attn.q_proj.lora_{one}.weight": torch.ones(4, 8) for one in "AB"},
        dict(list(ROUTED.items())[:3]),
    ],
    ids=["base-layer", "beside-weight", "few-of-its-own"],
)  # fmt: skip
@pytest.mark.parametrize("has_config", [False, True], ids=["alone", "adapter-config"])
def test_model_with_adapters_of_its_own_is_one(
    tmp_path: Path, beside: dict[str, torch.Tensor], has_config: bool
) -> None:
    key = "base_model_name_or_path" if has_config else None
    write_adapter(tmp_path, {**llama_tensors(), **beside}, "model.safetensors", llama_config(), key)
    assert ftw.inspect(tmp_path).is_host_eligible


@pytest.mark.parametrize(
    "file", ["adapters.safetensors", "0000100_adapters.safetensors", "adapter_model.safetensors"], ids=str
)
def test_adapter_beside_shards_without_an_index_is_no_part_of_the_model(tmp_path: Path, file: str) -> None:
    tensors = llama_tensors()
    head = {"lm_head.weight": tensors.pop("lm_head.weight")}
    for number, part in enumerate((tensors, head), 1):
        write_checkpoint(tmp_path / "in", part, llama_config(), f"model-0000{number}-of-00002.safetensors")
    source = write_checkpoint(tmp_path / "in", lora("q_proj"), file=file)
    with ftw.open_checkpoint(source) as checkpoint:
        assert set(checkpoint.tensors) == set(llama_tensors())
        assert checkpoint.left_out == (("file", file, "an adapter, not the model"),)
    ftw.convert(source, tmp_path / "out", embed="host")
    assert ftw.verify(tmp_path / "out", against=source).is_ok


def test_last_adapter_of_a_training_is_taken_alone(tmp_path: Path) -> None:
    for file in ("0000100_adapters.safetensors", "0000200_adapters.safetensors", "adapters.safetensors"):
        write_adapter(tmp_path, TRAINED["mlx-lm"], file, None, "model")
    assert ftw.inspect(tmp_path).verdict.token_embedding.detail.startswith(
        f"it is an adapter (LoRA or the like) of '{BASE}'"
    )
    with ftw.open_checkpoint(tmp_path) as checkpoint:
        assert [file.path.name for file in checkpoint.files] == ["adapters.safetensors"]


# files of one rank

TORCH, VLLM = "shard-{:05}-model-00001-of-00001.safetensors", "model-rank-{}-part-0.safetensors"


@pytest.mark.parametrize(
    ("files", "opened"),
    [
        (["model0-mp2.safetensors"], 0),
        (["model1-mp2.safetensors"], 0),
        (["model0-mp2.safetensors", "model1-mp2.safetensors"], 1),
        ([TORCH.format(2)], 0),
        ([TORCH.format(1), TORCH.format(2)], 0),
        ([VLLM.format(1)], 0),
        ([VLLM.format(0), VLLM.format(1)], 0),
    ],
    ids="deepseek-first deepseek-last deepseek-both torch-last torch-first vllm-last vllm-first".split(),
)
@pytest.mark.parametrize("config", [None, llama_config()], ids=["bare", "config"])
def test_part_of_one_rank_is_refused(
    tmp_path: Path, files: list[str], opened: int, config: dict[str, Any] | None
) -> None:
    for file in files:
        write_checkpoint(tmp_path, llama_tensors(), config, file)
    match = r"safetensors: file: holds one rank's part of each tensor; join the parts"
    for source in (tmp_path, tmp_path / files[opened]):
        with pytest.raises(ftw.CheckpointError, match=match):
            ftw.inspect(source)


@pytest.mark.parametrize("file", ["model0-mp1.safetensors", TORCH.format(1), VLLM.format(0)], ids=str)
def test_file_of_a_single_rank_may_be_a_model(tmp_path: Path, file: str) -> None:
    for vocab_size, reason in ((64, "ok"), (100, "unsupported_encoding"), (..., "unsupported_encoding")):
        config = llama_config(vocab_size=vocab_size)
        [table] = ftw.inspect(write_checkpoint(tmp_path, llama_tensors(), config, file)).verdict.tables
        assert table.reason == reason
        assert (file in table.detail) is (reason != "ok")


@pytest.mark.parametrize(
    ("vocab_size", "part"), [(64, 0), (128, 2), (512, 8), (192, 0), (65, 0), (127, 0), (32, 0)], ids=str
)
def test_table_of_a_half_or_a_quarter_of_the_rows_is_one_ranks(tmp_path: Path, vocab_size: int, part: int) -> None:
    [table] = ftw.inspect(
        write_checkpoint(tmp_path, llama_tensors(), llama_config(vocab_size=vocab_size))
    ).verdict.tables
    assert table.reason == ("unsupported_encoding" if part else "ok")
    assert (f"its 64 rows are one part in {part} of vocab_size, {vocab_size}" in table.detail) is bool(part)
